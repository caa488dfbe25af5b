"""Recognise modules of stacked experts by their Parameters and a run on random numbers.

A class does not declare the layout of its stacks or what its gate computes. Running its own
``forward`` on a small copy shows both. A class with which the FP8 form does not agree stays dense.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from fp8kit.conversion.expert_trials import DOWN, ELSE, difference, layouts
from fp8kit.errors import ConversionError, InvalidType, some_of, teach
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.library_experts import argument_names
from fp8kit.modules.trials import CopyError, contents, on_trial

_UP = ("gate_up_proj", "up_proj")
_LARGEST_TWIN = 2**24  # elements of the copy of a class that runs only in its own sizes
_REGISTERED: dict[type[nn.Module], Callable[[Any], ExpertStacks]] = {}


def register_experts(
    module_class: type[nn.Module], describe: Callable[[Any], ExpertStacks]
) -> None:
    """Let ``convert`` and ``load`` make FP8 experts of a class that they do not recognise.

    The class is still tried on random numbers. If its ``forward`` computes something else than
    ``describe`` says, it stays dense, and the report says so. If it cannot run on random numbers
    at all, ``describe`` is trusted, with a warning.

    Args:
        module_class: a class of your own that holds all experts of a layer in two Parameters.
        describe: returns the ``ExpertStacks`` of a module of it, dense or on meta; ``None`` skips.

    Raises:
        TypeError: if the class is no class of modules, or ``describe`` no function.

    Example:
        >>> def describe(module):
        ...     return fp8kit.ExpertStacks("w13", "w2", fp8kit.moe.Activation("gelu"))
        >>> fp8kit.register_experts(MyExperts, describe)
        >>> fp8kit.convert(model)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise InvalidType(
            f"Got {module_class!r:.80} as a class of experts.",
            "It must be a subclass of nn.Module.",
            "Pass the class, not a module of it.",
        )
    if not callable(describe):
        raise InvalidType(
            f"Got describe of type {type(describe).__name__}.",
            "It must be a function from a module to an fp8kit.ExpertStacks.",
            f"Pass lambda module: {describe!r:.80}.",
        )
    _REGISTERED[module_class] = describe


def recognize(module: nn.Module, tried: dict[Any, Any] | None = None) -> ExpertStacks | str | None:
    """Return the stacks of a module of experts, or why it stays dense; ``None`` for other modules.

    The module is not changed, and its Parameters may be on the meta device. ``tried`` caches
    results, so that modules alike are tried once.
    """
    if isinstance(module, ExpertTensors):
        return module.stacks
    if isinstance(module, torch.jit.ScriptModule):
        return None
    describe = next((_REGISTERED[c] for c in type(module).__mro__ if c in _REGISTERED), None)
    said: ExpertStacks | None = None
    up = next((n for n in _UP if _is_stack(module, n)), "")
    if describe is not None:
        if (said := _checked(describe(module), module)) is None:
            return None
    elif not up or not _is_stack(module, DOWN):
        return None
    elif reason := _holds_more(module, up):
        return f"stacks of {type(module).__name__}, {reason}"
    shapes = [(n, p if p is None else p.shape) for n, p in module._parameters.items()]
    tried = {} if tried is None else tried
    key = type(module), said, *shapes, *contents(module).items()
    if key not in tried:
        with on_trial():
            try:
                found = _unknown(module, up) if said is None else _believed(module, said)
            except CopyError as error:
                found = f"which {error}"
        tried[key] = found
    found = tried[key]
    return f"stacks of {type(module).__name__}, {found}" if isinstance(found, str) else found


def stacks_of(model: nn.Module, names: Iterable[str]) -> dict[str, ExpertStacks]:
    """Return the stacks of modules that were recognised before, by name."""
    tried: dict[Any, Any] = {}
    found = {name: recognize(model.get_submodule(name), tried) for name in names}
    return {name: cast(ExpertStacks, stacks) for name, stacks in found.items()}


def _holds_more(module: nn.Module, up: str) -> str:
    known = {name + kind for name in (up, DOWN) for kind in ("", "_bias")}
    if more := set(module._parameters) - known:
        return f"which has {', '.join(sorted(more))} as well"
    inside = (p for child in module.children() for p in child.parameters())
    if any(True for _ in (*module.buffers(), *inside)):
        return "which computes with more than its experts"
    if more := set(argument_names(type(module))[3:]):
        return (
            f"whose forward takes {', '.join(sorted(more))} besides tokens, ids and weights; "
            "fp8kit.register_experts converts it, for calls without that"
        )
    return ""


def _unknown(module: nn.Module, up: str) -> ExpertStacks | str:
    reason = ""
    for stacks in layouts(module, up):
        differs = difference(module, stacks)
        if differs == "":
            return stacks
        reason = differs if differs not in (None, ELSE) else reason
    return reason or f"{ELSE}; if an fp8kit.ExpertStacks says what, tell fp8kit.register_experts"


def _checked(stacks: object, module: nn.Module) -> ExpertStacks | None:
    """Return what ``describe`` returned; raise if it does not fit the module."""
    if stacks is None:
        return None
    named = module.named_parameters(recurse=False, remove_duplicate=False)
    held = {n: tuple(p.shape) for n, p in named if p.dim() == 3}
    required = f"names Parameters of three dimensions: {some_of(list(held))}."
    if isinstance(stacks, ExpertStacks) and all(_is_stack(module, n) for n in stacks.names):
        (e, *up), (e_, *down) = (held[name] for name in stacks.names)
        if stacks.transposed:
            up, down = up[::-1], down[::-1]
        (wide, hidden), (hidden_, inner) = up, down
        gate = stacks.activation
        wides = [2 * inner] if gate and gate.gated else [inner] if gate else [inner, 2 * inner]
        if (e, hidden) == (e_, hidden_) and wide in wides:
            return stacks
        required = (
            f"has shapes that go together, as its text says; {stacks.up} has {held[stacks.up]}, "
            f"{stacks.down} {held[stacks.down]}."
        )
    raise ConversionError(
        f"{type(module).__name__} was described to register_experts as {stacks!r:.200}.",
        f"An fp8kit.ExpertStacks {required}",
        "Correct what describe returns; None leaves a module as it is.",
    )


def _believed(module: nn.Module, stacks: ExpertStacks) -> ExpertStacks | str:
    """Try a registered description: on a small copy, or on one of full size if that cannot run."""
    differs = difference(module, stacks, told=True)
    if differs is None and sum(p.numel() for p in module.parameters(False)) <= _LARGEST_TWIN:
        differs = difference(module, stacks, told=True, small=False)
    if differs is None:
        warnings.warn(
            teach(
                f"{type(module).__name__} could not be run on random numbers.",
                "Its registration is trusted, unchecked.",
                "Compare a converted model with the dense one: fp8kit.evaluate.",
            ),
            stacklevel=2,
        )
    return differs or stacks


def names_to_match(names: Sequence[str], module: nn.Module, stacks: ExpertStacks) -> list[str]:
    """Return the names by which patterns select experts: the module's, its stacks', each expert's.

    Checkpoints hold experts one by one, where ``"*.experts.*"`` must select the same.
    """
    up, down = (module.get_parameter(name).shape for name in stacks.names)
    k = 1 if stacks.transposed and not isinstance(module, ExpertTensors) else 2
    parts = ("gate_proj", "up_proj") if up[3 - k] == 2 * down[k] else ("up_proj",)
    endings = [*stacks.names, *(f"0.{part}" for part in (*parts, "down_proj"))]
    return [*names, *(f"{name}.{ending}" for name in names for ending in endings)]


def _is_stack(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.dim() == 3
