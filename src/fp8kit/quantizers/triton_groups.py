"""One scale per group along a row (1x128, MX 1x32, any power of two), or per block.

    scale[m, g] = max(max_i |x[m, g * G + i]| / fp8_max, min_scale)        for groups
    byte[m, g]  = exponent of that maximum, rounded down or up             for MX

Every element is read once and stays in registers between the amax and the division. Scales are
written with any strides, so the column-major layout that a GEMM loads by TMA needs no transpose.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.quantizers.triton_encode import (
    LOADS,
    ScaleRule,
    amax_of,
    appended,
    encode,
    encode_quotient,
    existing,
    few_warps,
    float_scale,
    magnitude,
    magnitudes,
    mx_exponent,
    mx_inverse,
    widen,
)
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps, prefetch


class GroupTile(NamedTuple):
    """How a matrix of groups is tiled.

    A tile has ``rows`` rows of ``groups`` groups, both powers of two. A program has ``held`` tiles,
    which are adjacent along a row.
    """

    rows: int
    groups: int
    held: int
    warps: int


def group_tile(
    m: int, k: int, group: int, itemsize: int, column: bool, processors: int
) -> GroupTile:
    """Choose a tile for ``[m, k]`` in groups of ``group`` columns.

    A thread loads 16 bytes of each tile, so that the threads of a warp read without gaps. A tile
    has more rows where scales are column-major, so that they coalesce.
    """
    lanes = 32 * 16 // itemsize  # elements that one warp loads with 16 bytes per thread
    crowded = m * k > 16 * LOADS * lanes * processors
    warps, loads = (8, LOADS // 2) if crowded else (few_warps(m * k, lanes, processors), 1)
    if column and m * k <= 8 * 4 * lanes * processors:
        warps = 4  # eight programs of 4 warps per multiprocessor were faster than four of 8
    budget = max(1, warps * lanes // group)
    most = max(1, budget // 8) if column else budget
    count = triton.cdiv(k, group)
    # the most groups per program that leave at most one lane in eight idle
    spans = (1 << i for i in range((loads * most).bit_length() - 1, -1, -1))
    span = next(n for n in spans if -count % n * 7 <= count)
    held = min(loads, span)
    groups = min(span // held, most)
    rows = min(budget // groups, triton.next_power_of_2(m))
    return GroupTile(rows, groups, held, min(16, max(1, rows * groups * group // lanes)))


@triton.jit
def _group_scale(x, scale_ub_ptr, min_scale, DIVISION: tl.constexpr, FP8_MAX: tl.constexpr):
    amax = amax_of(tl.max(magnitude(x), 2), scale_ub_ptr, x.dtype)
    if DIVISION == "mx floor" or DIVISION == "mx ceil":
        return mx_exponent(amax, DIVISION == "mx floor", FP8_MAX)
    else:
        return float_scale(amax, min_scale, DIVISION, FP8_MAX)


@triton.jit
def _group_codes(x, scale, DIVISION: tl.constexpr, FP8_MAX: tl.constexpr):
    if DIVISION == "mx floor" or DIVISION == "mx ceil":
        inverse = mx_inverse(scale.to(tl.int32))
        return encode(widen(x) * inverse[:, :, None], FP8_MAX)
    else:
        return encode_quotient(x, scale[:, :, None], DIVISION, FP8_MAX)


@triton.jit(do_not_specialize=["M"])
def _groups_kernel(
    x_ptr,  # [M, K]
    scale_ptr,  # [M, ceil(K / GROUP)], float32, or E8M0 bytes for MX
    scale_ub_ptr,  # [1] or None
    data_ptr,  # [M, K] bytes
    M,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sg,
    min_scale,
    K: tl.constexpr,
    STRIDE_DM: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    ACROSS: tl.constexpr = (GROUPS + HELD * BLOCK_G - 1) // (HELD * BLOCK_G)
    COLS: tl.constexpr = HELD * BLOCK_G * GROUP
    program = tl.program_id(0)
    if stride_xk == 1:
        top, left = (program // ACROSS).to(tl.int64) * BLOCK_M, program % ACROSS * COLS
        rows, cols, total = min(BLOCK_M, M - top), min(COLS, K - left), M.to(tl.int64) * K
        at = x_ptr + top * stride_xm + left
        prefetch(at, stride_xm, rows, cols, total, BLOCK_M * COLS, OVERLAP)
    join_stream(OVERLAP)
    row = (program // ACROSS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (program % ACROSS).to(tl.int64) * (HELD * BLOCK_G) + tl.arange(0, BLOCK_G)
    lane = tl.arange(0, GROUP)[None, None, :]
    present = existing(row, M)
    held = ()
    for i in tl.static_range(HELD):
        col = (first + i * BLOCK_G)[None, :, None] * GROUP + lane
        offset = row[:, None, None] * stride_xm + col * stride_xk
        x = tl.load(x_ptr + offset, mask=present[:, None, None] & (col < K), other=0.0)
        held = appended(held, x)
    for i in tl.static_range(HELD):
        group = first + i * BLOCK_G
        where = scale_ptr + row[:, None] * stride_sm + group[None, :] * stride_sg
        kept = present[:, None] & (group < GROUPS)[None, :]
        if STATIC:
            scale = tl.load(where, mask=kept, other=0)
        else:
            scale = _group_scale(held[i], scale_ub_ptr, min_scale, DIVISION, FP8_MAX)
            tl.store(where, scale.to(scale_ptr.dtype.element_ty), mask=kept)
        codes = _group_codes(held[i], scale, DIVISION, FP8_MAX)
        col = group[None, :, None] * GROUP + lane
        to = data_ptr + row[:, None, None] * STRIDE_DM + col
        tl.store(to, codes, mask=present[:, None, None] & (col < K))


def quantize_groups(
    x: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    data: Tensor,
    group: int,
    rule: ScaleRule,
    tile: GroupTile,
) -> None:
    """Quantize ``x`` in groups of columns into ``data``, reading (static) or writing ``scale``.

    ``x [M, K]`` and ``scale``, ``[M, ceil(K / group)]`` of ``float32`` or (MX) ``uint8``, have any
    strides, and ``data`` is ``uint8 [M, K]`` with adjacent columns. ``group`` is a power of two.
    """
    m, k = x.shape
    overlap = overlaps(x.device)
    across = triton.cdiv(triton.cdiv(k, group), tile.groups * tile.held)
    launch(
        _groups_kernel, triton.cdiv(m, tile.rows) * across,
        x, scale, scale_ub, data, m, x.stride(0), x.stride(1), scale.stride(0), scale.stride(1),
        rule.min_scale, K=k, STRIDE_DM=data.stride(0), GROUP=group, STATIC=rule.static,
        DIVISION=rule.division, FP8_MAX=rule.fp8_max, BLOCK_M=tile.rows,
        BLOCK_G=tile.groups, HELD=tile.held, num_warps=tile.warps, enable_fp_fusion=False,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _blocks_kernel(
    x_ptr,  # [E, M, K]
    scale_ptr,  # [E, ceil(M / ROWS), ceil(K / COLS)]
    scale_ub_ptr,  # [1] or None
    data_ptr,  # [E, M, K] bytes, contiguous
    M,
    stride_xe,
    stride_xm,
    stride_xk,
    stride_se,
    stride_sm,
    stride_sk,
    min_scale,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STATIC: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCK_M: tl.constexpr = ROWS // HELD
    ACROSS: tl.constexpr = (K + COLS - 1) // COLS
    program = tl.program_id(0)
    down = (M + ROWS - 1) // ROWS
    block_k = (program % ACROSS).to(tl.int64)
    block_m = (program // ACROSS % down).to(tl.int64)
    expert = (program // ACROSS // down).to(tl.int64)
    if stride_xk == 1:
        at = x_ptr + expert * stride_xe + block_m * ROWS * stride_xm + block_k * COLS
        rows, cols = min(ROWS, M - block_m * ROWS), min(COLS, K - block_k * COLS)
        total = tl.num_programs(0).to(tl.int64) * (ROWS * COLS)
        prefetch(at, stride_xm, rows, cols, total, ROWS * COLS, OVERLAP)
    join_stream(OVERLAP)
    first = (block_m * ROWS + tl.arange(0, BLOCK_M))[:, None]
    col = (block_k * COLS + tl.arange(0, COLS))[None, :]
    x_block = x_ptr + expert * stride_xe + col * stride_xk
    held = ()
    for i in tl.static_range(HELD):
        row = first + i * BLOCK_M
        x = tl.load(x_block + row * stride_xm, mask=(row < M) & (col < K), other=0.0)
        held = appended(held, x)
    where = scale_ptr + expert * stride_se + block_m * stride_sm + block_k * stride_sk
    if STATIC:
        scale = tl.load(where)
    else:
        bits = tl.max(tl.max(magnitudes(held, HELD), 1), 0)
        amax = amax_of(bits, scale_ub_ptr, x_ptr.dtype.element_ty)
        scale = float_scale(amax, min_scale, DIVISION, FP8_MAX)
        tl.store(where, scale)
    data_block = data_ptr + expert * M * K + col
    for i in tl.static_range(HELD):
        row = first + i * BLOCK_M
        codes = encode_quotient(held[i], scale, DIVISION, FP8_MAX)
        tl.store(data_block + row * K, codes, mask=(row < M) & (col < K))


def quantize_blocks(
    x: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    data: Tensor,
    rows: int,
    cols: int,
    rule: ScaleRule,
) -> None:
    """Quantize a stack of matrices block by block, reading (static) or writing ``scale``.

    ``x [E, M, K]`` and ``scale``, ``float32 [E, ceil(M / rows), ceil(K / cols)]``, have any
    strides; ``data``, ``uint8 [E, M, K]``, is contiguous. ``rows`` and ``cols`` of a block are
    powers of two.
    """
    overlap = overlaps(x.device)
    warps = min(8, max(1, rows * cols // 2048))
    # two loads of 16 bytes per thread and tile, and two blocks' warps on a multiprocessor's quarter
    held = min(rows, max(1, rows * cols * x.element_size() // (warps * 32 * 32)))
    launch(
        _blocks_kernel, scale.numel(),
        x, scale, scale_ub, data, x.shape[1], *x.stride(), *scale.stride(), rule.min_scale,
        K=x.shape[2], ROWS=rows, COLS=cols, STATIC=rule.static, DIVISION=rule.division,
        FP8_MAX=rule.fp8_max, HELD=held, num_warps=warps, enable_fp_fusion=False,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
