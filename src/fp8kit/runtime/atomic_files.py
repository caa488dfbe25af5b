"""Write files so that other processes see them whole or not at all, and lock files and folders."""

from __future__ import annotations

import contextlib
import errno
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

    Its folder is created. Raises ``OSError`` if it cannot be written; nothing is left behind.
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
    """Hold an exclusive lock; it ends at the latest with the process, however that ends.

    The file ``lock`` has no other use, and its folder is created. The holder may remove both.
    Raises ``BlockingIOError`` if the lock cannot be had, and ``OSError`` if the file cannot be
    opened, or is a symbolic link.
    """
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:
            continue  # the holder removed the folder
        try:
            if not _flock(handle, wait):
                raise BlockingIOError(errno.EWOULDBLOCK, "another process has the lock", str(lock))
            if _is_at(handle, lock):
                yield
                return
        finally:
            os.close(handle)


@contextlib.contextmanager
def held(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a folder, at most while this process lives; give whether that succeeded.

    ``True``: no other process holds it, and it is still there. ``False`` also without file locks.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # it is gone, or is no folder that can be opened
        yield False
        return
    try:
        yield fcntl is not None and _flock(handle, wait) and _is_at(handle, folder)
    finally:
        os.close(handle)


def _flock(handle: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Return whether a path still leads to the file or folder that was opened there."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
