"""What is decided about one linear layer, and what it would weigh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fp8kit.conversion.eligibility import Eligibility
from fp8kit.conversion.patterns import exclusion
from fp8kit.conversion.report import Record
from fp8kit.formats import MX, Scheme, scale_dtype, scale_shape
from fp8kit.modules.dense import as_linear
from fp8kit.modules.linear import Fp8Linear


def decide_linear(
    module: nn.Module,
    names: list[str],
    role: str,
    obstacles: Eligibility,
    scheme: Scheme,
    include: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> Record:
    """Decide about a linear layer.

    Args:
        module: dense or FP8.
        names: its qualified names.
        role: what it does, if the defaults keep such layers; else empty.
        obstacles: of the model.
        scheme: what it would become.
        include: as in ``plan``.
        exclude: as in ``plan``.
    """
    record = _record(module, names)
    record.reason = exclusion(names, include, exclude, role)
    if not record.reason:
        wanted = not set(include or ()).isdisjoint(names)
        record.reason = obstacles.of(names, wanted)
        record.warning = bool(record.reason) and not isinstance(module, Fp8Linear)
    if not record.reason:
        record.action = "convert"
        record.bytes_after = _converted_bytes(as_linear(module), scheme)
    return record


def _record(module: nn.Module, names: list[str]) -> Record:
    size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
    return Record(
        names[0],
        type(module).__name__,
        tuple(as_linear(module).weight.shape),
        "skip",
        bytes_before=size,
        bytes_after=size,
        aliases=tuple(names[1:]),
    )


def _converted_bytes(linear: nn.Linear, scheme: Scheme) -> int:
    shape = tuple(linear.weight.shape)
    scales = torch.Size(scale_shape(shape, scheme.weight)).numel()
    bias = 0 if linear.bias is None else linear.bias.numel() * linear.bias.element_size()
    static = 4 if scheme.static else 0
    kept = torch.Size(scale_shape(shape, MX)).numel() if scheme.rebased else 0
    scales = scales * scale_dtype(scheme.weight).itemsize + kept
    return linear.weight.numel() + scales + bias + static
