"""Results that are computed where they are read: an activation, alone or behind other columns.

A block of diffusers concatenates attention and activation, and one layer reads the whole. What
stands for the activation makes of ``torch.cat`` what stands for that input, and the layer quantizes
both parts in one pass. Whatever else reads one of them gets a tensor. Unlike what stands for the
result of a fused norm, these may leave a graph that breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kit.fused import reference
from fp8kit.modules.norm_formula import concatenated_codes, takes_codes

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear


class Deferred:
    """Stands for a tensor that is computed when something reads it."""

    def tensor(self) -> Tensor:
        """Compute it."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Look up what a tensor has in the tensor."""
        if name.startswith("__"):  # of copies and pickles, which are those of this object
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Concatenate without computing, else call a function of torch with tensors."""
        kwargs = kwargs or {}
        if function is torch.cat and (joined := _concatenated(*args, **kwargs)) is not None:
            return joined
        return function(*map(_computed, args), **{n: _computed(v) for n, v in kwargs.items()})


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Deferred, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_computed, others))

    return compute


for _name in "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul pow neg getitem".split():
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))  # Python asks the class for these


class DeferredActivation(Deferred):
    """``act(gate)``; ``kind`` as of ``FusedActivation``."""

    def __init__(self, kind: str, gate: Tensor) -> None:
        self.kind, self.gate = kind, gate

    def tensor(self) -> Tensor:
        """Compute the activation."""
        return reference.activated(self.kind, self.gate, None)


class DeferredConcat(Deferred):
    """Columns ``left [..., K1]``, then an activation ``[..., K2]``."""

    def __init__(self, left: Tensor, right: DeferredActivation) -> None:
        self.left, self.right = left, right

    def tensor(self) -> Tensor:
        """Compute ``[..., K1 + K2]``."""
        return torch.cat((self.left, self.right.tensor()), -1)


def multiplied(layer: Fp8Linear, x: Deferred) -> Tensor:
    """Compute a layer of what is not written, from its codes where that may be."""
    if not isinstance(x, DeferredConcat):
        return layer.forward(x.tensor())
    left, kind, gate = x.left, x.right.kind, x.right.gate
    fits = left.shape[-1] + gate.shape[-1] == layer.in_features and layer.scale_ub is None
    if not fits or torch.is_grad_enabled() or not takes_codes(layer.scheme):
        return layer.forward(x.tensor())
    return layer.multiply(concatenated_codes(kind, left, gate, layer.scheme))


def _concatenated(tensors: Sequence[Any], dim: int = 0, **others: Any) -> DeferredConcat | None:
    """Return what stands for a concatenation, ``None`` if it is another one."""
    if others or len(tensors) != 2:
        return None
    left, right = tensors
    if not isinstance(left, Tensor) or not isinstance(right, DeferredActivation):
        return None
    gate, last = right.gate, right.gate.dim() - 1
    alike = (left.dtype, left.device) == (gate.dtype, gate.device)
    rows = left.dim() == gate.dim() and left.shape[:-1] == gate.shape[:-1]
    return DeferredConcat(left, right) if alike and rows and dim in (-1, last) else None


def _computed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_computed(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value.tensor() if isinstance(value, Deferred) else value
