"""Replacing modules while their hooks stay, and finding hooks that would see fused results."""

from __future__ import annotations

import functools
import types
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
    take_form(module, type(other), new | kept)
    return module


def take_form(module: nn.Module, kind: type[nn.Module], held: dict[str, Any]) -> None:
    """Give a module a class and all that it holds; no interrupt or thread finds one without both.

    ``held`` becomes the module's ``__dict__``.
    """
    parts = {"__dict__": held, "__class__": kind}
    # one call into C, within which Python handles no signal and runs no other thread
    list(map(object.__setattr__, (module, module), parts, parts.values()))


@functools.cache
def own_names(kind: Any) -> frozenset[str]:
    """Return the attribute names of a new layer of a class with ``nn.Linear``'s arguments."""
    return frozenset(dir(kind(1, 1, device="meta")))


class ClassForward:
    """A ``forward`` on an instance that only runs the code of its class, so it watches nothing."""


def is_replaced(module: nn.Module) -> bool:
    """Return whether a module has a ``forward`` that runs other code than its class's.

    Tools that wrap a ``forward`` put back the class's, bound to the module.
    """
    forward = vars(module).get("forward")
    if forward is None or isinstance(forward, ClassForward):
        return False
    bound = isinstance(forward, types.MethodType) and forward.__self__ is module
    return not (bound and forward.__func__ is type(module).forward)


def drop_restored(module: nn.Module) -> None:
    """Drop a ``forward`` that is only the class's, before the module becomes of another class."""
    if isinstance(vars(module).get("forward"), types.MethodType) and not is_replaced(module):
        del module.forward


def is_watched(*modules: nn.Module, inputs_alone: bool = False) -> bool:
    """Return whether a hook, another ``forward`` or ``compile()`` sees inputs or results.

    With ``inputs_alone``, a hook of Transformers that keeps results does not count.
    """
    for module in modules:
        own = vars(module)
        hooks = own["_forward_hooks"]
        if (
            ("forward" in own and is_replaced(module))
            or own.get("_compiled_call_impl") is not None
            or (hooks and not (inputs_alone and all(map(_keeps_results, hooks.values()))))
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return True
    return bool(_has_any_global_hook())


def _keeps_results(hook: Any) -> bool:
    """Return whether a hook is one that Transformers leaves on modules once a call asks for output.

    Those for hidden states also keep an input.
    """
    if getattr(hook, "__module__", "") != "transformers.utils.output_capturing":
        return False
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in held and held["key"].cell_contents != "hidden_states"


def arrives_with_its_call(module: nn.Module) -> bool:
    """Return whether a module may get its weights only when it is called, as by offloading.

    Before that call its weights must not be computed with, wherever they seem to be.
    """
    return is_replaced(module) or bool(module._forward_pre_hooks)
