"""A ``forward`` of our own on a module that keeps its class, as decoder layers have one.

What looks for modules by class, attribute or hook finds them as they were: recorders, initializers,
optimizers' groups, savers. Where kernels may not compute, the class does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.modules.fused_producers import may_fuse
from fp8kit.runtime.replay_cache import ReplayCache

_REPLICATE = "_replicate_for_data_parallel"
_SCALARS = (bool, int, float, str, type(None))


def settings(module: nn.Module) -> dict[str, object]:
    """Return what a module's own attributes say, by which its class may compute something else."""
    return {n: v for n, v in vars(module).items() if isinstance(v, _SCALARS) and n != "training"}


def is_unchanged(module: nn.Module, told: Mapping[str, object]) -> bool:
    """Return whether a module's attributes still say what they told."""
    own = vars(module)
    return all(own.get(name) == value for name, value in told.items())


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module a ``forward`` of ours, which holds it; its replicas on other GPUs get none."""
    module.forward = forward
    setattr(module, _REPLICATE, functools.partial(_replica, module))


def drop_forward(module: nn.Module) -> nn.Module:
    """Let a module run its class's ``forward`` again, and return it."""
    for name in ("forward", _REPLICATE):
        vars(module).pop(name, None)
    return module


def _replica(module: nn.Module) -> nn.Module:
    """Replicate a module for ``DataParallel``: what our ``forward`` holds is on another GPU."""
    return drop_forward(getattr(type(module), _REPLICATE)(module))


def own_forward(module: nn.Module) -> OwnForward | None:
    """Return the ``forward`` of ours that a module has, if it has one."""
    found = vars(module).get("forward")
    return found if isinstance(found, OwnForward) else None


class OwnForward:
    """The ``forward`` of a module that is known to follow a formula."""

    def __init__(self, module: nn.Module, formula: Any) -> None:
        self.module = module
        self.formula = formula
        self.settings = settings(module)
        self.replays = ReplayCache()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the class computes."""
        # torch.compile guards on every attribute read before it turns away, at each call
        if torch.compiler.is_compiling() or kwargs or not self._may_compute(args):
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.compute(*args)

    def takes(self, x: Tensor, *others: Any) -> bool:
        """Return whether the formula holds for these arguments."""
        raise NotImplementedError

    def compute(self, x: Tensor, *others: Any) -> Any:
        """Compute by our kernels."""
        raise NotImplementedError

    def _may_compute(self, args: tuple[Any, ...]) -> bool:
        module, x = self.module, args[0] if args else None
        if not isinstance(x, Tensor) or not may_fuse(module, x):
            return False
        weight = module._parameters.get("weight")
        fits = weight is not None and weight.device == x.device
        return fits and is_unchanged(module, self.settings) and self.takes(*args)
