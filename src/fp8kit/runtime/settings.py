"""Environment variables, read once at import and validated here and nowhere else.

``FP8KIT_DISABLE``: comma-separated names of backends that dispatch must not choose.
``FP8KIT_CACHE_DIR``: where compiled kernels and tuned times are kept; by default below the
    user's cache directory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fp8kit.errors import teach

BACKEND_NAMES = (
    "hopper_gemm",
    "torch_native",
    "triton_gemm",
    "deep_gemm",
    "dequantized",
    "triton_experts",
    "by_expert",
    "triton",
    "cpu",
    "reference",
)


def _backend_names(variable: str) -> frozenset[str]:
    names = frozenset(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())
    if not names <= set(BACKEND_NAMES):
        raise ValueError(
            teach(
                f"The environment variable {variable} names {sorted(names - set(BACKEND_NAMES))}.",
                f"Backends are {', '.join(BACKEND_NAMES)}.",
                "Correct or unset the variable.",
            )
        )
    return names


def _cache_dir() -> Path:
    chosen = os.environ.get("FP8KIT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "fp8kit"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()) / f"fp8kit-{os.getuid()}"


DISABLED_BACKENDS: frozenset[str] = _backend_names("FP8KIT_DISABLE")
CACHE_DIR: Path = _cache_dir()
