"""Every public name of ``fp8kit.compat`` has a row in the documents and a test."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import fp8kit
from fp8kit import compat
from published_names import DOCUMENT, END, NAMES, START, Name, with_table

FOLDER = Path(__file__).parent


def public() -> set[str]:
    """Return the names that ``fp8kit.compat`` exports, without its submodules."""
    files = {p.stem for p in Path(compat.__path__[0]).glob("*.py")}
    return {n for n in dir(compat) if not n.startswith("_")} - files


def without_row(names: set[str]) -> set[str]:
    return names - {row.name for row in NAMES}


def without_test(rows: Iterable[Name]) -> list[str]:
    """Return rows whose test does not exist or does not mention the name."""
    found = []
    for row in rows:
        file, _, test = row.test.partition("::")
        path = FOLDER / file
        text = path.read_text() if path.is_file() else ""
        functions = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
        if test not in functions or row.name not in text:
            found.append(row.name)
    return found


def test_every_name_has_a_row_and_a_test() -> None:
    assert without_row(public()) == set()
    assert len(NAMES) == len({row.name for row in NAMES})
    for row in NAMES:
        assert hasattr(fp8kit.compat, row.name), row.name
    assert without_test(NAMES) == []


def test_the_searches_can_fail() -> None:
    assert without_row({"supports", "gone"}) == {"gone"}
    row = NAMES[0]
    lost = (row._replace(test="test_gone.py::test_x"), row._replace(name="Gone"))
    assert without_test(lost) == [row.name, "Gone"]


def test_the_document_has_the_table_of_today() -> None:
    text = DOCUMENT.read_text()
    assert START in text
    assert text == with_table(text), "run: python tests/published_names.py"
    assert with_table(f"{START}\nold\n{END}") != f"{START}\nold\n{END}"
