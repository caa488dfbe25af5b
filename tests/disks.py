"""A disk that is full, read-only or failing: system calls replaced for one test."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CALLS: dict[str, Any] = {
    "open": os,
    "replace": os,
    "fsync": os,
    "flock": fcntl,
    "copyfile": shutil,
    "disk_usage": shutil,
    "mkdir": Path,
    "rename": Path,
}
ON_HANDLES = {"fsync", "flock"}


class Disk:
    """The value of the ``disk`` fixture; all faults end with the test.

    Args:
        monkeypatch: undoes the faults.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._whole = {name: getattr(home, name) for name, home in CALLS.items()}

    def refuses(
        self,
        call: str,
        code: int = errno.EIO,
        when: Callable[..., bool] = lambda *_: True,
    ) -> None:
        """Make a call raise ``OSError``.

        Args:
            call: one of ``CALLS``.
            code: error number from ``errno``.
            when: returns whether the call fails, from its arguments; a file descriptor is passed
                as the path of its file.
        """
        whole = self._whole[call]

        def faulty(*given: Any, **options: Any) -> Any:
            paths = [
                Path(os.readlink(f"/proc/self/fd/{p}")) if call in ON_HANDLES and not i else p
                for i, p in enumerate(given)
            ]
            if when(*paths):
                raise OSError(code, os.strerror(code), str(paths[0]))
            return whole(*given, **options)

        self._put(call, faulty)

    def notes(self, call: str, seen: Callable[..., object]) -> None:
        """Pass the paths of each call to a function, as ``refuses`` does, and run the call."""

        def note(*paths: Any) -> bool:
            seen(*paths)
            return False

        self.refuses(call, when=note)

    def has_free(self, size: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Make ``disk_usage`` report this number of free bytes.

        Args:
            size: free bytes.
            meanwhile: called at each query: what another process does to the disk at that moment.
        """

        def usage(_: object) -> SimpleNamespace:
            meanwhile()
            return SimpleNamespace(free=size)

        self._put("disk_usage", usage)

    def mend(self) -> None:
        """Undo all faults."""
        for call, whole in self._whole.items():
            self._put(call, whole)

    def _put(self, call: str, value: Callable[..., Any]) -> None:
        self._monkeypatch.setattr(CALLS[call], call, value)
