"""Check architectures in processes of their own: one that hangs or dies does not stop the run."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from zoo.architecture import Architecture
from zoo.check import CASES, QUICK, Cases, check
from zoo.of_vision import install_stand_ins

FAMILIES = ("torch", "diffusers", "vision", "transformers")
SECONDS = 300


def architectures() -> dict[str, Architecture]:
    """Return all architectures by name."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    install_stand_ins()
    found = []
    for family in FAMILIES:
        try:
            module = importlib.import_module(f"zoo.of_{family}")
        except ImportError as error:
            sys.stderr.write(f"{family}: left out, {error}\n")
            continue
        found += module.architectures()
    return {arch.name: arch for arch in found}


def run(
    found: dict[str, Architecture],
    names: list[str],
    processes: int,
    quick: bool = False,
    seconds: float = SECONDS,
) -> Iterator[dict[str, Any]]:
    """Yield a record for each architecture when it ends, or when its ``seconds`` are over."""
    torch.set_num_threads(1)  # threads do not survive the fork of the processes
    queue, workers = names[::-1], [_Worker(found, quick, seconds) for _ in range(processes)]
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
    def __init__(self, found: dict[str, Architecture], quick: bool, seconds: float) -> None:
        self.name, self.found, self.cases = "", found, QUICK if quick else CASES
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        context = mp.get_context("fork")  # saves the import of the libraries, half a minute
        self.pipe, theirs = context.Pipe()
        given = (theirs, self.found, self.cases)
        self.process = context.Process(target=_serve, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def take(self, queue: list[str]) -> None:
        self.name = queue.pop() if queue else ""
        self.since = time.monotonic()
        if self.name:
            self.pipe.send(self.name)

    def record(self) -> dict[str, Any] | None:
        """Return the record of the architecture; ``None`` while it runs."""
        try:
            if self.pipe.poll():
                found: dict[str, Any] = self.pipe.recv()
                return found
        except (EOFError, ConnectionError):
            self.process.join()
            return self._lost(f"its process ended with code {self.process.exitcode}")
        if time.monotonic() - self.since > self.seconds:
            self.process.kill()
            return self._lost(f"it took longer than {self.seconds} s")
        return None

    def _lost(self, why: str) -> dict[str, Any]:
        lost = {"name": self.name, "status": "fails", "why": why, "cases": {}}
        self._start()
        return {**lost, "seconds": self.seconds}


def _serve(pipe: Connection, found: dict[str, Architecture], cases: Cases) -> None:
    sys.stderr = sys.stdout = open(os.devnull, "w")
    while True:
        pipe.send(check(found[pipe.recv()], cases))
