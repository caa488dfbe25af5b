"""The specification against an oracle of Python fractions, which share no arithmetic with it.

The oracle takes one group at a time: amax, scale and codes as exact rationals, rounded where the
definition rounds. It encodes bytes itself and never calls a float of any hardware.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fp8kit
from fp8kit import formats
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.quantizers import reference
from grids import diagonal
from numerics import assert_bits_equal

E4M3, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
# stored mantissa bits, smallest normal exponent, exponent bias, largest value used, NaN byte
LAYOUT = {
    E4M3: (3, -6, 7, 448, 0x7F),
    FNUZ: (3, -7, 8, 224, 0x80),
    E5M2: (2, -14, 15, 57344, 0x7F),
}


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if value >= Fraction(2) ** exponent else exponent - 1


def rounded(value: Fraction, mantissa: int, least: int) -> Fraction:
    """Round to nearest even with ``mantissa`` stored bits, subnormal below exponent ``least``."""
    if value == 0:
        return value
    step = Fraction(2) ** (max(floor_log2(abs(value)), least) - mantissa)
    return round(value / step) * step


def fp32(value: Fraction) -> Fraction:
    return rounded(value, 23, -126)


def encode(value: Fraction, negative: bool, dtype: torch.dtype) -> int:
    """Return the byte of a value that the format represents exactly."""
    mantissa, least, bias, _, _ = LAYOUT[dtype]
    if value == 0:
        return 0x80 if negative and dtype != FNUZ else 0
    exponent = max(floor_log2(abs(value)), least)
    units = abs(value) / Fraction(2) ** (exponent - mantissa)
    assert units.denominator == 1
    # a subnormal has units under 2^mantissa, and then the exponent field is zero
    field = exponent + bias - 1 if units >= 2**mantissa else 0
    body = (field << mantissa) + int(units)
    return body + (0x80 if value < 0 else 0)


def oracle_scale(
    values: list[float], dtype: torch.dtype, floor: float, bound: float | None, rounding: str
) -> Fraction | None:
    """Return the scale of one group, ``None`` for NaN."""
    if any(math.isnan(v) for v in values):
        return None
    amax = max((abs(v) for v in values), default=0.0)
    amax = amax if bound is None else min(amax, bound)
    if math.isinf(amax):
        return None
    scale = max(fp32(Fraction(amax) / LAYOUT[dtype][3]), fp32(Fraction(floor)))
    if rounding == "up":
        exponent = floor_log2(scale)
        scale = Fraction(2) ** (exponent + (scale > Fraction(2) ** exponent))
    return scale


def oracle_mx_scale(values: list[float], dtype: torch.dtype, rounding: str) -> Fraction | None:
    """Return the power-of-two scale of one MX group (OCP MX v1.0, or rounded up)."""
    if not all(map(math.isfinite, values)):
        return None
    amax = Fraction(max((abs(v) for v in values), default=0.0))
    largest = LAYOUT[dtype][3]
    if amax == 0:
        return Fraction(2) ** -127
    if rounding == "floor":
        exponent = floor_log2(amax) - floor_log2(Fraction(largest))
    else:
        ratio = fp32(amax / largest)
        exponent = floor_log2(ratio) if ratio else -127
        exponent += ratio > Fraction(2) ** exponent
    return Fraction(2) ** max(exponent, -127)


def oracle_code(value: float, scale: Fraction | None, dtype: torch.dtype) -> int:
    mantissa, least, _, largest, nan = LAYOUT[dtype]
    if scale is None or math.isnan(value):
        return nan
    negative = math.copysign(1, value) < 0
    if math.isinf(value):
        return encode(Fraction(-largest if negative else largest), negative, dtype)
    ratio = fp32(Fraction(value) / scale)
    clamped = max(min(ratio, Fraction(largest)), Fraction(-largest))
    return encode(rounded(clamped, mantissa, least), negative, dtype)


def groups_of(
    shape: tuple[int, ...], group: GroupShape
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """Return each scale's index with the indices of the elements it belongs to."""
    members: dict[tuple[int, ...], list[tuple[int, ...]]] = {
        index: [] for index in itertools.product(*map(range, formats.scale_shape(shape, group)))
    }
    for index in itertools.product(*map(range, shape)):
        column = 0 if group.cols == -1 else index[-1] // group.cols
        if group == TENSOR:
            members[0, 0].append(index)
        elif group.rows == 1:
            members[(*index[:-1], column)].append(index)
        else:
            members[(*index[:-2], index[-2] // group.rows, column)].append(index)
    yield from members.items()


def check(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype = E4M3,
    role: str = "activation",
    bound: float | None = None,
    rounding: str | None = None,
) -> fp8kit.QTensor:
    """Compare every byte of the oracle with what dispatch chooses and with the reference."""
    scale_ub = None if bound is None else torch.tensor(bound, device=x.device)
    q = fp8kit.quantize(
        x, group, dtype=dtype, role=role, scale_ub=scale_ub, scale_rounding=rounding
    )
    assert q.data.shape == x.shape
    assert q.data.dtype == dtype
    assert q.data.is_contiguous()
    assert q.scale.is_contiguous()
    assert tuple(q.scale.shape) == formats.scale_shape(x.shape, group)
    assert q.scale.dtype == formats.scale_dtype(group)
    floor = formats.min_scale(group, dtype, role)
    chosen = rounding or ("up" if group == MX else "exact")
    specified = reference.quantize(x, group, dtype, floor, scale_ub, chosen)
    assert_bits_equal(specified[0], q.data)
    assert_bits_equal(specified[1], q.scale)
    judge(q, x, floor, bound, rounding)
    return q


def judge(
    q: fp8kit.QTensor,
    x: Tensor,
    floor: float,
    bound: float | None = None,
    rounding: str | None = None,
) -> None:
    """Compare every byte with the oracle."""
    group, dtype = q.group, q.data.dtype
    codes, values, scales = q.data.cpu().view(torch.uint8), x.cpu().float(), q.scale.cpu()
    for place, members in groups_of(tuple(x.shape), group):
        group_values = [values[i].item() for i in members]
        if group == MX:
            scale = oracle_mx_scale(group_values, dtype, rounding or "up")
            byte = 255 if scale is None else floor_log2(scale) + 127
            assert scales[place].item() == byte
        else:
            scale = oracle_scale(group_values, dtype, floor, bound, rounding or "exact")
            found = scales[place].item()
            assert math.isnan(found) if scale is None else Fraction(found) == scale
        expected = [oracle_code(v, scale, dtype) for v in group_values]
        assert [codes[i].item() for i in members] == expected


GROUPS = (TENSOR, ROW, GroupShape(1, 4), GroupShape(3, 5), GroupShape(2, -1), MX)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, GroupShape]:
    """Draw a tensor of 1 to 4 dimensions, any strides (zero too), and a group for it."""
    group = draw(st.sampled_from(GROUPS))
    least = 2 if group.rows > 1 else 1
    shape = draw(st.lists(st.integers(0, 5), min_size=least - 1, max_size=3))
    shape = [*shape, draw(st.sampled_from((0, 1, 3, 4, 9, 31, 32, 33)))]
    dtype = draw(st.sampled_from(DTYPES))
    exponents = draw(st.tuples(st.integers(-24, 4), st.integers(0, 20)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.integers(1, 2))
    # memory lies in another order than the dimensions, with gaps
    memory = [shape[d] * step for d in order]
    scale = torch.randint(
        exponents[0], exponents[0] + exponents[1] + 1, memory, generator=generator
    )
    base = torch.randn(memory, generator=generator).mul(2.0 ** scale.float()).to(dtype)
    back = [order.index(d) for d in range(len(shape))]
    x = base[tuple(slice(None, None, step) for _ in memory)].permute(back)
    if draw(st.booleans()) and x.numel():
        dim = draw(st.integers(0, len(shape) - 1))
        x = x.narrow(dim, 0, 1).expand(shape)
    return x, group


@given(inputs(), st.sampled_from(tuple(LAYOUT)), st.sampled_from(("activation", "weight")))
def test_any_shape_dtype_and_stride(
    case: tuple[Tensor, GroupShape], dtype: torch.dtype, role: str
) -> None:
    check(*case, dtype=dtype, role=role)


@given(inputs(), st.floats(2.0**-20, 2.0**16, width=32), st.sampled_from(("exact", "up")))
def test_any_shape_with_bound_and_rounding(
    case: tuple[Tensor, GroupShape], bound: float, rounding: str
) -> None:
    x, group = case
    check(x, ROW if group == MX else group, bound=bound, rounding=rounding)


@given(inputs(), st.sampled_from(("floor", "up")), st.sampled_from((E4M3, E5M2)))
def test_any_shape_in_mx(
    case: tuple[Tensor, GroupShape], rounding: str, dtype: torch.dtype
) -> None:
    check(case[0], MX, dtype=dtype, rounding=rounding)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(GROUPS))
def test_any_fp32_value(values: list[float], group: GroupShape) -> None:
    check(torch.tensor([values]), group)


# any group with any format, in smaller tensors: ``test_any_shape_dtype_and_stride``
@pytest.mark.parametrize(
    ("group", "dtype"), diagonal([TENSOR, ROW, GROUP128, BLOCK, MX], LAYOUT), ids=str
)
def test_standard_groups_with_ragged_edges(
    group: GroupShape, dtype: torch.dtype, device: torch.device
) -> None:
    check(torch.randn(130, 129, device=device), group, dtype)


@pytest.mark.parametrize("dtype", LAYOUT, ids=str)
def test_every_code_and_every_tie_between_two(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes.abs() <= LAYOUT[dtype][3])].unique()
    middle = (codes[1:] + codes[:-1]) / 2
    around = [middle, middle.nextafter(codes[1:]), middle.nextafter(codes[:-1])]
    x = torch.cat([codes, *around]).to(device)[None]
    q = check(x, ROW, dtype, role="weight")
    assert q.scale.item() == 1.0
    assert torch.equal(q.data[0, : len(codes)].float().cpu(), codes)


def test_zeros_keep_their_sign_and_get_the_smallest_scale(device: torch.device) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0]], device=device)
    q = check(x, ROW)
    assert q.data.view(torch.uint8).tolist() == [[0, 0x80, 0]]
    assert q.scale.item() == torch.tensor(1 / (448 * 512)).item()
    assert check(x, ROW, role="weight").scale.item() == torch.tensor(1e-10 / 448).item()
    assert check(x, MX).scale.item() == 0
    assert check(x, ROW, FNUZ).data.view(torch.uint8).tolist() == [[0, 0, 0]]


def test_denormals_are_not_flushed(device: torch.device) -> None:
    tiny = torch.tensor([[2.0**-149, -(2.0**-140), 2.0**-127, 2.0**-126]], device=device)
    for group in (ROW, TENSOR, MX):
        for role in ("activation", "weight"):
            check(tiny, group, role=role)
    assert check(tiny, MX).data.float().abs().max() > 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("group", [TENSOR, ROW, GroupShape(1, 4), GroupShape(2, 4), MX], ids=str)
@pytest.mark.parametrize("dtype", LAYOUT, ids=str)
def test_a_bad_value_makes_its_group_nan_and_no_other(
    bad: float, group: GroupShape, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 64)
    x[1, 5] = bad
    value = fp8kit.dequantize(check(x, group, dtype))
    for _, members in groups_of((4, 64), group):
        found = [value[i].isnan().item() for i in members]
        assert all(found) if (1, 5) in members else not any(found)


def test_a_bound_saturates_infinities_but_not_nan() -> None:
    x = torch.tensor([[torch.inf, -1.0], [-torch.inf, 2.0], [torch.nan, 3.0]])
    value = fp8kit.dequantize(check(x, ROW, bound=4.0))
    assert value[:2].tolist() == [[4.0, -1.0], [-4.0, 2.0]]
    assert value[2].isnan().all()


def test_the_bound_is_on_amax_not_on_the_scale() -> None:
    q = check(torch.tensor([[10.0, 1.0]]), ROW, bound=4.48)
    assert q.scale.item() == pytest.approx(0.01)
    assert fp8kit.dequantize(q)[0, 0].item() == pytest.approx(4.48)


@pytest.mark.parametrize(
    ("amax", "floor", "up"),
    [
        # OCP MX v1.0: 2^(floor(log2(amax)) - 8); up: the smallest power that holds amax
        (448.0, 127, 127),
        (449.0, 127, 128),
        (511.0, 127, 128),
        (512.0, 128, 128),
        (1.0, 119, 119),
        (1.75, 119, 119),
        (1.9, 119, 120),
        (2.0**-130, 0, 0),
        (3.4e38, 246, 247),
    ],
)
def test_mx_exponents(amax: float, floor: int, up: int) -> None:
    x = torch.full((1, 32), amax)
    assert check(x, MX, rounding="floor").scale.item() == floor
    assert check(x, MX).scale.item() == up


def test_rounding_up_gives_powers_of_two_that_never_saturate() -> None:
    x = torch.randn(64, 256) * torch.logspace(-10, 10, 64)[:, None]
    q = check(x, GROUP128, rounding="up")
    mantissas, _ = torch.frexp(q.scale)
    assert (mantissas == 0.5).all()
    assert (q.scale * 448 >= x.view(64, 2, 128).abs().amax(-1)).all()


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", LAYOUT, ids=str)
def test_static_scales(group: GroupShape, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 70) * 30
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    kind, shape = formats.scale_dtype(group), formats.scale_shape(x.shape, group)
    scale = torch.randint(120, 135, shape) if group == MX else torch.rand(shape) + 0.01
    scale = scale.to(kind)
    q = fp8kit.quantize(x.to(device), group, dtype=dtype, scale=scale.to(device))
    assert_bits_equal(q.scale.cpu(), scale)
    codes = q.data.cpu().view(torch.uint8)
    for place, members in groups_of((4, 70), group):
        number = scale[place].item()
        exact = Fraction(2) ** (int(number) - 127) if group == MX else Fraction(number)
        for index in members:
            assert codes[index].item() == oracle_code(x[index].item(), exact, dtype)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("out", DTYPES, ids=str)
def test_dequantize_multiplies_in_fp32_and_rounds_once(
    group: GroupShape, out: torch.dtype, device: torch.device
) -> None:
    q = fp8kit.quantize(torch.randn(5, 70, device=device), group)
    value = fp8kit.dequantize(q, out).cpu()
    data, scales = q.data.cpu().float(), q.scale.cpu()
    expected = torch.empty(5, 70)
    for place, members in groups_of((5, 70), group):
        number = scales[place].item()
        scale = Fraction(2) ** (int(number) - 127) if group == MX else Fraction(number)
        for index in members:
            expected[index] = float(fp32(Fraction(data[index].item()) * scale))
    assert_bits_equal(value, expected.to(out))
    assert value.is_contiguous()


def test_mx_scale_bytes_decode_at_both_ends() -> None:
    data = torch.ones(3, 32).to(E4M3)
    scale = torch.tensor([[0], [254], [255]], dtype=torch.uint8)
    value = fp8kit.dequantize(formats.QTensor(data, scale, MX))
    assert value[0, 0].item() == 2.0**-127
    assert value[1, 0].item() == 2.0**127
    assert value[2].isnan().all()


def test_the_definition_is_the_same_on_every_device(device: torch.device) -> None:
    x = torch.randn(257, 384)
    for group in (TENSOR, ROW, GROUP128, BLOCK, MX):
        here, there = fp8kit.quantize(x, group), fp8kit.quantize(x.to(device), group)
        assert_bits_equal(here.scale, there.scale.cpu())
        assert_bits_equal(here.data, there.data.cpu())


@pytest.mark.parametrize("group", [TENSOR, ROW, GROUP128, BLOCK, MX], ids=str)
def test_the_definition_itself_gives_the_same_bits_on_every_device(
    group: GroupShape, device: torch.device
) -> None:
    # called directly, because dispatch may prefer a kernel; a division that a device turns into a
    # multiplication shows here
    x = torch.randn(257, 384)
    for rounding in ("floor", "up") if group == MX else ("exact", "up"):
        here = reference.quantize(x, group, E4M3, 1e-12, None, rounding)
        there = reference.quantize(x.to(device), group, E4M3, 1e-12, None, rounding)
        for a, b in zip(here, there, strict=True):
            assert_bits_equal(a, b.cpu())
        value = reference.dequantize(there[0], there[1], group, torch.bfloat16)
        assert_bits_equal(reference.dequantize(*here, group, torch.bfloat16), value.cpu())


def test_the_oracle_notices_a_reciprocal() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = (codes[1:] + codes[:-1]) / 2
    scale = torch.rand(64, 1) + 1
    x = torch.cat([ties * scale, 448 * scale], 1)
    q = check(x, ROW)
    by_reciprocal = (x * (1 / q.scale)).clamp(-448, 448).to(E4M3)
    with pytest.raises(AssertionError):
        judge(fp8kit.QTensor(by_reciprocal, q.scale, ROW), x, 0.0)


def test_the_oracle_notices_a_rounded_scale() -> None:
    x = torch.randn(64, 32)
    q = check(x, ROW)
    rounded_twice = x.abs().amax(1, keepdim=True) * torch.tensor(1 / 448)
    with pytest.raises(AssertionError):
        judge(fp8kit.QTensor(q.data, rounded_twice, ROW), x, 0.0)
