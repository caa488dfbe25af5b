"""Environment variables, read once at import and validated here and nowhere else.

``FP8KIT_DISABLE``: comma-separated backend names that dispatch must not choose, e.g. ``triton``.
"""

from __future__ import annotations

import os


def _names(variable: str) -> frozenset[str]:
    return frozenset(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())


DISABLED_BACKENDS: frozenset[str] = _names("FP8KIT_DISABLE")
