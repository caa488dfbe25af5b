"""Replacing modules while their hooks stay, and finding hooks that would see fused results."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

_has_any_global_hook: Any = torch.nn.modules.module._has_any_global_hook
# belong to a dense or an FP8 layer, and are dropped when the layer becomes another one
LAYER_TENSORS = frozenset("weight bias weight_scale weight_exponents input_scale".split())


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a replacement the call hooks of the module it replaces, with their options."""
    for name, value in vars(old).items():
        if "hook" in name and "state_dict" not in name:
            setattr(new, name, value)


def become(module: nn.Module, other: nn.Module, own: Collection[str] = ()) -> Any:
    """Turn ``module`` into ``other`` in place, keeping its hooks and mode, and return it.

    Every holder of the module (a list, an object, a closure, a weak reference) then runs the new
    layer; replacing the child in its parent would leave the old one there. Attributes, tensors and
    modules that other code has set on it stay, except those named in ``own``, which belong to its
    old class. ``other`` gives its class and all that it holds, and must not be used afterwards.
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
    """Return the attribute names of a new layer of a class with ``nn.Linear``'s arguments."""
    return frozenset(dir(kind(1, 1, device="meta")))


class ClassForward:
    """A ``forward`` on an instance that only runs the code of its class, so it watches nothing."""


def is_replaced(forward: object) -> bool:
    """Return whether ``vars(module).get("forward")`` is code other than the class's."""
    return forward is not None and not isinstance(forward, ClassForward)


def is_watched(*modules: nn.Module) -> bool:
    """Return whether a hook, another ``forward`` or ``compile()`` sees inputs or results."""
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
    """Return whether a module may get its weights only when it is called, as by offloading.

    Before that call its weights must not be computed with, wherever they seem to be.
    """
    return "forward" in vars(module) or bool(module._forward_pre_hooks)
