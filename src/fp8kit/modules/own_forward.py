"""A ``forward`` of our own on a module that keeps its class, as decoder layers have one.

What looks for modules by class, attribute or hook finds them as they were: recorders, initializers,
optimizers' groups, savers. Where kernels may not compute, the class does.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import UnsupportedError
from fp8kit.modules.fused_producers import may_fuse
from fp8kit.modules.libraries import run_through
from fp8kit.runtime.replay_cache import ReplayCache

_REPLICATE = "_replicate_for_data_parallel"
_SCALARS = (bool, int, float, str, type(None))


def settings(module: nn.Module) -> dict[str, object]:
    """Return what a module's own attributes say, by which its class may compute something else."""
    return {n: v for n, v in vars(module).items() if isinstance(v, _SCALARS) and n != "training"}


def is_unchanged(module: nn.Module, told: Mapping[str, object]) -> bool:
    """Return whether a module's attributes still say what they told."""
    return told.items() <= vars(module).items()


def set_forward(module: nn.Module, forward: Any) -> None:
    """Give a module a ``forward`` of ours; its replicas on other GPUs get none."""
    module.forward = forward
    setattr(module, _REPLICATE, forward.replica)


def drop_forward(module: nn.Module) -> nn.Module:
    """Let a module run its class's ``forward`` again, and return it."""
    for name in ("forward", _REPLICATE):
        vars(module).pop(name, None)
    return module


def _set_state(own: Any, module: nn.Module, state: dict[str, Any]) -> None:
    """Let what ``copy.copy`` made run its class's ``forward``: ours is that of the other module."""
    own(module, state)
    forward = vars(module).get("forward")
    ref = vars(forward).get("_ref") if isinstance(forward, ModuleForward) else None
    if ref is not None and ref() is not module:
        drop_forward(module)


def _replica(module: nn.Module) -> nn.Module:
    """Replicate a module; files from before name this function."""
    return drop_forward(getattr(type(module), _REPLICATE)(module))


def own_forward(module: nn.Module) -> OwnForward | None:
    """Return the ``forward`` of ours that a module has, if it has one."""
    found = vars(module).get("forward")
    return found if isinstance(found, OwnForward) else None


class ModuleForward:
    """A ``forward`` of ours, of one module.

    It knows the module by a weak reference: the module holds it, and Python frees what holds itself
    only when it looks for it.
    """

    def __init__(self, module: nn.Module) -> None:
        run_through(nn.Module, "__setstate__", _set_state)
        self._ref = weakref.ref(module)
        self.code: object = type(module).forward

    @property
    def module(self) -> nn.Module:
        """The module that has this ``forward``; raises ``UnsupportedError`` if it is gone."""
        module = self._ref()
        if module is None:
            raise UnsupportedError(
                "The forward of a fused module was called, and the module is gone.",
                "Such a forward does not keep its module, as that one holds it.",
                "Keep the module and call that.",
            )
        return module

    @property
    def __func__(self) -> Any:
        """What a method has, for libraries that wrap it: the class's ``forward``."""
        return type(self.module).forward

    @property
    def __code__(self) -> Any:
        """Where it is written, for ``torch.export``: in the class."""
        return self.__func__.__code__

    @property
    def __signature__(self) -> inspect.Signature:
        """The arguments of the class's ``forward``, by which dynamic shapes are given."""
        return inspect.signature(self.__func__.__get__(self.module))

    def replica(self) -> nn.Module:
        """Replicate the module for ``DataParallel``: what this holds is on another GPU."""
        return _replica(self.module)

    def __getstate__(self) -> dict[str, Any]:
        """Name the module, and whether its class still has the code that is known."""
        module = self.module
        known = type(module).forward is self.code
        return {**vars(self), "_ref": None, "module": module, "code": known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo ``__getstate__``, also of a file from before; take the code as it is here."""
        run_through(nn.Module, "__setstate__", _set_state)
        module = state.pop("module" if "module" in state else "layer")
        vars(self).update(state)
        self._ref = weakref.ref(module)
        self.code = type(module).forward if state.get("code", True) else None


class OwnForward(ModuleForward):
    """The ``forward`` of a module that is known to follow a formula."""

    def __init__(self, module: nn.Module, formula: Any) -> None:
        super().__init__(module)
        self.formula = formula
        self.settings = settings(module)
        self.replays = ReplayCache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the class computes."""
        module = self._ref() or self.module
        # torch.compile guards on every attribute read before it turns away, at each call
        if torch.compiler.is_compiling() or kwargs or not self._may_compute(module, args):
            return type(module).forward(module, *args, **kwargs)
        return self.compute(module, *args)

    def takes(self, module: Any, x: Tensor, *others: Any) -> bool:
        """Return whether the formula holds for the module and these arguments."""
        raise NotImplementedError

    def compute(self, module: Any, x: Tensor, *others: Any) -> Any:
        """Compute what the module does by our kernels."""
        raise NotImplementedError

    def _may_compute(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        x = args[0] if args else None
        if type(module).forward is not self.code or not isinstance(x, Tensor):
            return False
        weight = module._parameters.get("weight")
        fits = weight is not None and weight.device == x.device and may_fuse(module, x)
        return fits and is_unchanged(module, self.settings) and self.takes(module, *args)
