"""Files that several processes may write: they appear whole, and one at a time changes them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: processes are not kept apart
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
def locked(lock: Path, *, wait: bool = True) -> Iterator[None]:
    """Keep other processes away; a lock ends with its process, however that ends.

    Args:
        lock: a file that is for nothing else; its folder is made.
        wait: until no other process has it.

    Raises:
        BlockingIOError: if the lock is not to be had.
        OSError: if the file cannot be opened.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                raise BlockingIOError(*error.args) from error
        yield
