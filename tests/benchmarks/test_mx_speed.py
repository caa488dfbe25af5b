"""The benchmark of MXFP8 layers, run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fp8kit
import layers
import mx_speed
from fp8kit.formats import MX_FORMS

SMALL = {"8b.o": (32, 64), "odd.smollm_qkv": (48, 80)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SMALL.items():
        monkeypatch.setitem(layers.SHAPES, name, shape)


def run(out: Path, *more: str) -> None:
    shapes = ",".join(SMALL)
    mx_speed.main([str(out), "--device", "cpu", "--shapes", shapes, "--rows", "1,5", *more])


def test_every_layer_is_compared_and_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "mx.json", "--quick")
    rows = json.loads((tmp_path / "mx.json").read_text())["rows"]
    assert [(row["shape"], row["m"]) for row in rows] == [(s, m) for s in SMALL for m in (1, 5)]
    for row in rows:
        assert {"bf16", "FP8_DYNAMIC", "MXFP8"} == set(row["us"]) == set(row["relative_error"])
        # the MXFP8 layer is not a bf16 one in disguise
        assert row["relative_error"]["bf16"] < 0.01 < row["relative_error"]["MXFP8"]
        assert min(row["us"].values()) > 0
        assert "rebased" in row["form"]
    absent, *said = capsys.readouterr().out.splitlines()
    assert absent == "humming: not asked for (HUMMING)"
    assert len(said) == len(rows) + 4
    ratio = rows[0]["us"]["MXFP8"] / rows[0]["us"]["FP8_DYNAMIC"]
    assert f"MXFP8 / FP8_DYNAMIC {ratio:.3f}" in said[0]
    assert said[-1].startswith("bf16 / MXFP8 m=5 ")


# a fake of Humming's layer, with the same interface, in plain torch
HUMMING = """
import torch
class HummingLayer(torch.nn.Module):
    def __init__(self, n, k, config, torch_dtype):
        super().__init__()
        assert config == {"quant_method": "modelopt", "quant_algo": "mxfp8"}
        assert torch_dtype == torch.bfloat16
    def load_from_tensors(self, tensors):
        self.tensors = tensors
    def transform(self):
        if self.tensors["weight"].shape[0] == 48:
            raise ValueError("48 rows")
        scales = torch.exp2(self.tensors["weight_scale"].float() - 127)
        self.dense = self.tensors["weight"].float() * scales.repeat_interleave(32, 1)
    def forward(self, x):
        return (x.float() @ self.dense.t()).bfloat16()
"""


def test_a_peer_is_timed_with_the_same_weight_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "humming"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.1"\n')
    (package / "layer.py").write_text(HUMMING)
    monkeypatch.setenv("HUMMING", "1")
    monkeypatch.syspath_prepend(tmp_path)
    run(tmp_path / "mx.json", "--quick")
    document = json.loads((tmp_path / "mx.json").read_text())
    assert document["peers"] == {"humming": "0.1"}
    served, *_, declined = document["rows"]
    assert 0 < served["relative_error"]["humming"] < served["relative_error"]["MXFP8"]
    assert "Humming / MXFP8 m=1 " in capsys.readouterr().out
    assert declined["failed"] == {"humming": "ValueError: 48 rows"}


def test_layers_have_one_weight_and_the_form_of_the_device() -> None:
    found = mx_speed.layers_of((32, 64), 2, torch.device("cpu"))
    dense, mx = found["bf16"][1], found["MXFP8"][1]
    assert isinstance(mx, fp8kit.Fp8Linear)
    assert mx.scheme in MX_FORMS.values()
    assert mx.scheme.rebased
    assert not torch.equal(dense.weight, found["bf16"][0].weight)
    again = fp8kit.rebase(fp8kit.quantize(dense.weight, fp8kit.MX, role="weight")).q
    assert torch.equal(mx.codes.view(torch.uint8), again.data.view(torch.uint8))


def test_a_layer_that_failed_is_told_and_an_error_in_the_end() -> None:
    row = {"shape": "8b.o", "m": 1, "us": {"bf16": 8.0, "MXFP8": 4.0}}
    failed = row | {"failed": {"FP8_DYNAMIC": "relative error 1"}}
    assert mx_speed.told(failed).endswith(
        "bf16 / MXFP8 2.000\n    failed FP8_DYNAMIC: relative error 1"
    )
    mx_speed.stop_if_broken([row])
    with pytest.raises(SystemExit, match=r"8b.o m=1: \{'FP8_DYNAMIC': 'relative error 1'"):
        mx_speed.stop_if_broken([row, failed])


def test_nothing_starts_after_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "none.json", "--seconds", "-1")
    assert capsys.readouterr().out.count("skipped, out of time") == 2
    assert not (tmp_path / "none.json").exists()
