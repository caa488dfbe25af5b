"""Quantizers and GEMMs with scales of groups and blocks, against their formulas in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine_formulas import FP8, LARGEST, with_scale
from fp8kit import compat
from numerics import assert_bits_equal, assert_matmul

M, K = 6, 300


@pytest.fixture
def x() -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16()


def expanded(scale: Tensor, rows: int, cols: int, shape: torch.Size) -> Tensor:
    """Repeat each scale over the elements of its group."""
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return wide[: shape[0], : shape[1]]


def scales(x: Tensor, rows: int, cols: int, least: float) -> Tensor:
    """Return ``amax / 448`` of each group, as the original sources compute it."""
    m, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % cols, 0, -m % rows))
    parts = padded.view(-(-m // rows), rows, -(-k // cols), cols)
    return parts.abs().amax((1, 3)).clamp(min=least) / LARGEST


@pytest.mark.parametrize("size", [32, 64, 128])
def test_per_token_group_quant_divides_by_the_scale_of_each_group(x: Tensor, size: int) -> None:
    codes, scale = compat.per_token_group_quant_fp8(x, size)
    wanted = scales(x, 1, size, 1e-10)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, wanted)
    assert_bits_equal(codes, with_scale(x, expanded(wanted, 1, size, x.shape)))

    stacked, of_stack = compat.per_token_group_quant_fp8(x.view(2, 3, K), size)
    assert_bits_equal(stacked.view(M, K), codes)
    assert torch.equal(of_stack.view(M, -1), scale)

    none, of_none = compat.per_token_group_quant_fp8(x[:0], size)
    assert (none.shape, of_none.shape) == ((0, K), (0, scale.shape[1]))

    out = torch.empty(M, K, dtype=FP8)
    found, columns = compat.per_token_group_quant_fp8(
        x, size, column_major_scales=True, tma_aligned_scales=True, out_q=out
    )
    assert found is out
    assert_bits_equal(out, codes)
    assert torch.equal(columns, scale)
    assert columns.stride() == (1, 8)


@pytest.mark.parametrize("size", [32, 128])
def test_a_group_has_a_least_amax_and_scales_become_powers_of_two(x: Tensor, size: int) -> None:
    x[0] = 0.0
    _, scale = compat.per_token_group_quant_fp8(x, size, eps=0.5, use_ue8m0=True)
    exact = scales(x, 1, size, 0.5)
    assert torch.equal(scale, torch.exp2(exact.log2().ceil()))
    assert scale[0, 0] == 2.0**-9


def test_casts_have_the_floor_of_deep_gemm(x: Tensor) -> None:
    x[0] = 0.0
    codes, scale = compat.per_token_cast_to_fp8(x)
    wanted = scales(x, 1, 128, 1e-4)
    torch.testing.assert_close(scale, wanted, rtol=2e-7, atol=0.0)
    assert_bits_equal(codes, with_scale(x, expanded(scale, 1, 128, x.shape)))

    codes, scale = compat.per_block_cast_to_fp8(x, [4, 64])
    torch.testing.assert_close(scale, scales(x, 4, 64, 1e-4), rtol=2e-7, atol=0.0)
    assert_bits_equal(codes, with_scale(x, expanded(scale, 4, 64, x.shape)))


def test_packed_scales_are_refused(x: Tensor) -> None:
    codes, scale = compat.per_token_cast_to_fp8(x, True, 64, False)
    assert torch.equal(scale, compat.per_token_cast_to_fp8(x, True, gran_k=64)[1])
    assert codes.shape == x.shape
    with pytest.raises(ValueError, match=r"Got use_packed_ue8m0=True\. Scales are fp32 numbers"):
        compat.per_token_cast_to_fp8(x, True, 64, use_packed_ue8m0=True)


def test_both_orders_of_arguments_are_taken(x: Tensor) -> None:
    by_vllm = compat.per_block_cast_to_fp8(x, [128, 128], True)
    by_deep_gemm = compat.per_block_cast_to_fp8(x, True)
    assert torch.equal(by_vllm[1], by_deep_gemm[1])
    assert torch.equal(by_vllm[1].frexp()[0], torch.full((1, 3), 0.5))
    assert compat.per_block_cast_to_fp8(x, False, gran_k=64)[1].shape == (1, 5)
    for powers in (False, True):
        by_place = compat.per_block_cast_to_fp8(x, powers, 64)[1]
        assert torch.equal(by_place, compat.per_block_cast_to_fp8(x, [64, 64], powers)[1])
    by_name = compat.per_block_cast_to_fp8(x, use_ue8m0=True, gran_k=64)[1]
    assert torch.equal(by_name, compat.per_block_cast_to_fp8(x, True, gran_k=64)[1])
    assert compat.per_block_cast_to_fp8(x, [64, 64], gran_k=64)[1].shape == (1, 5)
    with pytest.raises(ValueError, match="Both name the sides of a block"):
        compat.per_block_cast_to_fp8(x, [4, 64], gran_k=64)
    for wrong in ((True, True), ([64, 64], 64)):
        with pytest.raises(TypeError, match="after use_ue8m0 it is gran_k"):
            compat.per_block_cast_to_fp8(x, *wrong)
    with pytest.raises(ValueError, match="unsqueeze"):
        compat.per_block_cast_to_fp8(x[0])


def decoded_operands(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, ...]:
    """Return both operands in fp32."""
    left = a.float() * expanded(a_scale, 1, 128, a.shape)
    return left, b.float() * expanded(b_scale, 128, 128, b.shape)


def test_products_by_blocks_take_scales_of_either_name(x: Tensor) -> None:
    w = torch.randn(200, K, generator=torch.Generator().manual_seed(1))
    a, a_scale = compat.per_token_group_quant_fp8(x, 128)
    b, b_scale = compat.per_block_cast_to_fp8(w)
    y = compat.w8a8_block_fp8_matmul(a, b, a_scale, b_scale, [128, 128], torch.bfloat16)
    assert_matmul(y, *decoded_operands(a, b, a_scale, b_scale), backend="dequantized")
    columns = compat.per_token_group_quant_fp8(x, 128, column_major_scales=True)[1]
    stacked = compat.w8a8_triton_block_scaled_mm(
        a.view(2, 3, K), b, columns.unflatten(0, (2, 3)), b_scale, [128, 128], torch.bfloat16
    )
    assert_bits_equal(stacked.view(M, 200), y)


@pytest.mark.parametrize("sides", [(64, 128), (128, 64), (32, 32), (1, 32)])
def test_products_by_blocks_take_other_sides(x: Tensor, sides: tuple[int, int]) -> None:
    w = torch.randn(200, K, generator=torch.Generator().manual_seed(1))
    a, a_scale = compat.per_token_group_quant_fp8(x, sides[1])
    b, b_scale = compat.per_block_cast_to_fp8(w, sides)
    y = compat.w8a8_block_fp8_matmul(a, b, a_scale, b_scale, sides, torch.bfloat16)
    left = a.float() * expanded(a_scale, 1, sides[1], a.shape)
    right = b.float() * expanded(b_scale, *sides, b.shape)
    assert_matmul(y, left, right, backend="dequantized")
    with pytest.raises(ValueError, match="scale"):
        compat.w8a8_block_fp8_matmul(a, b, a_scale[:, :-1], b_scale, sides, torch.bfloat16)


@pytest.mark.parametrize("n", [1, 200])
def test_cutlass_scaled_mm_takes_scales_of_blocks(x: Tensor, n: int) -> None:
    w = torch.randn(n, K, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2))
    a, a_scale = compat.per_token_group_quant_fp8(x, 128)
    b, b_scale = compat.per_block_cast_to_fp8(w)
    y = compat.cutlass_scaled_mm(a, b.t(), a_scale, b_scale.t(), torch.float32, bias)
    assert_matmul(y, *decoded_operands(a, b, a_scale, b_scale), bias)
    with pytest.raises(ValueError, match="one for each of its rows"):
        compat.cutlass_scaled_mm(a, b.t(), a_scale[:, :2], b_scale.t(), torch.float32)


@pytest.mark.parametrize("block_size", [128, (128,), (128, 128, 1), None])
def test_a_block_has_two_sides(x: Tensor, block_size: Any) -> None:
    codes, scale = compat.per_token_cast_to_fp8(x)
    with pytest.raises(TypeError, match="A block has two sides"):
        compat.w8a8_block_fp8_matmul(codes, codes, scale, scale, block_size)
    with pytest.raises(TypeError, match="A block has two sides"):
        compat.per_block_cast_to_fp8(x, block_size)
