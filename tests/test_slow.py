"""The list of slow tests names existing tests, once each; `--cases` runs some cases of each."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from cases import beyond_the_first

SLOW = Path(__file__).with_name("slow.txt")
SLOWEST = SLOW.with_name("slowest.txt")


def missing(names: list[str]) -> list[str]:
    """Return the names for which there is no test function."""
    found: dict[str, set[str]] = {}
    for name in names:
        path = name.partition("::")[0]
        file = SLOW.parents[1] / path
        if path not in found:
            text = file.read_text() if file.is_file() else ""
            found[path] = {f"{path}::{n}" for n in re.findall(r"^ *def (\w+)\(", text, re.M)}
    return [name for name in names if name not in found[name.partition("::")[0]]]


def test_every_slow_test_exists() -> None:
    names, slowest = SLOW.read_text().split(), SLOWEST.read_text().split()
    assert (names, slowest) == (sorted(set(names)), sorted(set(slowest)))
    assert missing(names) == []
    assert set(slowest) <= set(names)


def test_the_search_for_slow_tests_can_fail() -> None:
    here = "tests/test_slow.py::test_every_slow_test_exists"
    gone = ["tests/test_slow.py::test_gone", "tests/gone.py::test_gone"]
    assert missing([here, *gone]) == gone


def test_a_listed_test_is_marked(request: pytest.FixtureRequest) -> None:
    marked = {
        item.nodeid.partition("[")[0]
        for item in request.session.items
        if item.get_closest_marker("slow")
    }
    ran = {item.nodeid.partition("[")[0] for item in request.session.items}
    assert ran & set(SLOW.read_text().split()) <= marked


class Case(SimpleNamespace):
    """Replaces a test that pytest has collected."""

    def get_closest_marker(self, name: str) -> bool:
        """Return whether the test has a mark."""
        return name in self.marks


def test_some_cases_of_each_slow_test_are_left_out() -> None:
    slow = [Case(nodeid=f"tests/a.py::test_a[{i}]", marks={"slow"}) for i in range(9)]
    other = Case(nodeid="tests/a.py::test_b", marks={"slow"})
    quick = [Case(nodeid=f"tests/a.py::test_c[{i}]", marks=set()) for i in range(9)]
    gpu = [Case(nodeid=f"tests/a.py::test_a[cuda-{i}]", marks={"slow", "gpu"}) for i in range(9)]
    out = beyond_the_first([*slow, other, *quick, *gpu], 2)
    assert len(out) == 7
    assert {case.nodeid for case in out} <= {case.nodeid for case in slow}
    kept = [case for case in slow if case not in out]
    assert kept != slow[:2]  # neighbours differ in the last parameter only
    more = Case(nodeid="tests/a.py::test_a[new]", marks={"slow"})
    assert len({*map(id, beyond_the_first([*slow[::-1], more], 2))} & {*map(id, kept)}) <= 1
    assert beyond_the_first(slow, 9) == []
    kept[0].callspec = SimpleNamespace(marks=[pytest.mark.slow])
    assert kept[0] in beyond_the_first(slow, 2)
    assert beyond_the_first([*slow, other], 9, {"tests/a.py::test_a"}) == beyond_the_first(slow, 0)
