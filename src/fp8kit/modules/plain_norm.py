"""RMS norms computed in one launch; they return a tensor, not codes, so any code may read it."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn

from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.own_forward import OwnForward


class NormForward(OwnForward):
    """The ``forward`` of an RMS norm."""

    formula: NormFormula

    def takes(self, module: nn.Module, x: Tensor, *others: Any) -> bool:
        """Return whether the formula holds for ``x``, and its rows have at most two strides."""
        weight = module._parameters["weight"]  # functional_call puts a plain tensor here
        assert weight is not None
        known = not others and x.dim() > 0 and x.shape[-1:] == weight.shape and _folds(x)
        return known and self.formula.takes(x, module)

    def compute(self, module: nn.Module, x: Tensor, *others: Any) -> Tensor:
        """Norm ``[..., K]``; the result is contiguous."""
        del others
        return self.formula.normed(self.replays, x, module)


def _folds(x: Tensor) -> bool:
    """Return whether rows are in memory order, and all dimensions before the last of rows merge."""
    if x.is_contiguous():
        return True
    lead = [(n, step) for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n != 1]
    ordered = all(one >= other for (_, one), (_, other) in itertools.pairwise(lead))
    outer = [(n, s) for n, s in zip(x.shape[:-2], x.stride()[:-2], strict=True) if n != 1]
    pairs = itertools.pairwise(outer)
    return ordered and x.stride(-1) == 1 and all(s == n * inner for (_, s), (n, inner) in pairs)
