"""Which layers become FP8 while a model loads: those of a plan that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fp8kit.checkpoint.streaming.layer_selection import AS_CONV1D
from fp8kit.conversion.plan import plan
from fp8kit.conversion.report import Report
from fp8kit.formats import Scheme
from fp8kit.modules.dense import is_conv1d


def plan_to_load(
    model: nn.Module,
    scheme: Scheme,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
    strict: bool,
) -> Report:
    """Plan as ``fp8kit.plan`` does, less what becomes FP8 in memory only: a ``Conv1D``."""
    report = plan(model, scheme, include=include, exclude=exclude, strict=strict).report
    for record in report.linears:
        if is_conv1d(model.get_submodule(record.name)):
            record.action, record.reason, record.warning = "skip", AS_CONV1D, True
            record.bytes_after = record.bytes_before
    if strict:
        report.refuse_blocked()
    return report
