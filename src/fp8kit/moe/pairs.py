"""Pairs of a token and an expert: translate their ids, sort them by expert, and add their rows.

Everything is plain torch that never waits for the device, so CUDA graphs can capture it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOWHERE = -1


def physical_ids(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """Translate ids into rows of the weights.

    Ids are integer ``[M, k]``; the map is integer ``[L]``, or ``[L, R]`` for replicas among which
    tokens take turns, or ``None`` if ids are rows already. Returns ``int64 [M, k]``, -1 for ids
    without a row.
    """
    found = ids.long()
    if expert_map is not None:
        table = expert_map if expert_map.dim() == 2 else expert_map.unsqueeze(1)
        known = (found >= 0) & (found < table.shape[0])
        turn = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) % table.shape[1]
        found = table.long()[torch.where(known, found, 0), turn]
        found = torch.where(known, found, NOWHERE)
    return torch.where((found >= 0) & (found < experts), found, NOWHERE)


class SortedPairs(NamedTuple):
    """Pairs ``token * k + place`` in the order of their experts.

    ``order``, int64 ``[M * k]``, lists pairs by expert and then by token, those without an expert
    last. The pairs of expert ``e`` are ``offsets[e] .. offsets[e + 1]`` in it, int64 ``[E + 1]``.
    """

    order: Tensor
    offsets: Tensor


def sorted_pairs(ids: Tensor, experts: int) -> SortedPairs:
    """Sort the pairs of ids ``[M, k]`` (-1 for no expert) stably by expert."""
    flat = ids.reshape(-1)
    places = torch.where(flat < 0, experts, flat)
    ranked, order = torch.sort(places, stable=True)
    edges = torch.arange(experts + 1, device=ids.device)
    return SortedPairs(order, torch.searchsorted(ranked, edges))


def combine(rows: Tensor, ids: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the rows of each token in ``float32``, in the order of its places, and round once.

    Rows are float ``[M * k, H]``; rows without an expert (id -1) add zero, whatever they hold.
    Weights are ``float32 [M, k]``; ``None`` adds rows as they are. Returns ``[M, H]``.
    """
    m, k = ids.shape
    parts = rows.view(m, k, rows.shape[1])
    total = torch.zeros(m, rows.shape[1], dtype=torch.float32, device=rows.device)
    for place in range(k):
        part = parts[:, place].float()
        if weights is not None:
            part = part * weights[:, place, None]
        total += part.masked_fill(ids[:, place, None] < 0, 0.0)
    return total.to(dtype)
