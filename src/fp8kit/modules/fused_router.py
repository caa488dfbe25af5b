"""Routers of Transformers that choose experts in one kernel, behind torch's product for logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit.modules.own_forward import OwnForward
from fp8kit.moe.top_k import CHOOSE, Formula

BIAS = "e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class RouterFormula:
    """What a router computes: its logits, and from them weights and ids.

    Args:
        wide: input, weight and bias are cast to float32 before the product.
        widened: the product's result is cast to float32.
        flattens: an input of any shape ``[..., H]`` is taken as rows; else it is ``[M, H]``.
        correction: where the correction bias comes from: ``""`` if there is none, ``"own"`` for a
            buffer or Parameter ``e_score_correction_bias``, ``"given"`` for a second argument.
        choice: how weights and ids follow from logits; a 16-bit ``dtype`` in it means the input's.
    """

    wide: bool
    widened: bool
    flattens: bool
    correction: str
    choice: Formula

    def logits(self, router: nn.Module, x: Tensor) -> Tensor:
        """Compute the logits of ``x [..., H]`` with torch, bit-equal to the router's."""
        weight, bias = router._parameters["weight"], router._parameters.get("bias")
        assert weight is not None
        x = x.reshape(-1, x.shape[-1])
        if self.wide:
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        y = F.linear(x, weight, bias)
        return y.float() if self.widened else y

    def bias(self, router: nn.Module, given: tuple[Tensor, ...]) -> Tensor | None:
        """Return the correction bias ``[E]``, from the router or from ``given``, its arguments."""
        if self.correction == "own":
            return getattr(router, BIAS)
        return given[0] if given else None

    def takes(self, router: nn.Module, x: Tensor, given: tuple[Any, ...]) -> bool:
        """Return whether the formula holds for an input and the arguments ``given`` after it."""
        weight = router._parameters["weight"]
        assert weight is not None
        if len(given) != (self.correction == "given") or not (self.flattens or x.dim() == 2):
            return False
        bias = self.bias(router, given)
        known = bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1])
        narrow = self.choice.dtype != torch.float32  # dtype of weight or input? both must agree
        wide = self.wide and not narrow
        return known and (wide or weight.dtype == x.dtype) and x.shape[-1] == weight.shape[1]

    def options(self, x: Tensor) -> Formula:
        """Return the formula of the choice for an input of the dtype of ``x``."""
        narrow = self.choice.dtype != torch.float32
        return self.choice._replace(dtype=x.dtype) if narrow else self.choice


class RouterForward(OwnForward):
    """A ``forward`` for a router whose formula is known."""

    formula: RouterFormula

    def takes(self, module: nn.Module, x: Tensor, *others: Any) -> bool:
        """Return whether the formula holds for an input and the arguments after it."""
        return self.formula.takes(module, x, others)

    def compute(self, module: nn.Module, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, weights and ids."""
        logits = self.formula.logits(module, x)
        constants, options = (self.formula.bias(module, others),), self.formula.options(x)
        ids, weights = self.replays.call(CHOOSE, (logits,), constants, options)
        return logits, weights, ids
