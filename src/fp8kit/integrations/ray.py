"""Spread the files of a checkpoint over the machines of a Ray cluster: one file, one task.

The plan is made first, so the result does not depend on which machine writes a file. Every machine
sees source and destination under the same paths. If a worker is lost, its task runs again elsewhere
and writes under another temporary name, so the lost worker cannot corrupt the file.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch

from fp8kit.checkpoint.streaming.executor import is_whole, write_shards
from fp8kit.checkpoint.streaming.work_plan import Work
from fp8kit.errors import CheckpointError, InvalidValue

# how often a task is repeated after its worker was lost
RETRIES = 10


def _write(work: Work, index: int, source: str, folder: str, device: str) -> None:
    """Write one file; runs on a worker."""
    for place in (source, folder):
        if not Path(place).is_dir():
            raise _unshared(f"The machine {socket.gethostname()} does not see {place}.")
    if is_whole(Path(folder), work.shards[index]):  # a worker wrote it, and was lost afterwards
        return
    places, devices = (Path(source), Path(folder)), [torch.device(device)]
    write_shards(work, [index], *places, lambda _: None, devices)


class Runner:
    """Carries out a work plan on a Ray cluster; arguments are those of ``ray_runner``."""

    write = staticmethod(_write)

    def __init__(self, address: str | None = None, device: str = "cpu") -> None:
        self.address, self.device = address, device

    def __call__(
        self,
        work: Work,
        indices: Sequence[int],
        source: Path,
        folder: Path,
        progress: Callable[[int], object],
    ) -> None:
        """Write some files of a plan, each in a task of its own.

        Every machine must see both directories. ``progress`` is called with the source bytes of
        each finished file. Raises ``CheckpointError`` if a machine does not see the directories,
        ``ValueError`` if there is no cluster, and errors of tasks as they are.
        """
        kind = "GPU" if self.device.startswith("cuda") else "CPU"
        gpus = 1 if kind == "GPU" else 0
        waiting = list(reversed(indices))
        running: dict[Any, int] = {}
        with ExitStack() as stack:
            if not ray.is_initialized():
                try:
                    ray.init(address=self.address, log_to_driver=False, include_dashboard=False)
                except ConnectionError as error:  # Ray's own text names options of its commands
                    raise InvalidValue(
                        f"Found no Ray cluster at {self.address!r}.",
                        "The files are spread over a cluster that runs already.",
                        "Start one with ray start --head, or pass the address of another.",
                    ) from error
                stack.callback(ray.shutdown)
            task = ray.remote(self.write).options(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)
            plan = ray.put(work)
            try:
                while waiting or running:
                    slots = max(1, int(ray.cluster_resources().get(kind, 1)))  # it may grow
                    while waiting and len(running) < 2 * slots:
                        index = waiting.pop()
                        started = task.remote(plan, index, str(source), str(folder), self.device)
                        running[started] = index
                    (ready, *_), _ = ray.wait(list(running), num_returns=1)
                    index = running.pop(ready)
                    ray.get(ready)
                    progress(work.source_bytes(index))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            finally:
                # wait, do not cancel: Ray aborts this process if a task ends while being cancelled
                if running:
                    ray.wait(list(running), num_returns=len(running))
        missing = [s.file for i in indices if not is_whole(folder, s := work.shards[i])]
        if missing:
            raise _unshared(f"{missing[0]} was written by another machine and is not in {folder}.")


def _unshared(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        "All machines share source and destination.",
        "Use a file system that every machine mounts under the same path.",
    )
