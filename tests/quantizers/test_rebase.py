"""MX weights rebased to coarser scales: exact if FP8 can hold them, else changes are counted."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

import fp8kit
from fp8kit.formats import BLOCK, MX, ROW, TENSOR, GroupShape, QTensor
from fp8kit.quantizers import reference
from fp8kit.quantizers.rebase import restore
from numerics import assert_bits_equal

E4M3 = torch.float8_e4m3fn


def value_of(code: int) -> Fraction | None:
    """Return what an e4m3fn byte means, from the fields of the OCP FP8 text; ``None`` for NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    magnitude = Fraction(mantissa, 8) / 64 if exponent == 0 else (
        (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )  # fmt: skip
    return -magnitude if sign else magnitude


def every_pair(anchor: int) -> tuple[QTensor, list[int]]:
    """Return a row for every exponent: a group with all codes, and one with larger values."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    data = torch.zeros(255, 288, dtype=torch.uint8)
    data[:, 32 : 32 + len(codes)] = codes
    data[:, 0] = 0x38  # 1.0
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 9)
    exponents[:, 0] = anchor
    return QTensor(data.view(E4M3), exponents, MX), codes.tolist()


def test_every_code_at_every_distance_keeps_its_value_or_is_rounded_once() -> None:
    q, codes = every_pair(200)
    found = fp8kit.rebase(q)
    shifts = torch.log2(found.q.scale).int().flatten().tolist()
    data = found.q.data.view(torch.uint8).tolist()
    lost = 0
    for row in range(255):
        ratio = Fraction(2) ** (row - 127 - shifts[row])
        anchor = Fraction(2) ** (200 - 127 - shifts[row])
        largest, lost = max(anchor, 448 * ratio), lost + (anchor != value_of(data[row][0]))
        assert 224 < largest <= 448, "the least scale under which the row fits"
        for column, code in enumerate(codes):
            exact, held = value_of(code), value_of(data[row][32 + column])
            assert exact is not None
            assert held is not None
            assert abs(exact * ratio - held) <= Fraction(1, 1024), "half a smallest step"
            assert (exact * ratio * 512).denominator > 1 or exact * ratio == held
            lost += exact * ratio != held
    counted = fp8kit.rebase(q).changed
    assert counted == lost > 0


@pytest.mark.parametrize("group", [ROW, BLOCK, TENSOR, GroupShape(1, 128)], ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (130, 200), (2, 130, 260)])
def test_weights_keep_their_values_and_get_their_bits_back(
    shape: tuple[int, ...], group: GroupShape
) -> None:
    torch.manual_seed(0)
    q = fp8kit.quantize(torch.randn(shape) * 0.02, MX, role="weight")
    found = fp8kit.rebase(q, group)
    assert found.q.group == group
    exact, held = fp8kit.dequantize(q), fp8kit.dequantize(found.q)
    changed = exact != held
    assert found.changed == int(changed.sum()) < 2e-3 * exact.numel()
    step = reference.expand_scale(found.q.scale, shape, group) * 2.0**-9
    assert ((exact - held).abs() <= step / 2).all()
    back = restore(found.q, found.exponents, "w")
    assert_bits_equal(back.data[~changed], q.data[~changed])
    assert_bits_equal(back.scale, q.scale)


def test_changes_are_counted_and_their_size_is_told() -> None:
    data = torch.full((3, 64), 0x38, dtype=torch.uint8)  # 1.0
    data[:, 32:] = 0x3F  # 1.875
    exponents = torch.tensor([[127, 127], [127, 112], [127, 107]], dtype=torch.uint8)
    found = fp8kit.rebase(QTensor(data.view(E4M3), exponents, MX))
    # 1.875 * 2^-15 is 15 / 2 of the smallest step 2^-9 under 2^-8, and 1.875 * 2^-20 is 1 / 4
    assert found.changed == 64
    exact = fp8kit.dequantize(QTensor(data.view(E4M3), exponents, MX))
    held = fp8kit.dequantize(found.q)
    ratios = (held - exact).view(3, 2, 32).norm(dim=2) / exact.view(3, 2, 32).norm(dim=2)
    largest = float(ratios.square().mean(1).sqrt().max())
    assert found.largest_change == pytest.approx(largest, rel=1e-6)
    back = restore(found.q, found.exponents, "w")
    assert_bits_equal(back.data[:2, :32], data[:2, :32].view(E4M3))


def test_every_code_at_every_distance_is_restored_to_the_nearest() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(8, 1, 32).repeat(1, 24, 1)
    # a group of its own holds the largest code, and sets the scale of the row
    data = torch.cat([codes, torch.full((8, 24, 32), 448.0).to(E4M3)], -1).reshape(-1, 64)
    down = torch.arange(24).repeat(8)
    exponents = torch.stack([160 - down, torch.full_like(down, 160)], -1).to(torch.uint8)
    found = fp8kit.rebase(QTensor(data, exponents, MX))
    assert (found.q.scale == 2.0**33).all()
    back, q = restore(found.q, found.exponents, "w"), found.q
    most = fp8kit.dequantize(QTensor(torch.full_like(data, 448.0), exponents, MX))
    wanted = fp8kit.dequantize(q).minimum(most).maximum(-most)
    assert_bits_equal(fp8kit.dequantize(back).nan_to_num(0), wanted.nan_to_num(0))


@pytest.mark.parametrize("group", [ROW, BLOCK], ids=str)
def test_codes_under_exponents_of_other_codes_are_refused(group: GroupShape) -> None:
    weight = torch.randn(64, 128) * torch.tensor([1.0, 64.0]).repeat_interleave(64)
    found = fp8kit.rebase(fp8kit.quantize(weight, MX, role="weight"), group)
    halves = found.q.data.chunk(2, 1)
    swapped = QTensor(torch.cat(halves[::-1], 1), found.q.scale, group)
    with pytest.raises(ValueError, match=r"fc1 has \d+ codes that do not fit"):
        restore(swapped, found.exponents, "fc1")


def test_groups_may_hold_less_than_rounding_leaves_and_no_less() -> None:
    data = torch.tensor([448.0, 0.0]).to(E4M3).repeat_interleave(32)[None]
    found = fp8kit.rebase(QTensor(data, torch.tensor([[160, 144]], dtype=torch.uint8), MX))
    codes = found.q.data.view(torch.uint8)
    codes[0, 32] = 4  # 448 at sixteen exponents less becomes four smallest steps
    assert restore(found.q, found.exponents, "w").data[0, 32] == 448
    codes[0, 32] = 5
    with pytest.raises(ValueError, match="w has 1 codes that do not fit"):
        restore(found.q, found.exponents, "w")


def test_numbers_under_the_exponent_of_nan_are_refused() -> None:
    found = fp8kit.rebase(fp8kit.quantize(torch.randn(4, 64), MX, role="weight"))
    found.exponents[0, 1] = 255
    with pytest.raises(ValueError, match=r"fc1 has \d+ codes that do not fit"):
        restore(found.q, found.exponents, "fc1")


def test_nan_stays_nan_and_zeros_keep_their_sign() -> None:
    data = torch.full((4, 64), 0x38, dtype=torch.uint8)
    data[0, 3], data[0, 40], data[1] = 0x7F, 0xFF, 0x80
    exponents = torch.full((4, 2), 127, dtype=torch.uint8)
    exponents[2, 1] = exponents[3, 0] = exponents[3, 1] = 255
    found = fp8kit.rebase(QTensor(data.view(E4M3), exponents, MX))
    bits = found.q.data.view(torch.uint8)
    assert (bits[0, 3], bits[0, 40]) == (0x7F, 0xFF)
    assert bits[1].unique().tolist() == [0x80]
    assert found.q.scale.isfinite().all()
    assert (found.q.scale > 0).all()
    assert found.changed == 0
    values = fp8kit.dequantize(found.q)
    assert values[2, 32:].isnan().all()
    assert values[2, :32].isfinite().all()
    assert values[3].isnan().all()
    back = restore(found.q, found.exponents, "w")
    assert fp8kit.dequantize(back).isnan().equal(values.isnan())


def test_both_ends_of_the_exponents() -> None:
    data = torch.tensor([[0x7E] * 32 + [0x01] * 32] * 3, dtype=torch.uint8)
    exponents = torch.tensor([[254, 254], [0, 0], [3, 0]], dtype=torch.uint8)
    q = QTensor(data.view(E4M3), exponents, MX)
    found = fp8kit.rebase(q)
    assert (found.q.scale >= torch.finfo(torch.float32).tiny).all()
    assert_bits_equal(fp8kit.dequantize(found.q)[0], fp8kit.dequantize(q)[0])
    # one row of the smallest scale: 2^-127 is no normal number, and codes move down by one
    assert_bits_equal(fp8kit.dequantize(found.q)[1, :32], fp8kit.dequantize(q)[1, :32])


def test_empty_weights_and_refusals() -> None:
    empty = fp8kit.quantize(torch.empty(0, 64), MX)
    assert fp8kit.rebase(empty).q.shape == (0, 64)
    ones = torch.ones(2, 64)
    for other in fp8kit.quantize(ones), fp8kit.quantize(ones, MX, dtype=torch.float8_e5m2):
        with pytest.raises(ValueError, match="E8M0 scales of 32 e4m3fn codes"):
            fp8kit.rebase(other)
    with pytest.raises(ValueError, match="whole groups of 32"):
        fp8kit.rebase(fp8kit.quantize(torch.ones(2, 64), MX), GroupShape(1, 48))


def test_random_codes_and_exponents_against_fractions() -> None:
    chance = random.Random(0)
    for _ in range(40):
        groups, base = chance.choice((1, 2, 5)), chance.randrange(0, 230)
        own = [base + chance.randrange(25) for _ in range(groups)]
        codes = [
            chance.choice([c for c in range(256) if c & 0x7F != 0x7F]) for _ in range(32 * groups)
        ]
        q = QTensor(
            torch.tensor([codes], dtype=torch.uint8).view(E4M3),
            torch.tensor([own], dtype=torch.uint8),
            MX,
        )
        found = fp8kit.rebase(q)
        scale = Fraction(found.q.scale.item())
        for i, (code, byte) in enumerate(
            zip(codes, found.q.data.view(torch.uint8)[0].tolist(), strict=True)
        ):
            exact, held = value_of(code), value_of(byte)
            assert exact is not None
            assert held is not None
            exact *= Fraction(2) ** (own[i // 32] - 127) / scale
            assert held == exact or (
                (exact * 512).denominator > 1 and abs(held - exact) * 1024 <= 1
            )


def test_codes_under_a_scale_that_is_nan_become_nan() -> None:
    """As an interrupted load leaves them: no numbers, so none are lost."""
    q = fp8kit.quantize(torch.randn(4, 64), MX)
    found = fp8kit.rebase(q, ROW).q
    scale, other = found.scale.clone(), q.scale.clone()
    scale[1], other[1] = torch.nan, 0
    restored = restore(QTensor(found.data, scale, ROW), other, "it")
    assert restored.data[1].float().isnan().all()
    assert not restored.data[[0, 2, 3]].float().isnan().any()
    with pytest.raises(ValueError, match="do not fit"):
        restore(found, other, "it")
