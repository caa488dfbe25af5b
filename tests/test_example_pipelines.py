"""The examples of image pipelines and of encoders run as they stand."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("diffusers")
pytest.importorskip("transformers")


def run(name: str, arguments: list[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the libraries say of their own code
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_image_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    run("image_pipeline.py", ["--steps", "2", "--out", str(tmp_path / "fp8")], monkeypatch)
    said = capsys.readouterr().out
    assert "12 layers converted" in said
    assert "drawn again to the bit" in said
    assert (tmp_path / "fp8" / "image.png").stat().st_size > 100


def test_encoder_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("encoder_search.py", [], monkeypatch)
    said = capsys.readouterr().out
    found = [line.split("  ")[1] for line in said.splitlines() if line.startswith(("bf16", "FP8:"))]
    assert len(found) == 2
    assert found[0] == found[1], "FP8 finds what bf16 finds"
    assert "open(path)" in found[0]
