"""The possible values of expressions in a model's code, found without running it.

A value is a tuple of candidates: actual modules and objects that they hold, or objects of the
classes below. An empty tuple is any value by which no layer can be reached. No code of the model
is executed: attributes are looked up where they are stored, properties are not called.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

Values = tuple[Any, ...]
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_CONSTANTS = (type(None), bool, int, float, str)
_MOST = 4096  # candidates of one expression


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight of a module, or its stacks of experts."""

    module: nn.Module
    tells_dtype: bool = True  # false in parameters() where another one comes first


@dataclass(frozen=True, eq=False)
class Items:
    """A container of values, or an iterator over one, without order."""

    values: Values

    @functools.cached_property
    def key(self) -> Any:
        """A key, equal for containers of equal candidates; cached, as containers share parts."""
        return "items", frozenset(map(identity, self.values))

    @functools.cached_property
    def flat(self) -> Values:
        """The candidates in this and all nested containers, each once."""
        return united(leaves(self.values))


@dataclass(frozen=True, eq=False)
class Parameters(Items):
    """The result of ``parameters()``, in order; ``None`` for those that are no layer's weight."""


@dataclass(frozen=True, eq=False)
class Method:
    """A function bound to its first argument."""

    owner: Any
    function: Any


@dataclass(frozen=True, eq=False)
class Parent:
    """The result of ``super()`` in a method of the class ``after``."""

    owner: Any
    after: type


@dataclass(eq=False)
class Scope:
    """The names of one function with their values; ``where`` names the function in reasons."""

    where: str
    names: dict[str, Values]
    function: Any = None
    outer: Scope | None = None
    returned: Values = ()

    def find(self, name: str) -> Values:
        """Return the value of a name: local, of an enclosing function, global or built-in."""
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.find(name)
        for scope in (closure(self.function), self.function.__globals__):
            if name in scope:
                return (scope[name],)
        found = getattr(builtins, name, None)
        return () if found is None else (found,)

    def is_local(self, name: str) -> bool:
        """Return whether a name is assigned here or in an enclosing function."""
        return name in self.names or (self.outer is not None and self.outer.is_local(name))

    def first(self) -> Values:
        """Return the first argument of the outermost function, which is ``self`` in methods."""
        return self.outer.first() if self.outer is not None else next(iter(self.names.values()), ())


@dataclass(frozen=True, eq=False)
class Local:
    """A function or lambda that is defined inside another."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope = field(repr=False)


def united(*many: Iterable[Any]) -> Values:
    """Join values, each candidate once."""
    return tuple({identity(v): v for values in many for v in values}.values())[:_MOST]


def identity(value: Any) -> Any:
    """Return a key that is equal for equal candidates, also if their objects differ."""
    if isinstance(value, Weight):
        return "weight", id(value.module), value.tells_dtype
    if isinstance(value, Items):
        return value.key
    if isinstance(value, Method | Property):
        return "method", id(value.owner), value.function
    if isinstance(value, Parent):
        return "parent", id(value.owner), value.after
    if isinstance(value, Local):
        return "local", value.node
    return value if isinstance(value, _CONSTANTS) else id(value)


def elements(values: Values) -> Values:
    """Return the possible results of iterating over values or taking an item of them."""
    return united(*(_items(v) for v in values))


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Items):
        return value.values
    if isinstance(value, CONTAINERS):
        return value.children()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    return () if isinstance(value, _CONSTANTS) else (value,)


def item(values: Values, key: Any) -> Values:
    """Return the item of a constant key, or all items where it cannot be told."""
    found: list[Any] = []
    for value in values:
        known = isinstance(value, list | tuple | dict | nn.ModuleList | nn.Sequential)
        try:
            exact = known or isinstance(value, nn.ModuleDict)
            found += [value[key]] if exact else elements((value,))
        except (LookupError, TypeError):
            found += elements((value,))
    return united(found)


def stacks(module: nn.Module) -> list[str]:
    """Return the names of a module's 3-D Parameters, if two or more: maybe stacks of experts."""
    found = [n for n, p in module._parameters.items() if p is not None and p.dim() == 3]
    return found if len(found) > 1 else []


def first_holder(module: nn.Module) -> nn.Module | None:
    """Return the module inside a module that holds its first floating-point Parameter."""
    for part in module.modules():
        if any(p is not None and p.is_floating_point() for p in part._parameters.values()):
            return part
    return None


def parameters_of(module: nn.Module) -> Parameters:
    """Return the parameters of a module and of all modules inside it."""
    first = first_holder(module)
    tells = isinstance(first, nn.Linear) and first.bias is None  # FP8 layers show the bias first
    return Parameters(
        tuple(
            Weight(m, tells and m is first)
            if isinstance(m, nn.Linear) and name == "weight"
            else None
            for m in module.modules()
            for name, p in m._parameters.items()
            if p is not None
        )
    )


def held_by(owner: Any) -> Values:
    """Return the children of a module, and its weight if it is a linear layer."""
    if isinstance(owner, nn.Module):
        return (*owner.children(), *([Weight(owner)] if isinstance(owner, nn.Linear) else []))
    return ()


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield all candidates, also those inside containers."""
    for value in values:
        if isinstance(value, Items):
            yield from value.flat
        elif isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def constant(values: Values) -> tuple[bool, Any]:
    """Return whether a value has one candidate, a constant, and that constant."""
    if len(values) == 1 and isinstance(values[0], _CONSTANTS):
        return True, values[0]
    return False, None


def closure(function: Any) -> dict[str, Any]:
    """Return the free variables of a function with their values."""
    found = {}
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def lookup(owner: Any, name: str) -> Values:
    """Return an attribute without running code: methods bound, properties as ``Property``."""
    if isinstance(owner, (Weight, Items, Local, Method, *_CONSTANTS)):
        return ()
    if isinstance(owner, Parent):
        kind = type(owner.owner)
        order = kind.__mro__[kind.__mro__.index(owner.after) + 1 :]
        return _of_classes(order, owner.owner, name)
    if isinstance(owner, types.ModuleType):
        return (vars(owner)[name],) if name in vars(owner) else ()
    if isinstance(owner, type):
        found = inspect.getattr_static(owner, name, None)
        bound = isinstance(found, classmethod)
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
        return () if found is None else (Method(owner, found) if bound else found,)
    if isinstance(owner, nn.Module):
        for kept in (owner._modules, owner._parameters, owner._buffers):
            if name in kept:
                is_weight = kept is owner._parameters and (
                    name == "weight" or name in stacks(owner)
                )
                return (Weight(owner),) if is_weight else (kept[name],)
    own = getattr(owner, "__dict__", None)
    if isinstance(own, dict) and name in own:
        return (own[name],)
    return _of_classes(type(owner).__mro__, owner, name)


def _of_classes(classes: Iterable[type], owner: Any, name: str) -> Values:
    for cls in classes:
        found = cls.__dict__.get(name)
        if isinstance(found, property | functools.cached_property):
            getter = found.fget if isinstance(found, property) else found.func
            return (Property(owner, getter),)
        if isinstance(found, staticmethod):
            return (found.__func__,)
        if isinstance(found, classmethod):
            return (Method(type(owner), found.__func__),)
        if isinstance(found, types.FunctionType | functools._lru_cache_wrapper):
            return (Method(owner, inspect.unwrap(found)),)
        if found is not None:
            return (found,)
    return ()


@dataclass(frozen=True, eq=False)
class Property:
    """A property that has not been evaluated, with its owner and getter."""

    owner: Any
    function: Any
