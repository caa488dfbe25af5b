"""Operands as the tensor memory accelerator loads them; what already fits is not copied."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.quantizers.layout import laid_out, pitch

ALIGN = 16  # bytes, of addresses and of strides


def aligned(codes: Tensor) -> Tensor:
    """Give codes ``[rows, K]``, K a multiple of 16, in rows that start at 16-byte boundaries.

    Args:
        codes: one byte an element, any strides.

    Returns:
        The codes, columns adjacent; their rows may have gaps.

    Example:
        >>> aligned(torch.empty(7, 64, dtype=torch.uint8)[:, :48]).stride()
        (64, 1)
    """
    rows, k = codes.shape
    # strides along one row or one column are never taken, so views may have any there
    step = codes.stride(0) if rows > 1 else k
    if codes.stride(1) == 1 and step >= k and not (step % ALIGN or codes.data_ptr() % ALIGN):
        return codes if codes.stride(0) == step else codes.as_strided((rows, k), (step, 1))
    return codes.clone(memory_format=torch.contiguous_format)


def by_column(scale: Tensor) -> Tensor:
    """Put the scales of one step along K next to each other, as the quantizer for layers does.

    Args:
        scale: ``float32 [rows, cols]``, any strides.

    Returns:
        The same scales, with rows adjacent and columns a multiple of four values apart.

    Example:
        >>> by_column(torch.ones(7, 3)).stride()
        (1, 8)
    """
    rows, cols = scale.shape
    # a stride along one row or one column is never taken, so views may have any there
    step = scale.stride(0) if rows > 1 else 1
    apart = scale.stride(1) if cols > 1 else pitch(rows)
    if step == 1 and apart >= rows and apart % 4 == 0 and scale.data_ptr() % ALIGN == 0:
        return scale if scale.stride() == (1, apart) else scale.as_strided((rows, cols), (1, apart))
    return laid_out(scale, "column")
