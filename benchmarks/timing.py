"""Timing by ``fp8kit.perf.timing``, and result files with the environment they were measured in."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from fp8kit.perf.timing import Case as Case
from fp8kit.perf.timing import copies_past_cache as copies_past_cache
from fp8kit.perf.timing import time_cases as time_cases

RESULTS = Path(__file__).resolve().parent / "results"


@functools.cache
def environment() -> dict[str, Any]:
    """Return device, versions and commit for the head of a result file; cached."""
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": _said(query) or "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_version,
        "python": sys.version.split()[0],
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit that is measured, marked ``-dirty`` if files differ from it."""
    # COMMIT is for a copy of the files that has an older history, or none
    named = os.environ.get("COMMIT") or _said(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    )
    return named or "unknown"


def _said(command: list[str]) -> str:
    """Return the standard output of a program; empty if the program is absent."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    except OSError:
        return ""
    return done.stdout.strip()


def write_results(path: Path, rows: list[dict[str, Any]], **facts: Any) -> None:
    """Write rows with the environment they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment(), **facts, "rows": rows}, indent=1) + "\n")
