"""Activations that are computed where they are read: alone, or behind other columns.

A layer that reads what stands for an activation computes and quantizes it in one pass. Blocks of
diffusers concatenate attention and activation first: ``torch.cat`` asks what stands for the
activation, and gives what stands for both. Whatever else reads one of them gets a tensor. Unlike
what stands for the result of a fused norm, these may leave a graph that breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.formats import Scheme
from fp8kit.fused import reference
from fp8kit.modules.activation_formula import activation_codes, concatenated_codes
from fp8kit.modules.codes_calls import takes_codes
from fp8kit.modules.parameters import any_trained
from fp8kit.ops.operators import CodesCall
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear


class Deferred:
    """Stands for a tensor that is computed when something reads it.

    ``width`` counts its columns.
    """

    device: torch.device
    width: int

    def tensor(self) -> Tensor:
        """Compute it."""
        raise NotImplementedError

    def codes(self, scheme: Scheme) -> CodesCall:
        """Return the call that computes it as layers of a scheme read it."""
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
    """``act(gate) * up``, or ``act(gate)``: arguments as of ``activation_codes``."""

    def __init__(self, kind: str, gate: Tensor, up: Tensor | None = None) -> None:
        self.kind, self._operands = kind, (gate.detach(), None if up is None else up.detach())
        self.device, self.width, self._version = gate.device, gate.shape[-1], _writes(gate)

    def operands(self) -> tuple[Tensor, Tensor | None]:
        """Return gate and up; raise ``UnsupportedError`` if somebody has written them since."""
        if _writes(self._operands[0]) != self._version:
            raise UnsupportedError(
                "The input of a fused activation was written before its result was read.",
                "The layer that reads the result computes it from that input.",
                "Write after the layer, or convert with fuse='inputs'.",
            )
        return self._operands

    def __reduce__(self) -> Any:
        """Make copies anew: writes of a copied tensor are counted from zero."""
        return type(self), (self.kind, *self.operands())

    def tensor(self) -> Tensor:
        """Compute the activation."""
        return reference.activated(self.kind, *self.operands())

    def codes(self, scheme: Scheme) -> CodesCall:
        """Return the call that computes the activation as layers of a scheme read it."""
        return activation_codes(self.kind, *self.operands(), scheme)


class DeferredConcat(Deferred):
    """Columns ``left [..., K1]``, then an activation."""

    def __init__(self, left: Tensor, right: DeferredActivation) -> None:
        self.left, self.right = left, right
        self.device, self.width = left.device, left.shape[-1] + right.width

    def tensor(self) -> Tensor:
        """Concatenate."""
        return torch.cat((self.left, self.right.tensor()), -1)

    def codes(self, scheme: Scheme) -> CodesCall:
        """Return the call that computes both parts as layers of a scheme read them."""
        return concatenated_codes(self.right.kind, self.left, *self.right.operands(), scheme)


def multiplied(layer: Fp8Linear, x: Deferred) -> Tensor:
    """Compute a layer of what is not written, from its codes where that may be."""
    fits = (x.width, x.device) == (layer.in_features, layer.codes.device)
    if not fits or layer.scale_ub is not None or not takes_codes(layer.scheme):
        return layer.forward(x.tensor())
    return (
        layer.forward(x.tensor()) if any_trained(layer) else layer.multiply(x.codes(layer.scheme))
    )


def _concatenated(tensors: Sequence[Any], dim: int = 0, **others: Any) -> DeferredConcat | None:
    """Return what stands for a concatenation, ``None`` if it is another one."""
    if others or len(tensors) != 2:
        return None
    left, right = tensors
    if not isinstance(left, Tensor) or not isinstance(right, DeferredActivation):
        return None
    gate, _ = right.operands()
    alike = (left.dtype, left.device) == (gate.dtype, gate.device)
    rows = left.dim() == gate.dim() and left.shape[:-1] == gate.shape[:-1]
    constant = not (torch.is_grad_enabled() and left.requires_grad)
    last = dim in (-1, gate.dim() - 1)
    return DeferredConcat(left, right) if alike and rows and constant and last else None


def _computed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_computed(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value.tensor() if isinstance(value, Deferred) else value


def _writes(tensor: Tensor) -> int:
    return UNCOUNTED if torch.compiler.is_compiling() else version(tensor)
