"""View tensors that are adjacent in memory, such as the weights of joined layers, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return one tensor over all parts, ``None`` unless they follow one another in memory.

    The parts agree in all extents but the first. They own the memory: the result is valid only
    while each of them is alive and at its address.
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
    # the strides of a part do not help: where an extent is 1, torch allows any
    return whole.view(first.dtype).view(rows, *first.shape[1:])
