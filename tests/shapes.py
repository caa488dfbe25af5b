"""Matmul shapes for tests, each with a name and the reason why it is tested."""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Regime(NamedTuple):
    """``x [m, k] @ w [n, k].T`` and why it is worth testing."""

    name: str
    m: int
    n: int
    k: int
    why: str

    def __str__(self) -> str:
        return self.name


REGIMES = (
    Regime("one-row", 1, 256, 512, "decode of one sequence: reductions over M degenerate"),
    Regime("decode", 16, 256, 512, "a decode batch: exactly one tile of rows"),
    Regime("decode-plus", 17, 256, 512, "one row more than a tile"),
    Regime("prefill", 255, 256, 384, "many rows, one short of a power of two"),
    Regime("ragged", 33, 200, 300, "N and K are no multiples of 16, 32 or 128"),
    Regime("odd", 7, 77, 131, "odd N and K: no vector load is aligned"),
    Regime("k-tail", 16, 128, 129, "one column in the last group of K"),
    Regime("n-tail", 16, 129, 128, "one row in the last block of N"),
    Regime("long-k", 3, 48, 8192, "rounding of long sums"),
    Regime("small-k", 5, 64, 16, "K shorter than every group"),
    Regime("single", 1, 1, 1, "the smallest matmul with a value"),
    Regime("empty-m", 0, 64, 128, "no rows: an expert that got no tokens"),
    Regime("empty-n", 4, 0, 128, "no output features"),
    Regime("empty-k", 4, 64, 0, "an empty sum is zero, plus the bias"),
)

# around powers of two and tile heights, where row masks go wrong
ROW_COUNTS = (0, 1, 2, 3, 7, 15, 16, 17, 33, 255)


def regimes() -> list[object]:
    """Return the regimes as parameters with their names as test ids."""
    return [pytest.param(r, id=r.name) for r in REGIMES]
