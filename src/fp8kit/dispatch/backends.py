"""Choose the backend of a call, by order and measured times, with a reason for each other one.

A backend implements one kind of problem: it is a module whose ``BACKEND`` is a ``Backend``. Backend
modules are the package's only lazy imports, so a missing Triton is a reason, not an exception.

The first backend in order that supports a problem runs, unless ``problem.measured()`` has times
that show another one to be faster. A first backend without a time runs too: a table can only
reorder the backends that it has times for, and exclude those that gave wrong results.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp8kit.dispatch.timings import DENSE, REJECTED, Measured, table_for
from fp8kit.errors import InvalidValue, UnsupportedError, did_you_mean
from fp8kit.runtime import settings
from fp8kit.runtime.replay_cache import forget_choices

# (name, path of its module, device types), the best first; no device types means any device
BackendTable = tuple[tuple[str, str, tuple[str, ...]], ...]

_EMULATED = (  # emulating MX activations changes the numbers, so it is a scheme and no backend
    "Use scheme='MXFP8_EMULATED' for MX activations on a GPU without MX tensor cores. On one that "
    "has them, backend='triton_gemm' decodes both operands; for experts 'triton_experts'."
)


@dataclass(kw_only=True, eq=False, slots=True)
class Backend:
    """The functions of a backend that dispatch calls; each kind adds those that compute.

    All of them depend only on the frozen problem, so a CPU can test them for any device.

    Args:
        supports: gives the reason why a problem cannot be computed; ``None`` (default) if it can.
        configurations: gives the names of tile configurations, among which measured times choose.
            ``run`` finds the chosen one in ``problem.configuration``. An empty name there leaves
            the choice to the backend; ``None`` lets dispatch choose among all.
        cut: says how a problem is tiled on this machine; empty where there is nothing to tell.
        pads: tells whether the weight is copied at every call.
        yields_to: names a backend that goes before this one in the order, unless that one pads.
    """

    supports: Callable[[Any], str | None] = lambda _: None
    configurations: Callable[[Any], tuple[str, ...]] = lambda _: ()
    cut: Callable[[Any], str] = lambda _: ""
    pads: Callable[[Any], bool] = lambda _: False
    yields_to: Callable[[Any], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend computes a problem, how long it should take, and why the others do not.

    Args:
        problem: the problem that was asked for, with the chosen configuration.
        backend: the name of the chosen backend; empty if none fits.
        implementation: the chosen backend itself; ``None`` if none fits.
        declined: pairs of backend name and reason, in dispatch order.
        us: measured microseconds of the whole layer; ``None`` if it was not measured.
        dense_us: measured microseconds of a dense bf16 layer.
        measured_m: the row count at which it was measured; 0 if it was not.
    """

    problem: Any
    backend: str
    implementation: Any  # a ``Backend`` of the table's kind
    declined: tuple[tuple[str, str], ...]
    us: float | None = None
    dense_us: float | None = None
    measured_m: int = 0

    @property
    def configuration(self) -> str:
        """Name of the backend's configuration; empty if the backend decides."""
        return getattr(self.problem, "configuration", None) or ""

    def cut(self) -> str:
        """Return how the backend tiles the problem; empty if it does not tell."""
        chosen: Backend | None = self.implementation
        return "" if chosen is None else chosen.cut(self.problem)

    def __str__(self) -> str:
        chosen = "chosen"
        if self.configuration:
            chosen += f" ({self.configuration})"
        if cut := self.cut():
            chosen += f": {cut}"
        if self.us is not None:
            chosen += f", {self.us:.1f} µs"
        if self.us is not None and self.dense_us is not None:
            chosen += f", bf16 {self.dense_us:.1f} µs"
        if self.us is not None:
            chosen += f" (measured at m={self.measured_m})"
        lines = [f"{self.problem}", f"  {self.backend or 'nothing fits':<14} {chosen}"]
        return "\n".join(lines + [f"  {name:<14} declined: {why}" for name, why in self.declined])


@functools.cache
def _load(path: str) -> tuple[Backend | None, str]:
    try:
        return importlib.import_module(path).BACKEND, ""
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "fp8kit":
            raise
        return None, f"{error.name} is not installed"


@functools.lru_cache(maxsize=4096)
def choose(table: BackendTable, problem: Any, only: str | None = None) -> Choice:
    """Choose the backend of a table that computes a problem, the fastest where times are known.

    With ``only``, consider that backend alone, even if it was rejected when it was measured. Equal
    problems share one cached choice; its ``implementation`` is ``None`` if no backend fits.
    """
    fits: dict[str, Backend] = {}
    reasons: dict[str, str] = {}
    for name, path, devices in table:
        if only is not None and name != only:
            continue
        backend: Backend | None = None
        if name in settings.DISABLED_BACKENDS:
            reason = "disabled by FP8KIT_DISABLE"
        elif devices and problem.device_type not in devices:
            reason = f"runs on {' and '.join(devices)}, not on {problem.device_type}"
        else:
            backend, reason = _load(path)
        if backend is not None:
            reason = backend.supports(problem) or ""
            if not reason:
                fits[name] = backend
        reasons[name] = reason
    fits = _ordered(fits, problem)
    measured: Measured | None = getattr(problem, "measured", lambda: None)()
    times = _times(fits, problem, measured)
    for name in [name for name, (us, _) in times.items() if us == REJECTED]:
        del times[name]
        if only is None:
            del fits[name]
            reasons[name] = "rejected when it was measured: it computed something else"
    if not fits:
        return Choice(problem, "", None, tuple(reasons.items()))
    return _fastest(fits, reasons, problem, times, measured)


def forget_tables() -> None:
    """Forget cached tables and choices, because the measured times have changed."""
    forget_choices()
    table_for.cache_clear()
    choose.cache_clear()


def _fastest(
    fits: dict[str, Backend],
    reasons: dict[str, str],
    problem: Any,
    times: dict[str, tuple[float, str]],
    measured: Measured | None,
) -> Choice:
    wanted = getattr(problem, "configuration", "")
    chosen, configuration, us = next(iter(fits)), wanted or "", None
    if chosen in times:
        chosen = min(times, key=lambda name: times[name][0])
        us, configuration = times[chosen]
    for name in fits:
        if name in times and us is not None:
            reasons[name] = f"{times[name][0]:.1f} µs, slower than {chosen}"
        elif fits[name].yields_to(problem) == chosen:
            reasons[name] = f"not measured, and yields to {chosen} for such a problem"
        elif fits[name].pads(problem):
            reasons[name] = f"not measured, would pad the weight, and after {chosen} in the order"
        else:
            reasons[name] = f"not measured, and after {chosen} in the order"
    del reasons[chosen]
    if wanted != configuration:
        problem = replace(problem, configuration=configuration)
    declined = tuple(reasons.items())
    if measured is None or us is None:
        return Choice(problem, chosen, fits[chosen], declined)
    dense = measured.us.get(DENSE)
    return Choice(problem, chosen, fits[chosen], declined, us, dense, measured.m)


def _ordered(fits: dict[str, Backend], problem: Any) -> dict[str, Backend]:
    """Put each backend right behind the one that it yields to."""
    order = list(fits)
    for name, backend in fits.items():
        before = backend.yields_to(problem)
        if before in fits and not fits[before].pads(problem):
            order.remove(name)
            order.insert(order.index(before) + 1, name)
    return {name: fits[name] for name in order}


def _times(
    fits: dict[str, Backend], problem: Any, measured: Measured | None
) -> dict[str, tuple[float, str]]:
    """Return the best microseconds of each backend, and the configuration that reaches them."""
    times: dict[str, tuple[float, str]] = {}
    wanted = getattr(problem, "configuration", None)
    for candidate, us in ({} if measured is None else measured.us).items():
        name, _, configuration = candidate.partition(":")
        if name not in fits or configuration not in ("", *fits[name].configurations(problem)):
            continue
        if wanted in (None, configuration) and (name not in times or us < times[name][0]):
            times[name] = (us, configuration)
    return times


def decide(table: BackendTable, problem: Any, only: str | None = None) -> Choice:
    """Choose a backend, or raise with every backend's reason; arguments as for ``choose``.

    Raises ``ValueError`` if ``only`` names no backend of the table, and ``UnsupportedError`` if
    none supports the problem.
    """
    choice = choose(table, problem, only)
    if choice.implementation is not None:
        return choice
    names = ", ".join(name for name, *_ in table)
    if only is not None and not choice.declined:
        raise InvalidValue(
            f"Unknown backend {only!r}.",
            f"Known are {names}.",
            _EMULATED
            if only in ("emulation", "emulated")
            else "Pass one of these or None." + did_you_mean(only, (n for n, *_ in table)),
        )
    reasons = "\n".join(f"  {name}: {why}" for name, why in choice.declined)
    raise UnsupportedError(
        f"No backend computes {problem}.",
        f"Each declined:\n{reasons}\n",
        "Change what the reasons name, or leave this layer in high precision.",
    )


def require(table: BackendTable, problem: Any, only: str | None = None) -> Any:
    """Return the backend that ``decide`` chooses, with the same arguments and errors."""
    return decide(table, problem, only).implementation
