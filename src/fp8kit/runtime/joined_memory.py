"""Tensors that lie one behind the other in memory, read as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that follow one another in memory as one, ``None`` where they do not.

    Args:
        parts: contiguous tensors that agree in all but their first extent. They own the memory:
            the result is valid while they are where they are.
    """
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    size = end - first.data_ptr()
    memory = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, size)
    rows = sum(part.shape[0] for part in parts)
    return first.detach().new_empty(0).set_(memory, 0, (rows, *first.shape[1:]), first.stride())
