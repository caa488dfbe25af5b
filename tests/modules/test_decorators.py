"""Decorators of a function, put around another one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fp8kit.modules.decorators import innermost, redecorated

Function = Callable[..., Any]


def renames(old: str, new: str) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def plain(x: int, **kwargs: Any) -> Any:
    return -x, kwargs


def other(x: int, **kwargs: Any) -> Any:
    return x, kwargs


def test_known_decorators_run_around_the_other_function() -> None:
    function = renames("oldest", "old")(renames("old", "new")(plain))
    assert innermost(function) is plain
    made = redecorated(function, other)
    assert made(1, oldest=2, more=3) == (1, {"new": 2, "more": 3})
    assert innermost(made) is other
    assert function(1, oldest=2) == (-1, {"new": 2})


def test_a_decorator_that_hides_its_function_is_left_out() -> None:
    hidden = functools.wraps(plain)(lambda *args, **kwargs: None)
    for function in (plain, hidden, functools.partial(plain)):
        assert innermost(function) is function
        assert redecorated(function, other) is other
