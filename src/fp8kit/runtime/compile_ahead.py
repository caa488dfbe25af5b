"""Compile CUDA kernels side by side, before they run.

A compiler takes seconds for one kernel, on one core, and a model of experts has dozens. What needs
kernels is run once while they are only noted: nothing is launched. Then threads compile them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_local = threading.local()


def noted() -> list[Callable[[], None]] | None:
    """Return what compiles the kernels that this thread notes; ``None`` if it launches them."""
    return getattr(_local, "kernels", None)


@contextmanager
def noting() -> Iterator[None]:
    """Note kernels instead of launching them, and compile them at the end.

    Results inside are of no use. Raises ``RuntimeError`` if a source does not compile.
    """
    kernels: list[Callable[[], None]] = []
    with _state(kernels):
        yield
    if kernels:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda load: load(), kernels))


@contextmanager
def running() -> Iterator[None]:
    """Launch kernels inside, also within ``noting``: for what decides by their results."""
    with _state(None):
        yield


@contextmanager
def _state(kernels: list[Callable[[], None]] | None) -> Iterator[None]:
    before, _local.kernels = noted(), kernels
    try:
        yield
    finally:
        _local.kernels = before
