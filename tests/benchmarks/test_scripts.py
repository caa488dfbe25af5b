"""Every benchmark prints its ``--help`` on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import llama_layer

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def scripts() -> list[Path]:
    return [p for p in sorted(FOLDER.glob("*.py")) if '__name__ == "__main__"' in p.read_text()]


@pytest.mark.parametrize("path", scripts(), ids=lambda p: p.stem)
def test_every_benchmark_prints_its_help(
    path: Path, run_script: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_script(path, "--help")
    assert stopped.value.code == 0
    assert f"usage: {path.name}" in capsys.readouterr().out


def test_there_are_scripts_to_ask() -> None:
    assert {"linear", "tables", "plot", "compiled"} <= {p.stem for p in scripts()}


def test_variants_of_a_decoder_layer_are_compared_with_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_layer, "time_cases", lambda cases, **_: dict.fromkeys(cases, 2.0))
    config = llama_layer.llama_8b()
    for name, size in {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}.items():
        setattr(config, name, size)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    device = torch.device("cpu")
    dense = llama_layer.dense_layer(config, device)

    def doubled(*args: object, **kwargs: object) -> torch.Tensor:
        return 2 * llama_layer.first(dense(*args, **kwargs))

    row = llama_layer.measure({"bf16": dense, "doubled": doubled}, config, 3, device)
    assert row["m"] == 3
    assert row["us"] == {"bf16": 2.0, "doubled": 2.0}
    assert row["relative_error"] == pytest.approx({"bf16": 0.0, "doubled": 1.0})
