"""Time FP8 layers against the bf16 layers they replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8kit import functional
from fp8kit.conversion.report import table
from fp8kit.dispatch.backends import choose
from fp8kit.dispatch.timings import Case
from fp8kit.formats import Scheme
from fp8kit.matmul.problem import MATMUL_BACKENDS
from fp8kit.perf.operands import Operands, Shape, dense_layer, dense_weights, operands
from fp8kit.perf.timing import THOROUGH, Effort, Timer, time_cases
from fp8kit.perf.timing import Case as Run
from fp8kit.perf.tune import limits


@dataclass(frozen=True, slots=True)
class Timing:
    """One layer at one row count.

    Times are in microseconds: of the FP8 layer, including the quantization of its input; of the
    dense layer; and the least that an FP8 layer can take on this device.
    """

    m: int
    n: int
    k: int
    scheme: str
    backend: str
    us: float
    bf16_us: float
    roofline_us: float


def bench(
    shapes: Sequence[Shape],
    rows: Sequence[int],
    scheme: Scheme,
    device: torch.device,
    *,
    accum: str = "precise",
    effort: Effort = THOROUGH,
    timer: Timer = time_cases,
) -> list[Timing]:
    """Time whole layers, with 16-bit input and output and weights outside the cache, against bf16.

    Shapes are ``(N, K)`` of the weights. Returns one timing per shape and row count.
    """
    ceiling, found = limits(device, timer), []
    for shape in shapes:
        dense = dense_weights(shape, device)
        weights = operands(dense, 1, scheme, accum).weights
        for m in rows:
            layer = operands(dense, m, scheme, accum, weights)

            def run(i: int, layer: Operands = layer) -> object:
                return functional.linear(
                    layer.x,
                    layer.weights[i],
                    scheme=scheme,
                    input_scale=layer.input_scale,
                    accum=accum,
                )

            cases: dict[str, Run] = {"bf16": dense_layer(layer.x, dense), "fp8": run}
            times = timer(cases, len(dense), effort, device)
            case = Case("", accum, m, *shape)
            backend = choose(MATMUL_BACKENDS, layer.problem()).backend
            facts = (m, *shape, scheme.name, backend, times["fp8"], times["bf16"])
            found.append(Timing(*facts, ceiling.roofline(case)))
    return found


def render(timings: Sequence[Timing]) -> str:
    """Return timings as a table."""
    rows = [("weight", "m", "scheme", "backend", "fp8 µs", "bf16 µs", "x bf16", "of the roofline")]
    rows += [
        (
            f"{t.n}x{t.k}",
            str(t.m),
            t.scheme,
            t.backend,
            f"{t.us:.1f}",
            f"{t.bf16_us:.1f}",
            f"{t.bf16_us / t.us:.2f}",
            f"{t.roofline_us / t.us:.0%}",
        )
        for t in timings
    ]
    return table(rows)
