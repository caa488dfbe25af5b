from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape, Scheme
from numerics import assert_bits_equal, assert_matmul, assert_scheme_error, relative_error

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
NAMED = (TENSOR, ROW, GROUP128, BLOCK, MX)
DYNAMIC = [name for name, scheme in SCHEMES.items() if not scheme.static]


def weight(
    scheme: str, n: int = 96, k: int = 200, device: torch.device | str = "cpu"
) -> fp8kit.QTensor:
    return fp8kit.quantize(torch.randn(n, k, device=device), SCHEMES[scheme].weight, role="weight")


def fake_quantized(x: Tensor, scheme: Scheme, input_scale: Tensor | None = None) -> Tensor:
    """Return the input as the layer sees it: quantized and dequantized, in fp32."""
    if scheme.activation is None:
        return x.float()
    return fp8kit.dequantize(fp8kit.quantize(x, scheme.activation, scale=input_scale))


@st.composite
def tensors(draw: st.DrawFn, rows: bool = False) -> Tensor:
    shape = draw(st.lists(st.integers(0, 6), min_size=1 if rows else 0, max_size=3))
    shape = [*shape, draw(st.integers(0, 300))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    x = torch.randn(shape, generator=generator).to(draw(st.sampled_from(FLOATS)))
    return x.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else x


@given(tensors(rows=True), st.sampled_from(NAMED))
def test_quantize_dequantize_is_within_one_rounding(x: Tensor, group: GroupShape) -> None:
    value = fp8kit.dequantize(fp8kit.quantize(x, group, scale_rounding="up"))
    assert value.shape == x.shape
    # relative error 2^-4 of a normal code; a subnormal code is off by half a step of 2^-9, and the
    # scale is at most 2 * amax / 448, or the floor
    amax = x.float().abs().amax().item() if x.numel() else 0.0
    step = 2.0**-10 * max(2 * amax / 448, 1 / (448 * 256))
    assert ((value - x.float()).abs() <= x.float().abs() * 2.0**-4 + step).all()


@pytest.mark.parametrize("group", [ROW, GROUP128, MX], ids=str)
def test_ceil_is_another_name_of_up(group: GroupShape) -> None:
    x = torch.randn(4, 256)
    up, ceil = (fp8kit.quantize(x, group, scale_rounding=name) for name in ("up", "ceil"))
    assert_bits_equal(ceil.data, up.data)
    assert_bits_equal(ceil.scale, up.scale)
    fused = fp8kit.fused.gelu_quantize
    up, ceil = (fused(x, group=group, scale_rounding=name) for name in ("up", "ceil"))
    assert_bits_equal(ceil.scale, up.scale)


@given(tensors(rows=True), st.sampled_from(NAMED))
def test_quantize_is_idempotent_on_its_own_values(x: Tensor, group: GroupShape) -> None:
    q = fp8kit.quantize(x, group)
    again = fp8kit.quantize(fp8kit.dequantize(q), group, scale=q.scale)
    assert torch.equal(again.data.float(), q.data.float())


@given(tensors(rows=True), st.integers(-6, 6))
def test_quantize_commutes_with_powers_of_two(x: Tensor, exponent: int) -> None:
    x = x.float().abs() + 1
    if not x.shape[-1]:
        return
    a, b = fp8kit.quantize(x), fp8kit.quantize(x * 2.0**exponent)
    assert torch.equal(a.scale * 2.0**exponent, b.scale)
    assert_bits_equal(a.data, b.data)


@given(tensors(rows=True))
def test_rows_are_quantized_independently(x: Tensor) -> None:
    whole = fp8kit.quantize(x)
    for i in range(x.shape[0]):
        alone = fp8kit.quantize(x[i : i + 1])
        assert_bits_equal(alone.data, whole.data[i : i + 1])
        assert_bits_equal(alone.scale, whole.scale[i : i + 1])


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 40),
    st.integers(0, 150),
    st.sampled_from(DYNAMIC),
    st.sampled_from(FLOATS),
    st.booleans(),
)
def test_linear_takes_any_shape(
    lead: list[int], n: int, k: int, scheme: str, dtype: torch.dtype, has_bias: bool
) -> None:
    x = torch.randn(*lead, k).to(dtype)
    w_q = weight(scheme, n, k)
    bias = torch.randn(n) if has_bias else None
    y = fp8kit.linear(x, w_q, bias, scheme=scheme)
    assert y.shape == (*lead, n)
    assert y.dtype == dtype
    seen = fake_quantized(x, SCHEMES[scheme])
    rows = math.prod(lead)
    assert_matmul(y.reshape(rows, n), seen.reshape(rows, k), fp8kit.dequantize(w_q), bias)


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 40),
    st.integers(0, 150),
    st.sampled_from([(a, b) for a in (TENSOR, ROW, GROUP128, MX) for b in NAMED]),
    st.sampled_from(FLOATS),
)
def test_scaled_mm_takes_any_shape_and_granularity(
    lead: list[int], n: int, k: int, groups: tuple[GroupShape, GroupShape], out: torch.dtype
) -> None:
    x_q = fp8kit.quantize(torch.randn(*lead, k), groups[0])
    w_q = fp8kit.quantize(torch.randn(n, k), groups[1])
    y = fp8kit.scaled_mm(x_q, w_q, out_dtype=out)
    assert y.shape == (*lead, n)
    rows = math.prod(lead)
    x = fp8kit.dequantize(x_q).reshape(rows, k)
    assert_matmul(y.reshape(rows, n), x, fp8kit.dequantize(w_q))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.jvp's own
def test_a_tangent_is_refused_and_a_plain_input_beside_one_is_not() -> None:
    x, w_q = torch.randn(3, 64), fp8kit.quantize(torch.randn(32, 64), role="weight")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda v: fp8kit.linear(v, w_q), (x,), (x,))
    with forward_ad.dual_level():
        assert fp8kit.linear(x, w_q).isfinite().all()
        with pytest.raises(NotImplementedError, match="forward-mode"):
            fp8kit.linear(forward_ad.make_dual(x, x), w_q)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_is_quantize_then_scaled_mm(scheme: str, device: torch.device) -> None:
    x, w_q = torch.randn(3, 5, 200, device=device), weight(scheme, device=device)
    static = torch.full((1, 1), 0.02, device=device) if scheme == "FP8" else None
    y = fp8kit.linear(x, w_q, scheme=scheme, input_scale=static)
    activation = SCHEMES[scheme].activation
    if activation is None:
        assert_matmul(y.flatten(0, 1), x.flatten(0, 1), fp8kit.dequantize(w_q))
        return
    x_q = fp8kit.quantize(x.flatten(0, 1), activation, scale=static)
    assert_bits_equal(y.flatten(0, 1), fp8kit.scaled_mm(x_q, w_q, out_dtype=torch.float32))


@pytest.mark.parametrize("group", [ROW, TENSOR, BLOCK, MX], ids=str)
def test_linear_knows_the_standard_partner_of_a_weight(group: GroupShape) -> None:
    x, w_q = torch.randn(4, 256), fp8kit.quantize(torch.randn(64, 256), group, role="weight")
    partner = {ROW: "FP8_DYNAMIC", TENSOR: "FP8_TENSOR", BLOCK: "FP8_BLOCK", MX: "MXFP8"}[group]
    assert_bits_equal(fp8kit.linear(x, w_q), fp8kit.linear(x, w_q, scheme=partner))


def test_linear_with_an_input_scale_is_static_for_any_weight() -> None:
    x, w_q = torch.randn(4, 200), weight("FP8_DYNAMIC")
    scale = torch.full((1, 1), 0.02)
    x_q = fp8kit.quantize(x, TENSOR, scale=scale)
    y = fp8kit.linear(x, w_q, input_scale=scale)
    assert_bits_equal(y, fp8kit.scaled_mm(x_q, w_q, out_dtype=torch.float32))


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_linear_is_as_wrong_as_fp8(scheme: str, device: torch.device) -> None:
    x, w = torch.randn(64, 1024, device=device), torch.randn(256, 1024, device=device)
    w_q = fp8kit.quantize(w, SCHEMES[scheme].weight, role="weight")
    y = fp8kit.linear(x.bfloat16(), w_q, scheme=scheme)
    assert_scheme_error(y, x @ w.t(), scheme)


def test_linear_with_power_of_two_scales(device: torch.device) -> None:
    own = Scheme("BLOCK_UE8M0", BLOCK, GROUP128, ue8m0=True)
    x = torch.randn(16, 256, device=device)
    w_q = fp8kit.quantize(torch.randn(128, 256, device=device), BLOCK, scale_rounding="up")
    x_q = fp8kit.quantize(x, GROUP128, scale_rounding="up")
    y = fp8kit.linear(x, w_q, scheme=own)
    assert_bits_equal(y, fp8kit.scaled_mm(x_q, w_q, out_dtype=torch.float32))


def test_linear_bound_clips_every_token() -> None:
    x, w_q = torch.randn(8, 200) * 3, weight("FP8_DYNAMIC")
    bound = torch.tensor(1.5)
    clipped = fp8kit.linear(x, w_q, scale_ub=bound)
    x_q = fp8kit.quantize(x, scale_ub=bound)
    assert fp8kit.dequantize(x_q).abs().max() <= 1.5 * (1 + 2**-20)
    assert_bits_equal(clipped, fp8kit.scaled_mm(x_q, w_q, out_dtype=torch.float32))
    assert relative_error(clipped, fp8kit.linear(x, w_q)) > 0.1


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16])
def test_linear_follows_autocast(inner: torch.dtype, device: torch.device) -> None:
    x, w_q = torch.randn(4, 200, device=device), weight("FP8_DYNAMIC", device=device)
    with torch.autocast(device.type, dtype=inner):
        y = fp8kit.linear(x, w_q)
        assert y.dtype == F.linear(x, torch.randn(96, 200, device=device)).dtype == inner
    assert_bits_equal(y, fp8kit.linear(x.to(inner), w_q))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scheme", DYNAMIC)
def test_input_gradient_is_the_dense_one_of_the_dequantized_weight(
    scheme: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(2, 5, 200, device=device, dtype=dtype, requires_grad=True)
    w_q = weight(scheme, device=device)
    grad = torch.randn(2, 5, 96, device=device, dtype=dtype)
    fp8kit.linear(x, w_q, scheme=scheme).backward(grad)
    assert x.grad is not None
    assert_bits_equal(x.grad, (grad @ fp8kit.dequantize(w_q, dtype)))
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [(200,), (1, 200), (2, 3, 200), (0, 200)], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bias_gradient_sums_over_rows(shape: tuple[int, ...], bias_dtype: torch.dtype) -> None:
    x = torch.randn(shape)
    bias = torch.randn(96).to(bias_dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], 96)
    fp8kit.linear(x, weight("FP8_DYNAMIC"), bias).backward(grad)
    assert bias.grad is not None
    assert bias.grad.dtype == bias_dtype
    expected = grad.reshape(-1, 96).sum(0) if grad.numel() else torch.zeros(96)
    torch.testing.assert_close(bias.grad, expected.to(bias_dtype))


def test_gradient_flows_through_autocast() -> None:
    x = torch.randn(4, 200, requires_grad=True)
    w_q = weight("FP8_DYNAMIC")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fp8kit.linear(x, w_q)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    expected = fp8kit.dequantize(w_q, torch.bfloat16).float().sum(0).expand(4, 200)
    assert relative_error(x.grad, expected) < 0.01


@pytest.mark.parametrize("which", ["weight", "scale", "input_scale"])
def test_gradient_to_weight_or_scale_is_refused(which: str) -> None:
    w_q = weight("FP8")
    scale = torch.ones(1, 1, requires_grad=which == "input_scale")
    w_scale = w_q.scale.clone().requires_grad_(which == "scale")
    data = w_q.data.clone().requires_grad_(which == "weight")
    x = torch.randn(2, 200, requires_grad=True)
    q = fp8kit.QTensor(data, w_scale, TENSOR)
    y = fp8kit.linear(x, q, scheme="FP8", input_scale=scale)
    with pytest.raises(RuntimeError, match="A gradient for an FP8 weight or a scale"):
        y.sum().backward()


def test_gradient_through_scaled_mm_is_refused() -> None:
    bias = torch.zeros(96, requires_grad=True)
    x_q, w_q = fp8kit.quantize(torch.randn(4, 200)), weight("FP8_DYNAMIC")
    y = fp8kit.scaled_mm(x_q, w_q, bias)
    with pytest.raises(RuntimeError, match="A gradient through quantize"):
        y.float().sum().backward()


def test_no_grad_needs_no_gradient_rule() -> None:
    x = torch.randn(2, 200, requires_grad=True)
    with torch.no_grad():
        value = fp8kit.dequantize(fp8kit.quantize(x))
    assert not value.requires_grad
    assert relative_error(value, x.detach()) < 0.05


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_batch_invariant_linear(scheme: str, device: torch.device) -> None:
    x, w_q = torch.randn(40, 200, device=device), weight(scheme, device=device)
    whole = fp8kit.linear(x, w_q, scheme=scheme, batch_invariant=True)
    for rows in (slice(0, 1), slice(39, 40), slice(10, 27)):
        part = fp8kit.linear(x[rows], w_q, scheme=scheme, batch_invariant=True)
        assert_bits_equal(part, whole[rows])


def test_inputs_are_not_written_to(device: torch.device) -> None:
    x, w_q = torch.randn(4, 200, device=device), weight("FP8_DYNAMIC", device=device)
    bias, bound = torch.randn(96, device=device), torch.tensor(1.0, device=device)
    before = [t.clone() for t in (x, w_q.data, w_q.scale, bias, bound)]
    fp8kit.linear(x, w_q, bias, scale_ub=bound)
    for old, new in zip(before, (x, w_q.data, w_q.scale, bias, bound), strict=True):
        assert_bits_equal(old, new)


@pytest.mark.parametrize("shape", [(128,), (4, 128), (2, 4, 128)], ids=str)
def test_results_may_be_changed_in_place(shape: tuple[int, ...], device: torch.device) -> None:
    x, w = torch.randn(shape, device=device), weight("FP8_DYNAMIC", 96, 128, device)
    adapter = torch.randn(96, device=device, requires_grad=True)
    for y in (fp8kit.linear(x, w), fp8kit.scaled_mm(fp8kit.quantize(x), w)):
        y += adapter
        assert y.requires_grad


def documented_errors() -> dict[str, tuple[float, float]]:
    """Read the range of errors, in per cent, that docs/numerics.md gives for each scheme."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| (`.*`) \| ([\d.]+) to ([\d.]+) % \|", text, re.MULTILINE)
    return {
        name: (float(least), float(most))
        for names, least, most in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_every_scheme_has_a_documented_error() -> None:
    assert set(documented_errors()) == set(SCHEMES)


@pytest.mark.parametrize("k", [1024, 4096, 16384])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_documented_error_is_what_is_measured(name: str, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(rows, k, generator=generator) for rows in (512, 128))
    scheme, exact = SCHEMES[name], x.double() @ w.double().t()
    w_q = fp8kit.quantize(w, scheme.weight, role="weight")
    scale = (x.abs().max() / 448).reshape(1, 1) if scheme.static else None
    y = fp8kit.linear(x, w_q, scheme=scheme, input_scale=scale).double()
    error = float((y - exact).norm() / exact.norm())
    least, most = documented_errors()[name]
    assert least <= round(100 * error, 1) <= most


def test_quantized_tensors_of_other_libraries_are_refused_by_name() -> None:
    ao = pytest.importorskip("torchao.quantization")
    other = ao.Float8Tensor.from_hp(torch.randn(128, 128).bfloat16(), granularity=ao.PerRow())
    weight, layer = fp8kit.quantize(torch.randn(128, 128)), fp8kit.Fp8Linear(128, 128)
    said = r"is a Float8Tensor of torchao.*Pass its \.dequantize\(\)"
    with pytest.raises(TypeError, match=said):
        fp8kit.quantize(other)
    with pytest.raises(TypeError, match=said):
        fp8kit.linear(other, weight)
    with pytest.raises(TypeError, match=f"The bias {said}"):
        fp8kit.linear(torch.randn(2, 128), weight, other[0])
    with pytest.raises(TypeError, match=said):
        layer(other)


def test_tensors_in_the_place_of_words_and_dtypes_are_refused() -> None:
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match="Got scale_rounding=tensor"):
        fp8kit.quantize(x, scale_rounding=x)
    with pytest.raises(ValueError, match="Got dtype tensor"):
        fp8kit.Recipe(dtype=x)
    layer = fp8kit.Fp8Experts(2, 64, 64)
    with pytest.raises(TypeError, match=r"Got a placement as a torch\.sparse_coo"):
        layer.place(torch.tensor([0, 1]).to_sparse())
