"""Operands that are decoded for a dense product."""

from __future__ import annotations

import pytest
import torch

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, GroupShape
from fp8kit.matmul.dequantized import scaled
from fp8kit.quantizers import reference
from numerics import assert_bits_equal


@pytest.mark.parametrize("group", [BLOCK, GROUP128, MX, GroupShape(4, 32)], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (4, 5)])
def test_scaled_operands_have_the_bits_of_the_reference(
    group: GroupShape, shape: tuple[int, int]
) -> None:
    q = fp8kit.quantize(torch.randn(shape) * 10, group, role="weight")
    for dtype in (torch.bfloat16, torch.float32):
        expected = reference.dequantize(q.data, q.scale, group, dtype)
        assert_bits_equal(scaled(q.data, q.scale, group, dtype), expected)
