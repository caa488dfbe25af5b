"""One scale per row: amax over the row, then division, in one launch.

    scale[m] = max(max_k |x[m, k]| / fp8_max, min_scale)        data[m, k] = fp8(x[m, k] / scale[m])

A row stays in registers between the two steps, unconverted, as several tiles whose widths need not
add up to a power of two. Where rows are too few to fill the GPU, several programs share a row: each
reads all of it for the amax, which is cheap, and encodes its own slice. Rows too long for registers
are read twice, the second time mostly from cache. No choice of tile changes the result.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.quantizers.triton_encode import (
    ScaleRule,
    amax_of,
    appended,
    encode_quotient,
    existing,
    float_scale,
    magnitude,
    magnitudes,
)
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps, prefetch

_HELD = 7  # 16-byte loads that a thread can hold in 64 registers and still compute


class RowTile(NamedTuple):
    """How rows are tiled, a pure function of the problem; see ``row_tile``.

    A tile has ``cols`` columns, a power of two. ``held`` tiles of a row stay in registers; with 0
    the row is read twice, and only then may several programs (``slices``) share a row.
    """

    rows: int
    cols: int
    held: int
    slices: int
    warps: int


def row_tile(m: int, k: int, itemsize: int, processors: int) -> RowTile:
    """Choose a tile for ``m`` rows of ``k`` elements."""
    lanes = 32 * 16 // itemsize  # elements that one warp loads with 16 bytes per thread
    whole = triton.next_power_of_2(max(k, 16))
    if 16 * m <= processors and k > 16 * lanes:
        cols = min(whole, 32 * 32 * 32)
        slices = min(8, 1 << (processors // m).bit_length() - 1, cols // 1024)
        return RowTile(1, cols, 0, slices, min(32, cols // lanes))
    crowded = m > 4 * processors
    each = triton.cdiv(k, lanes)
    if m > 64 and 1 < each <= _HELD:
        # a warp per row needs no barrier. Starting a program takes 1.3 ns, so they should be few,
        # but not so few that most fit on the multiprocessors that the previous product leaves idle
        if m > 8 * processors:
            rows = 8 if each <= 3 else 4
        else:
            rows = 4 if crowded and each <= 3 else 1
        return RowTile(rows, lanes, each, 1, rows)
    if k <= 1024:
        rows = 4096 // whole if crowded else 1
        return RowTile(rows, whole, 1, 1, max(1, min(4, rows * whole // lanes)))
    if 64 < m <= min(256, 2 * processors) and itemsize == 2 and k in (4096, 7168):
        # one or two rows per multiprocessor: the next product waits least for one load per thread
        return RowTile(1, whole, 1, 1, whole // lanes)
    if 64 < m <= 3 * processors // 2 and itemsize == 2 and k == 3072:
        return RowTile(1, 4 * lanes, 3, 1, 4)  # no lane idles, and few warps wait for each other
    # measured for 14336 and 28672 values of 16 bits, with one and two rows per multiprocessor
    patient = each > 32 and m > (processors if each > 64 else 2 * processors)
    for warps in (4, 8, 16, 32):
        held = triton.cdiv(k, warps * lanes)
        if (warps, held) == (4, 4):
            continue  # 8 warps of two tiles take 1 to 2 % less
        if held <= (_HELD if crowded or patient else 2):
            return RowTile(1, warps * lanes, held, 1, warps)
    for cols in (16 * lanes, 32 * lanes):  # half vectors, where both they and the sums are few
        if triton.cdiv(k, cols) <= _HELD:
            return RowTile(1, cols, triton.cdiv(k, cols), 1, 32)
    return RowTile(1, 32 * 32 * 16, 0, 1, 16)


@triton.jit(do_not_specialize=["M"])
def _rows_kernel(
    x_ptr,  # [M, K]
    scale_ptr,  # [M]
    scale_ub_ptr,  # [1] or None
    data_ptr,  # [M, K] bytes
    M,
    stride_xm,
    stride_xk,
    stride_sm,
    min_scale,
    K: tl.constexpr,
    STRIDE_DM: tl.constexpr,
    STATIC: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    if HELD > 0 and stride_xk == 1:
        top = (program // SLICES).to(tl.int64) * BLOCK_M
        rows, total = min(BLOCK_M, M - top), M.to(tl.int64) * K
        prefetch(x_ptr + top * stride_xm, stride_xm, rows, K, total, BLOCK_M * K, OVERLAP)
    join_stream(OVERLAP)
    row = (program // SLICES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = existing(row, M)
    x_row = x_ptr + row[:, None] * stride_xm
    data_row = data_ptr + row[:, None] * STRIDE_DM
    col = tl.arange(0, BLOCK_K).to(tl.int64)[None, :]
    # a loop over elements would count in 32 bits, too few for the longest rows
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    held = ()
    if STATIC:
        scale = tl.load(scale_ptr + row * stride_sm, mask=present, other=1.0)
    else:
        for i in tl.static_range(HELD):
            mask = present[:, None] & (i * BLOCK_K + col < K)
            x = tl.load(x_row + (i * BLOCK_K + col) * stride_xk, mask=mask, other=0.0)
            held = appended(held, x)
        if HELD == 0:
            bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
            for i in range(TILES):
                start = tl.cast(i, tl.int64) * BLOCK_K
                mask = present[:, None] & (start + col < K)
                x = tl.load(x_row + (start + col) * stride_xk, mask=mask, other=0.0)
                bits = tl.maximum(bits, magnitude(x))
        else:
            bits = magnitudes(held, HELD)
        amax = amax_of(tl.max(bits, 1), scale_ub_ptr, x_ptr.dtype.element_ty)
        scale = float_scale(amax, min_scale, DIVISION, FP8_MAX)
        if program % SLICES == 0:
            tl.store(scale_ptr + row * stride_sm, scale, mask=present)
    for i in tl.static_range(HELD):
        mask = present[:, None] & (i * BLOCK_K + col < K)
        codes = encode_quotient(held[i], scale[:, None], DIVISION, FP8_MAX)
        tl.store(data_row + i * BLOCK_K + col, codes, mask=mask)
    if HELD == 0:
        first = program % SLICES * (BLOCK_K // SLICES)
        part = first + tl.arange(0, BLOCK_K // SLICES).to(tl.int64)[None, :]
        for i in range(TILES):
            start = tl.cast(i, tl.int64) * BLOCK_K
            mask = present[:, None] & (start + part < K)
            x = tl.load(x_row + (start + part) * stride_xk, mask=mask, other=0.0)
            codes = encode_quotient(x, scale[:, None], DIVISION, FP8_MAX)
            tl.store(data_row + start + part, codes, mask=mask)


def quantize_rows(
    x: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    data: Tensor,
    rule: ScaleRule,
    tile: RowTile,
) -> None:
    """Quantize ``x`` row by row into ``data``, reading (static) or writing ``scale``.

    ``x [M, K]`` has any strides, ``scale`` is ``float32 [M]``, and ``data`` ``uint8 [M, K]`` with
    adjacent columns. A static quantization needs ``tile.held == 0``.
    """
    m, k = x.shape
    overlap = overlaps(x.device)
    # 64 registers let 32 warps share a multiprocessor; Triton 3.9 spills one 16-bit value for it
    registers = 64 if tile.held > 5 else None
    launch(
        _rows_kernel, triton.cdiv(m, tile.rows) * tile.slices,
        x, scale, scale_ub, data, m, x.stride(0), x.stride(1), scale.stride(0), rule.min_scale,
        K=k, STRIDE_DM=data.stride(0), STATIC=rule.static, DIVISION=rule.division,
        FP8_MAX=rule.fp8_max, BLOCK_M=tile.rows, BLOCK_K=tile.cols, HELD=tile.held,
        SLICES=tile.slices, num_warps=tile.warps, maxnreg=registers, enable_fp_fusion=False,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
