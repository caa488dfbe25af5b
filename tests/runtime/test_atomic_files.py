"""Files in the cache directory appear whole or not at all, also under concurrent writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import fresh
from disks import Disk
from fp8kit.runtime.atomic_files import held, locked, write_whole

COUNT = """
import sys
from pathlib import Path
from fp8kit.runtime.atomic_files import locked, write_whole
path = Path(sys.argv[1])
for _ in range(50):
    with locked(path.with_name("lock")):
        write_whole(path, str(int(path.read_text()) + 1).encode())
"""


def test_a_file_is_written_with_its_folder_and_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    path, plain = tmp_path / "a" / "b.json", tmp_path / "plain"
    write_whole(path, b"one")
    write_whole(path, b"two")
    plain.touch()
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    disk.refuses("replace")
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_processes_change_a_file_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    started = [fresh.Program(COUNT, path) for _ in range(3)]
    assert [program.wait()[1] for program in started] == [0, 0, 0]
    assert path.read_text() == "150"


def test_a_lock_ends_with_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with pytest.raises(KeyError), locked(path, wait=False):
            raise KeyError
    assert list(tmp_path.iterdir()) == [path]


def test_who_does_not_wait_is_told(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(BlockingIOError):
        locked(tmp_path / "lock", wait=False).__enter__()


def test_a_lock_that_its_owner_removed_is_made_again(tmp_path: Path, disk: Disk) -> None:
    """A process that opened the lock before its removal would hold a lock that no other sees."""
    lock, removed = tmp_path / "folder" / "lock", []

    def remove(opened: Path, *_: object) -> None:
        if not removed:
            assert opened == lock
            removed.append(lock.unlink())
            lock.parent.rmdir()

    disk.notes("flock", remove)
    with locked(lock):
        assert removed
        assert lock.exists()
        with pytest.raises(BlockingIOError):
            locked(lock, wait=False).__enter__()


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        locked(tmp_path / "lock").__enter__()
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_is_held_until_its_process_ends(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with held(folder) as mine:
        assert mine
        with held(folder) as other:
            assert not other
    with held(folder) as mine, held(tmp_path / "none") as absent:
        assert mine
        assert not absent
