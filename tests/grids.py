"""Grids of parameters: whole where kernels are compiled, thinned where they are interpreted.

Triton's interpreter takes a thousand times as long as a GPU. A thinned grid keeps every value of
every axis, so it still finds a fault of a single value; ``pairwise`` keeps every pair of values of
two axes as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

COMPILED = torch.cuda.is_available()


def pairwise(*axes: Iterable[Any], whole: bool = COMPILED) -> list[tuple[Any, ...]]:
    """Return combinations in which every pair of values of two axes occurs, chosen greedily."""
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
        row = dict(next(iter(missing)))  # a missing pair, and values that cover most other ones
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
    """Return as few combinations as possible in which every value of every axis occurs.

    Shorter axes repeat until the longest has been used ``turns`` times. At each repetition an axis
    starts one value later, so that its values meet other values of the other axes.
    """
    values: list[Sequence[Any]] = [list(axis) for axis in axes]
    if whole:
        return list(itertools.product(*values))
    places = (
        tuple((i + i // len(v)) % len(v) for v in values)
        for i in range(turns * max(map(len, values)))
    )
    return [tuple(v[i] for v, i in zip(values, row, strict=True)) for row in dict.fromkeys(places)]
