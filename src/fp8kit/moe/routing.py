"""Choose the experts of a token and their weights, by the formulas of known models.

Sources: Mixtral and Qwen3-MoE (softmax, largest k, renormalized), GPT-OSS (softmax of the k largest
logits, which is the same), Llama-4 (sigmoid), DeepSeek-V2 (a group counts as its best expert) and
DeepSeek-V3 (sigmoid, a group counts as the sum of its two best, with a bias that decides the choice
and not the weights).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import (
    InvalidType,
    InvalidValue,
    check_choice,
    check_number,
    check_strided,
    check_switch,
    is_integer,
)
from fp8kit.moe.top_k import CHOOSE, SCORINGS, Formula, scores_of, weights_of
from fp8kit.ops.validation import check_float, check_operand, check_size

_BEST_OF_GROUP = 2
_INTEGERS = (torch.int32, torch.int64)
_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)

Custom = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    groups: int | None = None,
    top_groups: int | None = None,
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
    custom: Custom | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token from the router's logits.

    Scores are fp32. The largest ``top_k`` are chosen, of equal ones those that ``torch.topk``
    takes; the ids of the largest scores come first. Without groups, one kernel does this on NVIDIA
    GPUs wherever it supports the call; of equal scores it takes the lowest id. Logits choose where
    sigmoids have neither a bias nor groups: above 17 a sigmoid is one.

    Args:
        logits: float ``[M, E]``.
        top_k: experts per token, 1 to E.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        renormalize: divide the weights of a token by their sum.
        groups: divide the experts, in order, into so many groups of equal size.
        top_groups: how many groups a token chooses its experts from; only with ``groups``. A group
            counts as its best expert, with ``correction_bias`` as the sum of its two best.
        correction_bias: float ``[E]``, added to the scores for the choice and not to the weights.
        scaling_factor: multiplies the weights at the end.
        custom: a function of ``(logits, top_k)`` that returns ids and weights; all other options
            but ``scaling_factor`` then keep their defaults.

    Returns:
        ids ``int64 [M, top_k]`` and weights ``float32 [M, top_k]``.

    Raises:
        TypeError: if ``logits`` or ``correction_bias`` is no float tensor, ``top_k`` no integer,
            ``renormalize`` no switch, or ``custom`` no function that returns ids and weights.
        ValueError: if shapes or options do not fit.

    Example:
        >>> ids, weights = fp8kit.moe.route(torch.randn(5, 8), 2)
        >>> ids.shape, weights.dtype
        (torch.Size([5, 2]), torch.float32)
    """
    check_float("logits", logits)
    _check_counts(logits, top_k)
    check_switch("renormalize", renormalize)
    check_number("scaling_factor", scaling_factor)
    if custom is not None:
        if (scoring, renormalize, groups, correction_bias) != ("softmax", True, None, None):
            raise InvalidValue(
                "Got a custom function beside options that it would replace.",
                "A custom function scores and chooses itself.",
                "Leave out scoring, renormalize, groups and correction_bias.",
            )
        if not callable(custom):
            raise InvalidType(
                f"Got custom={custom!r:.80}.",
                "It must be a function from logits and top_k to ids and weights.",
                "Leave it out for the formula of the other options.",
            )
        ids, weights = pair_of(custom(logits, top_k), "The custom function")
        check_routing(ids, weights, logits.shape[0])
        return ids.long(), weights.float() * scaling_factor
    check_choice("scoring", scoring, SCORINGS, "Pass one of these, or a custom function.")
    if correction_bias is not None:
        check_operand("correction_bias", correction_bias, (logits.shape[1],), logits, None)
    _check_groups(logits.shape[1], top_k, groups, top_groups)
    how = Formula(operator.index(top_k), scoring, renormalize, scaling_factor, torch.float32)
    if groups is None or top_groups is None:
        return CHOOSE(logits, correction_bias, *how)
    scores = scores_of(logits, scoring)
    choice = scores if correction_bias is None else scores + correction_bias.float()
    choice = _within_groups(choice, groups, top_groups, correction_bias is not None)
    ids = choice.topk(top_k, -1).indices
    return ids, weights_of(scores, ids, how)


def tokens_per_expert(ids: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen, without waiting for the device.

    Args:
        ids: integer, any shape; ids outside ``0 .. experts - 1`` are not counted.
        experts: E.

    Returns:
        ``int64 [E]``.

    Raises:
        TypeError: if ``ids`` is no tensor of integers.
        ValueError: if ``experts`` is no whole number, or is negative.

    Example:
        >>> fp8kit.moe.tokens_per_expert(torch.tensor([[0, 2], [2, -1]]), 3)
        tensor([1, 0, 2])
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (*_INTEGERS, *_SMALL_INTEGERS):
        raise InvalidType(
            f"Got ids={ids!r:.80}.",
            "Ids of experts are a tensor of integers.",
            "Pass ids first, as fp8kit.moe.route gives them.",
        )
    check_size("experts", experts)
    flat = ids.reshape(-1).long()
    found = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, found, torch.ones_like(found))[:experts]


def check_routing(ids: Tensor, weights: Tensor, m: int) -> None:
    """Refuse anything but integer ids and float weights of the same shape ``[M, k]``."""
    for name, tensor in (("ids", ids), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            raise InvalidType(
                f"Got {name} of type {type(tensor).__name__}.",
                f"They must be a tensor [{m}, k].",
                "Pass what fp8kit.moe.route gives.",
            )
        check_strided(name, tensor)
    if ids.dtype not in _INTEGERS or not weights.is_floating_point():
        raise InvalidType(
            f"Got ids of {ids.dtype} and weights of {weights.dtype}.",
            "Ids are int32 or int64, weights are floating-point numbers.",
            "Pass ids first, as fp8kit.moe.route gives them.",
        )
    if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != m:
        raise InvalidValue(
            f"Got ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for {m} tokens.",
            f"Both have the shape [{m}, k].",
            "Flatten the tokens of x, ids and weights alike.",
        )


def pair_of(found: object, maker: str) -> tuple[Any, Any]:
    """Return ids and weights that a caller's function made, which ``maker`` names in errors."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise InvalidType(
            f"{maker} returned {found!r:.80}.",
            "It must return ids and weights, both [M, top_k].",
            "Return both in a tuple.",
        )
    return found[0], found[1]


def _within_groups(choice: Tensor, groups: int, top_groups: int, summed: bool) -> Tensor:
    """Keep the scores in each token's best groups, and set all others to minus infinity."""
    parts = choice.view(choice.shape[0], groups, choice.shape[1] // groups)
    if summed:
        worth = parts.topk(min(_BEST_OF_GROUP, parts.shape[-1]), -1).values.sum(-1)
    else:
        worth = parts.amax(-1)
    best = worth.topk(top_groups, -1).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    return parts.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)


def _check_counts(logits: Tensor, top_k: int) -> None:
    if not is_integer(top_k):
        raise InvalidType(
            f"Got top_k={top_k!r}.",
            "How many experts a token takes is an integer.",
            "Pass the model's num_experts_per_tok.",
        )
    if logits.dim() != 2 or not 1 <= top_k <= logits.shape[1]:
        raise InvalidValue(
            f"Got logits of shape {tuple(logits.shape)} and top_k={top_k}.",
            "Logits are [M, E], and a token takes 1 to E experts.",
            "Flatten the tokens with logits.flatten(0, -2), or change top_k.",
        )


def _check_groups(experts: int, top_k: int, groups: int | None, top_groups: int | None) -> None:
    if groups is None and top_groups is None:
        return
    if groups is None or top_groups is None:
        raise InvalidValue(
            f"Got groups={groups} and top_groups={top_groups}.",
            "Groups of experts, and how many of them a token takes, come together.",
            "Pass both or neither.",
        )
    whole = all(map(is_integer, (groups, top_groups)))
    if not whole or groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise InvalidValue(
            f"Got {groups} groups, {top_groups} of them taken, for {experts} experts.",
            "Groups divide the experts evenly, and 1 to all of them are taken.",
            "Check n_group and topk_group of the model's config.",
        )
    if top_k > (held := experts // groups * top_groups):
        raise InvalidValue(
            f"Got top_k={top_k} and {top_groups} groups of {experts // groups} experts.",
            f"A token takes its experts from these groups, which hold {held}.",
            "Check topk_group and num_experts_per_tok of the model's config.",
        )
