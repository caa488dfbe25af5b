"""The kernels of ``triton``: products of rows by their experts' weights, and the sum of pairs.

Rows are sorted by expert, without gaps. A tile has rows of only one expert. It finds its expert in
``tile_starts``, the cumulated counts of tiles, because only the device knows how many tokens an
expert has. The grid has room for any distribution, and programs past the last tile end at once.
Rows past the end of an expert repeat its last one and are not written, so no row of another expert
and no uninitialized one is ever multiplied.

The weight is the left operand, as in ``triton_gemm_kernels``, whose device functions are used here.
"""

import triton
import triton.language as tl

from fp8kit.fused.triton_activations import activate, over_one_plus_exp2
from fp8kit.fused.triton_output import narrow
from fp8kit.matmul.triton_gemm_kernels import (
    FACTOR,
    NONE,
    add_product,
    chunk_sum,
    load_operand,
    place_of_tile,
    scale_and_add_bias,
)
from fp8kit.quantizers.triton_encode import amax_of, encode_quotient, float_scale, magnitude, widen

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _expert_of(tile, tile_starts_ptr, E, SEARCH: tl.constexpr):
    """Find the expert of a tile: the last one whose tiles begin at or before it."""
    low, high = tile * 0, E
    for _ in tl.static_range(SEARCH):
        middle = (low + high) // 2
        before = tl.load(tile_starts_ptr + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _rows_of_tile(
    tile, offsets_ptr, tile_starts_ptr, E, SEARCH: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a tile's expert, the tile's rows, and the end of the expert's rows."""
    e = _expert_of(tile, tile_starts_ptr, E, SEARCH).to(tl.int64)
    before = (tile - tl.load(tile_starts_ptr + e)).to(tl.int64) * BLOCK_M
    first = tl.load(offsets_ptr + e).to(tl.int64) + before
    return e, first + tl.arange(0, BLOCK_M), tl.load(offsets_ptr + e + 1).to(tl.int64)


@triton.jit(do_not_specialize=["TILES"])
def grouped_kernel(
    w_ptr,  # [E, N, K]
    x_ptr,  # [S, K]
    w_scale_ptr,  # [E, ...]
    x_scale_ptr,  # or None
    bias_ptr,  # [E, N] or None
    y_ptr,  # [S, N], contiguous
    out_row_ptr,  # [S], where each row's result goes, or None
    offsets_ptr,  # [E + 1]
    tile_starts_ptr,  # [E + 1]
    E,
    TILES,  # of the grid
    N,
    K,
    stride_we,
    stride_wn,
    stride_wk,
    stride_xm,
    stride_xk,
    stride_wse,
    stride_wsn,
    stride_wsk,
    stride_xsm,
    stride_xsk,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Multiply one tile of rows by the weight of their expert."""
    tile_n, tile, _ = place_of_tile(TILES * BLOCK_M, N, BLOCK_M, BLOCK_N)
    if tile >= tl.load(tile_starts_ptr + E):
        return
    e, m, end = _rows_of_tile(tile, offsets_ptr, tile_starts_ptr, E, SEARCH, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    row, w_row = tl.minimum(m, end - 1), tl.minimum(n, N - 1)
    w_scale = w_scale_ptr + e * stride_wse + w_row // FORM.w_rows * stride_wsn
    # not in a function of its own: functions of Triton 3.6 cannot return None
    x_scale = x_scale_ptr if FORM.x_kind == NONE else x_scale_ptr + row // FORM.x_rows * stride_xsm
    total = chunk_sum(
        w_ptr + e * stride_we + w_row[:, None] * stride_wn + k[None, :] * stride_wk,
        x_ptr + row[:, None] * stride_xm + k[None, :] * stride_xk,
        w_scale, x_scale, K, stride_wk, stride_xk, stride_wsk, stride_xsk, 0, tl.cdiv(K, BLOCK_K),
        FORM,
    )  # fmt: skip
    total = scale_and_add_bias(
        tl.trans(total), m < end, n < N, n, w_scale if FORM.w_kind == FACTOR else None,
        x_scale if FORM.x_kind == FACTOR else None, None if bias_ptr is None else bias_ptr + e * N,
    )  # fmt: skip
    out = m
    if out_row_ptr is not None:
        out = tl.load(out_row_ptr + row)
    inside = (m < end)[:, None] & (n < N)[None, :]
    at = y_ptr + out[:, None] * N + n[None, :]
    tl.store(at, narrow(total, y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["TILES"])
def activated_kernel(
    w_ptr,  # [E, 2 I, K], or [E, I, K] without a gate
    x_ptr,  # a row per token, or per pair
    w_scale_ptr,  # [E, ...]
    x_scale_ptr,  # or None
    bias_ptr,  # [E, 2 I] or None
    h_ptr,  # [S, I]: bytes of codes, or 16-bit numbers
    h_scale_ptr,  # [S, groups] to be written, or one given scale, or None
    pair_ptr,  # [S], the pair of each row
    offsets_ptr,  # [E + 1]
    tile_starts_ptr,  # [E + 1]
    E,
    TILES,
    INNER,  # I, features of an expert
    K,
    stride_we, stride_wn, stride_wk, stride_xm, stride_xk,
    stride_wse, stride_wsn, stride_wsk, stride_xsm, stride_xsk,
    min_scale, limit, alpha, up_offset,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SEARCH: tl.constexpr,
    FAN: tl.constexpr,  # pairs that read one row of x
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, LIMITED: tl.constexpr,
    SCALES: tl.constexpr,  # of the result: "group", "static" or "none"
    DIVISION: tl.constexpr, FP8_MAX: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of a tile's pairs, activate, and quantize in groups of ``BLOCK_N``."""
    tile_n, tile, _ = place_of_tile(TILES * BLOCK_M, INNER, BLOCK_M, BLOCK_N)
    if tile >= tl.load(tile_starts_ptr + E):
        return
    e, m, end = _rows_of_tile(tile, offsets_ptr, tile_starts_ptr, E, SEARCH, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    source = tl.load(pair_ptr + tl.minimum(m, end - 1)) // FAN
    gate_row, up_row = _rows_of(tl.minimum(n, INNER - 1), INNER, GATED, INTERLEAVED)
    w_ptr += e * stride_we
    w_scale_ptr += e * stride_wse
    gate_tile = w_ptr + gate_row[:, None] * stride_wn + k[None, :] * stride_wk
    up_tile = w_ptr + up_row[:, None] * stride_wn + k[None, :] * stride_wk
    x_tile = x_ptr + source[:, None] * stride_xm + k[None, :] * stride_xk
    gate_scale = w_scale_ptr + gate_row // FORM.w_rows * stride_wsn
    up_scale = w_scale_ptr + up_row // FORM.w_rows * stride_wsn
    x_scale = x_scale_ptr
    if FORM.x_kind != NONE:
        x_scale = x_scale_ptr + source // FORM.x_rows * stride_xsm
    gate, up = _both_sums(
        gate_tile, up_tile, x_tile, gate_scale, up_scale, x_scale, K,
        stride_wk, stride_xk, stride_wsk, stride_xsk, FORM, GATED,
    )  # fmt: skip
    inside_m, inside_n = m < end, n < INNER
    x_factor = x_scale if FORM.x_kind == FACTOR else None
    biases = None if bias_ptr is None else bias_ptr + e * (2 * INNER if GATED else INNER)
    y = scale_and_add_bias(
        tl.trans(gate), inside_m, inside_n, gate_row, gate_scale if FORM.w_kind == FACTOR else None,
        x_factor, biases,
    )  # fmt: skip
    if GATED:
        factor = scale_and_add_bias(
            tl.trans(up), inside_m, inside_n, up_row, up_scale if FORM.w_kind == FACTOR else None,
            x_factor, biases,
        )  # fmt: skip
        y = _activated(y, limit, alpha, ACT, LIMITED)
        if LIMITED:
            factor = tl.where(factor > limit, limit, tl.where(factor < -limit, -limit, factor))
        y *= factor + up_offset
    else:
        y = _activated(y, limit, alpha, ACT, LIMITED)
    y = tl.where(inside_n[None, :], y, 0.0)
    _store_activated(y, m, n, tile_n, inside_m, inside_n, INNER, h_ptr, h_scale_ptr, min_scale,
                     SCALES, DIVISION, FP8_MAX, FORM.native)  # fmt: skip


@triton.jit
def _activated(y, limit, alpha, ACT: tl.constexpr, LIMITED: tl.constexpr):
    if LIMITED:
        y = tl.where(y > limit, limit, y)
    if ACT == "relu2":
        y = tl.where(y < 0.0, 0.0, y)
        return y * y
    elif ACT == "silu":
        return over_one_plus_exp2(y, y * (-_LOG2_E * alpha))
    else:
        tl.static_assert(ACT == "gelu" or ACT == "gelu_tanh", "no such activation")
        return activate(y, ACT)


@triton.jit
def _rows_of(feature, INNER, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the weight rows of a feature: its gate and its up."""
    if not GATED:
        return feature, feature
    elif INTERLEAVED:
        return feature * 2, feature * 2 + 1
    else:
        return feature, feature + INNER


@triton.jit
def _both_sums(
    gate_tile,
    up_tile,
    x_tile,
    gate_scale,
    up_scale,
    x_scale,
    K,
    stride_wk,
    stride_xk,
    stride_wsk,
    stride_xsk,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Sum gates and ups in one pass over K, which loads ``x`` once for both."""
    BLOCK_K: tl.constexpr = x_tile.shape[1]
    gate = tl.zeros([gate_tile.shape[0], x_tile.shape[0]], tl.float32)
    up = gate
    w_step, x_step = tl.cast(stride_wk, tl.int64) * BLOCK_K, tl.cast(stride_xk, tl.int64) * BLOCK_K
    for step in tl.range(0, tl.cdiv(K, BLOCK_K)):
        x = load_operand(x_tile, x_scale, stride_xsk, step, K, "x", FORM)
        w = load_operand(gate_tile, gate_scale, stride_wsk, step, K, "w", FORM)
        gate = add_product(
            gate, w, x, gate_scale, x_scale, stride_wsk, stride_xsk, step * BLOCK_K, FORM
        )
        if GATED:
            w = load_operand(up_tile, up_scale, stride_wsk, step, K, "w", FORM)
            up = add_product(
                up, w, x, up_scale, x_scale, stride_wsk, stride_xsk, step * BLOCK_K, FORM
            )
        gate_tile += w_step
        up_tile += w_step
        x_tile += x_step
    return gate, up


@triton.jit
def _store_activated(
    y,  # [BLOCK_M, BLOCK_N] float32, zero past the last column
    m,
    n,
    group,
    inside_m,
    inside_n,
    INNER,
    h_ptr,
    h_scale_ptr,
    min_scale,
    SCALES: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    NATIVE: tl.constexpr,
):
    at = h_ptr + m[:, None] * INNER + n[None, :]
    inside = inside_m[:, None] & inside_n[None, :]
    if SCALES == "group":
        amax = amax_of(tl.max(magnitude(y), 1), None, tl.float32)
        scale = float_scale(amax, min_scale, DIVISION, FP8_MAX)
        groups = tl.cdiv(INNER, y.shape[1])
        tl.store(h_scale_ptr + m * groups + group, scale, mask=inside_m)
        tl.store(at, encode_quotient(y, scale[:, None], DIVISION, FP8_MAX, NATIVE), mask=inside)
    elif SCALES == "static":
        codes = encode_quotient(y, tl.load(h_scale_ptr), "ieee", FP8_MAX, NATIVE)
        tl.store(at, codes, mask=inside)
    else:
        tl.store(at, narrow(y, h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    rows_ptr,  # [M * TOP_K, H]
    ids_ptr,  # [M, TOP_K], negative where a row counts as zero
    weights_ptr,  # float32 [M, TOP_K], or None
    y_ptr,  # [M, H]
    H,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add the rows of a token in their order."""
    across = tl.cdiv(H, BLOCK_H)
    token = (tl.program_id(0) // across).to(tl.int64)
    h = (tl.program_id(0) % across).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for place in tl.range(0, TOP_K):
        pair = token * TOP_K + place
        taken = tl.load(ids_ptr + pair) >= 0
        part = widen(tl.load(rows_ptr + pair * H + h, mask=h < tl.where(taken, H, 0), other=0.0))
        if weights_ptr is not None:
            part *= tl.where(taken, tl.load(weights_ptr + pair), 0.0)
        total += part
    tl.store(y_ptr + token * H + h, narrow(total, y_ptr.dtype.element_ty), mask=h < H)
