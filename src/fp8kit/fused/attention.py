"""Attention of one new token in each sequence: its definition, operator and backends.

A group of query heads may share one head of keys and values, which is not repeated in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.dispatch.backends import Backend, BackendTable, require
from fp8kit.dispatch.device import capability
from fp8kit.ops.registration import register
from fp8kit.runtime.replay_cache import Operator

ATTENTION_BACKENDS: BackendTable = (
    ("triton", "fp8kit.fused.triton_attention", ("cuda",)),
    ("torch", "fp8kit.fused.attention", ()),
)


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The facts by which a backend accepts or declines.

    ``group`` is the number of query heads that share keys and values; ``head_dim`` and
    ``value_dim`` are the widths of keys and of values.
    """

    group: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor) -> AttentionProblem:
        """Describe attention over these tensors, which are those of ``attend``."""
        sizes = (query.shape[1] // key.shape[1], key.shape[3], value.shape[3])
        return AttentionProblem(*sizes, query.dtype, query.device.type, capability(query.device))

    def __str__(self) -> str:
        widths = f"heads of {self.head_dim} and {self.value_dim} in groups of {self.group}"
        return f"attention of one token, {widths}, {self.dtype}, on {self.device_type}"


@dataclass(kw_only=True, eq=False, slots=True)
class AttentionBackend(Backend):
    """An implementation of ``attend``."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute with torch's fused attention, passing the heads of a group as tokens.

    Args:
        query: ``[batch, heads, 1, head_dim]``.
        key: ``[batch, key_heads, tokens, head_dim]``; head ``h`` of the queries reads head
            ``h // (heads / key_heads)``.
        value: ``[batch, key_heads, tokens, value_dim]``.
        mask: bool ``[batch or 1, 1, 1, tokens]``, true for visible tokens; ``None`` for all.
        scale: factor on the products of queries and keys.

    Returns:
        ``[batch, 1, heads, value_dim]``, contiguous, the dtype of ``query``; zeros for a sequence
        without visible tokens.
    """
    batch, heads, _, dim = query.shape
    if batch == 0:  # torch 2.11 returns None for it on a GPU
        return query.new_empty(0, 1, heads, value.shape[3])
    groups = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    mixed = F.scaled_dot_product_attention(groups, key, value, attn_mask=mask, scale=scale)
    return mixed.reshape(batch, 1, heads, value.shape[3])


def _body(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    problem = AttentionProblem.of(query, key, value)
    backend: AttentionBackend = require(ATTENTION_BACKENDS, problem)
    return backend.attend(query, key, value, mask, scale)


def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    del key, mask, scale
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])


BACKEND = AttentionBackend(supports=lambda _: None, attend=attend)
register(
    "attention_of_one_token(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale)"
    " -> Tensor",
    _body,
    _fake,
)
ATTEND = Operator(_body, torch.ops.fp8kit.attention_of_one_token)
