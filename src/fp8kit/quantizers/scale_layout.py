"""How codes and scales lie in memory where products load them fastest.

Column-major scales have the logical shape of any others. Rows are adjacent, columns a multiple of
four values apart: what the tensor memory accelerator needs to load the scales of many rows at once.
On Hopper it loads rows of codes up to twice as fast if they start at multiples of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kit.dispatch.device import capability
from fp8kit.formats import GROUP128, GroupShape, scale_dtype, scale_shape

LAYOUTS = ("row", "column")
_MULTIPLE = 4  # rows: 16 bytes of ``float32``
_TMA_ALIGN, _FULL_RATE = 16, 64  # bytes that rows of codes have to start at multiples of


def product_layout(group: GroupShape) -> str:
    """Name the layout in which layers write the scales of activations, so that nothing copies them.

    Args:
        group: elements per scale.
    """
    return "column" if group == GROUP128 else "row"


def has_columns(group: GroupShape) -> bool:
    """Return whether scales of a granularity can be column-major: groups along a row."""
    return group.rows == 1 and group.cols != -1


def pitch(rows: int) -> int:
    """Return the distance in values from column to column, for scales of ``rows`` rows."""
    return -(-rows // _MULTIPLE) * _MULTIPLE


def empty_scale(x: Tensor, group: GroupShape, layout: str) -> Tensor:
    """Allocate the scales of a tensor, on its device.

    Args:
        x: what is quantized, K last.
        group: elements per scale.
        layout: ``"row"``, or ``"column"`` for groups along a row.

    Returns:
        ``scale_shape(x.shape, group)``, not initialised, and neither is the padding.

    Example:
        >>> empty_scale(torch.empty(2, 7, 512), GROUP128, "column").stride()
        (7, 1, 16)
    """
    shape, dtype = scale_shape(x.shape, group), scale_dtype(group)
    return empty_columns(x, shape, dtype) if layout == "column" else x.new_empty(shape, dtype=dtype)


def empty_codes(x: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor | None:
    """Allocate codes with gaps between their rows, if a product loads them faster then.

    Args:
        x: what is quantized, ``[M, K]``.
        group: elements per scale.
        dtype: of the codes.

    Returns:
        ``[M, K]``, not initialised; ``None`` where gaps gain nothing, or were not measured.

    Example:
        >>> empty_codes(torch.empty(7, 4304, device="cuda"), ROW, torch.float8_e4m3fn).stride()
        (4352, 1)
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
    """Allocate column-major scales on the device of a tensor.

    Args:
        like: gives the device.
        shape: logical shape ``[..., groups]``.
        dtype: of the scales.
    """
    strides, rows = [], 1
    for extent in reversed(shape[:-1]):
        strides.append(rows)
        rows *= extent
    storage = like.new_empty((shape[-1], pitch(rows)), dtype=dtype)
    return storage.as_strided(tuple(shape), (*reversed(strides), pitch(rows)))
