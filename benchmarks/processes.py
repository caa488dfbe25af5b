"""Measure variants of a model, each in a process of its own: prepare side by side, time in turns.

Compiling a model takes a minute of one core and hardly uses the GPU, so all processes compile at
once, and ten models take the time of one. While one process is timed, the others wait for their
next command. If a process fails or is late, only its own columns stay empty.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from checking import reason
from fp8kit.perf.timing import Effort
from timing import time_cases

_MOST_BUILDS = 3  # processes that build at once; each holds dense weights besides its model
_MOST_NUMBERS = 4096
_CALLS_TO_SETTLE = 3
_GRAPHS = Effort(round_ms=12.0, rounds=5)
_PATIENCE_S = 5.0
_SHORTEST_S = 0.2
_LONGEST_MEASURE_S = 60.0

BASE = "bf16"

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call that is timed for every variant, one line of the table.

    Args:
        way: how the model runs, such as ``"compiled"``.
        batch: number of sequences.
        tokens: tokens of each sequence in one call.
    """

    way: str
    batch: int = 1
    tokens: int = 1

    def __str__(self) -> str:
        return f"{self.way}, {self.batch} x {self.tokens}"


@dataclass(frozen=True)
class Prepared:
    """The findings of the first calls of a case.

    Args:
        first_us: microseconds of the first call, including what it compiles.
        peak_gb: the most memory during these calls, including the weights.
        result: numbers of the result, which all variants share up to rounding.
        ready_s: seconds until the case could be measured.
        facts: anything else, for the result file.
    """

    first_us: float
    peak_gb: float
    result: list[float]
    ready_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Subject(Protocol):
    """A variant of a model on its device: what a process builds and measures."""

    def about(self) -> dict[str, Any]:
        """Return facts that hold for all cases."""

    def prepare(self, case: Case) -> Prepared:
        """Run a case until a further call compiles nothing."""

    def measure(self, case: Case) -> float:
        """Return the microseconds of one call."""


def wall_us(
    call: Callable[[], object],
    device: torch.device,
    seconds: float = _SHORTEST_S,
    in_a_row: int = 1,
) -> float:
    """Return the mean microseconds of a call, host time included.

    Args:
        call: what to time.
        device: the device it runs on.
        seconds: the least time to measure.
        in_a_row: number of calls before the host waits for the device.
    """
    _synchronize(device)
    start, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - start < seconds:
        for _ in range(in_a_row):
            call()
        _synchronize(device)
        calls += in_a_row
    return (time.perf_counter() - start) * 1e6 / calls


def graph_us(call: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of a call in a CUDA graph; of the call itself on a CPU."""
    if device.type == "cpu":
        return wall_us(call, device)
    stream = torch.cuda.current_stream()
    try:
        return time_cases({"": lambda _: call()}, 1, _GRAPHS, device)[""]
    finally:
        # a failed capture leaves its own stream current
        torch.cuda.set_stream(stream)


def run_first_calls(call: Callable[[], Tensor], device: torch.device) -> Prepared:
    """Run the first calls of a case.

    Args:
        call: returns the numbers to compare.
        device: the device it runs on.

    Raises:
        ArithmeticError: if one of the numbers is not finite.
    """
    _return_memory()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    first = wall_us(call, device, seconds=0)
    for _ in range(_CALLS_TO_SETTLE - 1):
        result = call()
    numbers = result.float().flatten()[:_MOST_NUMBERS].tolist()
    if not bool(result.isfinite().all()):
        raise ArithmeticError("the result is not finite")
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else 0.0
    return Prepared(first, peak, numbers, time.perf_counter() - start)


def _return_memory() -> None:
    """Return freed memory to the device, for other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def memory(model: torch.nn.Module) -> dict[str, float]:
    """Return the gigabytes of all parameters and buffers, and of those in FP8.

    Quantized tensors of other libraries count as the tensors inside them.
    """
    held = {id(t): t for one in [*model.parameters(), *model.buffers()] for t in _held(one)}
    sizes = [(t.nbytes / 1e9, t.dtype == torch.float8_e4m3fn) for t in held.values()]
    return {
        "weights_gb": sum(size for size, _ in sizes),
        "fp8_gb": sum(size for size, fp8 in sizes if fp8),
    }


def check_fp8(model: torch.nn.Module, wanted: bool) -> None:
    """Check whether a model has FP8 weights if and only if they are ``wanted``.

    Raises:
        ValueError: if it has FP8 weights that it should not have, or lacks them.
    """
    sizes = memory(model)
    if bool(sizes["fp8_gb"]) != wanted:
        raise ValueError(f"{sizes['fp8_gb']:.3f} of {sizes['weights_gb']:.3f} GB are FP8")


def _held(tensor: Tensor) -> list[Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        return [t for name in tensor.__tensor_flatten__()[0] for t in _held(getattr(tensor, name))]
    return [tensor]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FailedError(Exception):
    """Raised if a process answers with an error, or not at all."""


def serve(
    build: Callable[[], Subject], turn: AbstractContextManager[Any], commands: Connection
) -> None:
    """Build a subject and execute commands until there are none left; a process's main function.

    Args:
        build: returns the subject.
        turn: held while building.
        commands: receives names of the subject's methods with arguments, and sends the results.
    """
    subject: Any = None

    def built() -> dict[str, Any]:
        nonlocal subject
        with turn:
            subject = build()
            _return_memory()
        return dict(subject.about())

    work: tuple[Callable[..., Any], tuple[Any, ...]] | None = (built, ())
    while work is not None:
        function, arguments = work
        try:
            answer = (True, function(*arguments))
        except Exception as broken:
            # the column stays empty in these lines, and the result file has the reason
            answer = (False, reason(broken))
        commands.send(answer)
        try:
            command = commands.recv()
        except EOFError:
            return
        work = command and (getattr(subject, command[0], _unbuilt), command[1:])


def _unbuilt(*_: object) -> None:
    raise FailedError("the model could not be built")


@dataclass(frozen=True)
class Plan:
    """A process to start.

    Args:
        variant: the column of the table that the process fills.
        cases: the lines of that column that it fills.
        build: returns its subject; can be pickled.
    """

    variant: str
    cases: tuple[Case, ...]
    build: Callable[[], Subject]


class Worker:
    """The parent's handle of a process that holds one variant."""

    def __init__(self, plan: Plan, turn: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.plan = plan
        self.commands, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(plan.build, turn, theirs))
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: object) -> None:
        """Send a command; ``answer`` returns the results in the order of the commands."""
        with suppress(OSError):  # ``answer`` reports a process that has ended
            self.commands.send((name, *arguments))

    def answer(self, seconds: float) -> Any:
        """Wait for the next result; the first one is ``about`` of the subject.

        Raises:
            FailedError: if it is an error, or is late; the process is ended if it is late.
        """
        try:
            if not self.commands.poll(max(seconds, 0.0)):
                self.end(0.0)
                raise FailedError("not ready in time")
            good, found = self.commands.recv()
        except (EOFError, OSError) as broken:
            raise FailedError("the process has ended") from broken
        if not good:
            raise FailedError(str(found))
        return found

    def end(self, patience: float = _PATIENCE_S) -> None:
        """Ask the process to end, and kill it if it does not."""
        with suppress(OSError):
            self.commands.send(None)
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.commands.close()


class Table:
    """The measurements so far: a row for each case, a column for each variant."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._found: dict[tuple[Case, str], Prepared] = {}
        self._failed: dict[tuple[Case, str], str] = {}
        self._us: dict[tuple[Case, str], list[float]] = {}
        self._cases = cases

    def prepared(self, case: Case, variant: str, found: Prepared) -> None:
        """Store the findings of the first calls."""
        self._found[case, variant] = found

    def measured(self, case: Case, variant: str, us: float) -> None:
        """Store one of several times."""
        self._us.setdefault((case, variant), []).append(us)

    def failed(self, case: Case, variant: str, why: str) -> None:
        """Store the reason why a case has no time; the first reason counts."""
        self._failed.setdefault((case, variant), why)
        print(f"{case}: {variant} failed: {why}", flush=True)

    def can_measure(self, case: Case, variant: str) -> bool:
        """Return whether a case is prepared and has not failed since."""
        return (case, variant) in self._found and (case, variant) not in self._failed

    def rows(self) -> list[Row]:
        """Return a result-file row for each case of which anything is known."""
        return [row for case in self._cases if (row := self._row(case))]

    def _row(self, case: Case) -> Row | None:
        us = {v: statistics.median(times) for (c, v), times in self._us.items() if c == case}
        found = {v: p for (c, v), p in self._found.items() if c == case and v in us}
        failed = {v: why for (c, v), why in self._failed.items() if c == case}
        if not us and not failed:
            return None
        row = {**asdict(case), "us": us, "failed": failed}
        for name in ("first_us", "ready_s", "peak_gb"):
            row[name] = {v: getattr(p, name) for v, p in found.items()}
        row["facts"] = {v: p.facts for v, p in found.items() if p.facts}
        if BASE in found:
            base = found[BASE].result
            row["relative_error"] = {v: _distance(p.result, base) for v, p in found.items()}
        return row


def _distance(found: list[float], base: list[float]) -> float:
    exact = torch.tensor(base)
    return float((torch.tensor(found) - exact).norm() / exact.norm())


def compare(
    plans: Sequence[Plan],
    phases: Sequence[Sequence[Case]],
    write: Callable[[list[Row], dict[str, Any]], None],
    rounds: int = 3,
    limit_s: float = 120.0,
) -> None:
    """Measure variants in processes of their own, and write the results after each line.

    Args:
        plans: the processes; results are compared with those of the variant ``"bf16"``.
        phases: the lines of the table; the lines of a phase are prepared together, then measured.
        write: called with all rows, and with the facts that each variant's ``about`` returns.
        rounds: how many times a case is measured; variants alternate, and the median counts.
        limit_s: seconds for preparing a phase; a process that needs more is ended.
    """
    table, about = Table([case for phase in phases for case in phase]), dict[str, Any]()
    turn = multiprocessing.get_context("spawn").Semaphore(_MOST_BUILDS)
    workers = [Worker(plan, turn) for plan in plans]
    ended = time.monotonic() + limit_s
    try:
        for worker, _, said in _answers({worker: [None] for worker in workers}, ended):
            if isinstance(said, FailedError):
                workers.remove(worker)
                worker.end()
                for case in worker.plan.cases:
                    table.failed(case, worker.plan.variant, str(said))
            else:
                about.setdefault(worker.plan.variant, said)
        for phase in phases:
            _prepare(workers, phase, table, time.monotonic() + limit_s)
            for case in phase:
                _measure(workers, case, table, rounds)
                write(table.rows(), about)
    finally:
        for worker in workers:
            worker.end()


def _prepare(workers: Sequence[Worker], phase: Sequence[Case], table: Table, ended: float) -> None:
    """Make all processes prepare their cases of a phase, at the same time."""
    wanted = {w: [c for c in phase if c in w.plan.cases] for w in workers}
    for worker, cases in wanted.items():
        for case in cases:
            worker.ask("prepare", case)
    for worker, case, found in _answers({w: list(cs) for w, cs in wanted.items() if cs}, ended):
        if isinstance(found, FailedError):
            table.failed(case, worker.plan.variant, str(found))
        else:
            table.prepared(case, worker.plan.variant, found)
            print(f"{case}: {worker.plan.variant} ready after {found.ready_s:.1f} s", flush=True)


def _answers(awaited: dict[Worker, list[Any]], ended: float) -> Iterator[tuple[Worker, Any, Any]]:
    """Yield worker, what it was asked, and the answer or its error, in the order of arrival."""
    while awaited:
        open_ones = [w.commands for w in awaited if not w.commands.closed]
        ready = wait(open_ones, max(ended - time.monotonic(), 0.0)) if open_ones else []
        come = [w for w in awaited if w.commands.closed or w.commands in ready]
        for worker in come or list(awaited):
            asked, answer = awaited[worker].pop(0), None
            try:
                answer = worker.answer(ended - time.monotonic())
            except FailedError as error:
                answer = error
            if not awaited[worker]:
                del awaited[worker]
            yield worker, asked, answer


def _measure(workers: Sequence[Worker], case: Case, table: Table, rounds: int) -> None:
    for _ in range(rounds):
        for worker in workers:
            variant = worker.plan.variant
            if case not in worker.plan.cases or not table.can_measure(case, variant):
                continue
            worker.ask("measure", case)
            try:
                table.measured(case, variant, worker.answer(_LONGEST_MEASURE_S))
            except FailedError as error:
                table.failed(case, variant, str(error))
    for row in table.rows():
        if all(row[name] == value for name, value in asdict(case).items()):
            base = row["us"].get(BASE)
            speed = {v: round(base / us, 3) for v, us in row["us"].items()} if base else {}
            print(
                case,
                {v: round(us, 1) for v, us in row["us"].items()},
                "speed-up",
                speed,
                flush=True,
            )
