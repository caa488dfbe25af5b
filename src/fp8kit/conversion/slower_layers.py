"""Leave layers in high precision that FP8 does not make faster, by measured times.

A layer is judged only by the times of layers of its shape in the table of its GPU. Siblings that
will share their input are judged together, because they run together.

If the user gives row counts, they are a promise that no call gets slower: FP8 must win at each of
them. Without row counts the layer stays FP8 if it wins at any measured one. A layer on meta is then
not judged, so that a checkpoint does not depend on the machine that makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fp8kit.conversion import notes
from fp8kit.conversion.report import Record, Report
from fp8kit.conversion.siblings import sibling_groups, tree_of
from fp8kit.dispatch.backends import Choice, choose
from fp8kit.dispatch.timings import table_for
from fp8kit.formats import Scheme
from fp8kit.matmul.problem import MATMUL_BACKENDS, linear_problem
from fp8kit.modules.dense import linear_at
from fp8kit.modules.joining import MOST_JOINED_ROWS, can_share, joined_shape, would_join

_NO_DEVICE = "a device yet to be chosen"  # for layers on meta
# from so many rows on, decoding a weight costs more time than reading fewer bytes saves: measured
# in all but one of 56 layers
_DECODING_ROWS = 64


def leave_slower(
    model: nn.Module,
    scheme: Scheme,
    report: Report,
    rows: tuple[int, ...] | None,
    wanted: Sequence[str] = (),
) -> None:
    """Turn planned conversions that would not make a layer faster into skips with a reason.

    Changes records and groups of the report, and adds notes. ``rows`` are the row counts that the
    layers will serve; if ``None``, layers whose full name is in ``wanted`` stay FP8.
    """
    records = {r.name: r for r in report.linears}
    grouped = {name for group in report.groups for name in group}
    teams = [[records[n] for n in group] for group in report.groups]
    teams += [[r] for name, r in records.items() if name not in grouped]
    unknown: dict[tuple[str, torch.dtype], list[str]] = defaultdict(list)
    sometimes: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for team in teams:
        layers = [linear_at(model, r.name) for r in team]
        weight = layers[0].weight
        if rows is None and (weight.is_meta or any(r.name in wanted for r in team)):
            continue
        device = _serving_device(weight)
        verdicts = [
            _judge(layers, scheme, device, m)
            for m in rows or _measured_rows(layers, scheme, device)
        ]
        known = [v for v in verdicts if v is not None]
        slower = [v for v in known if v.slower]
        asked = rows is not None or device.type == "cuda"
        if asked and (not known or len(known) < len(verdicts)):
            unknown[_device_name(device), weight.dtype] += [r.name for r in team]
        if slower and (rows is not None or len(slower) == len(known)):
            _skip(team, slower, known)
        elif slower:
            sometimes[tuple(v.m for v in slower)] += [r.name for r in team]
    left = {r.name for r in report.skipped}
    report.groups = [g for g in report.groups if left.isdisjoint(g)]
    report.notes += [notes.not_measured(*where, names) for where, names in unknown.items()]
    report.notes += [notes.slower_at(counts, names) for counts, names in sometimes.items()]


def leave_slower_by_name(report: Report, scheme: Scheme, rows: tuple[int, ...]) -> None:
    """Do as ``leave_slower`` for bf16 layers of which only names and shapes are known.

    Siblings are recognised by their usual names.
    """
    shapes = {record.name: record.shape for record in report.linears}
    tree = tree_of(shapes)
    if can_share(scheme):
        report.groups = sibling_groups(tree, shapes)
    leave_slower(tree, scheme, report, rows)
    report.groups = []  # a checkpoint stores no groups


def _skip(team: Sequence[Record], slower: Sequence[_Verdict], known: Sequence[_Verdict]) -> None:
    reason = f"bf16 is faster at m={slower[0].m}: {slower[0].because}"
    if faster := [str(v.m) for v in known if not v.slower]:
        reason += f"; FP8 is faster at m={', '.join(faster)}"
    for record in team:
        record.skip(reason)


def _serving_device(weight: torch.Tensor) -> torch.device:
    """Return the device that will read a weight; for one on meta the GPU, if there is one."""
    if weight.is_meta and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return weight.device


def _device_name(device: torch.device) -> str:
    if device.type == "meta":
        return _NO_DEVICE
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Whether bf16 is faster (``slower``) than FP8 for some layers at ``m`` rows.

    A tie goes to FP8, the smaller weight. ``because`` has the times, or the rule.
    """

    m: int
    slower: bool
    because: str


def _judge(
    layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device, m: int
) -> _Verdict | None:
    """Compare FP8 times of layers that share an input with dense ones; ``None`` without times."""
    joins = len(layers) > 1 and m <= MOST_JOINED_ROWS and would_join(scheme, layers)
    ran = [_choice(shape, layers[0], scheme, device, m) for shape in _run(layers, joins)]
    dense = [_choice(shape, layers[0], scheme, device, m).dense_us for shape in _run(layers, False)]
    if None in dense:
        dense = [choice.dense_us for choice in ran]
    if None in dense or any(choice.us is None for choice in ran):
        if scheme.activation is None and device.type == "cuda" and m >= _DECODING_ROWS:
            return _Verdict(m, True, f"from {_DECODING_ROWS} rows on decoding weights costs more")
        return None
    us, dense_us = sum(c.us or 0.0 for c in ran), sum(time or 0.0 for time in dense)
    at = ran[0].measured_m
    basis = "measured" if at == m else f"measured at m={at}"
    return _Verdict(m, us > dense_us, f"{dense_us:.1f} µs, FP8 {us:.1f} µs ({basis})")


def _measured_rows(layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device) -> list[int]:
    """Return the row counts for which the table of a device has times of layers in a group."""
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
    """Return ``(N, K)`` of the products that run: one for joined siblings, else one per layer."""
    if joined:
        return [joined_shape(layers)]
    return [(layer.out_features, layer.in_features) for layer in layers]


def _choice(
    shape: tuple[int, int], layer: nn.Linear, scheme: Scheme, device: torch.device, m: int
) -> Choice:
    kind = (scheme, layer.weight.dtype, device, layer.bias is not None)
    return choose(MATMUL_BACKENDS, linear_problem(shape, *kind, m))
