"""Find modules whose weight is read by code that does not call them.

FP8 codes are not the numbers of the weight, so a layer whose ``weight`` is read by the code around
it must stay dense. ``weight_reads`` follows the source of every module of a model: ``forward``, all
that it calls, and other methods and hooks that may run. Expressions evaluate to the model's actual
modules, so ``self.layers[i]``, loops, helpers, closures, processors and parent modules are resolved
to layers; branches that the model's own settings exclude are not followed. Without source, names in
the bytecode decide conservatively.

Not found are reads in code outside the model, in hooks of tensors, in global module hooks, in
``exec``, by computed names, through ``parameters()`` and ``state_dict()`` of modules with more than
one layer, and in torch's own modules. Most of these reads raise at run time: see
``modules.guarded_weight``.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fp8kit.conversion.readers.calls import DEPTH, SWAPS, TAKERS, TENSORS
from fp8kit.conversion.readers.source import arguments_of, names_in, node_of
from fp8kit.conversion.readers.values import (
    Scope,
    Values,
    Weight,
    closure,
    elements,
    first_holder,
    identity,
    leaves,
    stacks,
    united,
)
from fp8kit.conversion.readers.walk import Walk
from fp8kit.modules.hooks import is_replaced

# parts of the names of methods outside a forward pass, which make, load, change or describe a model
_APART = (
    "__ init reset load save tie untie fuse unfuse merge resize prune set_ add_ extra_repr "
    "state_dict quantize convert export decay param_group pretrained compile apply register "
    "gradient_checkpoint freeze transfer get_input_emb get_output_emb remove replace _hook "
    "num_param parameters memory push_to unload enable disable switch onnx dummy train "
    "optimiz optim_group get_last_layer parallelize weight_dtype "
    "parameter_group params_group lr_param plot setup"
).split()
_LIBRARIES = tuple(
    """
    abc. accelerate. ast. collections. diffusers. enum. fp8kit. functools. huggingface_hub.
    inspect. logging. numpy. peft. tensordict. torch. transformers. typing.
    """.split()
)
_MODELS = ("transformers.models.", "diffusers.models.", "fp8kit.compat.")
_SHORT = 200  # bytes of code; helpers that return a layer of their object are shorter
_WORDS = frozenset({"weight", SWAPS, *TENSORS, *[taker.__name__ for taker in TAKERS]})


def read_by_code(model: nn.Module) -> dict[nn.Module, str]:
    """Find the layers whose weight code reads, so that FP8 codes would give wrong results.

    The reason of each is the end of a sentence. The model is neither run nor changed.
    """
    return {**_dtype_answers(model), **weight_reads(model)}


def _dtype_answers(model: nn.Module) -> dict[nn.Module, str]:
    """Find the linear layers without a bias whose weight gives a module its ``dtype``.

    ``model.dtype`` of Transformers and diffusers is the dtype of the first Parameter, and code
    casts inputs to it. The first Parameter of an ``Fp8Linear`` is its bias, which has the right
    dtype; without a bias it would be the codes.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(inspect.getattr_static(type(module), "dtype", None), property):
            layer = first_holder(module)
            if isinstance(layer, nn.Linear) and layer.bias is None:
                kind = type(module).__name__
                said = f"its weight is the first of {kind}, whose dtype code asks for"
                found.setdefault(layer, said)
    return found


def weight_reads(model: nn.Module) -> dict[nn.Module, str]:
    """Find the modules of a model whose weight is read by code that does not call them.

    The value says where and how the weight is read.
    """
    reader = Reader(model)
    alike: dict[Any, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        if not isinstance(module, nn.Linear):  # eligibility judges subclasses of nn.Linear
            alike[_kind(module)].append(module)
    before = -1
    while before < len(reader.stored):  # one method may read what another one stores
        before = len(reader.stored)
        reader.forget()
        for modules in alike.values():
            reader.own = frozenset(modules if stacks(modules[0]) else ())
            for name, function in _roots(modules[0]):
                if reader.is_suspect(function):
                    reader.walked.clear()
                    reader.running = name in ("forward", "__call__")
                    result = reader.follow(function, [tuple(modules)], {}, 0)
                    reader.mark_read(result, function.__qualname__)
    reader.own = frozenset()
    for module in model.modules():
        reader.running = True
        for hook in _hooks(module):
            where = f"a hook of {type(module).__name__}"
            values = Walk(reader, Scope(where, {}, _hooks), 0).call((hook,), [(module,)], {})
            reader.mark_read(values, where)
    return reader.found


def _hooks(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of a module."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks)
    return [hook for kind in (*kinds, module._backward_pre_hooks) for hook in kind.values()]


def _kind(module: nn.Module) -> Any:
    """Return a key that is equal for modules of one class and equal switches: one walk for all."""
    held = {**vars(module), **module._parameters, **module._modules, **module._buffers}
    switches = (type(None), bool, str)
    kinds = [(n, v) if isinstance(v, switches) else (n, type(v)) for n, v in held.items()]
    own = id(vars(module)["forward"]) if is_replaced(module) else None
    return type(module), own, frozenset(kinds)


def _roots(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the functions of a module that may run when a model is used, by name."""
    seen: set[str] = set()
    for name, value in vars(module).items():
        if name == "forward" and is_replaced(module):
            seen.add(name)
            yield from ((name, f) for f in [_function(_function(value))] if _is_python(f))
    for cls in type(module).__mro__:
        if _is_library(cls.__module__) or cls is object:
            continue
        for name, value in vars(cls).items():
            if name in seen:
                continue
            seen.add(name)
            if isinstance(value, types.FunctionType) and _may_run(name):
                yield name, inspect.unwrap(value)


def _may_run(name: str) -> bool:
    if name in ("forward", "__call__", "__getitem__") or "cache" in name:  # also init_cache
        return True
    if name.startswith("_") or name.endswith("_"):  # private, or changes the model in place
        return False
    return not any(part in name for part in _APART)


def _assigned(kind: type) -> set[str]:
    """Return the attributes that methods of a class assign, except in initialization."""
    return {
        str(step.argval)
        for cls in kind.__mro__
        if not _is_library(cls.__module__)
        for name, method in vars(cls).items()
        if isinstance(method, types.FunctionType) and "init" not in name
        for step in dis.get_instructions(method)
        if step.opname == "STORE_ATTR"
    }


def _is_library(module: str) -> bool:
    """Return whether a library's code is not followed: it reads no weights, or handles FP8."""
    return f"{module}.".startswith(_LIBRARIES) and not module.startswith(_MODELS)


def _function(value: Any) -> Any:
    """Return the function inside a method, property or wrapper."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial | functools.cached_property):
        value = value.func
    wrappers = (types.FunctionType, functools._lru_cache_wrapper)
    return inspect.unwrap(value) if isinstance(value, wrappers) else value


def _is_python(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and not _is_library(function.__module__ or "")


class Reader:
    """What all walks through a model share; ``running`` while they are in its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.found: dict[nn.Module, str] = {}
        self.running = True
        self.inside: list[Any] = []
        self.walked = Counter[ast.AST]()
        self.own: frozenset[nn.Module] = frozenset()  # may read their own weights
        self.stored: dict[tuple[int, str], Values] = {}  # modules in attributes that methods assign
        self._words = _WORDS.union(["forward"], *map(stacks, model.modules()))
        self._results: dict[Any, Values] = {}
        self._suspects: dict[Any, bool] = {}
        self._changing: dict[type, set[str]] = {}
        self._alive: list[Any] = []  # keeps objects alive whose ids are in keys
        held = [v for m in model.modules() for v in leaves(vars(m).values())]
        self._called = [v for v in map(_function, held) if _is_python(v)]
        kinds = {type(m) for m in model.modules()}
        others = {type(v) for v in held} - kinds
        self._called += [inspect.getattr_static(k, "__call__", None) for k in others]
        self._methods: dict[str, list[Any]] = defaultdict(list)
        for cls in {c for kind in kinds | others for c in kind.__mro__}:
            for name, value in () if _is_library(cls.__module__) else vars(cls).items():
                if name not in ("forward", "__init__"):  # each module's forward is a root itself
                    self._methods[name].append(_function(value))

    def store(self, owners: Values, name: str, values: Values) -> None:
        """Record modules that a method stores in an attribute of one of the owners, or of each."""
        if any(isinstance(v, nn.Module) for v in leaves(values)):
            keys = [(id(owner), name) for owner in owners if isinstance(owner, nn.Module)]
            before = {id(held): held for k in keys if (held := self.stored.get(k))}
            self.stored |= dict.fromkeys(keys, united(*before.values(), values))

    def forget(self) -> None:
        """Follow each function anew."""
        self._results.clear()

    def mark_read(self, values: Iterable[Any], where: str, how: str = "") -> None:
        """Record the weights among values as read, at ``where``."""
        for value in leaves(values):
            if isinstance(value, Weight) and value.module not in self.own:
                how = how or "reads its weight instead of calling it"
                self.found.setdefault(value.module, f"{where} {how}")

    def is_suspect(self, function: Any) -> bool:
        """Return whether a function, or any that it may call by name, contains a weight's name."""
        key = function.__code__
        if key not in self._suspects:
            seen, ahead = {function.__code__}, [function]
            while ahead and not names_in(ahead[-1].__code__) & self._words:
                for other in self._named(ahead.pop()):
                    if other.__code__ not in seen:
                        seen.add(other.__code__)
                        ahead.append(other)
            self._suspects[key] = bool(ahead)
        return self._suspects[key]

    def _named(self, function: Any) -> list[Any]:
        """Return the functions that a function may call, judged by the names in its code."""
        names, known = names_in(function.__code__), function.__globals__
        found: list[Any] = [*self._called, *closure(function).values()]
        for name in names:
            found += self._methods.get(name, ())
            owner = known.get(name)
            found.append(owner)
            if isinstance(owner, types.ModuleType) and not _is_library(owner.__name__):
                found += [vars(owner).get(n) for n in names]
            elif isinstance(owner, type) and not _is_library(owner.__module__):
                found += [inspect.getattr_static(owner, n, None) for n in names]
        return [f for f in map(_function, found) if _is_python(f)]

    def follow(
        self, function: Any, args: list[Values], kwargs: dict[str, Values], depth: int
    ) -> Values:
        """Walk a function with given arguments, and return its possible results."""
        function = inspect.unwrap(function)
        if not _is_python(function) or depth > DEPTH:
            where = getattr(function, "__qualname__", "code")
            self.mark_read(united(*args, *kwargs.values()), where)
            return ()
        own = function.__code__.co_varnames[:1] == ("self",)
        passed = list(leaves(united(*args[own:], *kwargs.values())))
        brings = any(isinstance(v, Weight) for v in leaves(united(*args[:own], passed)))
        brings |= any(isinstance(v, nn.Module) for v in passed)
        long = len(function.__code__.co_code) > _SHORT
        if long and not brings and not self.is_suspect(function):
            return ()
        node = node_of(function.__code__)
        if node is None:
            self._guess(function, args)
            return ()
        bound = arguments_of(node, args, kwargs)
        if not any(bound.values()) and not function.__closure__:
            return ()
        held, owners = self.own, args[0] if args else ()
        if function.__name__ == "forward":
            linear = (m for m in owners if isinstance(m, nn.Linear))
            self.own |= {m for m in linear if inspect.unwrap(type(m).forward) is function}
            self.own |= {m for m in owners if isinstance(m, nn.Module) and stacks(m)}
        given = [(n, frozenset(map(identity, v))) for n, v in sorted(bound.items())]
        key = (function, self.own, self.running, *given)
        if key not in self._results:
            self._results[key] = ()
            self._alive += [v for values in bound.values() for v in values]
            scope = Scope(function.__qualname__, bound, function)
            self._results[key] = Walk(self, scope, depth).body(node)
        self.own = held
        return self._results[key]

    def is_followed(self, function: Any) -> bool:
        """Return whether a function is Python code of the model, not of a library."""
        return _is_python(inspect.unwrap(function))

    def changes(self, owner: Any, name: str) -> bool:
        """Return whether methods assign an attribute after initialization."""
        kind = type(owner)
        if kind not in self._changing:
            self._changing[kind] = _assigned(kind)
        return name in self._changing[kind]

    def _guess(self, function: Any, args: list[Values]) -> None:
        """Without source: if bytecode names a weight, note every layer that it names as read."""
        names = names_in(function.__code__)
        if not names & _WORDS:
            return
        for owner in elements(args[0] if args else ()):
            if isinstance(owner, nn.Module):
                named = [m for n, m in owner.named_children() if n in names]
                layers = [m for n in named for m in n.modules()] or list(owner.children())
                for layer in layers if named else [owner, *layers]:
                    if isinstance(layer._parameters.get("weight"), nn.Parameter):
                        how = "names a weight, and its source is not at hand"
                        self.mark_read((Weight(layer),), function.__qualname__, how)
