"""Leave in high precision what FP8 does not make faster.

A layer is judged at the row counts it will serve. Given row counts are a promise that no call gets
slower: FP8 must win at each of them. Without them the layer stays FP8 if it wins at any that was
measured; a layer on meta is then not judged, so that a checkpoint does not depend on the machine
that makes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from fp8kit.conversion import notes
from fp8kit.conversion.layers_by_name import linear_at, tree_of
from fp8kit.conversion.profitability import Verdict, judge, measured_rows
from fp8kit.conversion.report import Record, Report
from fp8kit.conversion.siblings import sibling_groups
from fp8kit.formats import Scheme
from fp8kit.modules.joining import can_share

_NO_DEVICE = "a device yet to be chosen"  # of layers on meta


def leave_slower(
    model: nn.Module,
    scheme: Scheme,
    report: Report,
    rows: tuple[int, ...] | None,
    wanted: Sequence[str] = (),
) -> None:
    """Turn planned conversions that would not pay into skips with a reason.

    Records and groups of the report are changed, and notes are added. Layers that are ``wanted`` by
    name stay FP8 if ``rows``, the row counts that they will serve, are not known.
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
            judge(layers, scheme, device, m) for m in rows or measured_rows(layers, scheme, device)
        ]
        known = [v for v in verdicts if v is not None]
        slower = [v for v in known if v.slower]
        asked = rows is not None or device.type == "cuda"
        if asked and (not known or len(known) < len(verdicts)):
            unknown[_told(device), weight.dtype] += [r.name for r in team]
        if slower and (rows is not None or len(slower) == len(known)):
            _skip(team, slower, known)
        elif slower:
            sometimes[tuple(v.m for v in slower)] += [r.name for r in team]
    left = {r.name for r in report.skipped}
    report.groups = [g for g in report.groups if left.isdisjoint(g)]
    report.notes += [notes.not_measured(*where, names) for where, names in unknown.items()]
    report.notes += [notes.slower_at(counts, names) for counts, names in sometimes.items()]


def leave_slower_by_name(report: Report, scheme: Scheme, rows: tuple[int, ...]) -> None:
    """Do as ``leave_slower`` for layers of which only names and shapes are known.

    They are bf16; siblings are told by their usual names.
    """
    shapes = {record.name: record.shape for record in report.linears}
    tree = tree_of(shapes)
    if can_share(scheme):
        report.groups = sibling_groups(tree, shapes)
    leave_slower(tree, scheme, report, rows)
    report.groups = []  # a checkpoint holds layers, whatever shares an input when they run


def _skip(team: Sequence[Record], slower: Sequence[Verdict], known: Sequence[Verdict]) -> None:
    reason = f"bf16 is faster at m={slower[0].m}: {slower[0].because}"
    if faster := [str(v.m) for v in known if not v.slower]:
        reason += f"; FP8 is faster at m={', '.join(faster)}"
    for record in team:
        record.skip(reason)


def _serving(weight: torch.Tensor) -> torch.device:
    """Return where a weight will be read; one on meta will go to the GPU, if there is one."""
    if weight.is_meta and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return weight.device


def _told(device: torch.device) -> str:
    if device.type == "meta":
        return _NO_DEVICE
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
