"""What works with other libraries, and the test that shows it: the tables of docs/integrations.md.

    python tests/integrations/matrix.py

writes them. A line is added here, with the test that shows it, and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "integrations.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing a user does: whether it works, how, and the test, as a path below ``tests``."""

    feature: str
    outcome: Literal["works", "refused", "untested"]
    test: str = ""
    how: str = ""


# a library by the name of its distribution, with a line of constraints.txt
MATRIX: dict[str, tuple[Row, ...]] = {
    "transformers": (
        Row(
            "`from_pretrained` of what `fp8kit.save` wrote",
            "works",
            "integrations/test_transformers.py::test_stock_transformers_computes_the_same",
            "this package need not be imported",
        ),
        Row(
            "`save_pretrained`",
            "works",
            "integrations/test_transformers.py::test_save_pretrained_loads_everywhere",
            "as compressed-tensors, byte for byte what `fp8kit.save` writes",
        ),
    ),
}


def version(library: str) -> str:
    """Return the version that the tests run on."""
    pinned = (ROOT / "constraints.txt").read_text()
    found = re.search(rf"^{re.escape(library)}==(\S+)$", pinned, re.MULTILINE)
    assert found, f"{library} is not in constraints.txt"
    return found[1]


def tables(matrix: dict[str, tuple[Row, ...]]) -> str:
    """Write one table per library."""
    lines = []
    for library, rows in matrix.items():
        lines += [f"### {library} {version(library)}", "", "| what | | how | shown by |"]
        lines += ["|---|---|---|---|"]
        for row in rows:
            shown = f"`tests/{row.test}`" if row.test else ""
            lines.append(f"| {row.feature} | {row.outcome} | {row.how} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def written(document: str) -> str:
    """Return the document with its tables replaced."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables(MATRIX)}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
