"""Verification: a right checkpoint passes, every kind of damage is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8kit
from checkpoint_samples import NANO, SHARD, all_bytes, edit_tensors
from fp8kit.checkpoint.streaming.verify import Verification
from fp8kit.errors import CheckpointError
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint, verify_checkpoint
from golden.generate import goldens
from golden.layout import Golden, codes, fp8, values, write

GOLDENS = goldens()
SCHEMES = ("FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "FP8_WEIGHT_ONLY", "MXFP8")
LAYER = "model.layers.2.self_attn.q_proj"
FIELD = LAYER.replace(".", "__")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    quantize_checkpoint(NANO, tmp_path / "out", progress=False)
    return NANO, tmp_path / "out"


def tensor(path: Path, kind: str) -> Tensor:
    return load_file(path / "model.safetensors")[f"{LAYER}.{kind}"]


def compared(found: Verification, name: str) -> fp8kit.checkpoint.streaming.verify.Comparison:
    return next(c for c in found.compared if c.name == name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fresh_checkpoint_is_right(scheme: str, tmp_path: Path) -> None:
    recipe = Recipe(scheme, dtype=torch.float32)
    quantize_checkpoint(NANO, tmp_path / "out", recipe, progress=False)
    found = verify_checkpoint(NANO, tmp_path / "out", workers=2)
    assert found.problems == []
    assert len(found.compared) == 38
    coded = [c for c in found.compared if c.kind == "fp8"]
    assert len(coded) == 28
    assert all(c.exact for c in found.compared)
    # uniform rounding errors of 3 mantissa bits give 31 to 32 dB for bell-shaped weights, and a
    # scale that is a power of two up to an eighth of saturation less
    assert all((26 if scheme == "MXFP8" else 30) < c.sqnr_db < 33 for c in coded)
    assert "28 of them equal to a new quantization; 10 tensors kept; 0 problems" in str(found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_figures_are_those_of_plain_torch(scheme: str, tmp_path: Path) -> None:
    quantize_checkpoint(NANO, tmp_path / "out", scheme, progress=False)
    w = load_file(NANO / "model.safetensors")[f"{LAYER}.weight"]
    q = fp8kit.quantize(w, fp8kit.SCHEMES[scheme].weight, role="weight")
    error = fp8kit.dequantize(q).double() - w.double()
    found = compared(verify_checkpoint(NANO, tmp_path / "out"), f"{LAYER}.weight")
    relative = float(error.norm() / w.double().norm())
    assert math.isclose(found.relative, relative, rel_tol=1e-6)
    assert math.isclose(found.sqnr_db, -20 * math.log10(relative), rel_tol=1e-6)
    assert math.isclose(found.largest, float(error.abs().max()), rel_tol=1e-6)


def test_one_wrong_code_is_found(pair: tuple[Path, Path]) -> None:
    codes = tensor(pair[1], "weight").view(torch.uint8)
    codes[100, 100] ^= 0x08  # one step of the exponent
    edit_tensors(pair[1], **{f"{FIELD}__weight": codes.view(torch.float8_e4m3fn)})
    found = verify_checkpoint(*pair)
    assert len(found.problems) == 1
    assert f"{LAYER}.weight: 1 elements are farther" in found.problems[0]
    assert not found.to_dict()["ok"]


def test_a_code_that_another_rounding_gives_is_told_and_allowed(pair: tuple[Path, Path]) -> None:
    scale = tensor(pair[1], "weight_scale").bfloat16().float()
    w = load_file(NANO / "model.safetensors")[f"{LAYER}.weight"]
    codes = fp8kit.quantize(w, fp8kit.ROW, scale=scale).data
    edit_tensors(pair[1], **{f"{FIELD}__weight": codes, f"{FIELD}__weight_scale": scale})
    found = verify_checkpoint(*pair)
    assert found.problems == []
    assert not compared(found, f"{LAYER}.weight").exact
    assert sum(c.exact for c in found.compared) == 37


def test_quotients_of_16_bits_are_allowed(pair: tuple[Path, Path]) -> None:
    """llm-compressor divides in bf16, so values near the middle of two codes are rounded twice."""
    name = "model.layers.0.mlp.down_proj"
    w = load_file(NANO / "model.safetensors")[f"{name}.weight"]
    scale = (w.abs().amax(1, keepdim=True).float() / 448).bfloat16()
    codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    field = name.replace(".", "__")
    edit_tensors(pair[1], **{f"{field}__weight": codes, f"{field}__weight_scale": scale})
    assert verify_checkpoint(*pair).problems == []


FP4 = [name for name in GOLDENS if name.endswith("fp4")]


@pytest.mark.parametrize("name", [*FP4, "modelopt-stacks"])
def test_what_is_packed_or_transposed_is_compared(name: str, tmp_path: Path) -> None:
    """FP4 differs from its source by FP4's rounding error; some stacks have K before N."""
    golden = GOLDENS.get(name) or transposed_stack()
    write(golden, tmp_path / "out")
    turned = name in ("mxfp4", "modelopt-stacks")
    dense = {
        layer if turned else f"{layer}.weight": (w.mT if turned else w).contiguous() * 1.02
        for layer, w in golden.truth.items()
    }
    (tmp_path / "source").mkdir()
    for wrong in (False, True):
        if wrong:
            next(iter(dense.values())).flatten()[-1] += 100
        save_file(dense, tmp_path / "source" / SHARD)
        found = verify_checkpoint(tmp_path / "source", tmp_path / "out").compared
        assert len(found) == len(golden.truth)
        assert sum(bool(c.problem) for c in found) == wrong


def transposed_stack() -> Golden:
    """Return a stack of experts as ModelOpt stores those of GPT-OSS: [E, K, N], one scale."""
    at = "model.layers.0.mlp.experts"
    tensors, truth = {}, {}
    for stack, (k, n) in (("gate_up_proj", (16, 24)), ("down_proj", (12, 16))):
        bytes_ = codes(2, k, n)
        tensors[f"{at}.{stack}"] = fp8(bytes_)
        tensors[f"{at}.{stack}_weight_scale"] = torch.tensor(0.5)
        tensors[f"{at}.{stack}_input_scale"] = torch.tensor(0.5)
        truth[f"{at}.{stack}"] = values(bytes_, torch.tensor(0.5)).mT
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return Golden("modelopt", "FP8", quantization=config, tensors=tensors, truth=truth)


def test_experts_may_have_the_names_of_modules(tmp_path: Path) -> None:
    """llm-compressor and ModelOpt name Mixtral's experts after Transformers' modules."""
    moe = "model.layers.0.block_sparse_moe"
    dense = {f"{moe}.experts.0.{part}.weight": torch.randn(128, 128) for part in ("w1", "w2", "w3")}
    (tmp_path / "source").mkdir()
    save_file({**dense, f"{moe}.gate.weight": torch.randn(4, 128)}, tmp_path / "source" / SHARD)
    (tmp_path / "source" / "config.json").write_text('{"model_type": "mixtral"}')
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", progress=False)
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    found = load_file(tmp_path / "out" / SHARD)
    for old in list(found):
        *_, part, kind = old.split(".")
        if part in parts:
            found[f"{moe}.experts.0.{parts[part]}.{kind}"] = found.pop(old)
    save_file(found, tmp_path / "out" / SHARD)
    compared = verify_checkpoint(tmp_path / "source", tmp_path / "out")
    assert compared.problems == []
    assert sum(c.kind == "fp8" for c in compared.compared) == 3


@pytest.mark.parametrize("factor", [0.5, 1.25, 2.0])
def test_a_wrong_scale_is_found(factor: float, pair: tuple[Path, Path]) -> None:
    scale = tensor(pair[1], "weight_scale")
    scale[7] *= factor
    edit_tensors(pair[1], **{f"{FIELD}__weight_scale": scale})
    assert len(verify_checkpoint(*pair).problems) == 1


def test_nan_codes_are_found(pair: tuple[Path, Path]) -> None:
    codes = tensor(pair[1], "weight").view(torch.uint8)
    codes[3, 3] = 0x7F
    edit_tensors(pair[1], **{f"{FIELD}__weight": codes.view(torch.float8_e4m3fn)})
    assert "1 elements are farther" in verify_checkpoint(*pair).problems[0]


def test_missing_extra_and_changed_tensors(pair: tuple[Path, Path]) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    edit_tensors(
        pair[1],
        model__norm__weight=None,
        stray=torch.ones(3),
        model__layers__1__input_layernorm__weight=torch.zeros(256).bfloat16(),
        model__embed_tokens__weight=torch.zeros(4, 256).bfloat16(),
    )
    found = verify_checkpoint(*pair)
    assert found.missing == ["model.norm.weight"]
    assert found.extra == ["stray"]
    text = "\n".join(found.problems)
    assert f"{norm}: it was to stay as it is, and differs" in text
    assert "model.embed_tokens.weight: its shape is [4, 256], and [4096, 256]" in text
    assert len(found.problems) == 4
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_layer_of_another_shape(pair: tuple[Path, Path]) -> None:
    half = {
        f"{FIELD}__weight": tensor(pair[1], "weight")[:128].clone(),
        f"{FIELD}__weight_scale": tensor(pair[1], "weight_scale")[:128].clone(),
    }
    edit_tensors(pair[1], **half)
    (problem,) = verify_checkpoint(*pair).problems
    assert "its shape is [128, 256], and [256, 256] in the source" in problem


def test_nothing_is_written(pair: tuple[Path, Path]) -> None:
    before = [all_bytes(p) for p in pair]
    verify_checkpoint(*pair)
    assert [all_bytes(p) for p in pair] == before


def test_the_wrong_way_round(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        CheckpointError, match=r"out is FP8, and .*nano is in high precision.*Pass the source first"
    ):
        verify_checkpoint(pair[1], pair[0])
    with pytest.raises(CheckpointError, match=r"nano was given twice.*Pass the source first"):
        verify_checkpoint(pair[0], pair[0])
