"""Walk through the source of a function, statement by statement.

An assignment adds to a name's possible values and removes none, so a walk needs no control flow.
Each body is walked twice, for values that a loop carries from one iteration to the next.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from fp8kit.conversion.readers.calls import DEPTH, Calls
from fp8kit.conversion.readers.source import arguments_of, defaults_of
from fp8kit.conversion.readers.values import Items, Local, Scope, Values, elements, identity, united

_MOST_WALKS = 16  # recursive walks through one function, each with other arguments


class Walk(Calls):
    """One walk through the body of a function: visits statements, evaluates expressions."""

    def body(self, node: Any) -> Values:
        """Walk the body twice, so that values assigned late in a loop reach its start.

        Walks through recursive functions are bounded: their time is exponential in the call depth.
        """
        given = {n: frozenset(map(identity, v)) for n, v in self.scope.names.items()}
        around = [known for other, known in self.reader.inside if other is node]
        if given in around:
            return ()
        if around and self.reader.walked[node] >= _MOST_WALKS:
            self.reader.mark_read(united(*self.scope.names.values()), self.scope.where)
            return ()
        self.reader.inside.append((node, given))
        self.reader.walked[node] += 1
        if isinstance(node, ast.Lambda):
            self.scope.returned = self.value(node.body)
        else:
            for _ in range(2):
                self.visit_all(node.body)
        self.reader.inside.pop()
        return self.scope.returned

    def visit_all(self, statements: Iterable[ast.AST]) -> None:
        """Walk statements in order, up to an assertion that cannot hold."""
        for statement in statements:
            self.visit(statement)
            if isinstance(statement, ast.Assert) and self.truth(statement.test) == (True, False):
                return

    def visit(self, node: ast.AST) -> None:
        """Walk one statement."""
        method = getattr(self, f"_visit_{type(node).__name__}", None)
        if method is not None:
            method(node)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read(child)
            else:
                self.visit(child)

    def _visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            a, b = target, node.value
            if isinstance(a, ast.Tuple) and isinstance(b, ast.Tuple) and len(a.elts) == len(b.elts):
                for t, v in zip(a.elts, b.elts, strict=True):
                    self.bind(t, self.value(v))
            else:
                self.bind(target, self.value(node.value))

    def _visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value))

    def _visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.read(node.target)
        added = self.read(node.value)
        if isinstance(node.target, ast.Name) and elements(added):
            self.bind(node.target, (Items(elements(added)),))

    def _visit_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _visit_Return(self, node: ast.Return) -> None:
        self.scope.returned = united(self.scope.returned, self.value(node.value))

    def _visit_For(self, node: ast.For) -> None:
        self.bind(node.target, elements(self.value(node.iter)))
        self.visit_all(node.body)
        self.visit_all(node.orelse)

    def _visit_If(self, node: ast.If) -> None:
        self.value(node.test)
        known, truth = self.truth(node.test)
        if truth or not known:
            self.visit_all(node.body)
        if not truth or not known:
            self.visit_all(node.orelse)

    def _visit_Match(self, node: ast.Match) -> None:
        subject = self.value(node.subject)
        for case in node.cases:
            self.capture(case.pattern, subject)
            self.value(case.guard)
            self.visit_all(case.body)

    def capture(self, pattern: Any, values: Values) -> None:
        """Assign values, and their elements, to the names in a pattern of ``match``."""
        if isinstance(pattern, ast.MatchClass):
            for attribute, inner in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
                self.capture(inner, self.attribute(values, attribute))
            return
        name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
        if name is not None:
            self.bind(ast.Name(name), values)
        apart = isinstance(pattern, ast.MatchSequence | ast.MatchMapping)
        for part in ast.iter_child_nodes(pattern):
            self.capture(part, elements(values) if apart else values)

    def _visit_With(self, node: ast.With) -> None:
        for part in node.items:
            values = self.value(part.context_expr)
            if part.optional_vars is not None:
                self.bind(part.optional_vars, values)
        self.visit_all(node.body)

    def _visit_FunctionDef(self, node: Any) -> None:
        local = Local(node, self.scope)
        self.bind(ast.Name(node.name), (local,))
        self.enter(local, [], {})

    _visit_AsyncFunctionDef = _visit_FunctionDef

    def _visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Do not walk classes that are defined inside functions."""

    def enter(self, local: Local, args: list[Values], kwargs: dict[str, Values]) -> Values:
        """Walk a function that is defined inside this one, with given arguments."""
        if self.depth > DEPTH:
            return ()
        bound = arguments_of(local.node, args, kwargs)
        around = Walk(self.reader, local.scope, self.depth)
        for name, default in defaults_of(local.node):
            bound[name] = united(bound[name], around.value(default))
        scope = Scope(self.scope.where, bound, self.scope.function, local.scope)
        return Walk(self.reader, scope, self.depth + 1).body(local.node)
