"""MX weights that become other FP8 schemes: changes are reported, and lossy ones fall back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import QTensor
from mx_checkpoints import K, Model, N, directory, outlying, trained
from numerics import assert_bits_equal

WEIGHT_ONLY = "FP8_MX_BY_16BIT"


def written(path: Path, name: str) -> tuple[str, torch.Tensor]:
    """Return the scheme of a layer on disk ("dense" if it has none) and its values."""
    found = open_checkpoint(path)
    if name not in found.layers:
        return "dense", found.read(f"{name}.weight").float()
    layer = found.layers[name]
    q = QTensor(found.read(layer.weight), found.read(layer.scale), layer.group)
    return layer.scheme.name, fp8kit.dequantize(q)


@pytest.mark.parametrize(
    ("kind", "scheme", "target", "fallen"),
    [
        ("columns", "FP8_DYNAMIC", "vllm", "FP8_BLOCK"),
        ("columns", "FP8_TENSOR", "sglang", "FP8_BLOCK"),
        ("columns", "FP8_WEIGHT_ONLY", "vllm", WEIGHT_ONLY),
        ("columns", "FP8_WEIGHT_ONLY", "sglang", "dense"),
        ("everywhere", "FP8_DYNAMIC", "vllm", WEIGHT_ONLY),
        ("everywhere", "FP8_DYNAMIC", "transformers", "dense"),
        ("everywhere", "FP8_BLOCK", "vllm", "dense"),
    ],
)  # fmt: skip
def test_weights_that_would_lose_too_much_fall_back_by_name(
    kind: str, scheme: str, target: str, fallen: str, tmp_path: Path
) -> None:
    weights = outlying(kind)
    source = directory(tmp_path / "a", weights)
    with pytest.warns(UserWarning, match="up: one power of two per .*would change") as told:
        fp8kit.convert_checkpoint(source, tmp_path / "b", target=target, scheme=scheme)
    said = {"dense": "in high precision", WEIGHT_ONLY: "as MXFP8_WEIGHT_ONLY"}
    assert str(told[0].message).endswith(f"written {said.get(fallen, 'as FP8_BLOCK')}: up.")
    kinds = {name: written(tmp_path / "b", name)[0] for name in weights}
    assert kinds == {"up": fallen, "down": scheme}
    # block scales can hold columns of another magnitude; the other forms hold all values
    assert_bits_equal(written(tmp_path / "b", "up")[1], fp8kit.dequantize(weights["up"]))
    model = fp8kit.load(tmp_path / "b", Model())
    assert model(torch.randn(2, K)).isfinite().all()


def test_what_changes_is_counted(tmp_path: Path) -> None:
    weights = trained()
    weights["up"].data.view(torch.uint8)[:3, 0] = 1  # less than a step of the row
    source = directory(tmp_path / "a", weights)
    with pytest.warns(UserWarning, match=r"Rebasing changed 1 weights. up: \d+ of") as told:
        fp8kit.convert_checkpoint(source, tmp_path / "b", scheme="FP8_DYNAMIC")
    wanted = fp8kit.dequantize(weights["up"])
    changed = int((written(tmp_path / "b", "up")[1] != wanted).sum())
    assert changed > 0
    assert f"up: {changed} of {N * K} values" in str(told[0].message)


def test_layers_that_engines_merge_fall_back_together(tmp_path: Path) -> None:
    good, bad = trained()["up"], outlying("everywhere")["up"]
    weights = {"mlp.gate_proj": good, "mlp.up_proj": bad, "mlp.down_proj": trained()["down"]}
    for i in range(2):
        held = {"gate_proj": bad if i else good, "up_proj": good, "down_proj": trained()["down"]}
        weights |= {f"mlp.experts.{i}.{n}": q for n, q in held.items()}
    source = directory(tmp_path / "a", weights)
    with pytest.warns(UserWarning, match="; written ") as told:
        fp8kit.convert_checkpoint(source, tmp_path / "b", scheme="FP8_DYNAMIC")
    said = sorted(str(w.message).partition("written ")[2] for w in told)
    assert said[0] == "as MXFP8_WEIGHT_ONLY: mlp.gate_proj, mlp.up_proj."
    assert said[1].startswith("in high precision: mlp.experts.0.")
    kinds = {name: written(tmp_path / "b", name)[0] for name in weights}
    assert kinds["mlp.gate_proj"] == kinds["mlp.up_proj"] == WEIGHT_ONLY
    assert {n for n, kind in kinds.items() if kind == "FP8_DYNAMIC"} == {"mlp.down_proj"}
    for name, q in weights.items():  # all are exact in bf16
        assert_bits_equal(written(tmp_path / "b", name)[1], fp8kit.dequantize(q))
