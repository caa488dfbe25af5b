"""Checkpoints that mix MX weights with other schemes: loaded, saved and translated."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.formats import MX, QTensor, Scheme
from mx_checkpoints import CT, packed
from numerics import assert_bits_equal
from tiny_experts import tiny

SCHEMES = {"mx": "MXFP8", "block": "FP8_BLOCK", "row": "FP8_DYNAMIC"}
IDS = torch.arange(24).view(1, -1) * 7 % 160


class Mixed(nn.Module):
    def __init__(self, counts: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        for kind, count in zip(SCHEMES, counts, strict=True):
            setattr(self, kind, nn.ModuleList(nn.Linear(256, 256) for _ in range(count)))
        self.dense = nn.Linear(256, 256)


def schemes_of(path: Path) -> Counter[str]:
    return Counter(layer.scheme.name for layer in open_checkpoint(path).layers.values())


def forms_in(model: nn.Module) -> Counter[str]:
    return Counter(str(m.scheme) for m in model.modules() if hasattr(m, "scheme"))


def tensors_of(path: Path) -> dict[str, Tensor]:
    found = open_checkpoint(path)
    return {name: found.read(name) for name in found.tensors}


@pytest.mark.parametrize("target", ["vllm", "transformers"])
@pytest.mark.parametrize("counts", [(2, 1, 0), (1, 2, 0), (1, 1, 1), (1, 0, 2)])
def test_each_layer_of_a_mixed_checkpoint_stays_what_it_is(
    counts: tuple[int, int, int], target: str, tmp_path: Path
) -> None:
    model = Mixed(counts)
    for (kind, scheme), count in zip(SCHEMES.items(), counts, strict=True):
        if count:
            fp8kit.convert(model, scheme, include=[f"{kind}.*"], exclude=[])
    held = {SCHEMES[kind]: n for kind, n in zip(SCHEMES, counts, strict=True) if n}
    fp8kit.save(model, tmp_path / "a", target=target)
    assert schemes_of(tmp_path / "a") == held
    first = tensors_of(tmp_path / "a")
    loaded = fp8kit.load(tmp_path / "a", Mixed(counts))
    assert forms_in(loaded)["MXFP8_ROW"] == counts[0]
    fp8kit.save(loaded, tmp_path / "b", target=target)
    fp8kit.convert_checkpoint(tmp_path / "a", tmp_path / "c", target=target)
    for path in (tmp_path / "b", tmp_path / "c"):
        again = tensors_of(path)
        assert again.keys() == first.keys()
        for name, tensor in first.items():
            assert_bits_equal(again[name], tensor)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("counts", [(2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_mx_weights_alone_become_the_scheme(
    counts: tuple[int, int, int], scheme: str, tmp_path: Path
) -> None:
    model = Mixed(counts)
    with torch.no_grad():  # values so small would lose bits
        for parameter in model.mx.parameters():
            parameter.masked_fill_(parameter.abs() < 1e-3, 0)
    for (kind, held), count in zip(SCHEMES.items(), counts, strict=True):
        if count:
            fp8kit.convert(model, held, include=[f"{kind}.*"], exclude=[])
    fp8kit.save(model, tmp_path / "a")
    fp8kit.convert_checkpoint(tmp_path / "a", tmp_path / "b", scheme=scheme)
    wanted: Counter[str] = Counter({scheme: counts[0]})
    wanted.update({"FP8_BLOCK": counts[1], "FP8_DYNAMIC": counts[2]})
    assert schemes_of(tmp_path / "b") == +wanted
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    layers = open_checkpoint(tmp_path / "a").layers, open_checkpoint(tmp_path / "b").layers
    for name, layer in layers[0].items():
        one = QTensor(first[layer.weight], first[layer.scale], layer.group)
        layer = layers[1][name]
        other = QTensor(second[layer.weight], second[layer.scale], layer.group)
        assert_bits_equal(fp8kit.dequantize(other), fp8kit.dequantize(one))
        if one.group != MX:
            assert_bits_equal(other.data, one.data)


def test_a_scheme_for_all_layers_of_a_mixed_checkpoint_is_refused(tmp_path: Path) -> None:
    model = Mixed((1, 1, 0))
    fp8kit.convert(model, "MXFP8", include=["mx.*"], exclude=[])
    fp8kit.convert(model, "FP8_BLOCK", include=["block.*"], exclude=[])
    fp8kit.save(model, tmp_path / "a")
    with pytest.raises(fp8kit.CheckpointError, match="name a form of its MX layers"):
        fp8kit.load(tmp_path / "a", Mixed((1, 1, 0)), scheme="FP8_DYNAMIC")
    loaded = fp8kit.load(tmp_path / "a", Mixed((1, 1, 0)), scheme="MXFP8_ROW_WEIGHT_ONLY")
    assert forms_in(loaded) == {"MXFP8_ROW_WEIGHT_ONLY": 1, "FP8_BLOCK": 1}


def test_a_scheme_of_another_name_and_the_same_numbers_is_taken(tmp_path: Path) -> None:
    kept = Scheme("MX_BY_16BIT", MX, None)
    model = fp8kit.Fp8Linear.from_linear(nn.Linear(256, 256), kept)
    fp8kit.save(nn.ModuleDict({"up": model}), tmp_path)
    for name in ("MXFP8_WEIGHT_ONLY", kept):
        loaded = fp8kit.load(tmp_path, nn.ModuleDict({"up": nn.Linear(256, 256)}), scheme=name)
        assert forms_in(loaded) == {"FP8_MX_BY_16BIT": 1}
    with pytest.raises(fp8kit.CheckpointError, match="is FP8_MX_BY_16BIT"):
        fp8kit.load(tmp_path, nn.ModuleDict({"up": nn.Linear(256, 256)}), scheme="MXFP8")


def with_fp4_experts(path: Path) -> None:
    """Write a tiny model: attention in MXFP8, its o_proj block-wise, experts packed as MXFP4."""
    model = tiny("Qwen3Moe")
    with torch.no_grad():  # values so small would lose bits
        for parameter in model.parameters():
            parameter.masked_fill_(parameter.abs() < 1e-3, 0)
    fp8kit.convert(model, "MXFP8", include=["*.q_proj", "*.k_proj", "*.v_proj"], exclude=[])
    fp8kit.convert(model, "FP8_BLOCK", include=["*.o_proj"], exclude=[])
    fp8kit.save(model, path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if ".mlp.experts." in n]:
        layer = name.removesuffix(".weight")
        pairs, exponents, _ = packed(*tensors.pop(name).shape)
        tensors |= {f"{layer}.weight_packed": pairs, f"{layer}.weight_scale": exponents}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["config_groups"]["experts"] = CT["config_groups"]["group_0"] | {
        "targets": ["re:.*experts.*"],
        "format": "mxfp4-pack-quantized",
    }
    quantization["ignore"] = [n for n in quantization["ignore"] if "experts" not in n]
    (path / "config.json").write_text(json.dumps(config))


def test_mxfp8_beside_blocks_and_mxfp4_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with_fp4_experts(tmp_path / "a")
    assert schemes_of(tmp_path / "a") == {"MXFP8": 30, "FP8_BLOCK": 2}
    model = fp8kit.load(tmp_path / "a")
    assert forms_in(model) == {"MXFP8_ROW": 8, "FP8_BLOCK": 2}  # two of them stacks of experts
    with torch.no_grad():
        logits = model(IDS).logits
    assert logits.isfinite().all()
    fp8kit.save(model, tmp_path / "b")
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert_bits_equal(second[name], tensor)
    for scheme in (None, "FP8_DYNAMIC"):
        there = tmp_path / f"{scheme}"
        fp8kit.convert_checkpoint(tmp_path / "a", there, scheme=scheme)
        assert schemes_of(there) == {scheme or "MXFP8": 30, "FP8_BLOCK": 2}
        with torch.no_grad():
            assert_bits_equal(fp8kit.load(there)(IDS).logits, logits)
