"""Processes that share a GPU get right results: the GPU switches between them inside kernels.

Processes start and end all the time, because the only fault found so far needed contexts that did.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROCESSES, AT_ONCE = 30, 10
SCRIPT = Path(__file__).resolve().parents[1] / "shared_gpu.py"


@pytest.mark.gpu
def test_kernels_that_overlap_survive_other_processes_on_their_gpu() -> None:
    def run(seed: int) -> subprocess.CompletedProcess[str]:
        seconds = str(3 + seed % 5)
        command = [sys.executable, str(SCRIPT), str(seed), seconds]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(run, range(PROCESSES)):
            assert done.returncode == 0, done.stderr
            count, differing = map(int, done.stdout.split())
            assert count >= 40
            assert differing == 0
