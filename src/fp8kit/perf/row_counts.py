"""Find the row counts for ``warmup`` that together run every kernel of a power of two of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fp8kit.dispatch.backends import choose
from fp8kit.dispatch.device import capability, current
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulBackend, MatmulProblem, m_bucket
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.moe.hopper import tile_config


def layer_counts(problems: Iterable[MatmulProblem], rows: int, device: torch.device) -> list[int]:
    """Return a row count, and others of its power of two for which backends run other kernels."""
    found = [rows]
    with current(device):
        for problem in problems:
            chosen: MatmulBackend | None = choose(MATMUL_BACKENDS, problem).implementation
            found += [] if chosen is None else chosen.row_counts(problem)
    return list(dict.fromkeys(found))


def expert_counts(module: ExpertTensors, takes: Sequence[int], tokens: int) -> list[int]:
    """Return a count of tokens, and others of its power of two that run other kernels of experts.

    ``takes`` has the experts per token of each call that ``forward`` may make. ``tokens`` counts
    those of the layer, or of each expert where rows come sorted. Experts that run product by
    product, with a gate of their own, see any number of tokens: they get every smaller power of
    two.
    """
    if module.stacks.activation is None:
        return _counts_of_products(module, tokens)
    device = module.codes(module.stacks.down).device
    copies = module.expert_count if module.stacks.call == "sorted" else 1
    on_hopper = (capability(device) or (0, 0))[0] == 9
    return counts_of_pairs(tokens, takes, module.expert_count, on_hopper, copies)


def counts_of_pairs(
    tokens: int, takes: Sequence[int], experts: int, on_hopper: bool, copies: int = 1
) -> list[int]:
    """Return ``tokens`` and those of its power of two that run other kernels of experts.

    ``takes`` has the experts per row of each call, and a token makes ``copies`` rows. On Hopper
    kernels depend on the number of pairs, not only on the power of two of rows.
    """
    found, bucket = dict[object, int](), m_bucket(tokens)
    for count in (tokens, *range(bucket, bucket // 2, -1)):
        rows = count * copies
        cuts = [hopper_cut(rows * k, experts) for k in takes] if on_hopper else []
        found.setdefault((m_bucket(rows), *cuts), count)
    return list(found.values())


def hopper_cut(pairs: int, experts: int) -> tuple[object, ...]:
    """Return a key that is equal for numbers of pairs that run the same kernels on Hopper."""
    sorting = (pairs <= tile_config.FEW_PAIRS, pairs <= tile_config.PAIRS_OF_BLOCK)
    return (tile_config.choose(pairs, experts), *sorting)


def _counts_of_products(module: ExpertTensors, tokens: int) -> list[int]:
    found = []
    for most in (tokens, *(1 << i for i in reversed(range((m_bucket(tokens) // 2).bit_length())))):
        device = module.codes(module.stacks.down).device
        found += layer_counts(module.products(most).values(), most, device)
    return list(dict.fromkeys(found))
