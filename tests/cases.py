"""Choose the cases of slow tests that `make test` runs (``--cases`` of ``conftest.py``)."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable

import pytest


def beyond_the_first(
    items: Iterable[pytest.Item], most: int, slowest: Collection[str] = ()
) -> list[pytest.Item]:
    """Return the cases of slow tests to leave out: all but the first ``most`` of each.

    The order is that of hashes of the names, so that new cases do not change it; a case with a mark
    ``slow`` of its own comes last.

    Args:
        items: all collected tests.
        most: number of cases of a slow test that run.
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
