"""Modules that become others in place, and hooks, which stay."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_has_any_global_hook: Any = torch.nn.modules.module._has_any_global_hook
# of dense and of FP8 layers, which do not outlive them
LAYER_TENSORS = frozenset("weight bias weight_scale weight_exponents input_scale".split())


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a replacement the call hooks of the module it replaces, with their options."""
    for name, value in vars(old).items():
        if "hook" in name and "state_dict" not in name:
            setattr(new, name, value)


def become(module: nn.Module, other: nn.Module, own: Collection[str] = ()) -> Any:
    """Turn a module into another, in place, with its own hooks and mode, and return it.

    Whoever holds it, in a list, an object, a closure or a weak reference, runs what it is now: a
    child that is replaced would stay as it was there. Code that hung attributes, tensors or modules
    of its own on it finds them there, but for those named as its ``own``, which go with its class.
    The other one gives its class and all that it holds, and is of no use afterwards.
    """
    held, new, passing = vars(module), vars(other), "_non_persistent_buffers_set"
    new |= {n: v for n, v in held.items() if "hook" in n or n == "training"}
    for kind in ("_parameters", "_buffers", "_modules"):
        new[kind] |= {n: v for n, v in held[kind].items() if n not in LAYER_TENSORS}
    new[passing] |= held[passing]
    known = {*own, *dir(other)}
    kept = {name: value for name, value in held.items() if name not in known}
    module.__class__ = type(other)
    held.clear()
    held.update(new | kept)
    return module


@functools.cache
def own_names(kind: Any) -> frozenset[str]:
    """Name what layers of a class, made as ``nn.Linear`` is, have by themselves."""
    return frozenset(dir(kind(1, 1, device="meta")))


class ClassForward:
    """A ``forward`` on an instance that runs the code of the class, and sees no more than that."""


def is_replaced(forward: object) -> bool:
    """Return whether what ``vars`` of a module has as ``forward``, or ``None``, is other code."""
    return forward is not None and not isinstance(forward, ClassForward)


def is_watched(*modules: nn.Module) -> bool:
    """Return whether a hook, another forward or ``compile()`` sees what these take or give."""
    for own in map(vars, modules):
        if (
            ("forward" in own and is_replaced(own["forward"]))
            or own.get("_compiled_call_impl") is not None
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return True
    return bool(_has_any_global_hook())


def arrives_with_its_call(module: nn.Module) -> bool:
    """Return whether weights may be put in place when a module is called, as offloading does it.

    Before that call they are nothing to compute with, wherever they seem to be.
    """
    return "forward" in vars(module) or bool(module._forward_pre_hooks)
