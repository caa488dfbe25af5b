"""Describing checkpoints, sound and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_samples import NANO, SHARD, edit_json, edit_tensors, saved
from fp8kit.checkpoint.inspection import Inspection, LayerInfo, inspect
from fp8kit.checkpoint.schema.pairing import group_repeated
from fp8kit.errors import CheckpointError
from golden.generate import FOLDER


def test_sound_checkpoint(tmp_path: Path) -> None:
    found = inspect(saved(tmp_path / "c", max_shard_bytes=20_000))
    assert (found.dialect, found.scheme) == ("compressed-tensors", "FP8_DYNAMIC")
    assert found.layers == [
        LayerInfo("down", (129, 203), "FP8_DYNAMIC", "row", "row", "float32", 129 * 203 + 4 * 129),
        LayerInfo("up", (203, 129), "FP8_DYNAMIC", "row", "row", "float32", 203 * 129 + 4 * 203),
    ]
    assert found.ignored == ["lm_head"]
    assert found.bytes_by_dtype["float8_e4m3fn"] == 2 * 203 * 129
    assert found.bytes_by_dtype["int64"] == 16
    assert found.tensors == 9
    assert found.shards == 5
    assert found.problems == []


@pytest.mark.parametrize(
    ("scheme", "weight", "activation"),
    [
        ("FP8", "tensor", "static tensor"),
        ("FP8_TENSOR", "tensor", "row"),
        ("FP8_WEIGHT_ONLY", "row", "16 bit"),
    ],
)
def test_granularities(tmp_path: Path, scheme: str, weight: str, activation: str) -> None:
    found = inspect(saved(tmp_path / "c", scheme))
    assert {(layer.weight, layer.activation) for layer in found.layers} == {(weight, activation)}


def test_high_precision() -> None:
    found = inspect(NANO)
    assert (found.dialect, found.scheme, found.layers) == ("", "", [])
    assert "high precision, 38 tensors in 1 file" in str(found)
    assert str(found).endswith("no problems found")


def test_text_and_json(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_json(path / "config.json", quantization_config=content | {"kv_cache_scheme": {"a": 1}})
    found = inspect(path)
    lines = str(found).splitlines()
    assert lines[0] == f"{path}: compressed-tensors, FP8_DYNAMIC, 9 tensors in 1 file"
    assert "up     203x129  row     row          float32      0.03" in lines
    assert "left in high precision: lm_head" in lines
    assert "The config quantizes the KV cache; only fp8kit.Fp8Cache uses its scales." in lines
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["layers"][1]["shape"] == [203, 129]
    assert plain["problems"] == []


def test_damage_is_listed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_tensors(path, up__weight_scale=None, down__weight=torch.ones(129, 203))
    found = inspect(path)
    assert len(found.problems) == 2
    told = "model.safetensors: up.weight is torch.float8_e4m3fn and has no up.weight_scale"
    assert f"PROBLEM: {told}" in str(found)
    assert "no problems found" not in str(found)
    assert found.layers == [LayerInfo("up", (203, 129), "FP8_DYNAMIC", "row", "row", "", 203 * 129)]


def test_bad_scales_are_listed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    scales = load_file(path / SHARD)
    edit_tensors(
        path,
        up__weight_scale=scales["up.weight_scale"] * float("inf"),
        down__weight_scale=-scales["down.weight_scale"],
    )
    assert len(inspect(path).problems) == 2


def test_missing_shard_is_listed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", max_shard_bytes=20_000)
    sorted(path.glob("*.safetensors"))[0].unlink()
    found = inspect(path)
    assert any("is missing in" in p for p in found.problems)
    assert found.tensors < 9


def test_nothing_to_describe(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no directory"):
        inspect(tmp_path / "none")


def test_layers_that_differ_in_numbers_are_one_line() -> None:
    layers = [
        LayerInfo(f"layers.{i}.{n}_proj", (4, i // 3), "FP8", "tensor", "row", "float32", 2**20)
        for n in ("up", "down")
        for i in range(4)
    ]
    ignored = ["lm_head", "layers.0.gate", "layers.1.gate"]
    found = Inspection("c", "fp8", "FP8", layers, ignored, ["layers.3.k_scale"])
    lines = [line.split() for line in str(found).splitlines()]
    assert ["layers.*.up_proj", "(3)", "4x0", "tensor", "row", "float32", "1.00"] in lines
    assert ["layers.3.down_proj", "4x1", "tensor", "row", "float32", "1.00"] in lines
    assert "left in high precision: lm_head, layers.*.gate (2)" in str(found)
    assert "scales of the KV cache: layers.3.k_scale" in str(found)
    assert len(found.to_dict()["layers"]) == 8


def test_repeated_problems_are_one_line() -> None:
    texts = [f"layers.{i}.weight has no scale." for i in range(5)] + ["b is bad."]
    assert group_repeated(texts) == [
        "layers.0.weight has no scale.",
        "layers.1.weight has no scale.",
        "layers.2.weight has no scale. (And 2 more like this.)",
        "b is bad.",
    ]
    assert str(Inspection("c", problems=texts)).count("PROBLEM") == 4


def test_scales_of_16_bit_are_noted() -> None:
    found = inspect(FOLDER / "compressed-tensors-bf16-scales")
    assert found.problems == []
    assert any(note.startswith("2 scales have 16 bit, e.g. model.layers.0") for note in found.notes)


def test_scales_of_the_cache_are_reported() -> None:
    found = inspect(FOLDER / "modelopt-nested")
    assert found.kv_scales == [f"model.layers.0.self_attn.{kv}_scale" for kv in "kv"]


def test_layers_may_differ() -> None:
    found = inspect(FOLDER / "modelopt-mixed")
    assert {layer.scheme for layer in found.layers} == {"FP8", "FP8_DYNAMIC"}
    assert "modelopt, FP8_DYNAMIC and others" in str(found) or "modelopt, FP8 and o" in str(found)


def test_one_file_is_described() -> None:
    found = inspect(FOLDER / "comfyui-quant" / "diffusion.safetensors")
    assert (found.dialect, found.scheme, found.shards) == ("comfyui", "FP8_WEIGHT_ONLY", 1)
    assert str(found).startswith(f"{FOLDER / 'comfyui-quant' / 'diffusion.safetensors'}: comfyui")


def test_quanto_is_named_once_by_its_tensors(tmp_path: Path) -> None:
    tensors = {}
    for name in ("up", "down"):
        tensors[f"{name}.weight._data"] = torch.ones(8, 16).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight._scale"] = torch.ones(8, 1)
    save_file(tensors, tmp_path / SHARD)
    (problem,) = inspect(tmp_path).problems
    assert problem.startswith("The checkpoint was written by quanto")


def test_an_unknown_dialect_is_described(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_json(path / "config.json", quantization_config={"quant_method": "awq"})
    found = inspect(path)
    assert (found.dialect, found.tensors) == ("", 9)
    assert found.problems[0].startswith("config.json says quant_method = 'awq'. This version reads")
    assert f"{path}: FP8 of no known dialect, 9 tensors" in str(found)
