"""The folder of an unfinished conversion, and the journal that lets only the same run continue.

``.<name>.partial`` is beside the destination and holds ``journal.json`` (source, recipe and plan of
the run), ``lock`` and ``checkpoint``, the folder that becomes the destination by a rename.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.storage import directory
from fp8kit.checkpoint.storage.headers import read_json
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.storage.refusals import check_name
from fp8kit.errors import CheckpointError
from fp8kit.runtime.atomic_files import locked

_VERSION = 1


class UnfinishedConversion:
    """An unfinished conversion on disk; ``destination`` is the directory that it will become."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.home = destination.parent / f".{destination.name}.partial"
        check_name(self.home)
        self.folder = self.home / "checkpoint"
        self._journal = self.home / "journal.json"
        self._lock_is_mine = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes away by a lock, which ends with its process, however that ends.

        Raises ``CheckpointError`` if another process holds the lock, or if there are symbolic links
        here, which would redirect what is written.
        """
        self._refuse_link(self.home)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.home / "lock", wait=False))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"Another process is writing {self.destination}.",
                    "One at a time writes a checkpoint.",
                    "Wait until it ends, or choose another destination.",
                ) from error
            except OSError:
                self._refuse_link(self.home / "lock")
                raise
            for name in ("checkpoint", "journal.json", "journal.new"):
                self._refuse_link(self.home / name)
            self._lock_is_mine = True
            try:
                yield
            finally:
                if self._lock_is_mine and not self._journal.exists():  # the run never began
                    self.forget()

    @staticmethod
    def _refuse_link(place: Path) -> None:
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, to {os.readlink(place)}.",
                "What is written there must stay there.",
                "Remove it, unless you know who put it there.",
            )

    def begin(self, run: JsonObject) -> None:
        """Start a run, or continue it if it was interrupted.

        ``run`` describes this run as plain data. Raises ``CheckpointError`` if a different one was
        interrupted here, and names every difference.
        """
        run = _described(run)
        if self._journal.exists():
            before = self._read().get("run")
            self._compare(before if isinstance(before, dict) else {}, run)
        else:
            self._write({"run": run})
        self.folder.mkdir(exist_ok=True)

    def keep(self, names: Collection[str]) -> None:
        """Remove what an interrupted run left half done: everything but these files."""
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in names or entry.is_symlink():
                entry.unlink()

    def install(self) -> None:
        """Move the finished checkpoint to its destination, and forget the run."""
        # the rename keeps the inode number, by which ``installed`` knows that it happened
        journal = self._read()
        self._write({**journal, "installing": self.folder.stat().st_ino})
        directory.install(self.folder, self.destination)
        self.forget()

    def installed(self) -> bool:
        """Return whether a run installed its result and ended before it could clean up."""
        if not self._journal.exists() or not self.destination.is_dir():
            return False
        return self._read().get("installing") == self.destination.stat().st_ino

    def is_of(self, run: JsonObject) -> bool:
        """Return whether the journal here is that of this run."""
        before = self._read().get("run")
        return bool(before == _described(run))

    def clear(self) -> None:
        """Remove the files of a run, so that another one may begin; the lock stays."""
        self._remove("journal.new", "journal.json")

    def forget(self) -> None:
        """Remove all files, the journal last: until then ``installed`` recognizes the run."""
        self._lock_is_mine = False  # from here on another process may make a lock
        self._remove("lock", "journal.new", "journal.json")
        self.sweep()

    def _remove(self, *names: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in names:
            with suppress(FileNotFoundError, PermissionError):  # Windows keeps open files
                (self.home / name).unlink()

    def sweep(self) -> None:
        """Remove the folder if it is empty, as after a run that ended while it cleaned up."""
        with suppress(OSError):  # it is not there, or not empty
            self.home.rmdir()

    def _compare(self, before: JsonObject, now: JsonObject) -> None:
        different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if different:
            words = [_difference(key, before.get(key), now.get(key)) for key in different]
            # the plan follows from the other entries, and its hash tells a reader nothing
            words = [w for w in words if w] or ["other versions of the libraries choose otherwise"]
            raise CheckpointError(
                f"A run that was interrupted left {self.home}, and it was another one "
                f"({'; '.join(words)}).",
                "Only the same source with the same options can be continued.",
                f"Run it again as it was, or start anew: rm -r {shlex.quote(str(self.home))}",
            )

    def _read(self) -> JsonObject:
        try:
            return read_json(self._journal)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # which is no damage, and has its own remedy
                raise
            raise CheckpointError(
                f"{self._journal} is damaged.",
                "A run that was interrupted is continued by what it says.",
                f"Start anew: rm -r {shlex.quote(str(self.home))}",
            ) from error

    def _write(self, content: JsonObject) -> None:
        draft = self.home / "journal.new"
        directory.write_json(draft, content)
        directory.sync(draft)
        draft.replace(self._journal)
        directory.sync(self.home)


def _described(run: JsonObject) -> JsonObject:
    return json.loads(json.dumps({"version": _VERSION, **run}))


def _difference(key: str, before: object, now: object) -> str:
    """Say how an entry differs between two runs; empty for the plan, which is a hash."""
    if key == "plan":
        return ""
    if key == "source":
        return "the files of the source have changed since"
    if key == "max_shard_bytes":
        found = [directory.size(n) if isinstance(n, int) else n for n in (before, now)]
        return f"files of up to {found[0]} then, {found[1]} now"
    then, new = _shown(before), _shown(now)
    return f"{key.replace('_', ' ')} {then} then, {new if new != then else 'another one'} now"


def _shown(value: object) -> str:
    if value is None or value == "None":
        return "not given"
    if isinstance(value, list):
        return " ".join(shlex.quote(str(item)) for item in value) or "switched off"
    named = re.match(r"Scheme\(name='([^']*)'", str(value))
    return named[1] if named else str(value)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash over the config and the files of a source, to recognize a change.

    It covers sizes, times and headers, but not the data, which would have to be read for it.
    """
    found = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    for shard in checkpoint.shards:
        file = checkpoint.path / shard
        status = os.stat(file)
        found.update(f"{shard} {status.st_size} {status.st_mtime_ns} ".encode())
        with file.open("rb") as f:
            found.update(f.read(8 + int.from_bytes(f.read(8), "little")))
    return found.hexdigest()
