"""A KeyboardInterrupt at a chosen instruction, as Ctrl-C may raise it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any


def interrupted(
    call: Callable[[], object], function: Any, *, step: int = 0, visit: int = 1
) -> bool:
    """Run a call, and interrupt it in a function that it runs.

    Args:
        call: runs once.
        function: a Python function.
        step: the interrupt comes before this instruction of it.
        visit: which of the function's calls is interrupted, from 1.

    Returns:
        ``False`` if the call ended first.
    """
    assert isinstance(function, FunctionType)
    code, visits, steps = function.__code__, 0, 0

    def enter(frame: FrameType, event: str, _: object) -> Any:
        nonlocal visits
        if frame.f_code is not code:
            return None
        visits += 1
        frame.f_trace_opcodes = True
        return within if visits == visit else None

    def within(frame: FrameType, event: str, _: object) -> Any:
        nonlocal steps
        if event == "opcode":
            steps += 1
            if steps > step:
                raise KeyboardInterrupt
        return within

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
