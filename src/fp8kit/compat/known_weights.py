"""Convert a weight to the core's form once, because the core identifies it by its tensor.

Ported code passes the view ``[K, N]`` and its scale at every call. If each call made a ``QTensor``,
results would be right, but launches never replayed (``fp8kit.runtime.replay_cache.call_on``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8kit.formats import QTensor
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

_transforms: Any = torch._C._functorch.peek_interpreter_stack  # not None within torch.func


class _Known(NamedTuple):
    scale: Tensor
    state: tuple[Any, ...]
    q: QTensor


class KnownWeights:
    """A cache of converted weights, each kept as long as the original weight lives."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def of(
        self, weight: Tensor, scale: Tensor, make: Callable[[Tensor, Tensor], QTensor]
    ) -> QTensor:
        """Return ``make(weight, scale)``, cached until one of the two changes.

        ``make`` converts both to the core's form.
        """
        if torch.compiler.is_compiling() or type(weight) not in (Tensor, torch.nn.Parameter):
            return make(weight, scale)
        learned = torch.is_grad_enabled() and (weight.requires_grad or scale.requires_grad)
        if learned or _transforms() is not None:  # the core refuses the former's gradient
            return make(weight, scale)
        counts = (version(weight), version(scale))
        if UNCOUNTED in counts:  # made in inference mode: changes are not counted
            return make(weight, scale)
        state = (*counts, *_form(weight), *_form(scale))
        found: _Known | None = self._known.get(weight)  # type: ignore[no-untyped-call]
        if found is None or found.scale is not scale or found.state != state:
            found = _Known(scale, state, make(_alias(weight), scale.detach()))
            self._known[weight] = found
        return found.q


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what ``tensor.data = other`` may change without being counted."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _alias(weight: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep the weight itself alive."""
    place = (weight.storage_offset(), weight.shape, weight.stride())
    with torch.no_grad():
        return torch.empty(0, dtype=weight.dtype, device=weight.device).set_(
            weight.untyped_storage(), *place
        )
