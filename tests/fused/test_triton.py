"""Fused norms and activations: the reference against Transformers, the kernels against both.

The same tests run under Triton's interpreter on a CPU (tiny shapes) and compiled on a GPU (real
ones). Where a norm's sums are exact in fp32, no order of summation matters, so everything after
them must agree bit for bit; these inputs are small integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from ahead import compiled_by
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, min_scale
from fp8kit.fused import reference
from fp8kit.fused.problem import ACTIVATIONS, CodesFormat, FusedProblem
from fp8kit.quantizers.scale_layout import empty_scale
from grids import COMPILED, diagonal, pairwise
from numerics import assert_bits_equal, bits

fused = pytest.importorskip("fp8kit.fused.triton")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from activated import applied  # noqa: E402
from fp8kit.fused.triton_activations import activation_tile  # noqa: E402
from fp8kit.fused.triton_norms import norm_tile  # noqa: E402
from fp8kit.fused.triton_output import rounded_product, rounded_sum, row_cut  # noqa: E402
from fp8kit.quantizers.triton_encode import INTERPRETED, magnitudes, widen  # noqa: E402

TRITON_3_8 = triton.__version__.startswith("3.8.")

# numpy, which the interpreter computes with, warns of the infinities that these tests provoke
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4M3, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (ROW, GROUP128, MX, TENSOR)
EPS = 1e-5

# How often a 16-bit activation of normal arguments may differ from torch's. Errors of a few fp32
# ulp reach a midpoint of bf16 (fp16) once in 2^15 (2^12) values each. GELU cancels below -2.5,
# where torch itself misses the exact value as often as this: 0.4 % of bf16 and 0.8 % of fp16.
ACTIVATION_RATE = {
    ("silu", torch.bfloat16): 2e-4,
    ("silu", torch.float16): 2e-3,
    ("gelu", torch.bfloat16): 1e-2,
    ("gelu", torch.float16): 2e-2,
    ("gelu_tanh", torch.bfloat16): 1e-2,
    ("gelu_tanh", torch.float16): 2e-2,
}
# A 16-bit flip is at most a sixteenth (e4m3 of bf16) of a code, so a code moves sixteen times more
# rarely than the intermediate result; fp32 inputs move a code where it is within ulps of a tie.
CODE_RATE = 1e-3


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """Leave the CPU out where kernels are compiled: only the interpreter runs there."""
    if device.type == "cpu" and not INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    return device


# M and K: several rows per program, an odd K, several tiles; on a GPU those of models
SHAPES = ((5, 64), (3, 131), (2, 1200))
if COMPILED:
    SHAPES += ((300, 4096), (33, 5120), (64, 8192), (17, 14336))
# offset, rounding and whether a residual is added, to a weight in fp32
RMS_VARIANTS = (
    (0.0, "stepwise", False),
    (1.0, "stepwise", False),
    (1.0, "once", False),
    (0.0, "once", True),
)
# which of weight, bias and modulation are given, and the rounding
LAYER_VARIANTS = (
    ("", "once"),
    ("weight", "once"),
    ("weight bias", "once"),
    ("modulation", "stepwise"),
    ("weight modulation", "stepwise"),
    ("modulation", "once"),
)


def codes_format(
    x: Tensor, group: GroupShape, dtype: torch.dtype = E4M3, **changes: object
) -> CodesFormat:
    scale = torch.full((1, 1), 0.013, device=x.device) if group == TENSOR else None
    rounding = "floor" if group == MX else "exact"
    plain = CodesFormat(scale, group, dtype, min_scale(group, dtype, "activation"), None, rounding)
    return plain._replace(**changes)


def integers(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows of small integers with mean zero, and a zero row: all sums are exact."""
    half = torch.randint(-8, 9, (m, k // 2))
    x = torch.cat([half, -half, torch.zeros(m, k % 2)], 1)[:, torch.randperm(k)]
    x[-1] = 0
    return x.to(device, dtype)


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            assert_bits_equal(canonical(a), canonical(b))


def canonical(x: Tensor) -> Tensor:
    """Give every NaN of a sum or scale the same sign and payload, which IEEE leaves open."""
    return x if x.dtype.itemsize == 1 else x.masked_fill(x.isnan(), torch.nan)


def assert_nearly_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check that scales differ by an ulp of the intermediate dtype and codes by one step, rarely.

    Codes are compared where their scales agree to fp32 rounding: a scale that moved by an ulp of a
    16-bit amax moves the codes of its group with it.
    """
    (codes, scale), (codes_, scale_) = found, expected
    close = ((scale / scale_) - 1).abs() <= 1e-6
    assert (~close).float().mean() <= 0.02
    assert (((scale / scale_) - 1).abs() <= 2**-7).all()
    a, b = ordered(codes), ordered(codes_)
    width = -(-codes.shape[-1] // close.shape[-1])
    compared = close.repeat_interleave(width, -1)[..., : codes.shape[-1]]
    steps = (a - b).abs() * compared
    assert steps.max() <= 1
    assert (steps > 0).float().mean() <= CODE_RATE


def ordered(codes: Tensor) -> Tensor:
    """Return e4m3 codes as integers in the order of their values."""
    raw = codes.view(torch.uint8).int()
    return torch.where(raw >= 128, 128 - raw, raw)


def poisoned(x: Tensor) -> Tensor:
    """Put NaN, infinities and large values into separate rows."""
    rows = torch.cat([x, x[:1].expand(4, -1)]).clone()
    for i, value in enumerate((float("nan"), float("inf"), float("-inf"), 3e4)):
        rows[len(x) + i, (7 * i) % x.shape[1]] = value
    return rows


# the reference


def transformers_norm(kind: str, k: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor]:
    norm = (LlamaRMSNorm if kind == "llama" else GemmaRMSNorm)(k, eps=EPS).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(k))
    return norm, norm.weight.detach()


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("k", [512, 4096])
def test_the_reference_is_the_rms_norm_of_llama_and_gemma(dtype: torch.dtype, k: int) -> None:
    # for K a power of two dividing by it and multiplying by its inverse are one
    x = torch.randn(7, k).to(dtype) * 3
    llama, weight = transformers_norm("llama", k, dtype)
    assert_bits_equal(reference.rms_normed(x, weight, EPS, 0.0, "stepwise"), llama(x).detach())
    gemma, weight = transformers_norm("gemma", k, dtype)
    assert_bits_equal(reference.rms_normed(x, weight, EPS, 1.0, "once"), gemma(x).detach())


def test_the_reference_adds_the_residual_as_a_decoder_layer_does() -> None:
    x, residual = torch.randn(2, 5, 512).bfloat16()
    llama, weight = transformers_norm("llama", 512, torch.bfloat16)
    t = codes_format(x, ROW)
    data, scale, total = reference.rms_norm(x, residual, weight, EPS, 0.0, "stepwise", t)
    assert total is not None
    assert_bits_equal(total, residual + x)
    assert_same((data, scale), reference.quantized(llama(residual + x).detach(), t))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_is_the_mlp_of_llama_and_gemma(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 160}
    llama = LlamaMLP(LlamaConfig(**sizes)).to(dtype)
    gemma = GemmaMLP(GemmaConfig(**sizes, hidden_activation="gelu_pytorch_tanh")).to(dtype)
    x = torch.randn(9, 64).to(dtype) * 4
    for kind, mlp in (("silu", llama), ("gelu_tanh", gemma)):
        seen: list[Tensor] = []
        mlp.down_proj.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            mlp(x)
            gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        assert_bits_equal(reference.activated(kind, gate, up), seen[0])


@pytest.mark.parametrize("dtype", INPUTS)
def test_the_reference_is_torchs_layer_norm_within_rounding(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(9, 384).to(dtype), *torch.randn(2, 384).to(dtype)
    y = reference.layer_normed(x, weight, bias, None, EPS, "once")
    # both round once, from fp32 values that differ by a few ulp of their largest term
    torch.testing.assert_close(
        y, F.layer_norm(x, (384,), weight, bias, EPS), rtol=torch.finfo(dtype).eps, atol=4e-6
    )


def test_the_adaptive_reference_takes_eager_torchs_steps() -> None:
    x = torch.randn(2, 3, 5, 256).bfloat16()
    scale, shift = torch.randn(2, 2, 256).bfloat16()
    y = reference.layer_normed(x, None, None, (scale, shift), EPS, "stepwise")
    plain = reference.layer_normed(x, None, None, None, EPS, "once")
    assert_bits_equal(y, plain * (1 + scale[:, None, None]) + shift[:, None, None])
    once = reference.layer_normed(x, None, None, (scale, shift), EPS, "once")
    wide = reference.layer_normed(x.float(), None, None, None, EPS, "once")
    expected = wide * (1 + scale[:, None, None].float()) + shift[:, None, None].float()
    assert_bits_equal(once, expected.bfloat16())


# kernels against the reference, bit for bit


@pytest.mark.parametrize(
    ("dtype", "group", "shape", "variant"),
    pairwise(INPUTS, GROUPS, SHAPES, RMS_VARIANTS),
    ids=str,
)
def test_rms_norm_bits(
    device: torch.device,
    dtype: torch.dtype,
    group: GroupShape,
    shape: tuple[int, int],
    variant: tuple[float, str, bool],
) -> None:
    offset, rounding, adds = variant
    x, residual = (poisoned(integers(*shape, dtype, device))[:-1] for _ in range(2))
    # the last row's 3e4 has a square that is not exact
    weight, t = torch.randn(shape[1], device=device).to(dtype), codes_format(x, group)
    arguments = (weight.float() if adds else weight, EPS, offset, rounding, t)
    added = residual if adds else None
    assert_same(fused.rms_norm(x, added, *arguments), reference.rms_norm(x, added, *arguments))


@pytest.mark.parametrize(
    ("dtype", "shape", "variant"), pairwise(INPUTS, SHAPES, RMS_VARIANTS), ids=str
)
def test_bits_of_a_norm_that_is_not_quantized(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int],
    variant: tuple[float, str, bool],
) -> None:
    offset, rounding, _ = variant
    x = poisoned(integers(*shape, dtype, device))[:-1]
    arguments = (x, torch.randn(shape[1], device=device).to(dtype), EPS, offset, rounding)
    y = fused.rms_normed(*arguments)
    assert y.is_contiguous()
    assert_same((y,), (reference.rms_normed(*arguments),))


def test_a_norm_reads_heads_where_they_lie(device: torch.device) -> None:
    heads, k = 3, 64
    joined = torch.full((4, (heads + 2) * k), torch.nan, dtype=torch.bfloat16, device=device)
    x = joined[:, k : k + heads * k].unflatten(1, (heads, k)).unflatten(0, (2, 2))
    x.copy_(integers(4 * heads, k, torch.bfloat16, device).view(x.shape))
    weight = torch.randn(k, device=device).bfloat16()
    for given in (x, x[0, 0], x[0, 0, 0], x.transpose(1, 2), x[..., :0, :]):
        arguments = (given, weight, EPS, 0.0, "stepwise")
        assert_same(
            (fused.rms_normed(*arguments),), (reference.rms_normed(*arguments).contiguous(),)
        )


@pytest.mark.parametrize(
    ("dtype", "group", "shape", "variant"),
    pairwise(INPUTS, GROUPS, SHAPES, LAYER_VARIANTS),
    ids=str,
)
def test_layer_norm_bits(
    device: torch.device,
    dtype: torch.dtype,
    group: GroupShape,
    shape: tuple[int, int],
    variant: tuple[str, str],
) -> None:
    (m, k), (given, rounding) = shape, variant
    if TRITON_3_8 and device.type == "cpu" and dtype == torch.bfloat16 and "modulation" in given:
        pytest.skip("the interpreter of Triton 3.8 has no constants of bf16")
    x = integers(2 * m, k, dtype, device)
    t = codes_format(x, group)
    weight, bias = torch.randn(2, k, device=device).to(dtype)
    modulation = torch.randn(2, 2 * k, device=device).to(dtype).chunk(2, 1)
    arguments = (
        weight if "weight" in given else None,
        bias if "bias" in given else None,
        modulation if "modulation" in given else None,
        *(EPS, rounding, t),
    )
    x = x.reshape(2, m, k) if "modulation" in given else x
    assert_same(fused.layer_norm(x, *arguments), reference.layer_norm(x, *arguments))


@pytest.mark.parametrize(
    ("kind", "dtype", "group", "shape", "gated"),
    pairwise(ACTIVATIONS, INPUTS[:2], GROUPS, SHAPES, (False, True)),
    ids=str,
)
def test_activations_quantize_their_rounded_result_exactly(
    device: torch.device,
    kind: str,
    dtype: torch.dtype,
    group: GroupShape,
    shape: tuple[int, int],
    gated: bool,
) -> None:
    # the intermediate result, written out by the same device function, leaves only the quantizer
    m, k = shape
    gate, up = torch.randn(m, 2 * k, device=device).to(dtype).mul(3).chunk(2, 1)
    gate = gate.contiguous()
    t, act = codes_format(gate, group), applied(kind, gate)
    act = act * up if gated else act
    assert_same(fused.activation(kind, gate, up if gated else None, t), reference.quantized(act, t))


@pytest.mark.parametrize(
    ("kind", "dtype", "group", "shape", "width", "gated"),
    pairwise(ACTIVATIONS, INPUTS[:2], GROUPS, SHAPES, (1, 64, 320), (False, True)),
    ids=str,
)
def test_activations_behind_other_columns(
    device: torch.device,
    kind: str,
    dtype: torch.dtype,
    group: GroupShape,
    shape: tuple[int, int],
    width: int,
    gated: bool,
) -> None:
    m, k = shape
    wide = torch.randn(m, width + 2 * k, device=device).to(dtype).mul(3)
    left, gate, up = wide.split([width, k, k], 1)
    gate, up = gate.contiguous(), up if gated else None
    t, act = codes_format(wide[:, : width + k], group), applied(kind, gate)
    whole = torch.cat((left, act if up is None else act * up), 1)
    assert_same(fused.activation(kind, gate, up, t, left), reference.quantized(whole, t))
    whole = torch.cat((left, reference.activated(kind, gate, up)), 1)
    assert_same(reference.activation(kind, gate, up, t, left), reference.quantized(whole, t))


def infinity(kind: str, device: torch.device) -> list[float]:
    # torch's vectorized GELU on a CPU overflows too early, and makes NaN of infinity
    return [] if kind == "gelu" and device.type == "cpu" else [float("inf")]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_special_values(device: torch.device, kind: str) -> None:
    special = [float("nan"), -float("inf"), 0.0, -0.0, 1e30, -1e30, -100.0, 100.0]
    special += infinity(kind, device)
    x = torch.tensor(special, device=device).reshape(-1, 1).expand(-1, 130).bfloat16()
    x = torch.cat([x, x.roll(1, 0)], 1)
    for group in (ROW, TENSOR):
        t = codes_format(x, group)
        assert_same(fused.activation(kind, x, None, t), reference.activation(kind, x, None, t))


BOUNDS_AND_ROUNDINGS = (
    {"scale_ub": 1.5},
    {"scale_rounding": "up"},
    {"min_scale": 0.0},
    {"min_scale": 0.0, "scale_rounding": "up"},
    {"min_scale": 0.1},
)


@pytest.mark.parametrize(
    ("dtype", "group", "changes"),
    pairwise([E4M3, FNUZ, E5M2], [ROW, GROUP128], BOUNDS_AND_ROUNDINGS),
    ids=str,
)
def test_every_format_bound_and_rounding(
    device: torch.device, dtype: torch.dtype, group: GroupShape, changes: dict[str, object]
) -> None:
    x = integers(4, 384, torch.bfloat16, device)
    weight = torch.randn(384, device=device).bfloat16()
    if "scale_ub" in changes:
        changes = {"scale_ub": torch.tensor(changes["scale_ub"], device=device)}
    t = codes_format(x, group, dtype, **changes)
    arguments = (x, None, weight, EPS, 0.0, "stepwise", t)
    assert_same(fused.rms_norm(*arguments), reference.rms_norm(*arguments))


@pytest.mark.parametrize(
    ("scale", "dtype"),
    diagonal([1e-30, 1e30, 0.02, float("nan"), float("inf"), 0.0], [E4M3, FNUZ, E5M2]),
)
def test_static_scales_of_every_size(
    device: torch.device, scale: float, dtype: torch.dtype
) -> None:
    x = integers(4, 200, torch.bfloat16, device)
    weight = torch.randn(200, device=device).bfloat16()
    t = codes_format(x, TENSOR, dtype, scale=torch.full((1, 1), scale, device=device))
    arguments = (x, None, weight, EPS, 0.0, "stepwise", t)
    assert_same(fused.rms_norm(*arguments), reference.rms_norm(*arguments))


COLUMN_SHAPES = ((1, 300), (5, 256), (3, 7, 130), (200,), (0, 256), (2, 1200))


@pytest.mark.parametrize(
    ("group", "shape", "producer"),
    pairwise([GROUP128, GroupShape(1, 16), MX], COLUMN_SHAPES, ["rms", "layer", "silu"]),
    ids=str,
)
def test_scales_by_column_bits(
    device: torch.device, group: GroupShape, shape: tuple[int, ...], producer: str
) -> None:
    count = math.prod(shape[:-1])
    x = integers(count + 1, shape[-1], torch.bfloat16, device)[:count].view(shape)
    weight = torch.randn(shape[-1], device=device).bfloat16()
    by_row = codes_format(x, group)
    by_column = by_row._replace(scale_layout="column")
    for backend in (fused, reference):
        if producer == "rms":  # of exact sums, so that backends agree in every bit
            found = backend.rms_norm(x, None, weight, EPS, 0.0, "stepwise", by_column)
            expected = reference.rms_norm(x, None, weight, EPS, 0.0, "stepwise", by_row)
        elif producer == "layer":
            found, expected = (
                backend.layer_norm(x, weight, None, None, EPS, "once", t)
                for t in (by_column, by_row)
            )
        else:
            found, expected = (backend.activation("silu", x, x, t) for t in (by_column, by_row))
        assert_same(found, expected)
        assert found[1].stride() == empty_scale(x, group, "column").stride()


# kernels against torch, where sums and transcendental functions are not exact


@pytest.mark.parametrize(
    ("dtype", "group", "shape", "norm"),
    pairwise(INPUTS, [ROW, GROUP128, TENSOR], SHAPES, ["rms stepwise", "rms once", "layer"]),
    ids=str,
)
def test_norms_of_real_values(
    device: torch.device, dtype: torch.dtype, group: GroupShape, shape: tuple[int, int], norm: str
) -> None:
    x, residual = torch.randn(2, *shape, device=device).to(dtype) * 2
    weight, bias = torch.randn(2, shape[1], device=device).to(dtype)
    t = codes_format(x, group)
    if norm == "layer":
        arguments = (x + 1, weight, bias, None, EPS, "once", t)
        assert_nearly_same(fused.layer_norm(*arguments), reference.layer_norm(*arguments))
        return
    arguments = (x, residual, weight, EPS, 0.0, norm.removeprefix("rms "), t)
    *found, total = fused.rms_norm(*arguments)
    *expected, total_ = reference.rms_norm(*arguments)
    assert_nearly_same(tuple(found), tuple(expected))
    assert_bits_equal(total, total_)


@triton.jit
def _pairs_kernel(x_ptr, y_ptr, product_ptr, sum_ptr, largest_ptr, wide_ptr, n,
                  BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(product_ptr + at, rounded_product(x, y), mask=at < n)
    tl.store(sum_ptr + at, rounded_sum(x, y), mask=at < n)
    tl.store(largest_ptr + at, magnitudes((x, y), 2), mask=at < n)
    tl.store(wide_ptr + at, widen(x), mask=at < n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_in_pairs_rounds_as_torch_does(device: torch.device, dtype: torch.dtype) -> None:
    # every 16-bit value against values of its own size, of any size, and of its negation
    x = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)
    for y in (x.roll(77), x[torch.randperm(len(x), device=device)], -x, x.roll(1 << 15)):
        product, total = torch.empty_like(x), torch.empty_like(x)
        largest, wide = (
            torch.empty_like(x, dtype=torch.int32),
            torch.empty_like(x, dtype=torch.float),
        )
        _pairs_kernel[(16,)](
            x, y, product, total, largest, wide, len(x), BLOCK=1 << 12, enable_fp_fusion=False
        )
        assert_same((total, wide), (x + y, x.float()))
        # products under 2^-126 are rounded twice by torch, to float32 and to bf16
        exact = (x * y).abs() >= 2.0**-126
        assert exact.sum() > len(x) // 8
        assert_same((product[exact],), ((x * y)[exact],))
        found = largest.to(torch.int16).view(dtype)
        expected = torch.maximum(x.abs(), y.abs())
        assert_same((found,), (expected,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_agree_with_torch(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    x = torch.randn(1 << 17, device=device).to(dtype)
    y, expected = applied(kind, x), reference.activated(kind, x, None)
    assert (y != expected).float().mean() <= ACTIVATION_RATE[kind, dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_every_16_bit_value(
    device: torch.device, kind: str, dtype: torch.dtype
) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)
    x = x if infinity(kind, device) else x[x.abs() < 1e38]
    y, expected = applied(kind, x), reference.activated(kind, x, None)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    finite = x.isfinite() & expected.isfinite()
    x, y, expected = (v[finite].double() for v in (x, y, expected))
    # one ulp of the result's dtype, and what is left of 2^-22 after 1 + odd has cancelled
    bound = torch.finfo(dtype).eps * expected.abs() + 2**-21 * x.abs().clamp(max=8)
    tiny = torch.finfo(dtype).smallest_normal
    assert ((y - expected).abs() <= bound + tiny).all()


# any shape, any stride, any number of rows


def layouts(m: int, k: int, device: torch.device) -> Iterator[Tensor]:
    wide = integers(m, 2 * k, torch.bfloat16, device)
    yield wide[:, :k]
    yield wide[:, 1 : k + 1]
    yield wide[:, ::2]
    yield wide[:, :k].t().contiguous().t()
    yield wide[:1, :k].expand(m, k)
    yield wide[:, :k].reshape(1, m, 1, k).transpose(1, 2)
    yield wide[0, :k]


def test_strides_and_leading_dimensions(device: torch.device) -> None:
    k = 200
    weight = torch.randn(k, device=device).bfloat16()
    for x, group in diagonal(layouts(6, k, device), (ROW, GROUP128, TENSOR)):
        t = codes_format(x, group)
        arguments = (x, x, weight, EPS, 0.0, "once", t)
        found, expected = fused.rms_norm(*arguments), reference.rms_norm(*arguments)
        assert found[1].shape == expected[1].shape
        assert_nearly_same(found[:2], expected[:2])
        assert_bits_equal(found[2], expected[2])
        found, expected = (b.activation("silu", x, x, t) for b in (fused, reference))
        assert_nearly_same(found, expected)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)])
def test_empty(device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=device, dtype=torch.bfloat16)
    weight = torch.ones(shape[-1], device=device, dtype=torch.bfloat16)
    for group in GROUPS:
        t = codes_format(x, group)
        for backend in (fused, reference):
            data, _, total = backend.rms_norm(x, x, weight, EPS, 0.0, "once", t)
            assert data.shape == shape == total.shape
            assert backend.layer_norm(x, None, None, None, EPS, "once", t)[0].shape == shape
            assert backend.activation("gelu", x, None, t)[0].shape == shape


def test_a_rows_bits_depend_on_nothing_else(device: torch.device) -> None:
    interpreted = ((19, 48), (5, 1200))  # 16 rows of 48 share a program
    for m, k in interpreted if device.type == "cpu" else ((67, 48), (67, 4096), (67, 14336)):
        x = torch.randn(m, k, device=device).bfloat16()
        weight = torch.randn(k, device=device).bfloat16()
        t = codes_format(x, ROW)
        data, scale, _ = fused.rms_norm(x, None, weight, EPS, 0.0, "stepwise", t)
        for first, last in ((0, 1), (m - 1, m), (2, m - 1)):
            part = fused.rms_norm(x[first:last], None, weight, EPS, 0.0, "stepwise", t)
            assert_same(part[:2], (data[first:last], scale[first:last]))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    m, k = (1 << 19) + 3, 4096
    x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
    x[-2:] = integers(2, k, torch.bfloat16, torch.device("cuda"))[:1]
    weight = torch.randn(k, device="cuda").bfloat16()
    for group in (ROW, GROUP128):
        t = codes_format(x, group)
        found = fused.rms_norm(x, None, weight, EPS, 0.0, "stepwise", t)[:2]
        expected = reference.rms_norm(x[-2:], None, weight, EPS, 0.0, "stepwise", t)[:2]
        assert_same(tuple(part[-2:] for part in found), expected)
        found = fused.activation("silu", x, x, t)
        assert_nearly_same(
            tuple(part[-2:] for part in found), reference.activation("silu", x[-2:], x[-2:], t)
        )


@pytest.mark.gpu
def test_a_norm_sees_what_the_kernel_ahead_writes() -> None:
    # 33 MB are prefetched while the sum that they are is still being written
    x = torch.randn(4099, 4100, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4100, device="cuda").bfloat16()
    t = codes_format(x, ROW)
    for _ in range(20):
        *_, total = fused.rms_norm(x, torch.randn_like(x), weight, EPS, 0.0, "stepwise", t)
        arguments = (total, None, weight, EPS, 0.0, "stepwise", t)
        found = fused.rms_norm(*arguments)[:2]
        torch.cuda.synchronize()
        assert_same(found, fused.rms_norm(*arguments)[:2])
        assert_nearly_same(found, reference.rms_norm(*arguments)[:2])


# pure choices


def test_tiles_cover_a_row_and_fit() -> None:
    for k in (1, 2, 100, 1024, 1025, 4096, 5120, 8192, 11008, 14336, 28672, 40960):
        for itemsize in (2, 4):
            tile = norm_tile(k, itemsize, 128)
            assert tile.cols * tile.held >= k
            assert tile.cols % 128 == 0
            assert tile.held == 1 or tile.cols * (tile.held - 1) < k
            for m in (1, 4096):
                for whole, paired, heavy in itertools.product((False, True), repeat=3):
                    cut = activation_tile(m, k, itemsize, 128, whole, paired, heavy)
                    assert not whole or cut.cols * cut.held >= k
                    assert cut.warps in (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("most", [5, 7])
@pytest.mark.parametrize("k", [4096, 5120, 14336, 4097, 1])
def test_a_cut_row_leaves_as_few_lanes_idle_as_any_other_cut(k: int, most: int) -> None:
    warps, held = row_cut(k, 256, most)
    assert warps * held * 256 >= k
    assert held <= most
    others = ((w, math.ceil(k / (w * 256))) for w in (4, 8, 16, 32))
    assert warps * held == min(w * h for w, h in others if h <= most)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Compile the kernels for sm90 in a process without the interpreter."""
    script = Path(__file__).parents[1] / "quantizers" / "ahead_of_time.py"
    return compiled_by(script, tmp_path_factory.mktemp("triton"))


# which costs time and no bits
IN_MEMORY = "Triton 3.8 keeps some of these kernels' values in memory, other versions do not"


@pytest.mark.skipif(TRITON_3_8, reason=IN_MEMORY)
def test_compiled_kernels_fit_their_registers(compiled: dict[str, dict[str, int]]) -> None:
    # a cap may cost one pair of registers, see ``quantize_norm`` and ``quantize_activation``
    assert {name: c["stack"] for name, c in compiled.items() if c["stack"] > 8} == {}
    assert {name: c["registers"] for name, c in compiled.items() if c["registers"] > 64} == {}
    assert compiled["gelu 14336 row"]["registers"] <= 40
    assert compiled["adaptive 8192 group"]["registers"] <= 48


def test_compiled_kernels_divide_cheaply(compiled: dict[str, dict[str, int]]) -> None:
    # only a static scale of unusual size is divided by as IEEE says, once per element of a thread
    divisions = {name: c["divisions"] for name, c in compiled.items() if c["divisions"]}
    assert divisions == {
        name: 56 if "gelu" in name else 32 for name in compiled if "static" in name
    }


@pytest.mark.skipif(TRITON_3_8, reason=IN_MEMORY)
def test_compiled_kernels_work_in_pairs(compiled: dict[str, dict[str, int]]) -> None:
    # of 32 elements per thread: 16 products; 12 maxima leave the pairs of one tile, 3 leave one
    assert compiled["rms 4096 row"]["paired_products"] == 16
    assert compiled["rms 4096 row"]["paired_maxima"] == 15
    assert compiled["adaptive 4096 row"]["paired_products"] == 48
    assert compiled["rms 4096 row"]["conversions_to_codes"] == 16


def test_no_maximum_loses_its_magnitude_to_a_fused_relu(
    compiled: dict[str, dict[str, int]],
) -> None:
    # masked columns are constant zeros, which tempt the assembler; see `magnitudes`
    relus = {name: c["relus"] for name, c in compiled.items() if "relus" in c}
    assert {"rms 1025 row bf16", "gated 1025 row fp16"} <= relus.keys()
    assert set(relus.values()) == {0}


def test_scales_of_groups_need_no_barrier(compiled: dict[str, dict[str, int]]) -> None:
    for layout in ("group", "column"):
        assert compiled[f"gelu 14336 {layout}"]["barriers"] == 0
        for name in ("rms 4096", "adaptive 8192"):
            barriers = compiled[f"{name} {layout}"]["barriers"]
            assert barriers == compiled[f"{name} static"]["barriers"] > 0


def test_inputs_are_prefetched_before_the_kernel_ahead_has_ended(
    compiled: dict[str, dict[str, int]],
) -> None:
    for name, counts in compiled.items():
        assert counts["waits"] == 1, name
        late = any(word in name for word in ("gelu", "gated", "plain"))
        operands = 0 if late else 2 if "add_rms" in name else 1
        assert counts["prefetches"] == operands, name
        assert counts["prefetches_before_the_wait"] == min(1, operands), name


def problem(**changes: object) -> FusedProblem:
    facts = {
        "producer": "rms_norm",
        "group": ROW,
        "static": False,
        "in_dtype": torch.bfloat16,
        "dtype": E4M3,
        "k": 4096,
        "device_type": "cuda",
        "capability": (9, 0),
    }
    return FusedProblem(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"group": TENSOR, "static": True}, None),
        ({"group": TENSOR}, "needs all rows"),
        ({"static": True}, "static row groups"),
        ({"group": BLOCK}, "not within one row"),
        ({"group": GroupShape(1, 96)}, "not a power of two"),
        ({"group": GroupShape(1, 512)}, "not a power of two up to 256"),
        ({"k": 40961}, "registers hold"),
        ({"producer": "silu", "k": 40961}, None),
        ({"producer": "silu", "k": 57345}, "registers hold"),
        ({"producer": "silu", "k": 1 << 20, "group": GROUP128}, None),
        ({"in_dtype": torch.float64}, "float64 input"),
    ],
)
def test_supports(changes: dict[str, object], reason: str | None) -> None:
    found = fused.supports(problem(**changes))
    assert found == reason if reason is None else reason in found


@pytest.mark.skipif(INTERPRETED.value, reason="the interpreter runs on every device")
@pytest.mark.parametrize("place", [("cpu", None), ("cuda", (8, 0))])
def test_supports_only_gpus_with_fp8(place: tuple[str, tuple[int, int] | None]) -> None:
    device_type, capability = place
    assert fused.supports(problem(device_type=device_type, capability=capability))


def test_the_comparison_of_codes_can_fail() -> None:
    x = torch.randn(4, 256)
    data, scale = reference.quantized(x, codes_format(x, ROW))
    moved = bits(data).clone()
    moved[0, 0] ^= 4
    with pytest.raises(AssertionError):
        assert_nearly_same((moved.view(E4M3), scale), (data, scale))
    with pytest.raises(AssertionError):
        assert_nearly_same((data, scale * 1.1), (data, scale))
