"""The table of what works with other libraries agrees with the tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from integrations import matrix
from integrations.matrix import MATRIX, Row

TESTS = Path(__file__).parents[1]


def flaw(row: Row) -> str | None:
    """Return what is wrong with a row: its test does not exist, or shows something else."""
    if not row.test:
        return None if row.outcome == "untested" else "has no test"
    file, _, function = row.test.partition("::")
    if not (TESTS / file).is_file():
        return f"names {file}, which is not there"
    tree = ast.parse((TESTS / file).read_text())
    body = {f.name: ast.unparse(f) for f in tree.body if isinstance(f, ast.FunctionDef)}
    if function not in body:
        return f"names {function}, which {file} does not have"
    if row.outcome == "refused" and "pytest.raises" not in body[function]:
        return f"is refused, and {function} expects no error"
    return f"is untested, and has {function}" if row.outcome == "untested" else None


@pytest.mark.parametrize("library", MATRIX)
def test_each_line_has_a_test_that_shows_it(library: str) -> None:
    assert {r.feature: f for r in MATRIX[library] if (f := flaw(r))} == {}


def test_the_document_is_in_step() -> None:
    text = matrix.DOCUMENT.read_text()
    assert text == matrix.written(text), "run python tests/integrations/matrix.py"


def test_the_search_for_flaws_can_fail() -> None:
    here = "integrations/test_matrix.py::"
    shown = f"{here}test_the_document_is_in_step"
    assert flaw(Row("works", "a", shown)) is None
    assert flaw(Row("untested", "a")) is None
    assert "no test" in str(flaw(Row("works", "a")))
    assert "not there" in str(flaw(Row("works", "a", "integrations/gone.py::test_a")))
    assert "does not have" in str(flaw(Row("works", "a", f"{here}test_gone")))
    assert "expects no error" in str(flaw(Row("refused", "a", shown)))
    assert "is untested" in str(flaw(Row("untested", "a", shown)))
    assert "| a | works |" not in matrix.DOCUMENT.read_text()
