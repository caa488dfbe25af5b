"""Find layers that stay dense where other objects hold their weight or a method of theirs."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.conversion.readers.reads import read_by_code
from fp8kit.conversion.readers.source import names_in
from fp8kit.conversion.readers.values import closure
from fp8kit.modules.dense import is_linear
from fp8kit.modules.hooks import is_replaced

# modules of torch that read the weights of their layers without calling the layers
_READERS: dict[type[nn.Module], str] = {
    nn.MultiheadAttention: "multiplies by the weight itself, in one function for all of attention",
    nn.TransformerEncoderLayer: "has a fast path that reads the dense weight itself",
}
_HOLD_NOTHING = (nn.Module, type, types.ModuleType, str, int, float, type(None))


def read_elsewhere(model: nn.Module, methods: bool = False) -> dict[nn.Module, str]:
    """Find layers whose weight is read by code or held by an attribute or buffer elsewhere.

    Modules of torch count as code. With ``methods`` also layers of which an attribute holds a
    method, such as ``forward``. The reason of each is the end of a sentence. The model is neither
    run nor changed.
    """
    held = _held_in_parts(model).items()
    return {
        **read_by_code(model),
        **{layer: said for (layer, part), said in held if methods or part == "weight"},
        **dict(_read_by_torch(model)),
    }


def _read_by_torch(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for holder in model.modules():
        for kind, reads in _READERS.items():
            if isinstance(holder, kind) and _runs_forward_of(kind, type(holder)):
                said = f"nn.{kind.__name__} {reads}"
                yield from ((layer, said) for layer in holder.children() if is_linear(layer))


def _runs_forward_of(kind: type, cls: type) -> bool:
    """Return whether subclass ``cls`` may run the ``forward`` of ``kind``, as far as names tell."""
    below = [vars(c) for c in cls.__mro__[: cls.__mro__.index(kind)]]
    functions = (f for held in below for f in held.values() if isinstance(f, types.FunctionType))
    named = any("forward" in names_in(inspect.unwrap(f).__code__) for f in functions)
    return named or not any("forward" in held for held in below)


def _held_in_parts(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Find layers of which an attribute or buffer holds a method, the weight, or a view of it.

    A held layer is converted in place; a held method or weight would stay the dense layer's.
    """
    of_every_module = vars(nn.Module()).keys() - {"_buffers"} | {"extra_repr"}
    owners = {
        address: module
        for module in model.modules()
        if is_linear(module) and (weight := module._parameters.get("weight")) is not None
        for address in addresses(weight)
    }
    seen: dict[int, tuple[int, Any]] = {}
    return {
        (layer, part): f"{type(holder).__name__} holds its {part} in {attribute}, "
        f"which stays dense; {_remedy(holder, attribute)}"
        for holder in model.modules()
        for attribute, value in vars(holder).items()
        if attribute not in of_every_module and (attribute != "forward" or is_replaced(holder))
        for layer, part in _parts_of_layers(value, owners, seen)
    }


def _remedy(holder: nn.Module, attribute: str) -> str:
    if isinstance(holder, nn.parallel.DistributedDataParallel):
        return "convert the model before it is wrapped"
    if attribute == "_compiled_call_impl":
        return "convert the model before its layers are compiled"
    return "call the layer instead"


def _parts_of_layers(
    value: Any, owners: Mapping[int, nn.Module], seen: dict[int, tuple[int, Any]], depth: int = 6
) -> Iterator[tuple[nn.Module, str]]:
    """Yield ``(layer, part)`` for parts of layers in a value.

    ``depth`` bounds recursive values; ``seen`` maps the id of each searched object to its depth,
    and to the object, because the id of a freed one is given to another.
    """
    try:
        if isinstance(value, weakref.ProxyTypes):
            value = value.__repr__.__self__  # the object behind the proxy
        owner: Any = value.__self__ if isinstance(value, types.MethodType) else None
        if is_linear(owner):
            if value.__func__ is not nn.Module.__call__:  # harmless: looks forward up at each call
                yield owner, getattr(value, "__name__", "method")  # a partial has no name
        elif isinstance(value, torch.Tensor):
            found = [owners[a] for a in addresses(value) if a in owners]
            base = None if is_lazy(value) else value._base
            if base is not None:  # a view of a weight, but not of memory that many tensors share
                whole = (owners[a] for a in addresses(base) if a in owners)
                found += [m for m in whole if base.numel() == m.get_parameter("weight").numel()]
            yield from ((owner, "weight") for owner in found)
        elif depth > seen.get(id(value), (0,))[0] and not isinstance(value, _HOLD_NOTHING):
            seen[id(value)] = depth, value
            for part in _parts(value):
                yield from _parts_of_layers(part, owners, seen, depth - 1)
    except Exception:  # a foreign object that cannot be looked at, such as a dead proxy
        return


def _parts(value: Any) -> Iterable[Any]:
    """Return the values inside a container, a function or another plain object."""
    if isinstance(value, dict):  # not any mapping: some load values from disk when asked
        return value.values()
    if isinstance(value, (list, tuple, Set, deque)):
        return value
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, types.FunctionType):
        return closure(value).values()
    return *getattr(value, "__dict__", {}).values(), *_in_slots(value)


def _in_slots(value: Any) -> Iterator[Any]:
    """Yield what the slots of an object hold, without running code of its class."""
    for kind in type(value).__mro__:
        slots = vars(kind).values() if "__slots__" in vars(kind) else ()
        for slot in slots:
            if isinstance(slot, types.MemberDescriptorType):
                with suppress(AttributeError):  # of an empty slot
                    yield slot.__get__(value)


def addresses(tensor: torch.Tensor) -> Iterator[int]:
    """Yield the id of a tensor and the address of its data, which whole views share."""
    yield id(tensor)
    plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    valueless = tensor.is_meta or isinstance(tensor, FakeTensor) or is_lazy(tensor)
    if plain and not valueless and tensor.numel():
        yield tensor.data_ptr()
