"""Memory layouts of codes and scales that products load fastest.

Column-major scales have the same logical shape as row-major ones, but the scales of one column are
adjacent, and columns start at multiples of four values: the tensor memory accelerator (TMA) needs
both to load the scales of many rows at once. On Hopper, TMA loads rows of codes up to twice as fast
if they start at multiples of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.dispatch.device import capability
from fp8kit.errors import InvalidType, InvalidValue, check_shape
from fp8kit.formats import GROUP128, GroupShape, scale_dtype, scale_shape

LAYOUTS = ("row", "column")
_MULTIPLE = 4  # rows: 16 bytes of ``float32``
_TILE_ROWS, _TILE_COLS = 128, 4  # scales in a tile of 512 bytes, for MX products
E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)  # of the scales of MX groups
_TMA_ALIGN, _FULL_RATE = 16, 64  # rows of codes start at multiples of so many bytes


def product_layout(group: GroupShape) -> str:
    """Return the layout in which layers write activation scales, so that no product copies them."""
    return "column" if group == GROUP128 else "row"


def has_columns(group: GroupShape) -> bool:
    """Return whether scales of a granularity can be column-major: groups along a row."""
    return group.rows == 1 and group.cols != -1


def pitch(rows: int) -> int:
    """Return the distance in values from column to column, for scales of ``rows`` rows."""
    return -(-rows // _MULTIPLE) * _MULTIPLE


def empty_scale(x: Tensor, group: GroupShape, layout: str) -> Tensor:
    """Allocate the scales of a tensor, on its device.

    ``layout`` is ``"row"``, or ``"column"`` for groups along a row. Neither the scales,
    ``scale_shape(x.shape, group)``, nor their padding are initialised.
    """
    shape, dtype = scale_shape(x.shape, group), scale_dtype(group)
    return empty_columns(x, shape, dtype) if layout == "column" else x.new_empty(shape, dtype=dtype)


def empty_codes(x: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor | None:
    """Allocate codes with gaps between their rows, if a product then loads them faster.

    The codes are ``[M, K]``, not initialised; ``None`` where gaps do not help or were not measured.
    """
    m, k = x.shape
    if m < 2 or k % _TMA_ALIGN or not k % _FULL_RATE or group.rows != 1:
        return None
    if (capability(x.device) or (0, 0))[0] != 9:
        return None
    row_pitch = -(-k // _FULL_RATE) * _FULL_RATE
    return x.new_empty((m, row_pitch), dtype=dtype).as_strided((m, k), (row_pitch, 1))


def laid_out(scale: Tensor, layout: str) -> Tensor:
    """Copy row-major scales into another layout; ``"row"`` leaves them as they are."""
    return scale if layout == "row" else empty_columns(scale, scale.shape, scale.dtype).copy_(scale)


def empty_columns(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate column-major scales ``[..., groups]`` on the device of a tensor."""
    strides, rows = [], 1
    for extent in reversed(shape[:-1]):
        strides.append(rows)
        rows *= extent
    storage = like.new_empty((shape[-1], pitch(rows)), dtype=dtype)
    return storage.as_strided(tuple(shape), (*reversed(strides), pitch(rows)))


def swizzle_scales(scale: Tensor) -> Tensor:
    """Rearrange MX scales into the 128x4 tiles that Blackwell's tensor cores load.

    The layout is the one cuBLAS documents for block scaling. Tiles of 512 bytes follow each other
    row by row; inside one, the scale of row ``r`` and column ``c`` is at byte
    ``(r % 32) * 16 + (r // 32) * 4 + c``. Edges are padded with zero bytes.

    Args:
        scale: E8M0 bytes, ``uint8`` or ``float8_e8m0fnu``, ``[..., rows, K / 32]``, any strides.

    Returns:
        The dtype of ``scale``, ``[..., ceil(rows / 128) * ceil(K / 128) * 512]``, contiguous.

    Raises:
        TypeError: if ``scale`` does not hold E8M0 bytes.
        ValueError: if it has fewer than two dimensions.

    Example:
        >>> fp8kit.swizzle_scales(torch.zeros(192, 5, dtype=torch.uint8)).shape
        torch.Size([2048])
    """
    _check_exponents(scale)
    if scale.dim() < 2:
        raise InvalidValue(
            f"Got scales of shape {tuple(scale.shape)}.",
            "They belong to a matrix: [..., rows, K / 32].",
            "Reshape them, e.g. with unsqueeze(0) for one row.",
        )
    *stack, rows, cols = scale.shape
    padded = F.pad(scale.view(torch.uint8), (0, -cols % _TILE_COLS, 0, -rows % _TILE_ROWS))
    tiles = padded.reshape(*stack, *_tile_counts(rows, cols, "rows"))
    return tiles.movedim(-2, -4).transpose(-3, -2).flatten(-5).view(scale.dtype)


def unswizzle_scales(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Undo ``swizzle_scales`` exactly.

    Args:
        scale: E8M0 bytes in 128x4 tiles, padded to whole tiles, any shape.
        shape: of the scales without padding, ``(..., rows, K / 32)``.

    Returns:
        The dtype of ``scale``, of ``shape``, contiguous.

    Raises:
        TypeError: if ``scale`` does not hold E8M0 bytes.
        ValueError: if it does not hold the tiles of that shape.

    Example:
        >>> flat = fp8kit.swizzle_scales(q.scale)
        >>> torch.equal(fp8kit.unswizzle_scales(flat, q.scale.shape), q.scale)
        True
    """
    _check_exponents(scale)
    check_shape(shape)
    sides = tuple(shape)
    padded = (*sides[:-2], *(-(-n // m) * m for n, m in zip(sides[-2:], (128, 4), strict=False)))
    if len(sides) < 2 or min(sides) < 0 or scale.numel() != math.prod(padded):
        raise InvalidValue(
            f"Got {scale.numel()} bytes for scales of shape {sides}.",
            "A matrix of scales is padded to tiles of 128 rows by 4 columns.",
            "Pass the shape of the scales, (..., rows, ceil(K / 32)), not that of the codes.",
        )
    *stack, rows, cols = sides
    tiles = scale.reshape(*stack, *_tile_counts(rows, cols, "tiles")).view(torch.uint8)
    plain = tiles.transpose(-3, -2).movedim(-4, -2).reshape(padded)
    return plain[..., :rows, :cols].contiguous().view(scale.dtype)


def _tile_counts(rows: int, cols: int, order: str) -> tuple[int, ...]:
    down, across = -(-rows // _TILE_ROWS), -(-cols // _TILE_COLS)
    inside = (_TILE_ROWS // 32, 32)
    if order == "rows":
        return down, *inside, across, _TILE_COLS
    return down, across, *reversed(inside), _TILE_COLS


def _check_exponents(scale: Tensor) -> None:
    if not isinstance(scale, Tensor) or scale.dtype not in E8M0_DTYPES:
        found = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidType(
            f"Got scales of {found}.",
            "MX scales are E8M0 bytes: uint8, or float8_e8m0fnu.",
            "Pass the scale of fp8kit.quantize(x, fp8kit.MX).",
        )
