"""A disk that is full, that may not be written or that fails, at the calls of the system."""

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
    """What the ``disk`` fixture gives; everything is as before when the test ends.

    Args:
        monkeypatch: what takes the faults back.
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
        """Let a call fail with this number of the system.

        Args:
            call: one of ``CALLS``.
            code: of ``errno``.
            when: given the call's paths, whether it fails; the file behind a handle.
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
        """Tell a function of each call's paths, as ``refuses`` does, and let it pass."""

        def note(*paths: Any) -> bool:
            seen(*paths)
            return False

        self.refuses(call, when=note)

    def has_free(self, size: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Tell of so many free bytes.

        Args:
            size: in bytes.
            meanwhile: what another process does to the disk as soon as it was asked.
        """

        def usage(_: object) -> SimpleNamespace:
            meanwhile()
            return SimpleNamespace(free=size)

        self._put("disk_usage", usage)

    def mend(self) -> None:
        """Take every fault back."""
        for call, whole in self._whole.items():
            self._put(call, whole)

    def _put(self, call: str, value: Callable[..., Any]) -> None:
        self._monkeypatch.setattr(CALLS[call], call, value)
