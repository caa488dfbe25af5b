"""The list of slow tests names tests that exist, once each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SLOW = Path(__file__).with_name("slow.txt")


def missing(names: list[str]) -> list[str]:
    """Return the names for which there is no test function."""
    found: dict[str, set[str]] = {}
    for name in names:
        path = name.partition("::")[0]
        file = SLOW.parents[1] / path
        if path not in found:
            tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
            functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
            found[path] = {f"{path}::{n.name}" for n in functions}
    return [name for name in names if name not in found[name.partition("::")[0]]]


def test_every_slow_test_exists() -> None:
    names = SLOW.read_text().split()
    assert names == sorted(set(names))
    assert missing(names) == []


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
