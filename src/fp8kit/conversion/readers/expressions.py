"""The possible values of expressions in a model's source, and which weights they read."""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8kit.conversion.readers.values import (
    CONTAINERS,
    Items,
    Local,
    Property,
    Scope,
    Values,
    Weight,
    constant,
    elements,
    held_by,
    item,
    lookup,
    united,
)

if TYPE_CHECKING:
    from fp8kit.conversion.readers.reads import Reader

_SETTINGS = (type(None), bool, int, float, str)
_COMPARES: dict[type, Callable[[Any, Any], bool]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# attributes that are the same for codes as for the dense weight
_HARMLESS = frozenset(
    """
    data_ptr device dim get_device is_contiguous is_cpu is_cuda is_floating_point is_meta layout
    ndim ndimension nelement numel requires_grad requires_grad_ shape size _is_hf_initialized
    """.split()
)


class Expressions:
    """Evaluation of the expressions of one function, whose names are in ``scope``.

    ``depth`` is the number of calls between the root function and this one.
    """

    def enter(self, local: Local, args: list[Values], kwargs: dict[str, Values]) -> Values:
        """Walk a function that is defined inside this one; ``Walk`` implements it."""
        raise NotImplementedError

    def __init__(self, reader: Reader, scope: Scope, depth: int) -> None:
        self.reader, self.scope, self.depth = reader, scope, depth

    def read(self, node: ast.AST | None) -> Values:
        """Evaluate an expression, and note its weights as read: the code uses their numbers."""
        values = self.value(node)
        self.reader.mark_read(values, self.scope.where)
        return values

    def value(self, node: ast.AST | None) -> Values:
        """Evaluate an expression without noting its weights as read."""
        if node is None:
            return ()
        method = getattr(self, f"_value_{type(node).__name__}", None)
        if method is not None:
            return method(node)
        for child in ast.iter_child_nodes(node):
            self.read(child)
        return ()

    def bind(self, target: ast.AST, values: Values) -> None:
        """Assign values to a target."""
        if isinstance(target, ast.Name):
            names = self.scope.names
            names[target.id] = united(names.get(target.id, ()), values)
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part, elements(values))
        elif isinstance(target, ast.Starred):
            self.bind(target.value, (Items(elements(values)),))
        else:
            if isinstance(target, ast.Attribute):
                self.reader.store(self.value(target.value), target.attr, values)
            self.reader.mark_read(values, self.scope.where)
            self.read(target)

    def _value_Constant(self, node: ast.Constant) -> Values:
        return (node.value,)

    def _value_Name(self, node: ast.Name) -> Values:
        return self.scope.find(node.id)

    def _value_NamedExpr(self, node: ast.NamedExpr) -> Values:
        values = self.value(node.value)
        self.bind(node.target, values)
        return values

    def _value_Starred(self, node: ast.Starred) -> Values:
        return elements(self.value(node.value))

    def _value_Await(self, node: ast.Await) -> Values:
        return self.value(node.value)

    def _value_Yield(self, node: ast.Yield) -> Values:
        self.scope.returned = united(self.scope.returned, self.value(node.value))
        return ()

    def _value_YieldFrom(self, node: ast.YieldFrom) -> Values:
        self.scope.returned = united(self.scope.returned, elements(self.value(node.value)))
        return ()

    def _value_Tuple(self, node: Any) -> Values:
        values = united(*[self.value(e) for e in node.elts])
        return (Items(values),) if values else ()

    _value_List = _value_Set = _value_Tuple

    def _value_Dict(self, node: ast.Dict) -> Values:
        for key in node.keys:
            self.value(key)
        values = united(*[self.value(v) for v in node.values])
        return (Items(values),) if values else ()

    def _value_BoolOp(self, node: ast.BoolOp) -> Values:
        return united(*[self.value(v) for v in node.values])

    def _value_IfExp(self, node: ast.IfExp) -> Values:
        self.value(node.test)
        known, truth = self.truth(node.test)
        yes = self.value(node.body) if truth or not known else ()
        return united(yes, self.value(node.orelse) if not truth or not known else ())

    def _value_BinOp(self, node: ast.BinOp) -> Values:
        sides = united(self.value(node.left), self.value(node.right))
        containers = [v for v in sides if isinstance(v, (Items, list, tuple, *CONTAINERS))]
        if containers and isinstance(node.op, ast.Add):
            return (Items(elements(tuple(containers))),)
        self.reader.mark_read(sides, self.scope.where)
        return ()

    def _value_Compare(self, node: ast.Compare) -> Values:
        for part in (node.left, *node.comparators):
            values = self.value(part)
            if not all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops):
                self.reader.mark_read(values, self.scope.where)
        return ()

    def _value_Lambda(self, node: ast.Lambda) -> Values:
        local = Local(node, self.scope)
        self.reader.mark_read(self.enter(local, [], {}), self.scope.where)
        return (local,)

    def _value_ListComp(self, node: Any) -> Values:
        scope = Scope(self.scope.where, {}, self.scope.function, self.scope)
        inner = type(self)(self.reader, scope, self.depth)
        for generator in node.generators:
            inner.bind(generator.target, elements(inner.value(generator.iter)))
            for test in generator.ifs:
                inner.value(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        values = united(*[inner.value(p) for p in parts])
        return (Items(values),) if values else ()

    _value_SetComp = _value_GeneratorExp = _value_DictComp = _value_ListComp

    def _value_Subscript(self, node: ast.Subscript) -> Values:
        values = self.value(node.value)
        known, key = constant(self.read(node.slice))
        self.reader.mark_read([v for v in values if isinstance(v, Weight)], self.scope.where)
        values = tuple(v for v in values if not isinstance(v, Weight))
        if isinstance(node.slice, ast.Slice):
            return (Items(elements(values)),)
        return item(values, key) if known else elements(values)

    def _value_Attribute(self, node: ast.Attribute) -> Values:
        return self.attribute(self.value(node.value), node.attr)

    def attribute(self, owners: Values, name: str) -> Values:
        """Return an attribute of values; most attributes of a weight note it as read."""
        found: list[Values] = []
        getters: dict[Any, list[Any]] = defaultdict(list)
        shared: dict[int, Values] = {}  # what methods stored, mostly once for many owners
        for owner in owners:
            if isinstance(owner, Weight):
                if name not in _HARMLESS and (name != "dtype" or owner.tells_dtype):
                    how = "asks for the dtype of its weight" if name == "dtype" else ""
                    self.reader.mark_read((owner,), self.scope.where, how)
                continue
            if name == "_parameters" and isinstance(owner, nn.Linear):
                found.append((Items((Weight(owner),)),))
                continue
            if name == "__dict__" and isinstance(owner, nn.Module):
                found.append((Items(held_by(owner)),))
                continue
            stored = self.reader.stored.get((id(owner), name), ())
            shared[id(stored)] = stored
            for value in lookup(owner, name):
                if isinstance(value, Property):
                    getters[value.function].append(value.owner)
                else:
                    found.append((value,))
        for function, bound in getters.items():
            found.append(self.reader.follow(function, [tuple(bound)], {}, self.depth + 1))
        return united(*found, *shared.values())

    def truth(self, node: ast.AST) -> tuple[bool, bool]:
        """Return whether a condition is known from the model's attributes, and whether it holds.

        Known are settings that modules store, and whether an attribute is ``None``. Attributes that
        methods assign, and ``training``, are unknown: they may change before a call.
        """
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            known, truth = self.truth(node.operand)
            return known, not truth
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(v) for v in node.values]
            decides = isinstance(node.op, ast.Or)  # by one part
            if (True, decides) in parts:
                return True, decides
            return all(known for known, _ in parts), not decides
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.compared(node)
        known, value = self.stored(node)
        return known and isinstance(value, _SETTINGS), bool(value) if known else False

    def compared(self, node: ast.Compare) -> tuple[bool, bool]:
        """Return whether a comparison is known, and whether it holds."""
        (left, a), (right, b) = self.stored(node.left), self.stored(node.comparators[0])
        compare = _COMPARES.get(type(node.ops[0]))
        if not left or not right or compare is None:
            return False, False
        if not isinstance(node.ops[0], ast.Is | ast.IsNot):
            if not isinstance(a, _SETTINGS) or not isinstance(b, _SETTINGS):
                return False, False
        try:
            return True, bool(compare(a, b))
        except TypeError:
            return False, False

    def stored(self, node: ast.AST) -> tuple[bool, Any]:
        """Return whether an expression is a constant or one stored attribute, and its value."""
        if isinstance(node, ast.Constant):
            return True, node.value
        if not isinstance(node, ast.Attribute) or node.attr == "training":
            return False, None
        owners = self.value(node.value)
        found = [lookup(owner, node.attr) for owner in owners]
        changes = any(self.reader.changes(owner, node.attr) for owner in owners)
        if changes or not found or any(len(v) != 1 or isinstance(v[0], Property) for v in found):
            return False, None
        values = [v[0] for v in found]
        settings = [isinstance(v, _SETTINGS) for v in values]
        alike = all(type(v) is type(values[0]) and v == values[0] for v in values if any(settings))
        return not any(settings) or (all(settings) and alike), values[0]
