"""Experts whose operands have more than 2^31 elements: no offset may be counted in 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8kit
from fp8kit.formats import BLOCK, ROW, GroupShape, QTensor
from numerics import assert_bits_equal

pytestmark = pytest.mark.gpu
LIMIT = 2**31
BACKENDS = ("hopper_experts", "triton_experts")
LARGEST_CODE = 0x50  # the byte of 8.0; sums of products stay finite


def stack(experts: int, rows: int, columns: int, group: GroupShape) -> QTensor:
    """Draw codes ``[experts, rows, columns]`` on the GPU, with small scales that all differ."""
    shape = (experts, rows, columns)
    codes = torch.randint(0, LARGEST_CODE, shape, dtype=torch.uint8, device="cuda")
    codes ^= (codes & 1) << 7  # half of them are negative
    scales = fp8kit.stack_scale_shape(shape, group)
    scale = torch.rand(scales, device="cuda") * 0.01 + 0.001
    return QTensor(codes.view(torch.float8_e4m3fn), scale, group)


def some_of(q: QTensor, chosen: list[int]) -> QTensor:
    return QTensor(q.data.view(torch.uint8)[chosen].view(q.data.dtype), q.scale[chosen], q.group)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [ROW, BLOCK], ids=str)
@pytest.mark.parametrize("tokens", [3, 300])
def test_stacks_beyond_31_bit_offsets(tokens: int, group: GroupShape, backend: str) -> None:
    hidden, inner, count = 4096, 2048, 264
    w13, w2 = stack(count, 2 * inner, hidden, group), stack(count, hidden, inner, group)
    assert w2.data.numel() > LIMIT
    # on both sides of where 31 bits end in each of both stacks, and the last one
    chosen = [0, 127, 128, 255, 256, count - 1]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    few = torch.arange(2 * tokens, device="cuda").view(tokens, 2) % len(chosen)
    many = torch.tensor(chosen, device="cuda")[few]
    weights = torch.linspace(0.2, 1, few.numel(), device="cuda").view(few.shape)
    options: Any = {"batch_invariant": True, "backend": backend}
    y = fp8kit.moe.experts(x, w13, w2, many, weights, **options)
    part = (some_of(w13, chosen), some_of(w2, chosen))
    assert_bits_equal(y, fp8kit.moe.experts(x, *part, few, weights, **options))
    assert y.isfinite().all()
    assert y.abs().amax(1).min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_pairs(backend: str) -> None:
    hidden, inner, count, tokens = 8192, 128, 3, 2**17 + 40
    w13, w2 = stack(count, 2 * inner, hidden, ROW), stack(count, hidden, inner, ROW)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(2 * tokens, device="cuda").view(tokens, 2) % count
    assert ids.numel() * hidden > LIMIT
    weights = torch.linspace(0.2, 1, ids.numel(), device="cuda").view(ids.shape)
    options: Any = {"batch_invariant": True, "backend": backend}
    y = fp8kit.moe.experts(x, w13, w2, ids, weights, **options)
    for part in (slice(0, 64), slice(tokens // 2 - 32, tokens // 2 + 32), slice(-64, None)):
        alone = fp8kit.moe.experts(x[part], w13, w2, ids[part], weights[part], **options)
        assert_bits_equal(y[part], alone)
        assert alone.abs().amax(1).min() > 0
