"""Compile CUDA kernels side by side, before they run.

A compiler takes seconds for one kernel, on one core, and a mixture of experts has dozens. The code
that launches the kernels runs once with launches off, which collects them; then threads compile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_local = threading.local()


def collected() -> list[Callable[[], None]] | None:
    """Return the loaders of the kernels that this thread collects; ``None`` if it launches them."""
    return getattr(_local, "kernels", None)


@contextmanager
def collecting() -> Iterator[None]:
    """Collect kernels instead of launching them, and compile them at the end.

    Results computed inside are not valid. Raises ``RuntimeError`` if a source does not compile.
    """
    kernels: list[Callable[[], None]] = []
    with _state(kernels):
        yield
    if kernels:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda load: load(), kernels))


@contextmanager
def launching() -> Iterator[None]:
    """Launch kernels inside, even within ``collecting``, for code that needs their results."""
    with _state(None):
        yield


@contextmanager
def _state(kernels: list[Callable[[], None]] | None) -> Iterator[None]:
    before, _local.kernels = collected(), kernels
    try:
        yield
    finally:
        _local.kernels = before
