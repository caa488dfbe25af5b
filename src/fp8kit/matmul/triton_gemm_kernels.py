"""The kernels of ``triton_gemm``: one product for every pair of scales, and the sum of its parts.

    y[m, n] = sum_k (x[m, k] * w[n, k]) * w_scale * x_scale + bias[n]

The weight is the left operand, so that a tile is as narrow as there are few tokens: its sums are
``[BLOCK_N, BLOCK_M]``. Along K a problem is cut into chunks. Each has a program of its own
(``SPLITS``), or one program sums them in turn (``CHUNKS``). The sums are added in order, so the
bits of a result depend on the number of chunks, not on which program sums them.

Products are exact, in one of two ways:

- codes are multiplied on FP8 tensor cores; every partial sum over ``BLOCK_K`` is then added in
  ``float32`` outside of them, unless ``fast`` leaves it to Hopper's short accumulator;
- where one operand has 16 bits, its scales are MX, or the device has no FP8 tensor cores, codes are
  decoded in registers to ``bfloat16`` or ``float16``, which hold every one of them.

MX scales, powers of two, are multiplied into the decoded values, which is exact down to ``2^-126``;
scales of other groups along K are applied to the partial sums, all others to the result.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fp8kit.quantizers.triton_encode import INTERPRETED, widen
from fp8kit.runtime.triton_overlap import join_stream

# how an operand's scales are applied: not at all, to the result, to partial sums, to the values
NONE, FACTOR, GROUPS, MICRO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Form(NamedTuple):
    """How operands are read and summed: one constant of every kernel with products.

    A kind is one of the four above; one scale covers ``rows`` times ``cols`` elements. Formats are
    those of ``decode``. ``dtype`` is what codes are decoded to, ``None`` if they are multiplied as
    they are. ``native`` devices convert FP8 themselves, ``fast`` is explained in the module's
    docstring, and ``even_k`` says that K is a multiple of a step.
    """

    w_kind: int
    x_kind: int
    w_rows: int
    w_cols: int
    x_rows: int
    x_cols: int
    w_format: str
    x_format: str
    dtype: object
    native: bool
    fast: bool
    even_k: bool


# packed conversions; those that the compiler emits are scalar, at a quarter of their rate
_E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b16 c<2>, h<4>;
    .reg .b32 p<2>;
    .reg .f32 f<4>;
    mov.b32 {c0, c1}, $2;
    cvt.rn.f16x2.e4m3x2 p0, c0;
    cvt.rn.f16x2.e4m3x2 p1, c1;
    mov.b32 {h0, h1}, p0;
    mov.b32 {h2, h3}, p1;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
}""")
_E5M2_TO_BF16 = tl.constexpr(_E4M3_TO_BF16.value.replace("e4m3", "e5m2"))
_PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.jit
def decode(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Convert FP8 bytes to ``DTYPE`` exactly.

    ``FORMAT`` is ``"e4m3fn"``, ``"e5m2"`` or ``"e4m3fnuz"``, and ``DTYPE`` ``bfloat16``,
    ``float16`` or ``float32``; a ``NATIVE`` device converts FP8 itself (sm89 and later).
    """
    if INTERPRETED or not NATIVE or FORMAT == "e4m3fnuz":
        return _decode_with_integers(codes, FORMAT).to(DTYPE)
    elif DTYPE == tl.bfloat16:
        assembly: tl.constexpr = _E5M2_TO_BF16 if FORMAT == "e5m2" else _E4M3_TO_BF16
        return tl.inline_asm_elementwise(
            assembly, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif FORMAT == "e5m2":
        return codes.to(tl.float8e5, bitcast=True).to(DTYPE)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit
def _decode_with_integers(codes, FORMAT: tl.constexpr):
    # exponent and mantissa go to their place in float32, where a subnormal code is a subnormal
    # number too; a power of two makes up for the difference of the biases
    bits = codes.to(tl.int32)
    size = bits & 0x7F
    if FORMAT == "e5m2":
        value = (size << 21).to(tl.float32, bitcast=True) * 2.0**112
        value = tl.where(size == 0x7C, float("inf"), value)
        value = tl.where(size > 0x7C, float("nan"), value)
    elif FORMAT == "e4m3fnuz":
        value = (size << 20).to(tl.float32, bitcast=True) * 2.0**119
        value = tl.where(bits == 0x80, float("nan"), value)
    else:
        value = (size << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where(size == 0x7F, float("nan"), value)
    signed = value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent, DTYPE: tl.constexpr):
    """Convert E8M0 bytes to ``bfloat16`` or ``float32``: ``2^(byte - 127)``, NaN for 255."""
    bits = tl.maximum(exponent.to(tl.int32) << 23, 0x400000)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    if DTYPE == tl.bfloat16:
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_operand(
    tile_ptr,  # [ROWS, BLOCK_K]
    scale_ptr,  # [ROWS], E8M0 scales of the first group
    stride_sk,
    step,
    K,
    OPERAND: tl.constexpr,
    FORM: tl.constexpr,
):
    """Load a tile of the operand ``"w"`` or ``"x"`` as it is multiplied: codes, or exact values."""
    KIND: tl.constexpr = FORM.w_kind if OPERAND == "w" else FORM.x_kind
    FORMAT: tl.constexpr = FORM.w_format if OPERAND == "w" else FORM.x_format
    DTYPE: tl.constexpr = FORM.dtype
    NATIVE: tl.constexpr = FORM.native
    ROWS: tl.constexpr = tile_ptr.shape[0]
    BLOCK_K: tl.constexpr = tile_ptr.shape[1]
    if FORM.even_k:
        tile = tl.load(tile_ptr)
    elif tile_ptr.dtype.element_ty == tl.uint8:
        tile = tl.load(
            tile_ptr, mask=(tl.arange(0, BLOCK_K) < K - step * BLOCK_K)[None, :], other=0
        )
    else:
        inside = (tl.arange(0, BLOCK_K) < K - step * BLOCK_K)[None, :]
        tile = tl.load(tile_ptr, mask=inside, other=0.0)
    if KIND == NONE:
        tile = widen(tile) if INTERPRETED else tile
    elif DTYPE is not None:
        tile = decode(tile, FORMAT, DTYPE, NATIVE)
    if KIND == MICRO:
        group = step * (BLOCK_K // 32) + tl.arange(0, BLOCK_K // 32)
        exponent = tl.load(
            scale_ptr[:, None] + group.to(tl.int64)[None, :] * stride_sk,
            mask=(group * 32 < K)[None, :],
            other=127,
        )
        scale = power_of_two(exponent, DTYPE)[:, :, None]
        tile = (tile.reshape(ROWS, BLOCK_K // 32, 32) * scale).reshape(ROWS, BLOCK_K)
    return tile


@triton.jit
def add_product(
    total,  # [BLOCK_N, BLOCK_M]
    w,  # [BLOCK_N, BLOCK_K], a result of ``load_operand``
    x,  # [BLOCK_M, BLOCK_K]
    w_scale_row,
    x_scale_row,
    stride_wsk,
    stride_xsk,
    column,  # of the first element
    FORM: tl.constexpr,
):
    """Add the product of two tiles to the sums, with the scales of their groups."""
    BLOCK_K: tl.constexpr = w.shape[1]
    if FORM.w_kind == GROUPS or FORM.x_kind == GROUPS:
        part = tl.dot(w, tl.trans(x), max_num_imprecise_acc=BLOCK_K)
        if FORM.w_kind == GROUPS:
            scale = _group_scale(w_scale_row, stride_wsk, column, FORM.w_cols)
            part *= scale[:, None] if len(scale.shape) == 1 else scale
        if FORM.x_kind == GROUPS:
            part *= _group_scale(x_scale_row, stride_xsk, column, FORM.x_cols)[None, :]
        total += part
    elif FORM.dtype is None and not FORM.fast:
        total += tl.dot(w, tl.trans(x), max_num_imprecise_acc=BLOCK_K)
    else:
        total = tl.dot(w, tl.trans(x), total)
    return total


@triton.jit
def _group_scale(scale_ptr, stride_sk, start, COLS: tl.constexpr):
    """Load the scales of the groups that hold column ``start``; ``scale_ptr`` selects the rows."""
    return tl.load(scale_ptr + tl.cast(start // COLS, tl.int64) * stride_sk)


@triton.jit
def chunk_sum(
    w_tile,  # [BLOCK_N, BLOCK_K], at K = 0
    x_tile,  # [BLOCK_M, BLOCK_K], at K = 0
    w_scale_row,
    x_scale_row,
    K,
    stride_wk,
    stride_xk,
    stride_wsk,
    stride_xsk,
    start,  # steps of BLOCK_K
    stop,
    FORM: tl.constexpr,
):
    """Sum the products of two tiles along a part of K."""
    BLOCK_K: tl.constexpr = w_tile.shape[1]
    total = tl.zeros([w_tile.shape[0], x_tile.shape[0]], tl.float32)
    w_step, x_step = tl.cast(stride_wk, tl.int64) * BLOCK_K, tl.cast(stride_xk, tl.int64) * BLOCK_K
    w_tile += start * w_step
    x_tile += start * x_step
    for step in tl.range(start, stop):
        w = load_operand(w_tile, w_scale_row, stride_wsk, step, K, "w", FORM)
        x = load_operand(x_tile, x_scale_row, stride_xsk, step, K, "x", FORM)
        total = add_product(
            total, w, x, w_scale_row, x_scale_row, stride_wsk, stride_xsk, step * BLOCK_K, FORM
        )
        w_tile += w_step
        x_tile += x_step
    return total


@triton.jit
def scale_and_add_bias(
    total,  # [BLOCK_M, BLOCK_N]
    inside_m,
    inside_n,
    n,
    w_scale,  # pointers [BLOCK_N] to scales that factor out of the sum, or None
    x_scale,  # pointers [BLOCK_M] to such scales, or None
    bias_ptr,  # [N] or None
):
    """Apply the scales that factor out of the sum, and add the bias."""
    if x_scale is not None:
        total *= tl.load(x_scale, mask=inside_m, other=0.0)[:, None]
    scale = tl.full([1, total.shape[1]], 1.0, tl.float32)
    if w_scale is not None:
        scale = tl.load(w_scale, mask=inside_n, other=0.0)[None, :]
    if bias_ptr is not None:
        bias = widen(tl.load(bias_ptr + n, mask=inside_n, other=0.0))[None, :]
        # an explicit fma, since a compiler may contract the product and sum in one kernel only
        total = tl.fma(
            total, tl.broadcast_to(scale, total.shape), tl.broadcast_to(bias, total.shape)
        )
    elif w_scale is not None:
        total *= scale
    return total


@triton.jit
def _write(
    total,  # [BLOCK_M, BLOCK_N]
    y_ptr,
    m,
    n,
    M,
    N,
    w_scale_ptr,  # or None, of a part of a sum
    x_scale_ptr,
    bias_ptr,
    stride_wsn,
    stride_xsm,
    FORM: tl.constexpr,
):
    """Apply the scales that factor out of the sum, add the bias, round once."""
    w_scale, x_scale = None, None
    if w_scale_ptr is not None and FORM.w_kind == FACTOR:
        w_scale = w_scale_ptr + n // FORM.w_rows * stride_wsn
    if x_scale_ptr is not None and FORM.x_kind == FACTOR:
        x_scale = x_scale_ptr + m // FORM.x_rows * stride_xsm
    total = scale_and_add_bias(total, m < M, n < N, n, w_scale, x_scale, bias_ptr)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def place_of_tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the program's tile along N and M, and its part of K; near programs share operands."""
    tiles_n, tiles_m = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    split = tl.program_id(0) // (tiles_n * tiles_m)
    program = tl.program_id(0) % (tiles_n * tiles_m)
    band = program // (8 * tiles_n)
    height = tl.minimum(tiles_m - band * 8, 8)
    inside = program % (8 * tiles_n)
    return inside // height, band * 8 + inside % height, split


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    w_ptr,  # [N, K]
    x_ptr,  # [M, K]
    w_scale_ptr,
    x_scale_ptr,  # or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N], or float32 [SPLITS, M, N]
    M,
    N,
    K,
    stride_wn,
    stride_wk,
    stride_xm,
    stride_xk,
    stride_wsn,
    stride_wsk,
    stride_xsm,
    stride_xsk,
    FORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute one tile: over all of K, or over one part, whose sum goes to the workspace."""
    tile_n, tile_m, split = place_of_tile(M, N, BLOCK_M, BLOCK_N)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    # rows past the end repeat the last one, and are not written
    w_row, x_row = tl.minimum(n, N - 1), tl.minimum(m, M - 1)
    w_tile = w_ptr + w_row[:, None] * stride_wn + k[None, :] * stride_wk
    x_tile = x_ptr + x_row[:, None] * stride_xm + k[None, :] * stride_xk
    if FORM.w_kind == GROUPS and FORM.w_rows % BLOCK_N == 0:
        w_scale_row = w_scale_ptr + tile_n.to(tl.int64) * BLOCK_N // FORM.w_rows * stride_wsn
    else:
        w_scale_row = w_scale_ptr + w_row // FORM.w_rows * stride_wsn
    x_scale_row = x_scale_ptr
    if FORM.x_kind != NONE:
        x_scale_row = x_scale_ptr + x_row // FORM.x_rows * stride_xsm
    steps = tl.cdiv(K, BLOCK_K)
    size = tl.cdiv(steps, SPLITS * CHUNKS)
    if PREFETCH > 0:
        # safe before the previous kernel has ended, whatever it writes: all writes go through L2
        line = tl.minimum(split * size * BLOCK_K + tl.arange(0, PREFETCH) * 128, K - 1)
        address = w_ptr + w_row[:, None] * stride_wn + line.to(tl.int64)[None, :]
        tl.inline_asm_elementwise(
            _PREFETCH, "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    join_stream(OVERLAP)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for chunk in tl.range(0, CHUNKS):
        start = (split * CHUNKS + chunk) * size
        stop = tl.minimum(start + size, steps)
        total += chunk_sum(
            w_tile, x_tile, w_scale_row, x_scale_row, K,
            stride_wk, stride_xk, stride_wsk, stride_xsk, start, stop, FORM,
        )  # fmt: skip
    if SPLITS == 1:
        _write(
            tl.trans(total), y_ptr, m, n, M, N, w_scale_ptr, x_scale_ptr, bias_ptr,
            stride_wsn, stride_xsm, FORM,
        )  # fmt: skip
    else:
        part_ptr = y_ptr + split.to(tl.int64) * M * N
        _write(tl.trans(total), part_ptr, m, n, M, N, None, None, None, 0, 0, FORM)


@triton.jit(do_not_specialize=["M"])
def sum_kernel(
    part_ptr,  # float32 [SPLITS, M, N]
    w_scale_ptr,
    x_scale_ptr,  # or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N]
    M,
    N,
    stride_wsn,
    stride_xsm,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the parts of K in their order, and finish as ``product_kernel`` does without parts."""
    n = (tl.program_id(0) % tl.cdiv(N, BLOCK_N)).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(0) // tl.cdiv(N, BLOCK_N)).to(tl.int64) + tl.arange(0, 1)
    at = m[:, None] * N + n[None, :]
    join_stream(OVERLAP)
    total = tl.zeros([1, BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        shift = tl.cast(M, tl.int64) * N * split
        total += tl.load(part_ptr + shift + at, mask=(n < N)[None, :], other=0.0)
    _write(
        total, y_ptr, m, n, M, N, w_scale_ptr, x_scale_ptr, bias_ptr,
        stride_wsn, stride_xsm, FORM,
    )  # fmt: skip
