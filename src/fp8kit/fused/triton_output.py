"""The common end of the fused kernels: quantize the tiles of a result that are in registers.

A result ``y`` is rounded to the dtype of the model before its amax is taken, as if it had gone
through memory; from there on codes and scales equal ``reference.quantize(y)`` bit for bit.

``SCALES`` is the kind of the scales: ``"row"`` one per row, ``"group"`` one per group of a row,
``"column"`` the same, stored column-major, ``"static"`` one given number.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.formats import TENSOR, fp8_format
from fp8kit.fused.problem import CodesFormat
from fp8kit.quantizers.scale_layout import empty_scale
from fp8kit.quantizers.triton_encode import (
    INTERPRETED,
    amax_of,
    division_of,
    encode,
    encode_quotient,
    existing,
    float_scale,
    is_safe,
    magnitude,
    magnitudes,
    mx_exponent,
    mx_inverse,
    widen,
)

TILE_BYTES = 32 * 32 * 16  # one 16-byte load by each thread of the largest program


class Output(NamedTuple):
    """The tensors for codes and scales, and the constants that the kernels are compiled with.

    Codes are contiguous. The scale has the layout of ``SCALES``; a static one is only read.
    ``constants`` are ``SCALES``, ``GROUP``, ``DIVISION`` and ``FP8_MAX``.
    """

    data: Tensor
    scale: Tensor
    scale_ub: Tensor | None
    min_scale: float
    constants: dict[str, Any]

    @staticmethod
    def of(x: Tensor, how: CodesFormat) -> "Output":
        """Allocate codes and scales for a result of the shape of ``x``."""
        scale, group, dtype, min_scale, scale_ub, rounding, layout = how
        if scale is None:
            scale = empty_scale(x, group, layout)
        grouped = "column" if layout == "column" else "group"
        constants = {
            "SCALES": "static" if group == TENSOR else "row" if group.cols == -1 else grouped,
            "GROUP": max(group.cols, 1),
            "DIVISION": division_of(group, min_scale, scale_ub, rounding),
            "FP8_MAX": fp8_format(dtype).max,
        }
        data = torch.empty(x.shape, dtype=dtype, device=x.device)
        return Output(data, scale, scale_ub, min_scale, constants)

    def pointers(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the kernels' arguments ``scale_ptr, scale_ub_ptr, data_ptr``."""
        return self.scale, self.scale_ub, self.data.view(torch.uint8)


class Tile(NamedTuple):
    """How rows are tiled: rows per program, columns per tile, tiles per program, warps."""

    rows: int
    cols: int
    held: int
    warps: int


def row_cut(k: int, lanes: int, most: int) -> tuple[int, int]:
    """Choose warps and tiles for a program that holds a row of ``k`` elements in registers.

    The fewest idle lanes win, then at most four tiles, so that several programs share a processor.
    One warp loads ``lanes`` elements at once, and the registers of a thread hold ``most`` tiles.
    """
    cuts = [(warps, triton.cdiv(k, warps * lanes)) for warps in (4, 8, 16, 32)]
    fitting = [(w, held) for w, held in cuts if held <= most] or cuts[-1:]
    return min(fitting, key=lambda cut: (cut[0] * cut[1], cut[1] > 4, cut[0]))


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """Round ``float32`` to nearest even (the interpreter's own cast to bf16 truncates).

    Converts pairs explicitly: without 16-bit arithmetic before or after, the compiler would convert
    one by one, at a quarter of the rate.
    """
    if x.dtype == DTYPE:
        return x
    elif INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif INTERPRETED or DTYPE == tl.float32:
        return x.to(DTYPE)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.float16, is_pure=True, pack=2
        )


@triton.jit
def rounded_product(x, y):
    """Multiply tiles of one dtype and round to it, two 16-bit products per instruction."""
    if INTERPRETED or x.dtype == tl.float32:
        return narrow(widen(x) * widen(y), x.dtype)
    elif x.dtype == tl.bfloat16:
        # adding minus zero keeps the sign of a zero product; a plain mul needs sm90
        return _by_pairs("{.reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z;}", x, y)
    else:
        return _by_pairs("mul.rn.f16x2 $0, $1, $2;", x, y)


@triton.jit
def rounded_sum(x, y):
    """Add tiles of one dtype and round to it, two 16-bit sums per instruction."""
    if INTERPRETED or x.dtype == tl.float32:
        return narrow(widen(x) + widen(y), x.dtype)
    elif x.dtype == tl.bfloat16:
        return _by_pairs("{.reg .b32 o; mov.b32 o, 0x3f803f80; fma.rn.bf16x2 $0, $1, o, $2;}", x, y)
    else:
        return _by_pairs("add.rn.f16x2 $0, $1, $2;", x, y)


@triton.jit
def _by_pairs(INSTRUCTION: tl.constexpr, x, y):
    return tl.inline_asm_elementwise(INSTRUCTION, "=r,r,r", [x, y], x.dtype, is_pure=True, pack=2)


@triton.jit
def _store_scales(place, scale, kept):
    # every thread of a group has its scale and stores it; ``tl.store`` would first rearrange the
    # scales through shared memory, with two barriers per tile
    if INTERPRETED:
        tl.store(place, scale, mask=kept)
    elif scale.dtype == tl.uint8:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.u8 [$1], $2; mov.b32 $0, 0;}",
            "=r,l,r,r", [place.to(tl.int64, bitcast=True), scale.to(tl.int32), kept.to(tl.int32)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0;}",
            "=r,l,f,r", [place.to(tl.int64, bitcast=True), scale, kept.to(tl.int32)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _store_columns(scale_ptr, row, group, M, scale, kept):
    # as ``_store_scales``, with the pitch of ``scale_layout.pitch``; an address is computed where
    # it is used, because those of all tiles of a row would fill the registers
    if INTERPRETED:
        tl.store(scale_ptr + row + group.to(tl.int64) * ((M + 3) // 4 * 4), scale, mask=kept)
    elif scale.dtype == tl.uint8:
        tl.inline_asm_elementwise(
            """{.reg .pred p; .reg .b64 a; .reg .b32 s; setp.ne.s32 p, $6, 0;
            add.s32 s, $4, 3; and.b32 s, s, -4; mul.wide.s32 a, $3, s; add.s64 a, a, $2;
            add.s64 a, a, $1; @p st.global.u8 [a], $5; mov.b32 $0, 0;}""",
            "=r,l,l,r,r,r,r",
            [scale_ptr.to(tl.int64, bitcast=True), row, group, M, scale.to(tl.int32),
             kept.to(tl.int32)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            """{.reg .pred p; .reg .b64 a; .reg .b32 s; setp.ne.s32 p, $6, 0;
            add.s32 s, $4, 3; and.b32 s, s, -4; mul.wide.s32 a, $3, s; add.s64 a, a, $2;
            shl.b64 a, a, 2; add.s64 a, a, $1; @p st.global.f32 [a], $5; mov.b32 $0, 0;}""",
            "=r,l,l,r,r,f,r",
            [scale_ptr.to(tl.int64, bitcast=True), row, group, M, scale, kept.to(tl.int32)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _store_codes(
    y,  # [BLOCK_M, BLOCK_K], zero past the last column
    scale,  # [BLOCK_M] for rows, a number if static, unused for groups
    row,  # [BLOCK_M]
    first,  # column of the tile's first element
    M,
    scale_ptr,
    scale_ub_ptr,
    data_ptr,
    min_scale,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    BLOCK_M: tl.constexpr = y.shape[0]
    BLOCK_K: tl.constexpr = y.shape[1]
    if SCALES == "row":
        codes = encode_quotient(y, scale[:, None], DIVISION, FP8_MAX)
    elif SCALES == "static":
        codes = encode_quotient(y, scale, DIVISION, FP8_MAX)
    else:
        parts = tl.reshape(y, [BLOCK_M, BLOCK_K // GROUP, GROUP])
        amax = amax_of(tl.max(magnitude(parts), 2), scale_ub_ptr, y.dtype)
        if DIVISION == "mx floor" or DIVISION == "mx ceil":
            found = mx_exponent(amax, DIVISION == "mx floor", FP8_MAX)
            grouped = encode(widen(parts) * mx_inverse(found)[:, :, None], FP8_MAX)
        else:
            found = float_scale(amax, min_scale, DIVISION, FP8_MAX)
            grouped = encode_quotient(parts, found[:, :, None], DIVISION, FP8_MAX)
        GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
        group = tl.arange(0, BLOCK_K // GROUP)[None, :] + first // GROUP
        kept = existing(row, M)[:, None] & (group < GROUPS)
        found = found.to(scale_ptr.dtype.element_ty)
        if SCALES == "column":
            _store_columns(scale_ptr, row[:, None], group, M, found, kept)
        else:
            _store_scales(scale_ptr + row[:, None] * GROUPS + group, found, kept)
        codes = tl.reshape(grouped, [BLOCK_M, BLOCK_K])
    col = tl.arange(0, BLOCK_K)[None, :] + first
    tl.store(data_ptr + row[:, None] * K + col, codes, mask=existing(row, M)[:, None] & (col < K))


@triton.jit
def _store_tiles(tiles, scale, row, first, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                 K: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
                 DIVISION: tl.constexpr, FP8_MAX: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    for i in tl.static_range(HELD):
        at = first + i * tiles[0].shape[1]
        _store_codes(tiles[i], scale, row, at, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                     K, SCALES, GROUP, DIVISION, FP8_MAX)  # fmt: skip


@triton.jit
def store_result(
    tiles,  # of a result, each [BLOCK_M, BLOCK_K], zero past the last column
    given,  # the scale if static
    row,  # [BLOCK_M]
    first,  # column of the first tile's first element
    M,
    scale_ptr,
    scale_ub_ptr,
    data_ptr,
    min_scale,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    HELD: tl.constexpr,
):
    """Quantize the tiles of a result: store codes and, unless static, scales."""
    DTYPE: tl.constexpr = tiles[0].dtype
    if SCALES == "static" and FP8_MAX != 224.0:
        # only here is it known whether a given scale has ordinary size, and so divides cheaply;
        # not for fnuz: Triton 3.6 miscompiles the integer steps of its codes in such a branch
        if is_safe(given):
            _store_tiles(tiles, given, row, first, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                         K, SCALES, GROUP, "safe", FP8_MAX, HELD)  # fmt: skip
        else:
            _store_tiles(tiles, given, row, first, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                         K, SCALES, GROUP, "ieee", FP8_MAX, HELD)  # fmt: skip
    else:
        scale = given
        HOW: tl.constexpr = "ieee" if SCALES == "static" else DIVISION
        if SCALES == "row":
            amax = amax_of(tl.max(magnitudes(tiles, HELD), 1), scale_ub_ptr, DTYPE)
            scale = float_scale(amax, min_scale, DIVISION, FP8_MAX)
            tl.store(scale_ptr + row, scale, mask=existing(row, M))
        _store_tiles(tiles, scale, row, first, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                     K, SCALES, GROUP, HOW, FP8_MAX, HELD)  # fmt: skip
