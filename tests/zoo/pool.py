"""Architectures in processes of their own: one that hangs or dies stops nothing."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from zoo.architecture import Architecture
from zoo.of_vision import install_stand_ins

FAMILIES = ("torch", "diffusers", "vision", "transformers")
SECONDS = 120


def listed() -> list[str]:
    """Name all architectures; the libraries are imported in a process that then ends."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(_names)


def architectures() -> dict[str, Architecture]:
    """Give all architectures by name."""
    install_stand_ins()
    found = []
    for family in FAMILIES:
        try:
            module = importlib.import_module(f"zoo.of_{family}")
        except ImportError as error:
            print(f"{family}: left out, {error}", file=sys.stderr)
            continue
        found += module.architectures()
    return {arch.name: arch for arch in found}


def _names() -> list[str]:
    return list(architectures())


def run(names: list[str], processes: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Give the record of each architecture, as they come."""
    queue, workers = names[::-1], [_Worker(quick) for _ in range(processes)]
    for worker in workers:
        worker.take(queue)
    while any(worker.name for worker in workers):
        busy = {worker.pipe: worker for worker in workers if worker.name}
        wait(list(busy), timeout=1)
        for worker in busy.values():
            record = worker.record()
            if record is not None:
                yield record
                worker.take(queue)
    for worker in workers:
        worker.process.kill()


class _Worker:
    def __init__(self, quick: bool) -> None:
        self.name, self.quick = "", quick
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.quick), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def take(self, queue: list[str]) -> None:
        self.name = queue.pop() if queue else ""
        self.since = time.monotonic() if self.ready else None
        if self.name:
            self.pipe.send(self.name)

    def record(self) -> dict[str, Any] | None:
        """Give what came of the architecture; ``None`` while it runs."""
        try:
            while self.pipe.poll():
                found: dict[str, Any] | None = self.pipe.recv()
                if found is not None:
                    return found
                self.ready, self.since = True, time.monotonic()
        except (EOFError, ConnectionError):
            self.process.join()
            return self._lost(f"its process ended with code {self.process.exitcode}")
        if self.since is not None and time.monotonic() - self.since > SECONDS:
            self.process.kill()
            return self._lost(f"it took longer than {SECONDS} s")
        return None

    def _lost(self, why: str) -> dict[str, Any]:
        lost = {"name": self.name, "status": "fails", "why": why, "cases": {}, "seconds": SECONDS}
        self._start()
        return lost


def _serve(pipe: Connection, quick: bool) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.stderr = sys.stdout = open(os.devnull, "w")
    import torch

    torch.set_num_threads(1)
    found = architectures()
    check = importlib.import_module("zoo.check")
    cases = check.QUICK if quick else check.CASES
    pipe.send(None)
    while True:
        pipe.send(check.check(found[pipe.recv()], cases))
