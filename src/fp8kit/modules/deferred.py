"""Results that FP8 layers read as codes, and all other readers as the tensor.

``FusedActivation`` returns a ``DeferredActivation`` in place of its result. An FP8 layer that reads
it activates and quantizes in one pass. Blocks of diffusers concatenate attention and activation
first: ``torch.cat`` of a tensor and a ``DeferredActivation`` is another one. In graphs, norms
return a ``DeferredNorm``, whose tensor is never computed if layers alone read it. As any other
reader gets the tensor, a ``Deferred`` may leave a graph that breaks, unlike a fused norm's
stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.formats import Scheme
from fp8kit.fused import reference
from fp8kit.modules.activation_formula import activation_codes
from fp8kit.modules.codes_calls import takes_codes
from fp8kit.modules.parameters import any_trained
from fp8kit.ops.operators import CodesCall, RowCodes
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear


class Deferred:
    """Stands for a tensor until something reads it.

    ``width`` is the number of columns. ``made`` is the tensor, once a reader has asked for it; from
    then on it is used, and may be written to.
    """

    made: Tensor | None = None
    device: torch.device
    width: int

    def compute(self) -> Tensor:
        """Return the tensor; called once."""
        raise NotImplementedError

    def codes(self, scheme: Scheme) -> CodesCall | RowCodes | None:
        """Return the codes that layers of a scheme read, ``None`` if there are none for them."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """Return the tensor that this stands for, computing it once."""
        if self.made is None:
            self.made = self.compute()
        return self.made

    def __reduce__(self) -> Any:
        """Copy and pickle the computed tensor."""
        return _computed, (self.tensor(),)

    def __getattr__(self, name: str) -> Any:
        """Fall back to the computed tensor for its attributes."""
        if name.startswith("__"):  # copy and pickle look for hooks, which must be this object's
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Concatenate without computing; call any other function of torch with the tensor."""
        kwargs = kwargs or {}
        if function is torch.cat and (joined := _concatenated(*args, **kwargs)) is not None:
            return joined
        return function(*map(_computed, args), **{n: _computed(v) for n, v in kwargs.items()})


class DeferredActivation(Deferred):
    """Stands for ``act(gate) * up``, or ``act(gate)``; arguments as in ``activation_codes``."""

    def __init__(
        self, kind: str, gate: Tensor, up: Tensor | None = None, left: Tensor | None = None
    ) -> None:
        operands = (gate, up, left)
        self.kind, self.device, self.joined = kind, gate.device, left is not None
        self.width = gate.shape[-1] + (0 if left is None else left.shape[-1])
        self._operands = tuple(None if t is None else t.detach() for t in operands)
        self._versions = list(map(_version_of, operands))

    def operands(self) -> tuple[Any, ...]:
        """Return gate, up and left; raises ``UnsupportedError`` if one was written to since."""
        if not torch.compiler.is_compiling():
            for before, now in zip(self._versions, map(_version_of, self._operands), strict=True):
                if before != now and UNCOUNTED not in (before, now):
                    raise UnsupportedError(
                        "The input of a fused activation, or what it was concatenated with, was "
                        "written before the result was read.",
                        "The layer that reads the result computes it from that input.",
                        "Write after the layer, or convert with fuse='inputs'.",
                    )
        return self._operands

    def compute(self) -> Tensor:
        """Return the activation, concatenated with ``left``."""
        gate, up, left = self.operands()
        y = reference.activated(self.kind, gate, up)
        return y if left is None else torch.cat((left, y), -1)

    def codes(self, scheme: Scheme) -> CodesCall:
        """Return the call that computes the codes which layers of a scheme read."""
        gate, up, left = self.operands()
        return activation_codes(self.kind, gate, up, scheme, left)


class DeferredNorm(Deferred):
    """Stands for the result ``y`` of a norm in a graph, beside its codes for layers of a scheme.

    What nothing reads, the compiler drops: ``y`` if only such layers do.
    """

    def __init__(self, y: Tensor, codes: RowCodes, scheme: Scheme) -> None:
        # what code asks before it multiplies; any other attribute counts as a reader
        self.shape, self.ndim, self.dtype, self.device = y.shape, y.ndim, y.dtype, y.device
        self.width = y.shape[-1]
        self._y, self._codes, self._scheme = y, codes, scheme

    def compute(self) -> Tensor:
        """Return the result of the norm."""
        return self._y

    def codes(self, scheme: Scheme) -> RowCodes | None:
        """Return the codes for layers of the scheme."""
        return self._codes if scheme == self._scheme else None


def _operator(name: str) -> Callable[..., Any]:
    def compute(self: Deferred, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_computed, others))

    return compute


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod matmul rmatmul pow rpow
    neg abs eq ne lt le gt ge len iter getitem setitem
""".split()
for _name in _OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))  # Python asks the class for these


def multiplied(layer: Fp8Linear, x: Deferred) -> Tensor:
    """Apply a layer to a deferred input: to its codes where permitted, else to the tensor."""
    fits = (x.width, x.device) == (layer.in_features, layer.codes.device)
    plain = x.made is None and layer.scale_ub is None and takes_codes(layer.scheme)
    cast = torch.is_autocast_enabled(x.device.type)
    codes = x.codes(layer.scheme) if fits and plain and not cast else None
    if codes is None or any_trained(layer):
        return layer.forward(x.tensor())
    return layer.multiply(codes)


def _concatenated(tensors: Sequence[Any], dim: int = 0, **others: Any) -> DeferredActivation | None:
    """Return a tensor and an activation, concatenated and deferred; ``None`` for all others."""
    if others or len(tensors) != 2:
        return None
    left, right = tensors
    if type(left) is not Tensor or not isinstance(right, DeferredActivation):
        return None
    if right.made is not None or right.joined:
        return None
    gate, up, _ = right.operands()
    alike = (left.dtype, left.device) == (gate.dtype, gate.device)
    rows = left.dim() == gate.dim() and left.shape[:-1] == gate.shape[:-1]
    constant = not (torch.is_grad_enabled() and left.requires_grad)
    last = dim in (-1, gate.dim() - 1)
    fits = alike and rows and constant and last
    return DeferredActivation(right.kind, gate, up, left) if fits else None


def _computed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_computed(each) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value.tensor() if isinstance(value, Deferred) else value


def _version_of(tensor: Tensor | None) -> int:
    return UNCOUNTED if tensor is None or torch.compiler.is_compiling() else version(tensor)
