"""Files below the cache directory: they appear whole, and one process at a time changes one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: processes that tune at the same moment may lose times
    fcntl = None  # type: ignore[assignment]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all.

    Args:
        path: where; its folder is made.
        data: all of it.

    Raises:
        OSError: if it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process changes a file.

    Args:
        path: of the file; the lock is another one beside it, and ends with its process.

    Raises:
        OSError: if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("ab") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
