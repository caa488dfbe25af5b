"""Operands as TMA loads them; what already fits is not copied."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.quantizers.scale_layout import laid_out, pitch

ALIGN = 16  # bytes, of addresses and of strides


def aligned(codes: Tensor) -> Tensor:
    """Return codes ``[rows, K]``, K a multiple of 16, in rows that start at 16-byte boundaries.

    They are one byte an element, in any strides. Columns of the result are adjacent; its rows may
    have gaps, see ``row_pitch``.
    """
    apart = row_pitch(codes)
    fits = codes.stride(1) == 1 and apart >= codes.shape[1] and apart % ALIGN == 0
    if fits and codes.data_ptr() % ALIGN == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


def row_pitch(codes: Tensor) -> int:
    """Return the bytes from row to row; of one row, which may have any stride, its length."""
    return codes.stride(0) if codes.shape[0] > 1 else codes.shape[1]


def by_column(scale: Tensor) -> Tensor:
    """Return scales with those of one K step adjacent, as the quantizer for layers writes them.

    They are ``float32 [rows, cols]`` in any strides. Rows of the result are adjacent, and columns a
    multiple of four values apart.
    """
    rows, cols = scale.shape
    # a stride along one row or one column is never taken, so views may have any there
    step = scale.stride(0) if rows > 1 else 1
    apart = scale.stride(1) if cols > 1 else pitch(rows)
    if step == 1 and apart >= rows and apart % 4 == 0 and scale.data_ptr() % ALIGN == 0:
        return scale if scale.stride() == (1, apart) else scale.as_strided((rows, cols), (1, apart))
    return laid_out(scale, "column")
