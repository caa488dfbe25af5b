"""An RMS norm whose result is not quantized, in one launch, computed as in ``triton_norms``.

Eager PyTorch needs eight launches for the norms of most models. Rows may have two strides, as have
the heads of queries in the result of a product that also holds keys and values.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.fused.triton_norms import load_weights, norm_tile, reciprocal_deviation, weighted
from fp8kit.fused.triton_output import narrow
from fp8kit.quantizers.triton_encode import appended, existing, widen
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps


@triton.jit(do_not_specialize=["M", "inner"])
def _plain_norm_kernel(
    x_ptr,  # [M / inner, inner, K]
    weight_ptr,  # [K]
    y_ptr,  # [M, K] contiguous
    M,
    inner,
    stride_outer,
    stride_inner,
    eps,
    offset,  # of the weight, or None
    K: tl.constexpr,
    STEPWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outer = (row // inner).to(tl.int64)
    x_row = x_ptr + outer * stride_outer + (row % inner).to(tl.int64) * stride_inner
    y_row = y_ptr + row.to(tl.int64) * K
    exists = existing(row, M)[:, None]
    weights, held = load_weights(weight_ptr, K, BLOCK_K, HELD), ()
    for i in tl.static_range(HELD):
        col = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        held = appended(held, tl.load(x_row[:, None] + col, mask=exists & (col < K), other=0.0))
    inverse = reciprocal_deviation(held, None, eps, K, False, HELD)
    for i in tl.static_range(HELD):
        col = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        n = weighted(widen(held[i]) * inverse, weights[i], offset, STEPWISE, DTYPE)
        tl.store(y_row[:, None] + col, narrow(n, DTYPE), mask=exists & (col < K))


def norm_rows(
    x: Tensor, weight: Tensor, y: Tensor, eps: float, weight_offset: float, stepwise: bool
) -> None:
    """Norm the rows of ``x [outer, inner, K]``, with unit stride along K, into contiguous ``y``."""
    outer, inner, k = x.shape
    tile, overlap = norm_tile(k, x.element_size(), 1), overlaps(x.device)
    launch(
        _plain_norm_kernel, triton.cdiv(outer * inner, tile.rows),
        x, weight, y, outer * inner, inner, x.stride(0), x.stride(1), eps, weight_offset or None,
        K=k, STEPWISE=stepwise, BLOCK_M=tile.rows, BLOCK_K=tile.cols, HELD=tile.held,
        OVERLAP=overlap, launch_pdl=overlap, num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
