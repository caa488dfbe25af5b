"""Environment variables, read once at import and validated here and nowhere else.

``FP8KIT_DISABLE``: comma-separated backend names that dispatch must not choose, e.g. ``triton``.
``FP8KIT_CACHE_DIR``: where compiled kernels are kept; by default below the user's cache directory.
"""

from __future__ import annotations

import os
from pathlib import Path


def _names(variable: str) -> frozenset[str]:
    return frozenset(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())


def _cache_dir() -> Path:
    chosen = os.environ.get("FP8KIT_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8kit"


DISABLED_BACKENDS: frozenset[str] = _names("FP8KIT_DISABLE")
CACHE_DIR: Path = _cache_dir()
