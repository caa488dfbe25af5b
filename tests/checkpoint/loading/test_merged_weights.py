"""FP8 weights are concatenated only if that keeps their values; otherwise it is refused."""

from __future__ import annotations

import pytest
import torch

import fp8kit
from fp8kit.checkpoint.loading.merged_weights import Fp8Weight, join
from fp8kit.formats import BLOCK, MX, ROW, TENSOR, GroupShape


@pytest.mark.parametrize(
    ("held", "wanted"), [(BLOCK, ROW), (ROW, BLOCK), (MX, ROW), (ROW, TENSOR), (TENSOR, BLOCK)]
)
def test_scales_of_another_granularity_do_not_join(held: GroupShape, wanted: GroupShape) -> None:
    parts = [Fp8Weight(fp8kit.quantize(torch.randn(128, 128), held), None) for _ in range(2)]
    with pytest.raises(fp8kit.CheckpointError, match=f"per {held}, and is itself per {wanted}"):
        join(parts, wanted, "qkv")
