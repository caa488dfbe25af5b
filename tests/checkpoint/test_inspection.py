"""Describing checkpoints, sound and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint_samples import NANO, SHARD, edit_json, edit_tensors, saved
from fp8kit.checkpoint.inspection import LayerInfo, inspect
from fp8kit.errors import CheckpointError


def test_sound_checkpoint(tmp_path: Path) -> None:
    found = inspect(saved(tmp_path / "c", max_shard_bytes=20_000))
    assert (found.dialect, found.scheme) == ("compressed-tensors", "FP8_DYNAMIC")
    assert found.layers == [
        LayerInfo("down", (129, 203), "row", "row", "float32", 129 * 203 + 4 * 129),
        LayerInfo("up", (203, 129), "row", "row", "float32", 203 * 129 + 4 * 203),
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
    assert "up     203x129  row     row          float32  0.03" in lines
    assert "left in high precision: lm_head" in lines
    assert "The config quantizes the KV cache; its scales are not used." in lines
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["layers"][1]["shape"] == [203, 129]
    assert plain["problems"] == []


def test_damage_is_listed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_tensors(path, up__weight_scale=None, down__weight=torch.ones(129, 203))
    found = inspect(path)
    assert len(found.problems) == 2
    assert "PROBLEM: up.weight is torch.float8_e4m3fn and has no up.weight_scale" in str(found)
    assert "no problems found" not in str(found)
    assert found.layers == [LayerInfo("up", (203, 129), "row", "row", "", 203 * 129)]


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
