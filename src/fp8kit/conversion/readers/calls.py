"""The calls in a model's source: what they may return, and which weights they read."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import stateless

from fp8kit.conversion.readers.expressions import Expressions
from fp8kit.conversion.readers.values import (
    CONTAINERS,
    Items,
    Local,
    Method,
    Parameters,
    Parent,
    Values,
    Weight,
    closure,
    constant,
    elements,
    held_by,
    leaves,
    lookup,
    parameters_of,
    united,
)

DEPTH = 10  # nested calls that are followed
_MOST_PARAMETERS = 8
_UNREAD = frozenset("isinstance hasattr callable id len print repr str".split())
_ITERATES = frozenset(
    "dict enumerate iter list max min next reversed set sorted sum tuple zip vars".split()
)
_INSIDE: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "children": lambda m: m.children(),
    "modules": lambda m: m.modules(),
    "named_children": lambda m: m.children(),
    "named_modules": lambda m: m.modules(),
}
# they take the Parameters of modules, and their callers compute with them or with others
TAKERS = (functional_call, stack_module_state, stateless.functional_call)
SWAPS = "to_module"  # a method of tensordict that puts other Parameters into a module
TENSORS = frozenset("parameters named_parameters state_dict _parameters get_parameter".split())
_TAKES = frozenset("values items keys get pop popleft copy".split())
_GROWS = frozenset("append add extend insert update setdefault appendleft".split())


class Calls(Expressions):
    """Evaluation of calls: of the model's modules and methods, of helpers, and of built-ins."""

    def _value_Call(self, node: ast.Call) -> Values:
        starred = (i for i, a in enumerate(node.args) if isinstance(a, ast.Starred))
        placed = next(starred, len(node.args))  # how many arguments have a known position
        args = [self.value(a) for a in node.args[:placed]]
        kwargs = {k.arg or "**": self.value(k.value) for k in node.keywords}
        if node.args[placed:]:
            kwargs["*"] = (Items(united(*map(self.value, node.args[placed:]))),)
        if isinstance(node.func, ast.Name) and not self.scope.is_local(node.func.id):
            known, values = self.builtin(node.func.id, args, kwargs.get("key", ()))
            if known:
                return values
        if isinstance(node.func, ast.Attribute):
            owners = self.value(node.func.value)
            known, values = self.member(node.func, owners, args)
            if known:
                return values
            callees = self.attribute(owners, node.func.attr)
        else:
            callees = self.value(node.func)
        return self.opaque(args, kwargs) if not callees else self.call(callees, args, kwargs)

    def builtin(self, name: str, args: list[Values], key: Values = ()) -> tuple[bool, Values]:
        """Call a built-in function; return whether it is known, and its result."""
        if name == "type" and len(args) == 1:
            return True, tuple(type(v) for v in args[0] if isinstance(v, nn.Module))
        if name == "getattr" and len(args) > 1:
            known, attribute = constant(args[1])
            if known:
                return True, united(self.attribute(args[0], attribute), *args[2:])
            return True, united(*map(held_by, args[0]))
        if name == "super":
            after: Any = closure(self.scope.function).get("__class__")
            owners = self.scope.first() if after is not None else ()
            return True, tuple(Parent(o, after) for o in owners if isinstance(o, after))
        if name in _UNREAD:
            return True, ()
        if name == "map" and args:
            return True, (Items(self.callback(args[0], [elements(a) for a in args[1:]])),)
        if name == "next":
            values = united(*[elements((v,)) for a in args for v in map(_ahead, a)])
            return True, values
        if name == "vars":
            return True, (Items(united(*map(held_by, args[0]))),)
        if name == "iter":
            return True, args[0] if args else ()
        if name in _ITERATES:
            values = united(*[elements(a) for a in args])
            self.callback(key, [values])
            if name in ("max", "min", "sum"):
                self.reader.mark_read(values, self.scope.where)
            return True, (Items(values),) if values else ()
        return False, ()

    def member(
        self, function: ast.Attribute, owners: Values, args: list[Values]
    ) -> tuple[bool, Values]:
        """Call a method of modules or containers; return whether it is known, and its result."""
        name, modules = function.attr, [o for o in owners if isinstance(o, nn.Module)]
        inner = function.value
        if name == "get" and isinstance(inner, ast.Attribute) and inner.attr == "__dict__" and args:
            return self.builtin("getattr", [self.value(inner.value), *args, ()])
        if modules and name in _INSIDE:
            return True, (Items(united(*[_INSIDE[name](m) for m in modules])),)
        if name in ("__getattr__", "__getattribute__") and args:
            bound = not all(isinstance(o, type) for o in owners)
            return self.builtin("getattr", [owners, *args] if bound else args)
        # type(layer) is the class that the layer has after a conversion
        classes = [o for o in owners if isinstance(o, type) and not isinstance(inner, ast.Call)]
        if name == "forward" and args and any(issubclass(c, nn.Linear) for c in classes):
            linear = [Weight(m) for m in args[0] if isinstance(m, nn.Linear)]
            self.reader.mark_read(linear, self.scope.where, "runs the forward of a class on it")
        if modules and name == "apply" and args and self.reader.running:
            self.callback(args[0], [united(*[m.modules() for m in modules])])
            return True, owners
        if name == SWAPS:
            self.opaque([tuple(map(parameters_of, _modules(args)))], {})
            return True, ()
        if modules and name == "get_submodule" and constant(args[0] if args else ())[0]:
            return True, tuple(m.get_submodule(args[0][0]) for m in modules)
        if modules and name == "get_parameter" and constant(args[0] if args else ())[0]:
            return True, functools.reduce(self.attribute, args[0][0].split("."), owners)
        if modules and name in TENSORS:
            # outside forward, parameters() of other modules is called to count or train them
            wanted = [m for m in modules if self.reader.running or isinstance(m, nn.Linear)]
            return True, tuple(map(parameters_of, wanted))
        if name in _GROWS and isinstance(inner, ast.Attribute):
            added = united(*args, *map(elements, args))
            self.reader.store(self.value(inner.value), inner.attr, (Items(added),))
        held = [o for o in owners if isinstance(o, (Items, list, tuple, dict, *CONTAINERS))]
        own = any(isinstance(v, Method) for o in owners for v in lookup(o, name))
        if name in _GROWS and isinstance(function.value, ast.Name) and not own:
            added = (Items(united(elements(owners), *args, *[elements(a) for a in args])),)
            scope, name = self.scope, function.value.id
            while scope.outer is not None and name not in scope.names:
                scope = scope.outer  # the list may belong to an enclosing function
            scope.names[name] = united(scope.names.get(name, ()), added if elements(added) else ())
            return True, ()
        if held and len(held) == len(owners) and name in _TAKES:
            return True, elements(owners)
        return False, ()

    def call(self, callees: Values, args: list[Values], kwargs: dict[str, Values]) -> Values:
        """Call all candidates of a callee; candidates with one function are called together."""
        owners: dict[Any, list[Any]] = defaultdict(list)
        results: list[Values] = []
        for callee in callees:
            function, owner = _bound(callee)
            if isinstance(callee, Local):
                results.append(self.enter(callee, args, kwargs))
            elif isinstance(callee, functools.partial):
                given = [*[(a,) for a in callee.args], *args]
                named = {k: (v,) for k, v in callee.keywords.items()}
                results.append(self.call((callee.func,), given, {**named, **kwargs}))
            elif callee is operator.attrgetter and all(constant(a)[0] for a in args):
                results.append((operator.attrgetter(*[a[0] for a in args]),))
            elif isinstance(callee, operator.attrgetter) and args:
                for path in callee.__reduce__()[1]:
                    results.append(functools.reduce(self.attribute, path.split("."), args[0]))
            elif callee is getattr and args:
                results.append(self.builtin("getattr", [*args, ()])[1])
            elif callee is torch.is_tensor:
                continue
            elif callee in TAKERS:
                held = tuple(map(parameters_of, _modules([*args, *kwargs.values()])))
                self.opaque([*args, held], kwargs)
            elif callee is functools.partial and args:
                results.append((Items(self.callback(args[0], args[1:], kwargs)),))
            elif function is None or not self.reader.is_followed(function):
                owners[None] = [callee]
            elif not isinstance(callee, nn.Module):
                owners[function] += owner
            elif any(map(_reaches, leaves(united(*args, *kwargs.values())))):
                owners[function] += owner  # without layers in arguments, its own walk suffices
        for function, bound in owners.items():
            if function is None:
                results.append(self.opaque(args, kwargs))
            else:
                given = [tuple(bound), *args] if bound else args
                results.append(self.reader.follow(function, given, kwargs, self.depth + 1))
        return united(*results)

    def opaque(self, args: list[Values], kwargs: dict[str, Values]) -> Values:
        """Pass arguments to code that is not followed: it may read weights and call functions."""
        given = united(*args, *kwargs.values())
        self.reader.mark_read(given, self.scope.where)
        functions = [v for v in leaves(given) if isinstance(v, Local | Method)]
        modules = [v for v in leaves(given) if isinstance(v, nn.Module)]
        others = united(modules, *[v.children() for v in modules if isinstance(v, CONTAINERS)])
        for function in functions:
            if isinstance(function, Method) and not others:
                self.call((function,), [], {})
            else:
                self.callback((function,), [others] * _MOST_PARAMETERS)
        return ()

    def callback(
        self, functions: Values, args: list[Values], kwargs: dict[str, Values] | None = None
    ) -> Values:
        """Call functions that were passed to other code, which may read their results."""
        results = self.call(functions, args, kwargs or {})
        self.reader.mark_read(results, self.scope.where)
        return results


def _modules(args: list[Values]) -> list[nn.Module]:
    """Return the modules among arguments, and those in their containers."""
    values = united(*args, *map(elements, args))
    return [value for value in values if isinstance(value, nn.Module)]


def _bound(callee: Any) -> tuple[Any, list[Any]]:
    """Return the Python function of a candidate, if any, and the first argument bound to it."""
    if isinstance(callee, Method):
        return callee.function, [callee.owner]
    if isinstance(callee, types.MethodType):
        return callee.__func__, [callee.__self__]
    if isinstance(callee, types.FunctionType):
        return callee, []
    if isinstance(callee, type | Local):
        return None, []
    name = "forward" if isinstance(callee, nn.Module) else "__call__"
    function = inspect.getattr_static(type(callee), name, None)
    return (function, [callee]) if isinstance(function, types.FunctionType) else (None, [])


def _ahead(value: Any) -> Any:
    return value.values[0] if isinstance(value, Parameters) and value.values else value


def _reaches(value: Any) -> bool:
    """Return whether code that gets this argument can reach layers by it."""
    if isinstance(value, nn.Module | Weight | Local | Method | functools.partial):
        return True
    return isinstance(value, types.FunctionType)
