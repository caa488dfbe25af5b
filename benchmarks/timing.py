"""How every GPU figure of this project is measured, in one place.

Each case is captured into a CUDA graph of many calls that rotate over copies of its operands, so
that nothing it reads is left in the L2 cache. The graphs of all cases are then replayed in turn,
round after round, and the median of a case's rounds is its time: drift of clocks and power hits all
alike.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Case = Callable[[int], object]

RESULTS = Path(__file__).resolve().parent / "results"
GRAPH_MS = 4.0
ROUNDS = 15
MOST_CALLS = 200


def time_cases(cases: Mapping[str, Case], copies: int) -> dict[str, float]:
    """Time cases against each other.

    Args:
        cases: name to a function that is called with the index of the operand copy to use.
        copies: how many copies of the operands there are.

    Returns:
        Name to the median microseconds of one call.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, case in cases.items():
        graphs[name] = _capture(case, copies)
    times: dict[str, list[float]] = {name: [] for name in cases}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(ROUNDS):
        for name, (graph, calls) in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(found) for name, found in times.items()}


def copies_past_l2(bytes_per_call: int) -> int:
    """Give the number of operand copies that no L2 cache holds, at least 2, at most 64."""
    l2 = torch.cuda.get_device_properties().L2_cache_size
    return max(2, min(64, -(-4 * l2 // max(bytes_per_call, 1))))


def environment() -> dict[str, Any]:
    """Describe device, versions and commit, for the head of a result file."""
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "python": sys.version.split()[0],
        "commit": commit or os.environ.get("COMMIT", "unknown"),
    }


def write_results(path: Path, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write rows with the environment they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **facts, "rows": rows}, indent=1) + "\n")


def _capture(case: Case, copies: int) -> tuple[torch.cuda.CUDAGraph, int]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(min(copies, 3)):
            case(i)
    torch.cuda.current_stream().wait_stream(side)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    case(0)
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end), 0.005)
    calls = max(copies, min(MOST_CALLS, int(GRAPH_MS / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            case(i % copies)
    graph.replay()
    torch.cuda.synchronize()
    return graph, calls
