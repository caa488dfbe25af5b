"""Whether FP8 makes a layer faster, as far as measured times can tell.

A layer is judged only by the times of that exact layer in the table of its GPU. Siblings that will
share their input are judged together, because they run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8kit.dispatch.backends import Choice, choose
from fp8kit.dispatch.timings import table_for
from fp8kit.formats import Scheme
from fp8kit.matmul.problem import MATMUL_BACKENDS, linear_problem
from fp8kit.modules.joining import MOST_JOINED_ROWS, joined_shape, would_join

# rows from which decoding a weight takes longer than reading it in 16 bits saves: all but one of
# 56 measured layers
_DECODING_ROWS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether bf16 is faster than FP8 for some layers at one row count.

    A tie goes to the smaller weight. ``because`` has the times, or the rule.
    """

    m: int
    slower: bool
    because: str


def judge(
    layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device, m: int
) -> Verdict | None:
    """Compare layers that share an input with their dense form; ``None`` without measured times."""
    joins = len(layers) > 1 and m <= MOST_JOINED_ROWS and would_join(scheme, layers)
    ran = [_choice(shape, layers[0], scheme, device, m) for shape in _run(layers, joins)]
    dense = [_choice(shape, layers[0], scheme, device, m).dense_us for shape in _run(layers, False)]
    if None in dense:
        dense = [choice.dense_us for choice in ran]
    if None in dense or any(choice.us is None for choice in ran):
        if scheme.activation is None and device.type == "cuda" and m >= _DECODING_ROWS:
            return Verdict(m, True, f"from {_DECODING_ROWS} rows on decoding weights costs more")
        return None
    us, dense_us = sum(c.us or 0.0 for c in ran), sum(time or 0.0 for time in dense)
    at = ran[0].measured_m
    basis = "measured" if at == m else f"measured at m={at}"
    return Verdict(m, us > dense_us, f"{dense_us:.1f} µs, FP8 {us:.1f} µs ({basis})")


def measured_rows(layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device) -> list[int]:
    """Return the row counts at which a device has times of layers that share an input."""
    kind = (scheme, layers[0].weight.dtype, device, False)
    joins = len(layers) > 1 and would_join(scheme, layers)
    shapes = {*_run(layers, joins), *_run(layers, False)}
    found = set[int]()
    for shape in shapes:
        problem = linear_problem(shape, *kind, 1)
        table, case = table_for(problem.device), problem.case()
        layer = (case.scales, case.accum, *shape)
        rows = {} if table is None else table.rows
        found |= {c.m for c in rows if (c.scales, c.accum, c.n, c.k) == layer}
    return sorted(found)


def _run(layers: Sequence[nn.Linear], joined: bool) -> list[tuple[int, int]]:
    """Return the shapes that are multiplied: one for siblings that are joined, else each."""
    if joined:
        return [joined_shape(layers)]
    return [(layer.out_features, layer.in_features) for layer in layers]


def _choice(
    shape: tuple[int, int], layer: nn.Linear, scheme: Scheme, device: torch.device, m: int
) -> Choice:
    kind = (scheme, layer.weight.dtype, device, layer.bias is not None)
    return choose(MATMUL_BACKENDS, linear_problem(shape, *kind, m))
