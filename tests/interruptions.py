"""Kill a streaming conversion and resume it, many times; a script.

python tests/interruptions.py FOLDER KILLS: each trial starts the conversion in a child process,
kills it (SIGKILL) at a random moment, or right before one of the calls that change files, and runs
it again to its end. The result must be that of an uninterrupted run, the source must be unchanged,
and nothing else may be left in the folder. Prints the counts of trials and kills as JSON.

Children are forks of one process that has imported everything and computed nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checkpoint_samples import NANO
from fp8kit.checkpoint.storage import directory
from fp8kit.integrations import transformers_facts  # noqa: F401  (children shall not load it)
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint, workers_on

RECIPE = Recipe("FP8_DYNAMIC", max_shard_bytes=500_000)
OLD = {"config.json": b"{}", "model.safetensors": b"old"}


def convert(source: Path, destination: Path, overwrite: bool) -> None:
    devices = workers_on(["cpu"], 2)
    quantize_checkpoint(
        source, destination, RECIPE, overwrite=overwrite, devices=devices, progress=False
    )


def forked(action: Callable[[], None]) -> int:
    """Run an action in a child process and return its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def killed_at(step: int, action: Callable[[], None]) -> None:
    """Run an action in this process, and kill the process before the step-th change of files."""
    left = [step]

    def counting(call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted

    for owner, name in (
        (os, "fsync"),
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (Path, "mkdir"),
        (directory, "exchange"),
        (shutil, "rmtree"),
    ):
        setattr(owner, name, counting(getattr(owner, name)))
    action()


def contents(folder: Path) -> dict[str, str]:
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def finished(child: int) -> bool:
    """Wait for a child; return whether it ended by itself, not killed, and fail if it failed."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "a run failed instead of resuming"
    return True


def trial(folder: Path, source: Path, wanted: dict[str, str], overwrite: bool, kill: float) -> bool:
    """Kill one run, after ``kill`` seconds or before step ``-kill``; return whether it was."""
    destination = folder / "destination"
    if overwrite:
        destination.mkdir()
        for name, data in OLD.items():
            (destination / name).write_bytes(data)
    if kill < 0:
        first = forked(
            lambda: killed_at(int(-kill), lambda: convert(source, destination, overwrite))
        )
    else:
        first = forked(lambda: convert(source, destination, overwrite))
        time.sleep(kill)
        os.kill(first, signal.SIGKILL)
    ended = finished(first)
    found = contents(destination) if destination.exists() else {}
    old = {n: hashlib.sha256(d).hexdigest() for n, d in OLD.items()} if overwrite else {}
    assert found in (wanted, old), "the destination is neither the old nor the new checkpoint"
    if found == wanted and not any((folder / ".destination.partial").glob("*")):
        overwrite = True  # the run was complete; a second one would refuse the destination
    if not ended:
        assert finished(forked(lambda: convert(source, destination, overwrite)))
    assert contents(destination) == wanted, "the result differs"
    assert os.listdir(folder) == ["destination"], "something was left behind"
    shutil.rmtree(destination)
    return not ended


def main() -> None:
    base, kills = Path(sys.argv[1]), int(sys.argv[2])
    source, clean, folder = base / "source", base / "clean", base / "work"
    shutil.copytree(NANO, source)
    before = contents(source)
    started = time.perf_counter()
    assert finished(forked(lambda: convert(source, clean, False)))
    duration = time.perf_counter() - started
    wanted = contents(clean)
    folder.mkdir()
    random.seed(0)
    counts = {"random": 0, "steps": 0, "trials": 0}
    step, overwrite = 1, False
    while counts["random"] + counts["steps"] < kills:
        by_step = counts["trials"] % 2 == 0
        kill = -step if by_step else random.uniform(0, duration)
        died = trial(folder, source, wanted, overwrite, kill)
        counts["trials"] += 1
        counts["steps" if by_step else "random"] += died
        if by_step and died:
            step += max(1, 60 // kills)
        elif by_step:  # past the last step: start over with a destination to replace, or without
            step, overwrite = 1, not overwrite
        assert contents(source) == before, "the source changed"
    print(json.dumps({**counts, "seconds_of_a_run": duration, "files": len(wanted)}))


if __name__ == "__main__":
    main()
