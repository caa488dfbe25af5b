"""Kernels compiled without a GPU, in a process of their own: the interpreter must be off there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def compiled_by(script: Path, cache: Path) -> dict[str, dict[str, int]]:
    """Run a script that compiles kernels and prints a JSON object of counts.

    Args:
        script: what to run.
        cache: an empty directory for Triton.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    out = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(out.stdout.splitlines()[-1])
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Give a kernel's registers, and the bytes of local memory of what did not fit in them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(tool), "-res-usage", file.name]
        out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    (registers, stack) = re.findall(r"REG:(\d+) STACK:(\d+)", out)[0]
    return {"registers": int(registers), "stack": int(stack)}
