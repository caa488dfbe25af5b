"""The examples of image pipelines and encoders run verbatim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' warnings about their own code


def test_image_pipeline(tmp_path: Path, run_script: Callable[..., str]) -> None:
    pytest.importorskip("PIL")
    script = EXAMPLES / "image_pipeline.py"
    said = run_script(script, "--steps", "2", "--out", str(tmp_path / "fp8"))
    assert "12 layers converted" in said
    assert "drawn again to the bit" in said
    assert (tmp_path / "fp8" / "image.png").stat().st_size > 100


def test_encoder_search(run_script: Callable[..., str]) -> None:
    said = run_script(EXAMPLES / "encoder_search.py")
    found = [line.split("  ")[1] for line in said.splitlines() if line.startswith(("bf16", "FP8:"))]
    assert len(found) == 2
    assert found[0] == found[1], "FP8 finds what bf16 finds"
    assert "open(path)" in found[0]
