"""The documentation site builds, strictly: every link, anchor and documented name resolves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fp8kit

ROOT = Path(__file__).resolve().parents[1]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # not --quiet, which hides warnings: --strict counts only warnings that are shown
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": ""}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def test_the_site_builds(tmp_path: Path) -> None:
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stderr
    operators = (tmp_path / "api" / "operators" / "index.html").read_text()
    assert "Quantize a tensor" in operators, "docstrings are not rendered"


@pytest.mark.parametrize(
    "broken",
    ["[gone](gone.md)", "[gone](conversion.md#gone)", "::: fp8kit.functional.gone"],
    ids=["link", "anchor", "name"],
)
def test_the_site_can_fail(broken: str, tmp_path: Path) -> None:
    """Two pages, one with an error, are built under the same settings."""
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conversion.md").write_text("# Conversion\n")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Home\n\n[there](conversion.md#conversion)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    page.write_text(f"# Home\n\n{broken}\n")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert "gone" in result.stderr


def test_every_page_has_a_place() -> None:
    """A reader cannot find a page outside the navigation."""
    text = (ROOT / "mkdocs.yml").read_text()
    nav = yaml.safe_load(text)["nav"]

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        inside = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(pages, inside))  # type: ignore[arg-type]

    docs = ROOT / "docs"
    assert pages(nav) == {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}


def test_every_public_name_is_documented() -> None:
    """Every export of ``fp8kit`` has an entry in the reference, or is a constant on one page."""
    text = "\n".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    missing = [n for n in fp8kit.__all__ if n not in text]
    assert not missing, f"no page of docs/api names {missing}"
