"""Replace the tables of backends, among which dispatch chooses, by a test's own backends."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest

from fp8kit.dispatch.backends import BackendTable, choose

# where each table was imported, by kind
HOMES = {
    "matmul": ("fp8kit.ops.bodies.MATMUL_BACKENDS", "fp8kit.perf.operands.MATMUL_BACKENDS"),
    "quantizers": ("fp8kit.ops.bodies.QUANTIZER_BACKENDS",),
    "moe": ("fp8kit.moe.operators.MOE_BACKENDS",),
    "fused": ("fp8kit.fused.operators.FUSED_BACKENDS",),
    "top_k": ("fp8kit.moe.top_k.TOP_K_BACKENDS",),
    "plan": ("fp8kit.conversion.notes.MATMUL_BACKENDS",),
    "slower_layers": ("fp8kit.conversion.slower_layers.MATMUL_BACKENDS",),
    "warmup": ("fp8kit.perf.row_counts.MATMUL_BACKENDS",),
}
_NUMBERS = itertools.count()  # choices are cached by table: two tests' tables must not be equal


def table_of(monkeypatch: pytest.MonkeyPatch, backends: Mapping[str, object]) -> BackendTable:
    """Return a table of backends, each in a module of its own that can be imported."""
    rows = []
    for name, backend in backends.items():
        module = ModuleType(f"backend_of_a_test_{next(_NUMBERS)}")
        module.BACKEND = backend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows.append((name, module.__name__, ()))
    return tuple(rows)


def install(monkeypatch: pytest.MonkeyPatch, **kinds: Mapping[str, object]) -> None:
    """Make the package choose among these backends alone; ``kinds`` are keys of ``HOMES``."""
    # recordings of other backends belong to other generations, and so are not replayed
    places: dict[str, object] = {"fp8kit.runtime.replay_cache.generation": next(_NUMBERS) * 10**6}
    for kind, backends in kinds.items():
        places |= dict.fromkeys(HOMES[kind], table_of(monkeypatch, backends))
    for place, value in places.items():
        monkeypatch.setattr(place, value)
    choose.cache_clear()
