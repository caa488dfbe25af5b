"""MX blocks against independent implementations: integers by the OCP texts, and torchao."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fp8kit
import mx_accuracy
from fp8kit.formats import MX, ROW
from fp8kit.quantizers.rebase import restore
from numerics import assert_bits_equal

ROUNDINGS = ("floor", "up")
EDGES = (
    0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F7FFFFF, 0x43E00000, 0x43E00001,
    0x43F00000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF,
)  # fmt: skip


def block_of(bits: list[int], rounding: str) -> tuple[int, list[int]]:
    """Quantize the bits of 32 fp32 numbers, from the texts of OCP MX 1.0 and OCP FP8 1.0.

    Every number is an integer multiple of 2^-149, so that only the result is rounded.
    """
    if any(b >> 23 & 255 == 255 for b in bits):
        return 255, [0x7F] * 32
    whole = [_multiple(b) for b in bits]
    if not any(whole):
        return 0, [b >> 31 << 7 for b in bits]
    largest = max(whole)
    exponent = largest.bit_length() - 1 - 149 - 8
    if rounding == "up":  # the least under which nothing exceeds 448 = 7 * 2^6
        exponent -= 1
        while largest > _shifted(7, exponent + 6 + 149):
            exponent += 1
    exponent = min(max(exponent, -127), 127)
    codes = [b >> 31 << 7 | _code(w, exponent) for b, w in zip(bits, whole, strict=True)]
    return exponent + 127, codes


def _multiple(bits: int) -> int:
    field, fraction = bits >> 23 & 255, bits & 0x7FFFFF
    return fraction if field == 0 else (fraction | 0x800000) << field - 1


def _shifted(value: int, places: int) -> int:
    return value << places if places >= 0 else value >> -places


def _code(whole: int, exponent: int) -> int:
    """Return the e4m3 code of ``whole * 2^-149 / 2^exponent``, to nearest even, saturating."""
    # in smallest steps of 2^-9; a binade holds 8 codes, each step of it twice that of the last
    places = 149 - 9 + exponent
    binade = max(whole.bit_length() - places - 4, 0)
    step = places + binade
    if step <= 0:
        kept = whole << -step
    else:
        kept, rest = whole >> step, whole & (1 << step) - 1
        half = 1 << step - 1
        kept += rest > half or (rest == half and kept & 1)
    return min(kept + 8 * binade, 0x7E)


def blocks(count: int, seed: int) -> Tensor:
    """Return bits of blocks: of any exponents, of near ones, and with edges of the format."""
    random = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    bits = whole(0, 2**31, count, 32)
    near = (whole(0, 255, count, 1) - whole(0, 12, count, 32)).clamp(min=0)
    bits = torch.where(whole(0, 5, count, 1) == 0, bits, bits & 0x7FFFFF | near << 23)
    bits = torch.where(whole(0, 4, count, 32) == 0, bits & 0x7FF00000, bits)  # ties
    edges = torch.tensor(EDGES)[whole(0, len(EDGES), count, 32)]
    edged = (whole(0, 8, count, 1) == 0) & (whole(0, 16, count, 32) == 0)
    return torch.where(edged, edges, bits) | whole(0, 2, count, 32) << 31


def floats(bits: Tensor) -> Tensor:
    return bits.sub(bits >> 31 << 32).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_blocks_equal_those_of_python_integers(count: int, rounding: str) -> None:
    bits = blocks(count, 0)
    q = fp8kit.quantize(floats(bits), MX, scale_rounding=rounding)
    found = zip(q.scale.flatten().tolist(), q.data.view(torch.uint8).tolist(), strict=True)
    wrong = [b for b, got in zip(bits.tolist(), found, strict=True) if block_of(b, rounding) != got]
    assert wrong == []


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_integers_of_tensors_equal_those_of_python(rounding: str) -> None:
    """The tensor version, yardstick for a million blocks, is compared with Python's integers."""
    bits = blocks(500, 1)
    scale, codes = mx_accuracy.integers(floats(bits), rounding)
    found = list(zip(scale.tolist(), codes.tolist(), strict=True))
    assert [block_of(b, rounding) for b in bits.tolist()] == found


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_million_blocks_equal_those_of_integers(count: int) -> None:
    found = mx_accuracy.against_integers(count)
    assert found == {"blocks": count, "wrong_floor": 0, "wrong_up": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rounding", "mode"), [("floor", "FLOOR"), ("up", "RCEIL")])
@pytest.mark.parametrize("count", [5000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_blocks_equal_those_of_torchao(
    count: int, rounding: str, mode: str, dtype: torch.dtype
) -> None:
    theirs = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed"
    )
    for seed in range(-(-count // 50_000)):
        x = floats(blocks(min(count, 50_000), seed) & ~255).to(dtype)
        # its floats round log2(amax / 448), and what is near the smallest; it takes no infinity
        x = x[x.isfinite().all(1) & (x.abs().amax(1) >= 2.0**-110)]
        scale, codes = theirs.to_mx(
            x, torch.float8_e4m3fn, 32, getattr(theirs.ScaleCalculationMode, mode)
        )
        q = fp8kit.quantize(x, MX, scale_rounding=rounding)
        assert_bits_equal(q.scale.flatten(), scale.view(torch.uint8).flatten())
        assert_bits_equal(q.data, codes)


@pytest.mark.slow
def test_every_code_at_every_distance_of_exponents() -> None:
    found = mx_accuracy.every_distance()
    assert found["pairs"] == 254 * 254
    assert found["wrong"] == 0 < found["changed"]


def test_scales_lie_where_the_formula_says_in_a_thousand_shapes() -> None:
    assert mx_accuracy.swizzled(1000) == {"shapes": 1000, "wrong": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("group", [ROW, fp8kit.BLOCK, fp8kit.TENSOR], ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (300, 4096), (3, 130, 260)], ids=str)
def test_a_gpu_rebases_and_restores_to_the_bits_of_the_cpu(
    shape: tuple[int, ...], group: fp8kit.GroupShape
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1))
    weight[..., ::7] *= 2.0**12
    q = fp8kit.quantize(weight, MX, role="weight")
    q.scale.view(-1)[1] = 255  # a group of NaN
    there = fp8kit.QTensor(q.data.cuda(), q.scale.cuda(), MX)
    here, found = fp8kit.rebase(q, group), fp8kit.rebase(there, group)
    assert_bits_equal(found.q.data.cpu(), here.q.data)
    assert_bits_equal(found.q.scale.cpu(), here.q.scale)
    assert_bits_equal(found.exponents.cpu(), here.exponents)
    assert found.changed == here.changed > 0
    assert found.largest_change == pytest.approx(here.largest_change, rel=1e-5)
    back, wanted = (restore(x.q, x.exponents, "w") for x in (found, here))
    assert_bits_equal(back.data.cpu(), wanted.data)
    assert_bits_equal(back.scale.cpu(), wanted.scale)


@pytest.mark.gpu
def test_a_gpu_swizzles_to_the_bytes_of_the_cpu() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(50):
        shape = tuple(torch.randint(1, 700, (2,), generator=random).tolist())
        scale = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        flat = fp8kit.swizzle_scales(scale.cuda())
        assert_bits_equal(flat.cpu(), fp8kit.swizzle_scales(scale))
        assert_bits_equal(fp8kit.unswizzle_scales(flat, shape).cpu(), scale)
