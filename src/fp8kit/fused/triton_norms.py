"""RMS norm and layer norm that end in FP8: one launch, every operand read once.

    rms    n = t * rsqrt(sum(t^2) / K + eps)       t = x, or x + residual rounded and stored
    layer  n = c * rsqrt(sum(c^2) / K + eps)       c = x - sum(x) / K

followed by weight, bias and modulation, rounded as in ``reference``, and by the quantizer.

A row stays in registers from its load to its codes. Sums are taken in ``float32`` over a tree: the
tiles of a row are added lane by lane, then at most 8 elements of a thread (7 sums), 32 threads (5)
and 32 warps (5), so a sum of squares passes through at most HELD + 17 <= 24 roundings and is within
24 * 2^-24 of the exact one, relatively; ``rsqrt`` halves that. A sum in any other order, torch's
included, obeys a bound of the same kind, and results differ where a value lies that close to the
midpoint of two 16-bit numbers. How a row is cut depends on K and the dtype alone, so the bits of a
row depend neither on M nor on other rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.fused.triton_output import (
    Output,
    Tile,
    narrow,
    rounded_product,
    rounded_sum,
    row_cut,
    store_result,
)
from fp8kit.quantizers.triton_encode import appended, existing, widen
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps, prefetch

MOST_TILES = 5  # of a row in registers; its weights take as many registers again


class NormOperands(NamedTuple):
    """The tensors of a norm besides ``x``, each ``None`` if absent.

    The residual and ``modulation``, scale and shift ``[B, K]``, have unit stride along K.
    ``total [M, K]`` receives ``x + residual``. It, weight and bias are contiguous.
    """

    residual: Tensor | None = None
    total: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    modulation: tuple[Tensor, Tensor] | None = None


class NormSettings(NamedTuple):
    """The settings of a norm, which is a layer norm if ``centered``; see ``reference``."""

    centered: bool
    stepwise: bool
    eps: float
    weight_offset: float = 0.0


def norm_tile(k: int, itemsize: int, least: int) -> Tile:
    """Choose a tile for rows of ``k`` elements; it does not depend on the number of rows.

    A tile has at least ``least`` columns, a power of two.
    """
    lanes = 32 * 16 // itemsize  # elements that one warp loads with 16 bytes per thread
    whole = max(triton.next_power_of_2(k), 16, least)
    if whole <= 4 * lanes:
        rows = max(1, 4 * lanes // whole)
        return Tile(rows, whole, 1, 4)
    warps, held = row_cut(k, lanes, MOST_TILES)
    return Tile(1, warps * lanes, held, warps)


@triton.jit
def _mean(held, K: tl.constexpr, HELD: tl.constexpr):
    sums = widen(held[0])
    for i in tl.static_range(1, HELD):
        sums += widen(held[i])
    return (tl.sum(sums, 1) * (1.0 / K))[:, None]


@triton.jit
def reciprocal_deviation(held, mean, eps, K: tl.constexpr, CENTERED: tl.constexpr,
                         HELD: tl.constexpr):  # fmt: skip
    """Return ``1 / sqrt(variance + eps)`` per row; without ``CENTERED`` that of the mean square."""
    BLOCK_K: tl.constexpr = held[0].shape[1]
    squares = tl.zeros(held[0].shape, tl.float32)
    for i in tl.static_range(HELD):
        x = widen(held[i])
        if CENTERED:
            x -= mean
            if (i + 1) * BLOCK_K > K:
                x = tl.where(tl.arange(0, BLOCK_K)[None, :] + i * BLOCK_K < K, x, 0.0)
        squares = tl.fma(x, x, squares)
    return tl.rsqrt(tl.sum(squares, 1) * (1.0 / K) + eps)[:, None]


@triton.jit
def weighted(n, weight, offset, STEPWISE: tl.constexpr, DTYPE: tl.constexpr):
    """Multiply by the weight: in ``DTYPE`` stepwise, otherwise in ``float32``, not yet rounded."""
    if STEPWISE:
        if offset is not None:
            weight = narrow(widen(weight) + offset, DTYPE)
        return rounded_product(narrow(n, DTYPE), weight)
    else:
        w = widen(weight)
        return n * (w if offset is None else w + offset)


@triton.jit
def _modulated(n, gain, shift, STEPWISE: tl.constexpr, DTYPE: tl.constexpr):
    # stepwise the result has DTYPE, otherwise it is float32 and not yet rounded
    if STEPWISE:
        one = tl.full(gain.shape, 1.0, DTYPE)
        return rounded_sum(rounded_product(narrow(n, DTYPE), rounded_sum(gain, one)), shift)
    else:
        return n * (1.0 + widen(gain)) + widen(shift)


@triton.jit
def _load_rows(ptr, stride, row, M, K: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr):
    tiles = ()
    for i in tl.static_range(HELD):
        at = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = existing(row, M)[:, None] & (at < K)
        tile = tl.load(ptr + row[:, None] * stride + at, mask=mask, other=0.0)
        tiles = appended(tiles, tile)
    return tiles


@triton.jit
def load_weights(ptr, K: tl.constexpr, BLOCK_K: tl.constexpr, HELD: tl.constexpr):
    """Load the weights of a row, the same for every program, before the sums are taken."""
    tiles = ()
    if ptr is not None:
        for i in tl.static_range(HELD):
            at = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            tile = tl.load(ptr + at, mask=at < K, other=0.0, eviction_policy="evict_last")
            tiles = appended(tiles, tile)
    return tiles


@triton.jit
def _add(held, residual_ptr, stride, total_ptr, row, M, K: tl.constexpr, BLOCK_K: tl.constexpr,
         HELD: tl.constexpr):  # fmt: skip
    others, totals = _load_rows(residual_ptr, stride, row, M, K, BLOCK_K, HELD), ()
    for i in tl.static_range(HELD):
        at = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        total = rounded_sum(held[i], others[i])
        tl.store(
            total_ptr + row[:, None] * K + at, total, mask=existing(row, M)[:, None] & (at < K)
        )
        totals = appended(totals, total)
    return totals


@triton.jit(do_not_specialize=["M", "rows_per_batch"])
def _norm_kernel(
    x_ptr,  # [M, K]
    residual_ptr,  # [M, K] or None
    total_ptr,  # [M, K] contiguous, or None
    weight_ptr,  # [K] or None
    bias_ptr,  # [K] or None
    gain_ptr,  # [M / rows_per_batch, K] or None
    shift_ptr,  # like gain
    scale_ptr,
    scale_ub_ptr,
    data_ptr,  # [M, K] bytes, contiguous
    M,
    rows_per_batch,
    stride_xm,
    stride_rm,
    stride_gb,
    stride_sb,
    eps,
    offset,  # of the weight, or None
    min_scale,
    K: tl.constexpr,
    CENTERED: tl.constexpr,
    STEPWISE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    top = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows, total = min(BLOCK_M, M - top), M.to(tl.int64) * K
    prefetch(x_ptr + top * stride_xm, stride_xm, rows, K, total, BLOCK_M * K, OVERLAP)
    if residual_ptr is not None:
        other = residual_ptr + top * stride_rm
        prefetch(other, stride_rm, rows, K, total, BLOCK_M * K, OVERLAP)
    join_stream(OVERLAP)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    weights = load_weights(weight_ptr, K, BLOCK_K, HELD)
    held = _load_rows(x_ptr, stride_xm, row, M, K, BLOCK_K, HELD)
    given = tl.load(scale_ptr) if SCALES == "static" else None
    if residual_ptr is not None:
        held = _add(held, residual_ptr, stride_rm, total_ptr, row, M, K, BLOCK_K, HELD)
    mean = _mean(held, K, HELD) if CENTERED else None
    inverse = reciprocal_deviation(held, mean, eps, K, CENTERED, HELD)
    results = ()
    for i in tl.static_range(HELD):
        col = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        n = (widen(held[i]) - mean if CENTERED else widen(held[i])) * inverse
        if weight_ptr is not None:
            n = weighted(n, weights[i], offset, STEPWISE and not CENTERED, DTYPE)
        if bias_ptr is not None:
            n += widen(tl.load(bias_ptr + col, mask=col < K, other=0.0))
        if gain_ptr is not None:
            batch = (row.to(tl.int32) // rows_per_batch).to(tl.int64)[:, None]
            mask = existing(row, M)[:, None] & (col < K)
            # loaded this late, they take no registers while the sums are computed
            gain = tl.load(gain_ptr + batch * stride_gb + col, mask=mask, other=0.0)
            shift = tl.load(shift_ptr + batch * stride_sb + col, mask=mask, other=0.0)
            n = _modulated(n, gain, shift, STEPWISE, DTYPE)
        if (i + 1) * BLOCK_K > K:
            n = tl.where(col < K, n, 0.0)
        results = appended(results, narrow(n, DTYPE))
    store_result(results, given, row, 0, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                 K, SCALES, GROUP, DIVISION, FP8_MAX, HELD)  # fmt: skip


def quantize_norm(
    x: Tensor, operands: NormOperands, settings: NormSettings, output: Output
) -> None:
    """Norm the rows of ``x`` and quantize them into ``output``.

    ``x`` is ``[M, K]`` with unit stride along K.
    """
    m, k = x.shape
    residual, total, weight, bias, modulation = operands
    gain, shift = modulation or (None, None)
    constants, overlap = output.constants, overlaps(output.data.device)
    tile = norm_tile(k, x.element_size(), constants["GROUP"])
    # 48 registers let five programs of 8 warps share a multiprocessor, not four
    registers = 48 if gain is not None and tile.warps == 8 and tile.held <= 4 else None
    launch(
        _norm_kernel, triton.cdiv(m, tile.rows),
        x, residual, total, weight, bias, gain, shift, *output.pointers(),
        m, m if gain is None else m // gain.shape[0], x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if gain is None else gain.stride(0), 0 if shift is None else shift.stride(0),
        settings.eps, settings.weight_offset or None, output.min_scale,
        K=k, CENTERED=settings.centered, STEPWISE=settings.stepwise, **constants,
        BLOCK_M=tile.rows, BLOCK_K=tile.cols, HELD=tile.held,
        OVERLAP=overlap, launch_pdl=overlap, num_warps=tile.warps, maxnreg=registers,
        enable_fp_fusion=False,
    )  # fmt: skip
