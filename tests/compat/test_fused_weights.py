"""Fused weights: one column of scales, one largest scale, codes of e4m3fnuz."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_formulas import FP8, LARGEST, decoded, quantized, with_scale
from fp8kit import compat
from numerics import assert_bits_equal

WIDTHS = [8, 4, 4]


@pytest.fixture
def shards() -> tuple[Tensor, Tensor]:
    """Return a fused weight whose parts (shards) have separate scales."""
    parts = [torch.randn(n, 16) * 2.0**i for i, n in enumerate(WIDTHS)]
    found = [quantized(p, per_row=False) for p in parts]
    codes = torch.cat([c.view(torch.uint8) for c, _ in found]).view(FP8)
    return codes, torch.cat([s.flatten() for _, s in found])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
def test_convert_to_channelwise_repeats_scales(shards: tuple[Tensor, Tensor], shape: tuple) -> None:
    scale = shards[1].bfloat16()
    column = compat.convert_to_channelwise(scale.reshape(shape), WIDTHS)
    assert column.shape == (16, 1)
    assert column.dtype == torch.float32
    assert torch.equal(column.flatten(), scale.float().repeat_interleave(torch.tensor(WIDTHS)))


def test_requantize_with_max_scale_writes_in_place(shards: tuple[Tensor, Tensor]) -> None:
    codes, scales = shards
    before = codes.clone()
    largest, same = compat.requantize_with_max_scale(codes, scales, WIDTHS)
    assert same is codes
    assert largest.shape == ()
    assert largest == scales.max()
    start = 0
    for width, scale in zip(WIDTHS, scales, strict=True):
        values = decoded(before[start : start + width], scale)
        assert_bits_equal(codes[start : start + width], with_scale(values, largest))
        start += width


def test_a_weight_that_was_fused_before_is_not_requantized(shards: tuple[Tensor, Tensor]) -> None:
    codes, scales = shards
    before = codes.clone()
    unset = torch.tensor([float(scales[0]), -LARGEST, -LARGEST])
    largest, after = compat.requantize_with_max_scale(codes, unset, WIDTHS)
    assert largest == scales[0]
    assert_bits_equal(after, before)


def test_normalize_to_e4m3fnuz_keeps_every_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = codes[~codes.float().isnan()]
    scale = torch.tensor([0.5])
    fnuz, doubled, of_input = compat.normalize_e4m3fn_to_e4m3fnuz(numbers, scale, scale)
    assert fnuz.dtype == torch.float8_e4m3fnuz
    assert torch.equal(doubled, torch.tensor([1.0]))
    assert of_input is not None
    assert torch.equal(of_input, doubled)
    assert torch.equal(fnuz.float() * doubled, numbers.float() * scale)
    minus_zero = (numbers.view(torch.uint8) == 0x80).nonzero()
    assert not fnuz.view(torch.uint8)[minus_zero].any()
    assert compat.normalize_e4m3fn_to_e4m3fnuz(numbers, scale)[2] is None
    with pytest.raises(TypeError, match="They must be float8_e4m3fn"):
        compat.normalize_e4m3fn_to_e4m3fnuz(fnuz, scale)


def test_per_tensor_dequantize_gives_what_torch_promotes_to() -> None:
    codes = torch.tensor([1.5, -448.0]).to(FP8)
    half = compat.per_tensor_dequantize(codes, 0.5)
    assert half.dtype == torch.float16
    assert half.tolist() == [0.75, -224.0]
    assert compat.per_tensor_dequantize(codes, torch.tensor(0.5)).dtype == torch.float16
    assert compat.per_tensor_dequantize(codes, torch.tensor([0.5])).dtype == torch.float32


def test_all_close_1d_compares_with_the_first() -> None:
    assert compat.all_close_1d(torch.tensor([1.0, 1.0 + 1e-7]))
    assert not compat.all_close_1d(torch.tensor([1.0, 1.1]))
    assert compat.all_close_1d(torch.tensor([]))
    with pytest.raises(ValueError, match="as one vector"):
        compat.all_close_1d(torch.ones(1, 1))
