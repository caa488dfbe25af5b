"""The package's Python functions on the stack between a call and its launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import fp8kit

PACKAGE = Path(fp8kit.__file__).parent


def above_launches(
    call: Callable[[], object], launches: Callable[[FrameType], bool], most: int = sys.maxsize
) -> list[list[str]]:
    """Return the package's functions on the stack of each launch, the outermost first.

    Args:
        call: runs once.
        launches: returns whether a frame is that of a launch; that frame is in the result, too.
        most: number of launches to look at; Triton's interpreter is slow under a profiler.
    """
    found: list[list[str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not of_package(frame) or not launches(frame):
            return
        names, above = [], frame
        while above is not None:
            names += [above.f_code.co_qualname] if of_package(above) else []
            above = above.f_back  # type: ignore[assignment]
        found.append(names[::-1])
        if len(found) == most:
            sys.setprofile(None)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def launch_from(folder: str) -> Callable[[FrameType], bool]:
    """Return a test of frames: is it a ``launch`` that code in this folder of the package calls?"""

    def launches(frame: FrameType) -> bool:
        caller = frame.f_back
        if frame.f_code.co_name != "launch" or caller is None:
            return False
        return PACKAGE / folder in Path(caller.f_code.co_filename).parents

    return launches


def of_package(frame: FrameType) -> bool:
    """Return whether a frame runs code of the package."""
    return PACKAGE in Path(frame.f_code.co_filename).parents
