"""Thinned grids lose no value, and ``pairwise`` no pair."""

from __future__ import annotations

import itertools

import pytest

from grids import diagonal, pairwise

AXES = ("abcdefg", range(4), (True, False), "xyz")


def test_pairwise_keeps_every_pair_in_few_combinations() -> None:
    rows = pairwise(*AXES, whole=False)
    for (i, a), (j, b) in itertools.combinations(enumerate(AXES), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(a, b))
    assert len(rows) <= 32
    assert rows == pairwise(*AXES, whole=False)


@pytest.mark.parametrize("axes", [AXES, ("ab", "cd"), ("abcdef", "xyz"), ("abc", "abcdef")])
def test_a_diagonal_keeps_every_value(axes: tuple[str, ...]) -> None:
    rows = diagonal(*axes, whole=False)
    assert len(rows) == max(map(len, axes))
    for kept, axis in zip(zip(*rows, strict=True), axes, strict=True):
        assert set(kept) == set(axis)


def test_where_kernels_are_compiled_grids_are_whole() -> None:
    for grid in (pairwise, diagonal):
        assert grid("ab", "cd", whole=True) == list(itertools.product("ab", "cd"))
