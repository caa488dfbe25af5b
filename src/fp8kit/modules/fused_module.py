"""A module in place of another, which computes it in one pass, and where it may do so."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit.modules.hooks import carry_hooks
from fp8kit.modules.tracing import constant_in_graphs, is_compiled
from fp8kit.ops.transforms import is_transformed
from fp8kit.runtime.replay_cache import ReplayCache, jit_tracing

FUSED_DEVICES = ("cuda",)
# set on the fused module itself, even if the replaced module has an attribute of that name
_OWN = frozenset(
    """
    altered concatenated consumers embedding formula gated kind modulation parameter_names
    positional replaced replays scheme
    """.split()
)


class Fused(nn.Module):
    """A module in place of another (the replaced module), which it computes in one pass.

    Both share their dictionaries of Parameters, buffers and children, so names, moves, casts and
    loading reach both. Where it may not fuse, and for most keyword arguments, whose names differ
    between classes, it calls the replaced module. The fused pass also computes ``inner`` modules.
    """

    def __init__(self, replaced: nn.Module, *inner: object) -> None:
        super().__init__()
        self._parameters = replaced._parameters
        self._buffers = replaced._buffers
        self._modules = replaced._modules
        self.training = replaced.training
        self.altered = False
        self.parameter_names = tuple(replaced._parameters)
        self.replaced = (replaced,)  # inside a tuple, it is not registered as a child
        self.replays = ReplayCache()
        self._kinds = (type(replaced), *(type(m) for m in inner if isinstance(m, nn.Module)))
        self._code: object = [kind.forward for kind in self._kinds]
        carry_hooks(replaced, self)

    def __copy__(self) -> nn.Module:
        """Copy what was replaced: who reads a copy, and which settings it gets, is not known."""
        return copy.copy(self.replaced[0])

    def __getstate__(self) -> dict[str, Any]:
        """Store whether the code is known, not the code: pickle may not find it by name."""
        return {**vars(self), "_code": self.has_known_code()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without recordings; older files have them under the name ``_tapes``."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.pop("_tapes", None)
        self.__dict__.setdefault("parameter_names", tuple(self._parameters))
        self.replays = ReplayCache()
        kinds = self.__dict__.setdefault("_kinds", (type(self.replaced[0]),))
        self._code = [kind.forward for kind in kinds] if state.get("_code", True) else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Forward an attribute of the replaced module to it; if its value changes, stop fusing."""
        replaced = self.__dict__.get("replaced")
        own = name[0] == "_" or name in _OWN or name in vars(self).get("parameter_names", ())
        if replaced is None or own or name not in vars(replaced[0]):
            super().__setattr__(name, value)
            return
        before = getattr(replaced[0], name)
        setattr(replaced[0], name, value)
        if name == "training":
            super().__setattr__(name, value)
        elif before is not value:
            self.altered = True

    def __getattr__(self, name: str) -> Any:
        """Fall back to the replaced module for attributes that this one lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # an unfilled copy has no "replaced" yet; a missing Parameter was deleted
            if name == "replaced" or name in self.__dict__.get("parameter_names", ()):
                raise
            return getattr(self.replaced[0], name)

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the code of the replaced module."""
        replaced = self.replaced[0]
        # FSDP, pruning and parametrizations replace a Parameter by a tensor attribute of this one
        others = () if torch.compiler.is_compiling() else self.parameter_names
        found = {name: getattr(self, name) for name in others if name not in self._parameters}
        if found:  # in a copy for this call alone: the next call may get other tensors
            held, replaced = vars(replaced), type(replaced).__new__(type(replaced))
            vars(replaced).update({**held, **found})
        elif torch.compiler.is_compiling() and not self._is_known():
            return type(replaced).forward(self, *args, **kwargs)
        return replaced.forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the module in ``print(model)``."""
        return f"replaces {type(self.replaced[0]).__name__}"

    def may_fuse(self, *inputs: Tensor) -> bool:
        """Return whether device, modes and unchanged code permit fusing for these inputs."""
        return may_fuse(self, *inputs) and self.is_unaltered()

    def may_compute(self, *inputs: Tensor) -> bool:
        """Return whether the fused pass may compute these inputs, eagerly or in a graph."""
        if not torch.compiler.is_compiling():
            return self.may_fuse(*inputs)
        place = inputs[0].device.type
        if place not in FUSED_DEVICES or torch.is_grad_enabled() or not is_compiled():
            return False
        return not torch.is_autocast_enabled(place) and self.is_unaltered()

    def is_unaltered(self) -> bool:
        """Return whether code and settings of the replaced module are those of the fusion."""
        return not self.altered and self._is_known()

    @constant_in_graphs
    def _is_known(self) -> bool:
        held = self._parameters
        return self.has_known_code() and all(map(held.__contains__, self.parameter_names))

    def has_known_code(self) -> bool:
        """Return whether the replaced classes still have the ``forward`` they had at fusion."""
        return [kind.forward for kind in self._kinds] == self._code

    def _replicate_for_data_parallel(self) -> nn.Module:
        """Replicate the replaced module: codes are offered to layers of one GPU only."""
        replaced: Any = self.replaced[0]
        return replaced._replicate_for_data_parallel()


def may_fuse(module: nn.Module, *inputs: Tensor) -> bool:
    """Return whether device, modes and gradients permit our kernels for a module's inputs."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_transformed():
        return False
    if jit_tracing() or not isinstance(inputs[0], Tensor):  # torch.fx traces without tensors
        return False
    place = inputs[0].device.type
    if place not in FUSED_DEVICES or torch.is_autocast_enabled(place):
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (*inputs, *module._parameters.values())
    return not any(t is not None and t.requires_grad for t in tensors)
