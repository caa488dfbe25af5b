"""The source of functions as syntax trees, and the binding of values to parameters."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import CodeType
from typing import Any

from fp8kit.conversion.readers.values import Items, Values, elements, united


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return all names, and words in strings, of a code object and of functions inside it."""
    consts = [c for held in code.co_consts for c in (held if isinstance(held, tuple) else (held,))]
    words = {w for c in consts if isinstance(c, str) for w in c.split(".") if w.isidentifier()}
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(words | set(code.co_names)).union(*inner)


@functools.lru_cache(maxsize=4096)
def node_of(code: CodeType) -> Any:
    """Return a function's syntax tree; ``None`` if there is no source, or only another one's."""
    try:
        lines, _ = inspect.getsourcelines(code)
        if code.co_name == "<lambda>":
            return _lambda(inspect.getsourcefile(code), code.co_firstlineno, code.co_varnames)
        tree = _parsed("".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            return node
    return None


def _parsed(text: str) -> ast.Module:
    # not dedent alone: strings of several lines may be indented less than the code
    return ast.parse(f"if 1:\n{text}" if text[:1].isspace() else textwrap.dedent(text))


@functools.lru_cache(maxsize=64)
def _lambdas(file: str) -> list[ast.Lambda]:
    lines = inspect.linecache.getlines(file)  # type: ignore[attr-defined]
    return [n for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, ast.Lambda)]


def _lambda(file: str | None, line: int, names: tuple[str, ...]) -> ast.Lambda | None:
    """Return the lambda of a line with these parameters; ``None`` if there are none or several."""
    found = [
        n
        for n in _lambdas(file or "")
        if n.lineno <= line <= (n.end_lineno or line)
        and [a.arg for a in n.args.args] == list(names[: len(n.args.args)])
    ]
    exact = [n for n in found if n.lineno == line] or found
    return exact[0] if len(exact) == 1 else None


def arguments_of(node: Any, args: list[Values], kwargs: dict[str, Values]) -> dict[str, Values]:
    """Bind arguments to parameters; ``kwargs`` has starred ones under ``"*"`` and ``"**"``."""
    given = node.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    starred = united(elements(kwargs.get("*", ())), elements(kwargs.get("**", ())))
    bound = dict(zip(positional, args, strict=False))
    for name in (*positional, *[a.arg for a in given.kwonlyargs]):
        bound[name] = united(bound.get(name, ()), kwargs.get(name, ()))
        if name not in kwargs and name not in positional[: len(args)]:
            bound[name] = united(bound[name], starred)
    if given.vararg is not None:
        rest = united(*args[len(positional) :], starred)
        bound[given.vararg.arg] = (Items(rest),) if rest else ()
    if given.kwarg is not None:
        names = {*positional, *[a.arg for a in given.kwonlyargs], "*", "**"}
        rest = united(*[v for n, v in kwargs.items() if n not in names], starred)
        bound[given.kwarg.arg] = (Items(rest),) if rest else ()
    return bound


def defaults_of(node: Any) -> Iterator[tuple[str, ast.expr]]:
    """Yield each parameter of a function that has a default, with the default's expression."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    yield from zip(
        (a.arg for a in positional[len(positional) - len(given.defaults) :]),
        given.defaults,
        strict=True,
    )
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    yield from ((a.arg, default) for a, default in pairs if default is not None)
