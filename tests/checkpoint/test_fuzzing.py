"""Untrusted files, mutated in many ways: each is read, or refused with file and field."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fresh
import fuzzing
from fp8kit.errors import CheckpointError

# the full number, 100000, takes ten minutes
CASES = int(os.environ.get("FP8KIT_FUZZ_CASES", "600"))
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")


@pytest.mark.timeout(300 + CASES // 20)
def test_mutated_files_are_read_or_refused_by_name() -> None:
    code = "import sys, fuzzing; sys.exit(fuzzing.main(int(sys.argv[1])))"
    done = fresh.run(code, CASES, first=Path(fuzzing.__file__).parent, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}{done.stderr[-5000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cases"] == CASES
    assert found["failures"] == 0
    assert found["grown MiB"] < 200
    # both outcomes are frequent: mutations neither break everything nor miss what is read
    assert found["refused by read_all"] > CASES // 2
    assert found["read"] > CASES // 20


@pytest.fixture(scope="module")
def watch() -> fuzzing.Watch:
    return fuzzing.Watch()


def wrong_with(
    read: Callable[[Path], None],
    folder: Path,
    watch: fuzzing.Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Return the complaints about a sound checkpoint that is read by this function."""
    case = fuzzing.Case(dict(fuzzing.samples()[0]), touched=["dtype"])
    fuzzing.write(case, folder)
    for name in ("read_all", "fill", "describe"):
        monkeypatch.setattr(fuzzing, name, read if name == "fill" else lambda _: None)
    return "\n".join(fuzzing.judge(case, folder, watch, 0.15)[1])


def raising(error: BaseException) -> Callable[[Path], None]:
    def read(path: Path) -> None:
        raise error

    return read


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


GOOD = "config.json has dtype = 3."


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda path: path, ""),
        (raising(CheckpointError(GOOD)), ""),
        (raising(KeyError("weights")), "KeyError: 'weights'"),
        (raising(MemoryError()), "MemoryError"),
        (raising(RecursionError()), "RecursionError"),
        (raising(CheckpointError("It is damaged.")), "names no file"),
        (raising(CheckpointError("config.json is bad.")), "names none of ['dtype']"),
        (raising(CheckpointError(GOOD + "x" * 20_000)), "characters long"),
        (raising(CheckpointError(GOOD + "\x1b[2J")), "cannot be printed"),
        (lambda path: Path("/etc/hosts").read_bytes(), "opened /etc/hosts"),
        (lambda path: (path / "new.json").touch(), "changed what it read"),
        (lambda path: busy(0.2), "took 0."),
    ],
    ids=(
        *("sound", "refused", "key-error", "memory", "recursion", "no-file", "no-field", "long"),
        *("control-characters", "outside", "writes", "slow"),
    ),
)
def test_the_judgement_can_fail(
    read: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    watch: fuzzing.Watch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = wrong_with(read, tmp_path, watch, monkeypatch)
    assert said in wrong
    assert bool(said) == bool(wrong)


def test_cases_can_be_made_again() -> None:
    bases = fuzzing.samples()
    first, again, other = (fuzzing.make(n, bases) for n in (7, 7, 8))
    assert first == again != other


def test_sound_samples_are_read(tmp_path: Path, watch: fuzzing.Watch) -> None:
    for number, files in enumerate(fuzzing.samples()[: fuzzing.FITTING]):
        folder = tmp_path / str(number)
        folder.mkdir()
        fuzzing.write(fuzzing.Case(files), folder)
        assert fuzzing.judge(fuzzing.Case(files), folder, watch) == ("read", [])
