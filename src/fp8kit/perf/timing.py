"""How every figure of this project is measured, in one place.

On a GPU each case is captured into a CUDA graph of many calls that rotate over copies of its
operands, so that its operands are not in the L2 cache. The graphs of all cases are then replayed in
turn, round after round, and the median of a case's rounds is its time, so drift of clocks and power
affects all alike. Host time is not included: graphs run longer than their launch takes, and are
launched before the clock starts. On a CPU the calls themselves alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Case = Callable[[int], object]
Timer = Callable[[Mapping[str, Case], int, "Effort", torch.device], dict[str, float]]

_CUDA = torch.device("cuda")
_MOST_CALLS = 400
_HAND_OVER, _LONGEST_HAND_OVER = 400_000, 12_800_000  # clock cycles of the GPU
_MOST_COPIES = {"cuda": 1024, "cpu": 64}  # weights of 240 KB and more leave the cache of an H200
_CPU_CACHE = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: milliseconds of one round of a case, and the number of rounds."""

    round_ms: float = 4.0
    rounds: int = 15


THOROUGH = Effort()
QUICK = Effort(round_ms=2.0, rounds=7)
# long enough for a GPU to lower its clock to its power limit
SUSTAINED = Effort(round_ms=6.0, rounds=11)


def time_cases(
    cases: Mapping[str, Case], copies: int, effort: Effort = THOROUGH, device: torch.device = _CUDA
) -> dict[str, float]:
    """Time cases against each other.

    A case is called with the index of the operand copy to use. Returns the median microseconds of
    one call, by name.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_graphs(cases, copies, effort)
    return _time_calls(cases, copies, effort)


def copies_past_cache(bytes_per_call: int, device: torch.device = _CUDA) -> int:
    """Return a number of operand copies that exceeds the L2 cache four times.

    It is at least 2, and at most 1024 on a GPU or 64 on a CPU, whose cache counts as 32 MiB.
    """
    cache = _CPU_CACHE
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    most = _MOST_COPIES.get(device.type, _MOST_COPIES["cpu"])
    return max(2, min(most, -(-4 * cache // max(bytes_per_call, 1))))


def _time_graphs(cases: Mapping[str, Case], copies: int, effort: Effort) -> dict[str, float]:
    clock = _Clock()
    graphs = {name: _capture(case, copies, effort, clock) for name, case in cases.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(effort.rounds):
        for name, (graph, calls) in graphs.items():
            times[name].append(clock.milliseconds(graph) * 1e3 / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def _time_calls(cases: Mapping[str, Case], copies: int, effort: Effort) -> dict[str, float]:
    calls = {}
    for name, case in cases.items():
        case(0)
        start = time.perf_counter()
        case(0)
        calls[name] = calls_for(effort, (time.perf_counter() - start) * 1e3, copies)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(effort.rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            for i in range(calls[name]):
                case(i % copies)
            times[name].append((time.perf_counter() - start) * 1e6 / calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def _capture(
    case: Case, copies: int, effort: Effort, clock: _Clock
) -> tuple[torch.cuda.CUDAGraph, int]:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(copies):  # so that each copy's layer has run before the capture
            case(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = _graph_of(case, copies, copies)
    calls = calls_for(effort, clock.milliseconds(graph) / copies, copies)
    return (graph if calls == copies else _graph_of(case, calls, copies)), calls


def calls_for(effort: Effort, once: float, copies: int) -> int:
    """Return the number of calls in one round, at least one per copy.

    ``once`` is the milliseconds of a call; on a GPU without host time, which would make graphs
    shorter: their start adds a microsecond and more per call to short graphs.
    """
    return max(copies, min(_MOST_CALLS, int(effort.round_ms / max(once, 1e-3))))


def _graph_of(case: Case, calls: int, copies: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            case(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    return graph


class _Clock:
    """Time graphs that have reached the GPU before the clock starts; learn how long to wait.

    Otherwise the transfer of a graph from the host to the GPU would be timed, too.
    """

    def __init__(self) -> None:
        self._cycles = _HAND_OVER

    def milliseconds(self, graph: torch.cuda.CUDAGraph) -> float:
        """Replay a graph and return its time; repeat if it reached the GPU too late."""
        start, end = _event(), _event()
        while True:
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            late = start.query()  # type: ignore[no-untyped-call]
            end.record()
            end.synchronize()
            if not late or self._cycles >= _LONGEST_HAND_OVER:
                return float(start.elapsed_time(end))
            self._cycles *= 2


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
