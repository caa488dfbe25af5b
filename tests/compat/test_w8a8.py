"""The quantizer, the scaled products and ``Fp8LinearOp`` against their formulas in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fp8kit
from engine_formulas import FP8, decoded, quantized, with_scale
from fp8kit import compat
from fp8kit.errors import InvalidType, InvalidValue
from numerics import assert_bits_equal, assert_matmul, assert_scheme_error

M, N, K = 5, 24, 32
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda s: s,
    "row": lambda s: s.t(),
    "flat": lambda s: s.flatten(),
}
NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "()": lambda s: s.reshape(()),
    "(1,)": lambda s: s.reshape(1),
    "(1, 1)": lambda s: s,
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def w() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("per_token", [False, True])
def test_scaled_fp8_quant_finds_a_scale(x: Tensor, per_token: bool) -> None:
    codes, scale = compat.scaled_fp8_quant(x, use_per_token_if_dynamic=per_token)
    wanted, wanted_scale = quantized(x, per_row=per_token)
    assert scale.shape == ((M, 1) if per_token else (1,))
    assert torch.equal(scale.flatten(), wanted_scale.flatten())
    assert_bits_equal(codes, wanted)


@pytest.mark.parametrize("shape", [(M, 1), (1, K), (M, 2), (1, 2)])
def test_scaled_fp8_quant_reads_groups_from_the_shape_of_scales(
    x: Tensor, shape: tuple[int, int]
) -> None:
    given = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.1
    codes, scale = compat.scaled_fp8_quant(x, given)
    assert scale is given
    wide = given.repeat_interleave(M // shape[0], 0).repeat_interleave(K // shape[1], 1)
    assert_bits_equal(codes, with_scale(x, wide))
    twice = compat.scaled_fp8_quant(x.repeat(1, 2), given.repeat(1, 2))[0]
    assert_bits_equal(twice, codes.view(torch.uint8).repeat(1, 2).view(FP8))
    wider = compat.scaled_fp8_quant(x, given, output_dtype=torch.float8_e5m2)[0]
    assert_bits_equal(wider, (x.float() / wide).to(torch.float8_e5m2))


def test_scaled_fp8_quant_takes_a_scale_bound_padding_and_output(x: Tensor) -> None:
    given = torch.tensor([0.25])
    out = torch.empty(17, K, dtype=FP8)
    codes, scale = compat.scaled_fp8_quant(x, given, num_token_padding=17, output=out)
    assert scale is given
    assert codes is out
    assert_bits_equal(codes[:M], with_scale(x, given))
    assert not codes[M:].view(torch.uint8).any()
    codes, scale = compat.scaled_fp8_quant(
        x, num_token_padding=8, scale_ub=torch.tensor([0.5]), use_per_token_if_dynamic=True
    )
    wanted, wanted_scale = quantized(x, bound=0.5)
    assert_bits_equal(codes[:M], wanted)
    assert scale.shape == (8, 1)
    assert torch.equal(scale[:M], wanted_scale)


@pytest.mark.parametrize("shape", [(K,), (2, M, K), ()])
def test_scaled_fp8_quant_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValue, match=r"It must be a matrix \[M, K\]"):
        compat.scaled_fp8_quant(torch.ones(shape), num_token_padding=17)
    with pytest.raises(InvalidType, match="Got input of type NoneType"):
        compat.scaled_fp8_quant(None)


@pytest.mark.parametrize(
    "output",
    [
        torch.empty(M, K),
        torch.empty(M, K, dtype=torch.float8_e5m2),
        torch.empty(3, M, K, dtype=FP8),
        torch.empty(M - 1, K, dtype=FP8),
    ],
    ids=lambda output: f"{output.dtype}-{tuple(output.shape)}",
)
def test_quantizers_write_codes_as_they_are(x: Tensor, output: Tensor) -> None:
    wanted = rf"The codes are {FP8} \({M}, {K}\)"
    with pytest.raises(InvalidValue, match=wanted):
        compat.scaled_fp8_quant(x, output=output)
    with pytest.raises(InvalidValue, match=wanted):
        compat.per_token_group_quant_fp8(x, K, out_q=output)


@pytest.mark.parametrize("group", [(-1, -1), (-1, 1), (1, -1), (-1, 8), (1, 16), (2, 16), (4, -1)])
def test_scaled_fp8_quant_takes_static_scales_of_groups(group: tuple[int, int]) -> None:
    x = torch.randn(8, K).bfloat16()
    rows, cols = 8 if group[0] == -1 else group[0], K if group[1] == -1 else group[1]
    scale = torch.rand(8 // rows, K // cols) + 0.5
    each = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    given = scale.flatten() if 1 in scale.shape else scale
    codes, same = compat.scaled_fp8_quant(x, scale=given, group_shape=group)
    assert same is given
    assert_bits_equal(codes, with_scale(x, each))
    with pytest.raises(ValueError, match=r"Pass one number for each group|is one number"):
        compat.scaled_fp8_quant(x, torch.ones(77), group_shape=group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_number_is_a_scale_in_fp32_whatever_the_default(dtype: torch.dtype) -> None:
    x = torch.randn(2, K) * 1e-6
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        codes, scale = compat.scaled_fp8_quant(x, 1e-8)
        y = compat.cutlass_scaled_mm(codes, codes.t(), 1e-8, 1.0, torch.float32)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(scale, torch.tensor(1e-8))
    assert_bits_equal(codes, with_scale(x, scale))
    assert torch.equal(y, compat.cutlass_scaled_mm(codes, codes.t(), scale, 1.0, torch.float32))


@pytest.mark.parametrize(("rows", "group"), [(2, (1, 32)), (1, (-1, 32)), (2, (-1, 32))])
@pytest.mark.parametrize("k", [16, 48, 64])
def test_scaled_fp8_quant_takes_static_scales_of_32_columns(
    rows: int, group: tuple[int, int], k: int
) -> None:
    x = torch.randn(rows, k)
    scale = torch.rand(1 if group[0] == -1 else rows, -(-k // 32)) + 0.5
    each = scale.repeat_interleave(32, 1)[:, :k]
    assert_bits_equal(compat.scaled_fp8_quant(x, scale, group_shape=group)[0], with_scale(x, each))
    with pytest.raises(InvalidValue, match=rf"x \({rows}, {k}\).*one number for each group"):
        compat.scaled_fp8_quant(x, torch.ones(3), group_shape=group)


def test_groups_are_not_guessed_from_scales_of_ragged_ones() -> None:
    x = torch.randn(130, 1025)  # nine groups of 128 columns, or of 114
    for group in ((1, 128), (128, 128)):
        scale = fp8kit.quantize(x, fp8kit.GroupShape(*group)).scale
        with pytest.raises(InvalidValue, match=r"Pass group_shape="):
            compat.scaled_fp8_quant(x, scale)
        codes, _ = compat.scaled_fp8_quant(x, scale, group_shape=group)
        each = scale.repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)
        assert_bits_equal(codes, with_scale(x, each[:130, :1025]))


@pytest.mark.parametrize("shape", [(K,), (2, K, N), ()])
def test_a_product_refuses_a_weight_that_is_no_matrix(x: Tensor, shape: tuple[int, ...]) -> None:
    codes, scale = compat.scaled_fp8_quant(x)
    weight = torch.zeros(shape, dtype=FP8)
    with pytest.raises(InvalidValue, match=r"Got a weight of shape .* It is a matrix"):
        compat.cutlass_scaled_mm(codes, weight, scale, scale, torch.bfloat16)


def test_a_weight_as_it_is_stored_is_named_in_the_words_of_the_caller(x: Tensor, w: Tensor) -> None:
    (a, s), (b, t) = quantized(x), quantized(w)
    message = rf"K = {K} and a weight of shape \({N}, {K}\).*Pass weight.t\(\)"
    with pytest.raises(InvalidValue, match=message):
        compat.cutlass_scaled_mm(a, b, s, t, torch.bfloat16)
    with pytest.raises(InvalidValue, match=message):
        compat.Fp8LinearOp().apply(x, b, t)


@pytest.mark.parametrize(("rows", "columns"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("shape", ["column", "row", "flat"])
def test_cutlass_scaled_mm_takes_scales_of_any_shape(
    x: Tensor, w: Tensor, rows: bool, columns: bool, shape: str
) -> None:
    (a, s), (b, t) = quantized(x, per_row=rows), quantized(w, per_row=columns)
    bias = torch.randn(N).bfloat16()
    laid = SHAPES[shape]
    y = compat.cutlass_scaled_mm(a, b.t(), laid(s), laid(t), torch.bfloat16, bias)
    assert_matmul(y, decoded(a, s), decoded(b, t), bias)


def test_a_scale_that_fits_nothing_is_refused(x: Tensor, w: Tensor) -> None:
    (a, s), (b, _) = quantized(x), quantized(w)
    with pytest.raises(ValueError, match="one scale, or one for each of its rows"):
        compat.cutlass_scaled_mm(a, b.t(), s, torch.ones(3), torch.bfloat16)
    with pytest.raises(ValueError, match="need \\(24, 1\\)"):  # the core takes one shape only
        fp8kit.QTensor(b, torch.ones(N), fp8kit.ROW)


PRODUCTS = [
    "cutlass_w8a8_scaled_mm",
    "flashinfer_w8a8_scaled_mm",
    "rocm_per_tensor_w8a8_scaled_mm",
    "torch_per_tensor_w8a8_scaled_mm",
    "torch_per_token_w8a8_scaled_mm",
    "torch_channelwise_w8a8_scaled_mm",
]


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_drop_padding_and_restore_the_shape(x: Tensor, w: Tensor, name: str) -> None:
    one = "per_tensor" in name or name.startswith("flashinfer")
    batched = x[:4].reshape(2, 2, K)
    codes, s = compat.scaled_fp8_quant(
        x[:4], num_token_padding=17, use_per_token_if_dynamic=not one
    )
    b, t = quantized(w, per_row=not one)
    y = getattr(compat, name)(
        qinput=codes,
        weight=b.t(),
        out_dtype=torch.float16,
        scale_a=s,
        scale_b=t,
        bias=None,
        input_2d=batched.view(4, K),
        output_shape=[2, 2, N],
    )
    assert y.shape == (2, 2, N)
    assert y.dtype == torch.float16
    scale = s if one else s[:4]
    assert_matmul(y.view(4, N), decoded(codes[:4], scale), decoded(b, t))


def test_scales_of_groups_are_not_taken_for_those_of_rows(x: Tensor, w: Tensor) -> None:
    a, (b, t) = fp8kit.quantize(x, fp8kit.GroupShape(1, 16)), quantized(w)
    operands = {"weight": b.t(), "scale_b": t, "bias": None, "output_shape": [M, N]}
    with pytest.raises(ValueError, match="one scale, or one for each of its rows"):
        compat.cutlass_w8a8_scaled_mm(
            qinput=a.data, scale_a=a.scale, out_dtype=torch.float16, **operands
        )


def test_dispatch_w8a8_scaled_mm_names_the_product() -> None:
    choose = compat.dispatch_w8a8_scaled_mm
    assert choose("cutlass", False, True) is compat.cutlass_w8a8_scaled_mm
    assert choose(True, True, True) is compat.cutlass_w8a8_scaled_mm
    assert choose("flashinfer", True, True) is compat.flashinfer_w8a8_scaled_mm
    assert choose("flashinfer", False, False) is compat.cutlass_w8a8_scaled_mm
    assert choose("rocm", True, True) is compat.rocm_per_tensor_w8a8_scaled_mm
    assert choose("torch", True, True) is compat.torch_per_tensor_w8a8_scaled_mm
    old = {"per_tensor_weights": False, "per_tensor_activations": True}
    found = choose(cutlass_fp8_supported=False, **old)
    assert found is compat.torch_channelwise_w8a8_scaled_mm
    rowwise = compat.USE_ROWWISE_TORCH_SCALED_MM
    both = choose("torch", False, False)
    wanted = "torch_per_token" if rowwise else "torch_channelwise"
    assert both is getattr(compat, f"{wanted}_w8a8_scaled_mm")
    with pytest.raises(ValueError, match="It must be 'cutlass', 'flashinfer', 'rocm' or 'torch'"):
        choose("cublas", True, True)


def test_the_device_identity_appears_when_it_is_made() -> None:
    assert compat.maybe_create_device_identity() is None
    assert torch.equal(compat.TORCH_DEVICE_IDENTITY, torch.ones(1))


PAIRINGS = list(itertools.product([False, True], [False, True]))


@pytest.mark.parametrize(("per_token", "per_channel"), PAIRINGS)
def test_fp8_linear_op_computes_every_pairing(
    x: Tensor, w: Tensor, per_token: bool, per_channel: bool
) -> None:
    shape = compat.GroupShape.PER_TOKEN if per_token else compat.GroupShape.PER_TENSOR
    op = compat.Fp8LinearOp(act_quant_static=False, act_quant_group_shape=shape, pad_output=False)
    (a, s), (b, t) = quantized(x, per_row=per_token), quantized(w, per_row=per_channel)
    bias = torch.randn(N).bfloat16()
    y = op.apply(input=x.view(1, M, K), weight=b.t(), weight_scale=t.t(), bias=bias)
    assert y.shape == (1, M, N)
    assert y.dtype == torch.bfloat16
    assert_matmul(y[0], decoded(a, s), decoded(b, t), bias)
    codes, scale = op.quant_fp8(x)
    assert_bits_equal(codes, a)
    assert torch.equal(scale.reshape(s.shape), s)
    assert_scheme_error(y[0].double() - bias.double(), x.double() @ w.double().t(), "FP8_DYNAMIC")


@pytest.mark.parametrize("number", list(NUMBERS))
def test_a_static_fp8_linear_op_ignores_the_bound(x: Tensor, w: Tensor, number: str) -> None:
    b, t = quantized(w, per_row=False)
    scale = NUMBERS[number](torch.full((1, 1), 0.03125)).bfloat16()
    bound = torch.tensor([1e-3])
    op = compat.Fp8LinearOp(act_quant_static=True)
    y = op.apply(x, b.t(), NUMBERS[number](t), torch.float32, scale, bound)
    assert y.dtype == torch.float32
    step = torch.tensor([[0.03125]])
    assert_matmul(y, decoded(with_scale(x, step), step), decoded(b, t))
    with pytest.raises(ValueError, match="got no input_scale"):
        op.apply(x, b.t(), t)


def test_fp8_linear_op_honours_the_bound_of_tokens(x: Tensor, w: Tensor) -> None:
    (a, s), (b, t) = quantized(x, bound=1.0), quantized(w)
    op = compat.Fp8LinearOp(use_per_token_if_dynamic=True)
    y = op.apply(x, b.t(), t, input_scale_ub=torch.tensor([1.0]))
    assert_matmul(y, decoded(a, s), decoded(b, t))
    by_call = compat.Fp8LinearOp(False, True).apply(
        x, b.t(), t, input_scale_ub=torch.tensor(1.0), use_per_token_if_dynamic=True
    )
    assert torch.equal(y, by_call)


def test_fp8_linear_op_is_made_with_the_words_of_every_version() -> None:
    token = compat.GroupShape.PER_TOKEN
    older = compat.Fp8LinearOp(
        cutlass_fp8_supported=False, use_per_token_if_dynamic=True, pad_output=None
    )
    assert older.per_token
    assert not older.act_quant_static
    for newer in (
        compat.Fp8LinearOp(False, True, token, None),
        compat.Fp8LinearOp(False, token, None),
        compat.Fp8LinearOp(act_quant_static=False, act_quant_group_shape=token),
    ):
        assert newer.per_token
        assert not newer.act_quant_static
    assert not compat.Fp8LinearOp(False, True).per_token  # of the older ones it says the opposite
    assert compat.Fp8LinearOp(True, False).act_quant_static


def test_fp8_linear_op_takes_codes(x: Tensor, w: Tensor) -> None:
    (a, s), (b, t) = quantized(x), quantized(w)
    op = compat.Fp8LinearOp(False, compat.GroupShape.PER_TENSOR)
    y = op.apply(a, b.t(), t, out_dtype=torch.float16, input_scale=s)
    assert_matmul(y, decoded(a, s), decoded(b, t))
    with pytest.raises(ValueError, match="Codes mean nothing without their scale"):
        op.apply(a, b.t(), t)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2])
@pytest.mark.parametrize("group", [fp8kit.ROW, fp8kit.TENSOR], ids=str)
def test_weights_may_have_other_codes(
    x: Tensor, dtype: torch.dtype, group: fp8kit.GroupShape
) -> None:
    w_q = fp8kit.quantize(torch.randn(N, K), group, dtype=dtype, role="weight")
    weight, scale = w_q.data, w_q.scale
    wanted = fp8kit.linear(x, w_q)
    op, step = compat.Fp8LinearOp(use_per_token_if_dynamic=True), torch.tensor([0.02])
    for y in (
        op.apply(x, weight.t(), scale),
        compat.apply_fp8_linear(x, weight.t(), scale),
        compat.Fp8Linear(weight, None, scale)(x),
    ):
        assert_bits_equal(y, wanted)
    x_q = fp8kit.quantize(x, fp8kit.TENSOR, dtype=dtype)
    wanted = fp8kit.scaled_mm(x_q, w_q, out_dtype=x.dtype)
    assert_bits_equal(compat.Fp8LinearOp().apply(x, weight.t(), scale), wanted)
    static = compat.Fp8Linear(weight, None, scale, step)(x)
    assert_bits_equal(static, op.apply(x, weight.t(), scale, input_scale=step))


@pytest.mark.parametrize("m", [0, 1])
def test_fp8_linear_op_takes_any_number_of_rows(x: Tensor, w: Tensor, m: int) -> None:
    b, t = quantized(w)
    y = compat.Fp8LinearOp().apply(x[:m], b.t(), t)
    assert y.shape == (m, N)


def test_group_shapes_that_inputs_do_not_have_are_refused() -> None:
    kinds = ("tensor", "token", "channel")
    shapes = [getattr(compat.GroupShape, f"PER_{kind.upper()}") for kind in kinds]
    assert shapes == [(-1, -1), (1, -1), (-1, 1)]
    for shape in (*shapes, compat.GroupShape(1, 128), compat.GroupShape(128, 128)):
        said = [getattr(shape, f"is_per_{kind}")() for kind in (*kinds, "group")]
        assert said == [*(shape == other for other in shapes), shape == (1, 128)]
    assert compat.Fp8LinearOp(act_quant_group_shape=fp8kit.ROW).per_token
    with pytest.raises(ValueError, match="For groups along K"):
        compat.Fp8LinearOp(act_quant_group_shape=compat.GroupShape(1, 128))


def test_a_scale_may_be_a_number(x: Tensor, w: Tensor) -> None:
    codes, scale = compat.scaled_fp8_quant(x, 0.5)
    wanted, _ = compat.scaled_fp8_quant(x, torch.tensor(0.5))
    assert_bits_equal(codes, wanted)
    assert scale.item() == 0.5
    w_codes = compat.scaled_fp8_quant(w, 0.25)[0].t()
    y = compat.cutlass_scaled_mm(codes, w_codes, 0.5, 0.25, torch.bfloat16)
    given = torch.tensor(0.5), torch.tensor(0.25)
    assert_bits_equal(y, compat.cutlass_scaled_mm(codes, w_codes, *given, torch.bfloat16))
