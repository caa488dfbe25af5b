"""Ordered backends, the reason each one gives for declining, and the choice among them.

A backend is a module with two functions: ``supports(problem) -> None | reason`` and ``run(...)``.
Loading one is the package's only lazy import, so a missing triton is a reason, not an exception.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fp8kit import settings
from fp8kit.errors import UnsupportedError, did_you_mean, teach

# (name, module path, device types), the best first; no device types means any device
BackendTable = tuple[tuple[str, str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend computes a problem, and why the ones before it do not.

    Args:
        problem: what was asked.
        backend: the name that was chosen; empty if none fits.
        module: the backend module, ``None`` if none fits.
        declined: pairs of backend name and reason, in dispatch order.
    """

    problem: Any
    backend: str
    module: ModuleType | None
    declined: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.problem}", f"  {self.backend or 'nothing fits':<13} chosen"]
        return "\n".join(lines + [f"  {name:<13} declined: {why}" for name, why in self.declined])


@functools.cache
def _load(path: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(path), ""
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "fp8kit":
            raise
        return None, f"{error.name} is not installed"


@functools.lru_cache(maxsize=4096)
def choose(table: BackendTable, problem: Any, only: str | None = None) -> Choice:
    """Pick the first backend of a table that supports a problem.

    Args:
        table: backend names, module paths and device types, in order of preference.
        problem: a frozen description with a ``device_type``; equal problems get one choice.
        only: consider this backend alone.

    Returns:
        The choice; its ``module`` is ``None`` if no backend fits.
    """
    declined: list[tuple[str, str]] = []
    for name, path, devices in table:
        if only is not None and name != only:
            continue
        module: ModuleType | None = None
        if name in settings.DISABLED_BACKENDS:
            reason = "disabled by FP8KIT_DISABLE"
        elif devices and problem.device_type not in devices:
            reason = f"runs on {' and '.join(devices)}, not on {problem.device_type}"
        else:
            module, reason = _load(path)
        if module is not None:
            reason = module.supports(problem) or ""
            if not reason:
                return Choice(problem, name, module, tuple(declined))
        declined.append((name, reason))
    return Choice(problem, "", None, tuple(declined))


def require(table: BackendTable, problem: Any, only: str | None = None) -> ModuleType:
    """Return the chosen backend module, or raise with every backend's reason.

    Raises:
        ValueError: if ``only`` names no backend of the table.
        UnsupportedError: if no backend supports the problem.
    """
    choice = choose(table, problem, only)
    if choice.module is not None:
        return choice.module
    names = ", ".join(name for name, *_ in table)
    if only is not None and not choice.declined:
        raise ValueError(
            teach(
                f"Unknown backend {only!r}.",
                f"Known are {names}.",
                "Pass one of these or None." + did_you_mean(only, (name for name, *_ in table)),
            )
        )
    reasons = "\n".join(f"  {name}: {why}" for name, why in choice.declined)
    raise UnsupportedError(
        teach(
            f"No backend computes {problem}.",
            f"Each declined:\n{reasons}\n",
            "Change what the reasons name, or leave this layer in high precision.",
        )
    )
