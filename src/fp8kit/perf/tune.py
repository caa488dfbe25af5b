"""Time every candidate of dispatch on given layers; only candidates with right results may win.

Before it is timed, a candidate is compared with the fp32 product of the dequantized operands: on
normal data, and on same-sign data, where a short accumulator shows as a bias. Both limits are
relative errors of a row in the 2-norm. The result is rounded once to bf16, which costs at most
2^-8; a precise sum may lose 1e-3 (promoted every 128 of K, Hopper loses 6e-4), a fast one 8e-3 on
normal data (Hopper loses 5e-3 at K = 28672) and any amount on same-sign data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8kit.dispatch.backends import forget_tables
from fp8kit.dispatch.device import device_name
from fp8kit.dispatch.timings import DENSE, REJECTED, Table, fingerprint, table_for, tuned_path
from fp8kit.errors import InvalidValue
from fp8kit.formats import QTensor, Scheme
from fp8kit.matmul.problem import m_bucket
from fp8kit.modules.joining import MOST_JOINED_ROWS
from fp8kit.perf.operands import (
    MODEL_SHAPES,
    Operands,
    Shape,
    candidates,
    dense_layer,
    dense_weights,
    exact_rows,
    operands,
)
from fp8kit.perf.timing import QUICK, SUSTAINED, Case, Timer, time_cases
from fp8kit.runtime.atomic_files import locked

_ROUNDING = 2.0**-8
_LOSS = {"precise": 1e-3, "fast": 8e-3}
_CHECKED_ROWS = 64
_LONG_US = 100.0  # from here on power limits the clock
SHIPPED_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class TuneRequest:
    """Layers to measure.

    Shapes are ``(N, K)`` of the weights; each row count stands for its power of two.
    """

    shapes: Sequence[Shape]
    rows: Sequence[int]
    schemes: Sequence[Scheme]
    accum: str = "precise"


@dataclass(slots=True)
class Outcome:
    """What tuning found.

    ``faults`` are candidates with wrong results, with the layer and what was wrong; ``left`` counts
    the shapes that were not reached in time.
    """

    table: Table
    faults: list[str] = field(default_factory=list)
    left: int = 0

    def __str__(self) -> str:
        lines = []
        for case, times in self.table.rows.items():
            right = [c for c, us in times.items() if c != DENSE and us != REJECTED]
            fastest = min(right, key=times.__getitem__, default="")
            dense = times.get(DENSE)
            if fastest and dense:
                lines.append(
                    f"{case.n}x{case.k} m={case.m} {case.scales} {case.accum}: {fastest} "
                    f"{times[fastest]:.1f} µs, {dense / times[fastest]:.2f} x bf16"
                )
        lines += [f"rejected: {fault}" for fault in self.faults]
        if self.left:
            lines.append(f"{self.left} shapes were not reached in time; tune again with more.")
        return "\n".join(lines)


def requests_of(
    alone: Iterable[Shape], joined: Iterable[Shape], rows: Sequence[int], scheme: Scheme, accum: str
) -> Iterator[TuneRequest]:
    """Yield what to measure for layers, some of which run as one matrix for few rows.

    ``alone`` are the shapes of the layers, ``joined`` those of the matrices of joined siblings.
    """
    yield TuneRequest([*dict.fromkeys(alone)], rows, [scheme], accum)
    few = [m for m in rows if m <= MOST_JOINED_ROWS]
    if few and (matrices := [*dict.fromkeys(joined)]):
        yield TuneRequest(matrices, few, [scheme], accum)


def shipped_requests() -> list[TuneRequest]:
    """Return what the shipped tables contain: the shapes of known models, for every scheme."""
    every = [*dict.fromkeys(s for shapes in MODEL_SHAPES.values() for s in shapes)]
    llama = MODEL_SHAPES["Llama 8B"] + MODEL_SHAPES["Llama 70B"]
    main = [Scheme.of("FP8_DYNAMIC"), Scheme.of("FP8_BLOCK")]
    rest = [Scheme.of("FP8_TENSOR"), Scheme.of("FP8"), Scheme.of("FP8_WEIGHT_ONLY")]
    return [
        TuneRequest(every, SHIPPED_ROWS, main),
        TuneRequest(llama, SHIPPED_ROWS, rest),
        TuneRequest(every, [m for m in SHIPPED_ROWS if m > 256], main[:1], "fast"),
    ]


def tune(
    requests: Iterable[TuneRequest],
    device: torch.device,
    *,
    seconds: float | None = None,
    timer: Timer = time_cases,
    progress: Callable[[str], None] | None = None,
    store: Callable[[Table], None] | None = None,
) -> Outcome:
    """Check and time every candidate for the layers in ``requests``.

    No further shape starts after ``seconds``. ``progress`` is called with each shape; ``store``,
    such as ``keep``, with the table after each, so that a later failure loses no times. Raises
    ``ValueError`` if a shape or row count is not positive, and ``torch.cuda.OutOfMemoryError`` if a
    layer does not fit.
    """
    start = time.monotonic()
    outcome = Outcome(limits(device, timer))
    for request in requests:
        if min((*request.rows, *(side for s in request.shapes for side in s)), default=1) < 1:
            raise InvalidValue(
                f"Got shapes {list(request.shapes)} and rows {list(request.rows)}.",
                "Only layers with work can be timed.",
                "Pass positive numbers.",
            )
        for shape in request.shapes:
            if seconds is not None and time.monotonic() - start > seconds:
                outcome.left += 1
                continue
            if progress is not None:
                progress(f"{shape[0]}x{shape[1]} {request.accum}")
            _measure(outcome, request, shape, device, timer)
            if store is not None:
                store(outcome.table)
    return outcome


def keep(table: Table) -> None:
    """Store a table for this machine, over what was tuned before; dispatch uses it at once.

    Raises ``OSError`` if the cache directory cannot be written.
    """
    path = tuned_path(table.device)
    # each GPU of a machine may be tuned by a process of its own
    with locked(path.with_suffix(".lock")):
        try:
            known = Table.from_json(path.read_text())
        except (OSError, ValueError):
            known = dataclasses.replace(table, rows={})
        known.merge(table)
        known.write(path)
    forget_tables()


def _measure(
    outcome: Outcome, request: TuneRequest, shape: Shape, device: torch.device, timer: Timer
) -> None:
    dense = dense_weights(shape, device)
    quantized: dict[str, Sequence[QTensor]] = {}
    for m in sorted({m_bucket(m) for m in request.rows}):
        cases: dict[str, Case] = {}
        layers: dict[str, tuple[Operands, dict[str, Case], list[str]]] = {}
        for scheme in request.schemes:
            layer = operands(dense, m, scheme, request.accum, quantized.get(scheme.name, ()))
            quantized[scheme.name] = layer.weights
            runs: dict[str, Case] = {}
            rejected = []
            wanted = expected(layer)
            for backend, configuration in candidates(layer.problem()):
                name = f"{backend}:{configuration}" if configuration else backend
                wrong = fault(wanted, backend, configuration)
                if wrong:
                    outcome.faults.append(f"{name} on {layer.problem()}: {wrong}")
                    rejected.append(name)
                else:
                    runs[name] = layer.layer(backend, configuration)
            layers[scheme.name] = (layer, runs, rejected)
            cases |= {f"{scheme.name} {name}": run for name, run in runs.items()}
        x = torch.randn(m, shape[1], device=device, dtype=torch.bfloat16)
        cases[DENSE] = dense_layer(x, dense)
        # long kernels reach the power limit, where the clock falls and another may be the fastest
        case = layers[request.schemes[0].name][0].problem().case()
        effort = SUSTAINED if outcome.table.roofline(case) >= _LONG_US else QUICK
        times = timer(cases, len(dense), effort, device)
        for name, (layer, runs, rejected) in layers.items():
            row = {DENSE: times[DENSE], **{c: times[f"{name} {c}"] for c in runs}}
            row |= dict.fromkeys(rejected, REJECTED)
            outcome.table.rows[layer.problem().case()] = row


@dataclass(frozen=True, slots=True)
class Expected:
    """The result that every candidate for a layer must have.

    The ``rows`` (int64) of the product with the first copy of the weight are compared with
    ``exact`` (fp32).
    """

    name: str
    layer: Operands
    rows: Tensor
    exact: Tensor


def expected(layer: Operands) -> list[Expected]:
    """Compute the expected results: for normal data, and for precise sums also data of one sign."""
    m = layer.x.shape[0]
    count = min(m, _CHECKED_ROWS)
    rows = torch.arange(count, device=layer.x.device) * (m - 1) // max(count - 1, 1)
    kinds = [("normal data", layer)]
    if layer.accum == "precise":
        kinds.append(("data of one sign", _one_sign(layer)))
    return [Expected(name, one, rows, exact_rows(one, rows)) for name, one in kinds]


def fault(wanted: Sequence[Expected], backend: str, configuration: str = "") -> str:
    """Compare a candidate with the expected results; return what is wrong, or an empty string.

    A candidate is right if two runs give the same finite bits and every checked row is within the
    limits in the module's docstring.
    """
    for one in wanted:
        try:
            run = one.layer.layer(backend, configuration)
            y, again = run(0), run(0)
            same = torch.equal(y.view(torch.int16), again.view(torch.int16))
        except torch.OutOfMemoryError:
            raise  # the machine's fault, not the candidate's
        except Exception as failure:  # compilers and libraries have exceptions of their own
            return f"{type(failure).__name__}: {failure}"
        if not same:
            return f"two runs on {one.name} differ"
        if not y.isfinite().all():
            return f"not finite on {one.name}"
        found = y.index_select(0, one.rows).float()
        worst = float(((found - one.exact).norm(dim=1) / one.exact.norm(dim=1)).max())
        limit = _ROUNDING + _LOSS[one.layer.accum]
        if worst > limit:
            return f"relative error {worst:.2e} of a row on {one.name}, at most {limit:.2e}"
    return ""


def _one_sign(layer: Operands) -> Operands:
    weight = layer.weights[0]
    positive = (weight.data.view(torch.uint8) & 0x7F).view(weight.data.dtype)
    weights = [QTensor(positive, weight.scale, weight.group)]
    return dataclasses.replace(layer, x=layer.x.abs(), weights=weights)


def limits(device: torch.device, timer: Timer = time_cases) -> Table:
    """Return the bandwidth and FP8 rate of a device as an empty table, for rooflines.

    A GPU with a table has the table's figures; any other is measured.
    """
    name = device_name(device) or device.type
    known = table_for(device_name(device))
    if known is not None:
        return Table(name, known.bandwidth, known.flops, facts=dict(fingerprint()))
    return Table(name, *_limits(device, timer), facts=dict(fingerprint()))


def _limits(device: torch.device, timer: Timer) -> tuple[float, float]:
    """Measure bandwidth by a copy, and FP8 operations as twice those of a bf16 product."""
    side = 8192 if device.type == "cuda" else 512
    source = torch.empty(side, 8 * side, dtype=torch.bfloat16, device=device).zero_()
    target = torch.empty_like(source)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    cases: dict[str, Case] = {"copy": lambda _: target.copy_(source), "product": lambda _: a @ a}
    times = timer(cases, 2, QUICK, device)
    return 2 * source.nbytes / times["copy"] * 1e6, 2 * 2 * side**3 / times["product"] * 1e6
