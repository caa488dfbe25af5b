"""Functions inside decorators, and decorators around another function.

A decorator counts as known if its wrapper holds the function that it calls in a cell, under the
name ``__wrapped__`` that ``functools.wraps`` gives it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def innermost(function: Any) -> Any:
    """Return the function inside known decorators, such as one that renames arguments."""
    while (inner := _decorated(function)) is not None:
        function = inner
    return function


def redecorated(function: Any, other: Any) -> Any:
    """Return ``other`` inside the known decorators of a function, in place of the innermost one."""
    inner = _decorated(function)
    if inner is None:
        return other
    ours = types.CellType(redecorated(inner, other))
    cells = tuple(ours if _holds(cell, inner) else cell for cell in function.__closure__)
    made = copied(function, function.__globals__, cells)
    vars(made).update(vars(function), __wrapped__=ours.cell_contents)
    return made


def copied(function: Any, names: dict[str, Any], cells: Any) -> Callable[..., Any]:
    """Copy a function, with the globals ``names`` and the closure ``cells``."""
    made = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _decorated(function: Any) -> Any:
    """Return the function that a decorator's wrapper calls; ``None`` if it is not known."""
    if hasattr(function, "_torchdynamo_orig_callable"):  # compiled code has its own globals
        return None
    inner = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return inner if any(_holds(cell, inner) for cell in cells) else None


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # the cell is empty
        return False
