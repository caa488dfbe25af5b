"""Grids of parameters: whole where kernels are compiled, thinned where they are interpreted.

Triton's interpreter takes a thousand times as long as a GPU. What one value of an axis breaks, a
thinned grid still shows, for every value of every axis stays; ``pairwise`` keeps every pair, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

COMPILED = torch.cuda.is_available()


def pairwise(*axes: Iterable[Any], whole: bool = COMPILED) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of two axes meet, chosen greedily."""
    values = [list(axis) for axis in axes]
    if whole:
        return list(itertools.product(*values))
    rows = _covering([len(axis) for axis in values])
    return [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows]


def _covering(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    places = [[(axis, i) for i in range(n)] for axis, n in enumerate(lengths)]
    missing = dict.fromkeys(
        pair for a, b in itertools.combinations(places, 2) for pair in itertools.product(a, b)
    )
    rows: list[tuple[int, ...]] = []
    while missing:
        row = dict(next(iter(missing)))  # a pair that no row has, and what meets most of them yet
        for axis in range(len(lengths)):
            if axis not in row:
                met = {i: _met(row, axis, i) & missing.keys() for _, i in places[axis]}
                row[axis] = max(
                    met, key=lambda i, met=met: (len(met[i]), -((i - len(rows)) % len(met)))
                )
        rows.append(tuple(row[axis] for axis in range(len(lengths))))
        for pair in itertools.combinations(enumerate(rows[-1]), 2):
            missing.pop(pair, None)
    return rows


def _met(row: dict[int, int], axis: int, i: int) -> set[tuple[tuple[int, int], ...]]:
    return {tuple(sorted([other, (axis, i)])) for other in row.items()}


def diagonal(*axes: Iterable[Any], turns: int = 1, whole: bool = COMPILED) -> list[tuple[Any, ...]]:
    """Return combinations in which every value of every axis occurs, as few as that takes.

    Axes repeat until the longest has ended ``turns`` times; each starts a step later in each round,
    so that it meets other values of its neighbours.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    if whole:
        return list(itertools.product(*values))
    places = (
        tuple((i + i // len(v)) % len(v) for v in values)
        for i in range(turns * max(map(len, values)))
    )
    return [tuple(v[i] for v, i in zip(values, row, strict=True)) for row in dict.fromkeys(places)]
