"""NVFP4 checkpoints: both layouts are read and quantized to FP8, and the error is reported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import QTensor
from numerics import ONE_OPERAND, assert_bits_equal, relative_error

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
N, K = 128, 256
FACTOR = 2.0**-12
GROUP = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
        "group_size": 16, "dynamic": False,
    },
}  # fmt: skip
CONFIGS = {
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": GROUP},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "auto-round": {"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4, "group_size": 16},
}


def packed(columns: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, e4m3 scales and values of a trained-like weight, packed by the definition."""
    weight = torch.randn(N, K // columns, columns) * 0.02
    scale = (weight.abs().amax(-1) / 6 / FACTOR).to(torch.float8_e4m3fn)
    wide = scale.float().unsqueeze(-1) * FACTOR
    codes = ((weight.abs() / wide).unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * weight.sign() * wide).view(N, K)
    halves = (codes + 8 * (weight < 0)).view(N, K)
    pairs = halves[:, 0::2] + 16 * halves[:, 1::2]  # the first value is the low half
    return pairs.to(torch.uint8), scale, values


def directory(path: Path, layout: str) -> tuple[Path, Tensor]:
    torch.manual_seed(0)
    pairs, scale, values = packed()
    tensors = {"fc.weight_scale": scale}
    if layout == "modelopt":
        tensors |= {"fc.weight": pairs, "fc.weight_scale_2": torch.tensor(FACTOR)}
        tensors |= {"fc.input_scale": torch.tensor(0.1)}
    else:
        tensors |= {"fc.weight_packed": pairs, "fc.weight_global_scale": torch.tensor([1 / FACTOR])}
        tensors |= {"fc.input_global_scale": torch.tensor([0.1])}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": CONFIGS[layout]}))
    return path, values


@pytest.mark.parametrize("layout", CONFIGS)
def test_a_source_is_quantized_as_it_loads_and_the_error_is_told(
    layout: str, tmp_path: Path
) -> None:
    path, values = directory(tmp_path / "a", layout)
    assert open_checkpoint(path).spec.scheme.name == "FP8_DYNAMIC"
    model = nn.ModuleDict({"fc": nn.Linear(K, N, False)})
    with pytest.warns(UserWarning, match="1 NVFP4 weights were quantized to FP8_DYNAMIC") as told:
        fp8kit.load(path, model)
    found = re.search(r"(\S+) at most \(fc\)", str(told[0].message))
    assert found is not None
    weight = model.fc.to_linear(torch.float32).weight.detach()
    error = relative_error(weight, values)
    assert float(found[1]) == pytest.approx(error, rel=0.05)
    assert ONE_OPERAND / 3 < error < ONE_OPERAND * 1.5
    wanted = fp8kit.quantize(values, role="weight")
    assert_bits_equal(model.fc.codes, wanted.data)
    assert_bits_equal(model.fc.weight_scale.detach(), wanted.scale)
    assert "NVFP4 quantized to FP8: relative error" in str(fp8kit.explain(model))


def test_another_thread_may_read_in_between(tmp_path: Path) -> None:
    tensors = {}
    for name in "ab":
        pairs, scale, _ = packed()
        tensors |= {f"{name}.weight": pairs, f"{name}.weight_scale": scale}
        tensors[f"{name}.weight_scale_2"] = torch.tensor(FACTOR)
    path, _ = directory(tmp_path / "a", "modelopt")
    save_file(tensors, path / "model.safetensors")
    found, wanted = open_checkpoint(path), open_checkpoint(path).read("a.weight")

    class Interrupted(dict[str, float]):
        def __setitem__(self, layer: str, error: float) -> None:
            super().__setitem__(layer, error)
            if layer == "a":
                found.read("b.weight")

    found.errors = Interrupted()
    assert_bits_equal(found.read("a.weight"), wanted)
    assert found.errors.keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [("modelopt", None), ("compressed-tensors", "FP8_DYNAMIC"), ("modelopt", "FP8_BLOCK"),
     ("compressed-tensors", "MXFP8")],
)  # fmt: skip
def test_a_source_is_converted_to_a_scheme(layout: str, scheme: str | None, tmp_path: Path) -> None:
    path, values = directory(tmp_path / "a", layout)
    with pytest.warns(UserWarning, match=f"quantized to {scheme or 'FP8_DYNAMIC'}"):
        fp8kit.convert_checkpoint(path, tmp_path / "b", scheme=scheme)
    written = open_checkpoint(tmp_path / "b")
    layer = written.layers["fc"]
    assert layer.scheme.name == (scheme or "FP8_DYNAMIC")
    q = QTensor(written.read("fc.weight"), written.read(layer.scale), layer.group)
    wanted = fp8kit.quantize(values, layer.group, role="weight")
    assert_bits_equal(q.data, wanted.data)
    assert_bits_equal(q.scale, wanted.scale)


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "FP8_TENSOR", "FP8_DYNAMIC"])
def test_a_weight_of_one_block_gets_the_scheme_that_was_asked_for(
    scheme: str, tmp_path: Path
) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    pairs, scale, _ = packed()
    small = {"fc.weight": pairs[:, :64].contiguous(), "fc.weight_scale": scale[:, :8].contiguous()}
    factor = {"fc.weight_scale_2": torch.tensor(FACTOR)}
    save_file(small | factor, path / "model.safetensors")
    model = nn.ModuleDict({"fc": nn.Linear(128, N, False)})
    with pytest.warns(UserWarning, match=f"quantized to {scheme}"):
        fp8kit.load(path, model, scheme=scheme)
    assert model.fc.scheme.name == scheme


@pytest.mark.parametrize("scheme", ["FP8", "FP8_WEIGHT_ONLY"])
def test_other_schemes_are_refused(scheme: str, tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    for use in (
        lambda: fp8kit.convert_checkpoint(path, tmp_path / "b", scheme=scheme),
        lambda: fp8kit.load(path, nn.ModuleDict({"fc": nn.Linear(K, N, False)}), scheme=scheme),
    ):
        with pytest.raises(fp8kit.CheckpointError, match="NVFP4 weights become"):
            use()


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_NVFP4_FP8"])
def test_groups_of_32_are_read_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    said = CONFIGS["modelopt"] | {"quant_algo": algorithm}
    (path / "config.json").write_text(json.dumps({"quantization_config": said}))
    torch.manual_seed(1)
    source = (torch.randn(N, K // 32, 32) * 0.02).view(N, K)
    torch.manual_seed(1)
    pairs, scale, values = packed(32)
    tensors = {"fc.weight": pairs, "fc.weight_scale": scale}
    save_file(tensors | {"fc.weight_scale_2": torch.tensor(FACTOR)}, path / "model.safetensors")
    save_file({"fc.weight": source}, tmp_path / "source.safetensors")
    with pytest.warns(UserWarning, match="1 NVFP4 weights were quantized to FP8_DYNAMIC"):
        fp8kit.convert_checkpoint(path, tmp_path / "b")
    written = load_file(tmp_path / "b" / "model.safetensors")
    wanted = fp8kit.quantize(values, role="weight")
    assert_bits_equal(written["fc.weight"], wanted.data)
    assert_bits_equal(written["fc.weight_scale"], wanted.scale)
    assert fp8kit.verify_checkpoint(tmp_path / "source.safetensors", path).problems == []


def test_groups_of_32_are_nobody_elses(tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    tensors["fc.weight_scale"] = tensors["fc.weight_scale"][:, ::2].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(fp8kit.CheckpointError, match=r"\[128, 8\] beside fc.weight_packed"):
        fp8kit.convert_checkpoint(path, tmp_path / "b")


@pytest.mark.parametrize("kind", ["bytes", "float32", "narrow"])
def test_what_is_not_scaled_as_nvfp4_is_not_read_as_it(kind: str, tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    tensors = load_file(path / "model.safetensors")
    scale = tensors["fc.weight_scale"]
    others = {"bytes": scale.view(torch.uint8), "float32": scale.float()}
    tensors["fc.weight_scale"] = others.get(kind, scale[:, ::4].contiguous())
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(fp8kit.CheckpointError, match=r"fc\.weight"):
        fp8kit.convert_checkpoint(path, tmp_path / "b")


def test_scales_of_other_groups_say_what_is_read(tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    tensors = load_file(path / "model.safetensors")
    tensors["fc.weight_scale"] = tensors["fc.weight_scale"][:, ::4].contiguous()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(fp8kit.CheckpointError) as error:
        open_checkpoint(path)
    said = str(error.value)
    assert "fc.weight_scale is torch.float8_e4m3fn [128, 4] beside fc.weight, torch.uint8" in said
    assert "scales [N, K / 16], of ModelOpt also [N, K / 32]" in said
    assert "Start from the high-precision checkpoint" in said


def test_scales_of_modelopt_that_may_lie_in_tiles_are_refused(tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    tensors, header = load_file(path / "model.safetensors"), {"quantization_config": "{}"}
    save_file(tensors, path / "model.safetensors", header)
    with pytest.raises(fp8kit.CheckpointError, match="row by row or in tiles, which the file does"):
        open_checkpoint(path)
    for part in "weight", "weight_scale":  # in tiles, these scales would have more rows
        tensors[f"small.{part}"] = tensors[f"fc.{part}"][:16].clone()
    tensors["small.weight_scale_2"] = tensors["fc.weight_scale_2"].clone()
    save_file(tensors, path / "model.safetensors", header)
    assert open_checkpoint(path).layers.keys() == {"fc", "small"}


@pytest.mark.parametrize("bad", [float("nan"), 0.0, -1.0])
def test_scales_that_are_no_scales_are_refused(bad: float, tmp_path: Path) -> None:
    path, _ = directory(tmp_path / "a", "modelopt")
    pairs, scale, _ = packed()
    tensors = {"fc.weight": pairs, "fc.weight_scale": scale}
    save_file(tensors | {"fc.weight_scale_2": torch.tensor(bad)}, path / "model.safetensors")
    with pytest.raises(fp8kit.CheckpointError, match="NaN or negative"):
        fp8kit.convert_checkpoint(path, tmp_path / "b")
