"""Which cases of slow tests `make test` runs."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable

import pytest


def beyond_the_first(
    items: Iterable[pytest.Item], most: int, slowest: Collection[str] = ()
) -> list[pytest.Item]:
    """Return all but so many cases of each slow test, in an order that new cases do not change.

    Those that are marked as slow by themselves come last.

    Args:
        items: all tests.
        most: how many cases of a slow test run.
        slowest: names of slow tests of which no case runs.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0]].append(item)
    ordered = (sorted(of, key=_order) for of in cases.values())
    return [
        item
        for of in ordered
        for at, item in enumerate(of)
        if at >= most or item.nodeid.partition("[")[0] in slowest
    ]


def _order(item: pytest.Item) -> tuple[bool, int]:
    own = getattr(getattr(item, "callspec", None), "marks", ())
    return any(mark.name == "slow" for mark in own), zlib.crc32(item.nodeid.encode())
