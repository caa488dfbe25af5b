"""Bring operands into layouts that TMA can load; those that already fit are not copied."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.quantizers.scale_layout import laid_out, pitch

ALIGN = 16  # bytes, of addresses and of strides


def aligned(codes: Tensor) -> Tensor:
    """Return codes ``[rows, K]``, K a multiple of 16, in rows that start at 16-byte boundaries.

    ``codes`` have one byte per element and any strides. Columns of the result are adjacent; its
    rows may have gaps, see ``row_pitch``.
    """
    apart = row_pitch(codes)
    fits = codes.stride(1) == 1 and apart >= codes.shape[1] and apart % ALIGN == 0
    if fits and codes.data_ptr() % ALIGN == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


def row_pitch(codes: Tensor) -> int:
    """Return the bytes from row to row; for a single row, whose stride says nothing, its length."""
    return codes.stride(0) if codes.shape[0] > 1 else codes.shape[1]


def by_column(scale: Tensor) -> Tensor:
    """Return column-major scales, as the quantizer of layers writes them.

    ``scale`` is ``float32 [rows, cols]`` in any strides. In the result the scales of one column (a
    step along K) are adjacent, and columns are a multiple of four values apart.
    """
    rows, cols = scale.shape
    # along an extent of 1 a stride is never taken, so views may have any there
    step = scale.stride(0) if rows > 1 else 1
    apart = scale.stride(1) if cols > 1 else pitch(rows)
    if step == 1 and apart >= rows and apart % 4 == 0 and scale.data_ptr() % ALIGN == 0:
        return scale if scale.stride() == (1, apart) else scale.as_strided((rows, cols), (1, apart))
    return laid_out(scale, "column")
