"""The package's way of timing, and result files that say where they come from."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fp8kit.bench.timing import Case as Case
from fp8kit.bench.timing import copies_past_cache
from fp8kit.bench.timing import time_cases as time_cases

RESULTS = Path(__file__).resolve().parent / "results"
_CUDA = torch.device("cuda")


def copies_past_l2(bytes_per_call: int, device: torch.device = _CUDA) -> int:
    """Give the number of operand copies that no L2 cache holds, at least 2, at most 64."""
    return copies_past_cache(bytes_per_call, device)


@functools.cache
def environment() -> dict[str, Any]:
    """Describe device, versions and commit, for the head of a result file; asked for once."""
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        driver = "none"
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
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
