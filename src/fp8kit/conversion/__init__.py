"""Plan and convert: which dense layers become FP8, and what is fused around them."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Return ``Plan``, which pickles of earlier versions name here."""
    if name == "Plan":
        return importlib.import_module("fp8kit.conversion.plan").Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
