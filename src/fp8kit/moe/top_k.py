"""Choose the experts with the largest scores: the definition in torch, and the backends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kit.dispatch.backends import Backend, BackendTable, require
from fp8kit.dispatch.device import capability
from fp8kit.runtime.replay_cache import Operator

TOP_K_BACKENDS: BackendTable = (
    ("triton", "fp8kit.moe.triton_top_k", ("cuda",)),
    ("reference", "fp8kit.moe.top_k", ()),
)
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": functools.partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}
SCORINGS = tuple(_SCORES)
# DeepSeek adds this to the denominator of a renormalization. Other models add nothing; in float32
# that is the same unless a sum is below 1e-13, and where all scores are zero this gives no NaN.
TINY = 1e-20


class Formula(NamedTuple):
    """How logits become ids and weights; the last arguments of ``CHOOSE``.

    With ``renormalize`` the weights of a token are divided by their sum. Then they are multiplied
    by ``scaling_factor`` and rounded once to ``dtype``.
    """

    top_k: int
    scoring: str
    renormalize: bool
    scaling_factor: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class TopKProblem:
    """The facts by which a backend accepts or declines."""

    experts: int
    top_k: int
    in_dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None


@dataclass(kw_only=True, eq=False, slots=True)
class TopKBackend(Backend):
    """A backend whose ``choose`` takes logits, correction bias and formula: see ``choose``."""

    choose: Callable[[Tensor, Tensor | None, Formula], tuple[Tensor, Tensor]]


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """Return the float32 scores of all experts."""
    return _SCORES[scoring](logits.float())


def weights_of(scores: Tensor, ids: Tensor, how: Formula) -> Tensor:
    """Return the weights of chosen experts: scores float32 ``[M, E]``, ids int64 ``[M, k]``."""
    weights = scores.gather(-1, ids)
    if how.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return (weights * how.scaling_factor).to(how.dtype)


def choose(logits: Tensor, bias: Tensor | None, how: Formula) -> tuple[Tensor, Tensor]:
    """Choose in plain torch: the definition.

    Logits are float ``[M, E]``; ``bias [E]`` is added to the scores for the choice only. Returns
    ids ``int64 [M, k]``, the largest scores first, and weights of ``how.dtype``. Without a bias
    logits choose, not their sigmoids, as in Llama-4: above 17 a sigmoid is one.
    """
    worth = scores = scores_of(logits, how.scoring)
    if bias is not None:
        worth = scores + bias.float()
    elif how.scoring == "sigmoid":
        worth = logits
    ids = worth.topk(how.top_k, -1).indices
    return ids, weights_of(scores, ids, how)


def _registered(logits: Tensor, bias: Tensor | None, *how: object) -> tuple[Tensor, Tensor]:
    return choose(logits, bias, Formula(*how))  # type: ignore[arg-type]


def _body(logits: Tensor, bias: Tensor | None, *how: object) -> tuple[Tensor, Tensor]:
    formula = Formula(*how)  # type: ignore[arg-type]
    place = (logits.device.type, capability(logits.device))
    problem = TopKProblem(logits.shape[1], formula.top_k, logits.dtype, *place)
    backend: TopKBackend = require(TOP_K_BACKENDS, problem)
    return backend.choose(logits, bias, formula)


BACKEND = TopKBackend(choose=choose)
CHOOSE = Operator(_body, _registered)
