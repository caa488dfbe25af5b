"""Leave in high precision what FP8 does not make faster, as far as measured times can tell.

A layer is judged at the row counts it will serve, by the times of that very layer in the table of
its GPU; other layers tell nothing of it. Given row counts are a promise that no call gets slower:
FP8 must win at each of them. Without them the layer stays FP8 if it wins at any that was measured;
a layer on meta is then not judged, so that a checkpoint does not depend on the machine that makes
it. Siblings that will share their input are judged together, because together they run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8kit.conversion.patterns import some_of
from fp8kit.conversion.report import Record, Report
from fp8kit.conversion.siblings import sibling_groups
from fp8kit.dispatch.backends import Choice, choose
from fp8kit.dispatch.timings import table_for
from fp8kit.formats import Scheme
from fp8kit.matmul.problem import BACKENDS, TIMED_DTYPES, linear_problem
from fp8kit.modules.dense import as_linear
from fp8kit.modules.joining import MOST_JOINED_ROWS, can_share, would_join

_NO_DEVICE = "a device yet to be chosen"  # of layers on meta
# rows from which decoding a weight takes longer than reading it in 16 bits saves: all but one of
# 56 measured layers
_DECODING_ROWS = 64


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether bf16 is faster than FP8 for some layers at one row count.

    Args:
        m: rows of the input.
        slower: FP8 takes longer; a tie goes to the smaller weight.
        because: the times, or the rule.
    """

    m: int
    slower: bool
    because: str


def judge(
    layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device, m: int
) -> Verdict | None:
    """Compare layers that share an input with their dense form; ``None`` without measured times.

    Args:
        layers: one layer, or siblings.
        scheme: what they would become.
        device: where they will run.
        m: rows of the input.
    """
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


def leave_slower(
    model: nn.Module,
    scheme: Scheme,
    report: Report,
    rows: tuple[int, ...] | None,
    wanted: Sequence[str] = (),
) -> None:
    """Turn planned conversions that would not pay into skips with a reason.

    Args:
        model: the model.
        scheme: what its layers would become.
        report: records and groups so far; both are changed, and notes are added.
        rows: row counts that the layers will serve, ``None`` if that is not known.
        wanted: names of layers that stay FP8 if ``rows`` is ``None``.
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
        device = _serving(weight)
        verdicts = [
            judge(layers, scheme, device, m) for m in rows or _measured_rows(layers, scheme, device)
        ]
        known = [v for v in verdicts if v is not None]
        slower = [v for v in known if v.slower]
        asked = rows is not None or device.type == "cuda"
        if asked and (not known or len(known) < len(verdicts)):
            unknown[_name(device), weight.dtype] += [r.name for r in team]
        if slower and (rows is not None or len(slower) == len(known)):
            _skip(team, slower, known)
        elif slower:
            sometimes[tuple(v.m for v in slower)] += [r.name for r in team]
    left = {r.name for r in report.skipped}
    report.groups = [g for g in report.groups if left.isdisjoint(g)]
    report.notes += [_not_measured(*where, names) for where, names in unknown.items()]
    report.notes += [
        f"At m={', '.join(map(str, counts))} bf16 is faster than FP8 for {some_of(names)}. "
        "Name the row counts that you serve (m=[1, 64]) to leave out what is slower there."
        for counts, names in sometimes.items()
    ]


def leave_slower_by_name(report: Report, scheme: Scheme, rows: tuple[int, ...]) -> None:
    """Do as ``leave_slower`` for layers of which only names and shapes are known.

    Args:
        report: records of bf16 layers; siblings are told by their usual names.
        scheme: what the layers would become.
        rows: row counts that they will serve.
    """
    shapes = {record.name: record.shape for record in report.linears}
    tree = _tree(shapes)
    if can_share(scheme):
        report.groups = sibling_groups(tree, shapes)
    leave_slower(tree, scheme, report, rows)
    report.groups = []  # a checkpoint holds layers, whatever shares an input when they run


def joined_shapes(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> list[tuple[int, int]]:
    """Return the shapes of the matrices that siblings are multiplied as, for few rows.

    Args:
        shapes: ``(N, K)`` of layers by name; siblings are told by their usual names.
        scheme: what the layers are, or would become.
    """
    tree = _tree(shapes)
    groups = sibling_groups(tree, shapes) if can_share(scheme) else []
    teams = [[linear_at(tree, name) for name in group] for group in groups]
    return [_joined(team) for team in teams if would_join(scheme, team)]


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the dense layer of a qualified name, as ``as_linear`` does."""
    module: nn.Module | None = model
    for part in name.split("."):
        assert module is not None
        module = module._modules[part]
    return as_linear(module)


def _run(layers: Sequence[nn.Linear], joined: bool) -> list[tuple[int, int]]:
    """Return the shapes that are multiplied: one for siblings that are joined, else each."""
    if joined:
        return [_joined(layers)]
    return [(layer.out_features, layer.in_features) for layer in layers]


def _joined(layers: Sequence[nn.Linear]) -> tuple[int, int]:
    return sum(layer.out_features for layer in layers), layers[0].in_features


def _choice(
    shape: tuple[int, int], layer: nn.Linear, scheme: Scheme, device: torch.device, m: int
) -> Choice:
    kind = (scheme, layer.weight.dtype, device, layer.bias is not None)
    return choose(BACKENDS, linear_problem(shape, *kind, m))


def _measured_rows(layers: Sequence[nn.Linear], scheme: Scheme, device: torch.device) -> list[int]:
    """Return the row counts at which a device has times of these layers."""
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


def _skip(team: Sequence[Record], slower: Sequence[Verdict], known: Sequence[Verdict]) -> None:
    reason = f"bf16 is faster at m={slower[0].m}: {slower[0].because}"
    if faster := [str(v.m) for v in known if not v.slower]:
        reason += f"; FP8 is faster at m={', '.join(faster)}"
    for record in team:
        record.action, record.reason = "skip", reason
        record.bytes_after = record.bytes_before


def _not_measured(device: str, dtype: torch.dtype, names: Sequence[str]) -> str:
    dense, remedy = "bf16", "`fp8kit tune` measures them on a GPU."
    if dtype not in TIMED_DTYPES:
        dense = str(dtype).removeprefix("torch.")
        remedy = "Times are measured of 16-bit layers alone: see model.bfloat16()."
    return (
        f"Whether FP8 is faster than {dense} on {device} was not measured for {some_of(names)}: "
        f"they are converted. {remedy}"
    )


def _tree(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    # a file may name layers as no module could: by nothing, or by what modules have already
    root = nn.Module()
    for name, (n, k) in shapes.items():
        *path, last = name.split(".")
        children: dict[str, Any] = root._modules
        for part in path:
            children = children.setdefault(part, nn.Module())._modules
        layer = nn.Linear(k, n, False, device="meta", dtype=torch.bfloat16)
        if last in children:
            layer._modules.update(children[last]._modules)
        children[last] = layer
    return root


def _serving(weight: torch.Tensor) -> torch.device:
    """Return where a weight will be read; one on meta will go to the GPU, if there is one."""
    if weight.is_meta and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return weight.device


def _name(device: torch.device) -> str:
    if device.type == "meta":
        return _NO_DEVICE
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
