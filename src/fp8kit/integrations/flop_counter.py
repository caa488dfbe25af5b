"""Formulas for torch's ``FlopCounterMode``, which counts operators without a formula as zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = Sequence[int]


def patch() -> None:
    """Register a formula for each product: two operations per weight and row, as for dense ones."""
    operators = torch.ops.fp8kit
    if operators.linear in flop_registry:
        return
    for operator, formula in (
        (operators.linear, _linear),
        (operators.joined_linear, _joined_linear),
        (operators.scaled_mm, _scaled_mm),
        (operators.grouped_scaled_mm, _scaled_mm),
        (operators.experts, _experts),
        (operators.experts_backward, _experts_backward),
    ):
        register_flop_formula(operator)(formula)


def _linear(x: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * w[-2]


def _joined_linear(x: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    return sum(_linear(x, w) for w in weights)


def _scaled_mm(x: Shape, _scale: Shape | None, w: Shape, *_: Any, **__: Any) -> int:
    return _linear(x, w)


def _experts(_x: Shape, ids: Shape, _weights: Shape, w13: Shape, *others: Any, **_: Any) -> int:
    w2: Shape = others[3]
    return 2 * math.prod(ids) * (math.prod(w13[1:]) + math.prod(w2[1:]))


def _experts_backward(_grad: Shape, *arguments: Any, **_: Any) -> int:
    """Count both products twice: recomputed, as the forward pass kept nothing, and gradients."""
    return 2 * _experts(*arguments)
