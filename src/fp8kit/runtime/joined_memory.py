"""Tensors that lie one behind the other in memory, read as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow one another in memory as one, ``None`` where they do not.

    They are contiguous and agree in all but their first extent. They own the memory: the result is
    valid while they are where they are.
    """
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    size = end - first.data_ptr()
    memory = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, size)
    rows = sum(part.shape[0] for part in parts)
    whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(memory, 0, (size,), (1,))
    # not by the strides of a part: where an extent is 1, they may be any number
    return whole.view(first.dtype).view(rows, *first.shape[1:])
