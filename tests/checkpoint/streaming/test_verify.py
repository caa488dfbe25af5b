"""Verification: what is right passes, every kind of damage is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fp8kit
from checkpoint_samples import NANO, all_bytes, edit_tensors
from fp8kit.checkpoint.streaming.verify import Verification
from fp8kit.errors import CheckpointError
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint, verify_checkpoint

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
