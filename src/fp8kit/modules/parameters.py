"""Frozen Parameters of codes and scales: made, and moved without a cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fp8kit.formats import MX, scale_shape
from fp8kit.runtime.weight_hazards import invalidate

_BYTES = {1: torch.uint8, 4: torch.int32}


def frozen(tensor: Tensor) -> nn.Parameter:
    """Make a Parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def empty_exponents(
    shape: tuple[int, int], device: torch.device | str | None = None
) -> nn.Parameter:
    """Make the Parameter of the exponents that a rebased weight ``[N, K]`` keeps, uninitialized."""
    return frozen(torch.empty(scale_shape(shape, MX), dtype=torch.uint8, device=device))


def moved(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Move a Parameter of codes or scales with ``fn``, which may cast what it takes for floats."""
    bits = parameter.data.view(_BYTES[parameter.element_size()])
    out = fn(bits)
    if out.dtype != bits.dtype:  # .type(dtype) casts integers too
        out = bits.to(out.device)
    view = out.view(parameter.dtype)
    if torch._has_compatible_shallow_copy_type(parameter.data, view):
        parameter.data = view  # the same Parameter object: optimizers and ties stay valid
        invalidate(parameter)  # it may lie where the last one lay
        return parameter
    return frozen(view)
