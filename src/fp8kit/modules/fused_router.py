"""Routers of Transformers that choose in one kernel behind the product with their weight.

A router keeps its class, so that what looks for it by class finds it: recorders of its logits,
initializers. It gets a new ``forward``, as decoder layers do (``decoder_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit.modules.fused_producers import may_fuse
from fp8kit.moe.choice import CHOOSE, Formula
from fp8kit.runtime.replay_cache import ReplayCache

BIAS = "e_score_correction_bias"
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class RouterFormula:
    """What a router computes: its logits, and from them weights and ids.

    Args:
        wide: input, weight and bias are cast to float32 before the product.
        widened: its result is.
        flattens: an input of any shape ``[..., H]`` is taken as rows; else it is ``[M, H]``.
        correction: where the correction bias comes from: ``""`` if there is none, ``"own"`` for a
            buffer or Parameter ``e_score_correction_bias``, ``"given"`` for a second argument.
        choice: how the choice is made; in it a ``dtype`` of 16 bits stands for that of the input.
    """

    wide: bool
    widened: bool
    flattens: bool
    correction: str
    choice: Formula

    def logits(self, router: nn.Module, x: Tensor) -> Tensor:
        """Compute the logits of ``x [..., H]`` with torch, to the bit as the router does."""
        weight, bias = router._parameters["weight"], router._parameters.get("bias")
        assert weight is not None
        x = x.reshape(-1, x.shape[-1])
        if self.wide:
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        y = F.linear(x, weight, bias)
        return y.float() if self.widened else y

    def bias(self, router: nn.Module, given: tuple[Tensor, ...]) -> Tensor | None:
        """Return the correction bias ``[E]``, from the router or the arguments behind its input."""
        if self.correction == "own":
            own: Tensor = getattr(router, BIAS)
            return own
        return given[0] if given else None

    def takes(self, router: nn.Module, x: Tensor, given: int) -> bool:
        """Return whether the formula holds for an input, and that many arguments behind it."""
        weight = router._parameters.get("weight")
        fits = weight is not None and (self.wide or weight.dtype == x.dtype)
        return fits and given == (self.correction == "given") and (self.flattens or x.dim() == 2)

    def options(self, x: Tensor) -> Formula:
        """Return the choice for an input of its dtype."""
        narrow = self.choice.dtype != torch.float32
        return self.choice._replace(dtype=x.dtype) if narrow else self.choice


def settings(router: nn.Module) -> dict[str, object]:
    """Return what a router's own attributes say, by which its class may compute something else."""
    return {n: v for n, v in vars(router).items() if isinstance(v, _SCALARS) and n != "training"}


class RouterForward:
    """The ``forward`` of a router that is known to follow a formula.

    Args:
        router: the module; its class computes wherever kernels may not.
        formula: what it does.
    """

    def __init__(self, router: nn.Module, formula: RouterFormula) -> None:
        self.router = router
        self.formula = formula
        self.settings = settings(router)
        self.replays = ReplayCache()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute logits, weights and ids."""
        # torch.compile guards on every attribute read before it turns away, at each call
        if torch.compiler.is_compiling() or kwargs or not self._may_fuse(hidden_states, args):
            return type(self.router).forward(self.router, hidden_states, *args, **kwargs)
        router, formula = self.router, self.formula
        logits = formula.logits(router, hidden_states)
        constants, options = (formula.bias(router, args),), formula.options(hidden_states)
        ids, weights = self.replays.call(CHOOSE, (logits,), constants, options)
        return logits, weights, ids

    def _may_fuse(self, x: Tensor, args: tuple[Any, ...]) -> bool:
        own = vars(self.router)
        return (
            may_fuse(self.router, x)
            and self.formula.takes(self.router, x, len(args))
            and all(own.get(name) == value for name, value in self.settings.items())
        )
