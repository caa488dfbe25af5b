"""Written checkpoints obey the rules by which vLLM, SGLang and Transformers load.

The rules were read in the engines' code:
vLLM 0.33 ``compressed_tensors.py`` and ``fp8.py``, SGLang 0.5.23, Transformers 5.23.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from engines import disagreements, experts_are_dense, is_listed, linear_is_dense
from fp8kit.checkpoint.dialects import Spec
from fp8kit.checkpoint.schema.targets import TARGETS, dialect_for
from fp8kit.errors import CheckpointError
from fp8kit.formats import SCHEMES
from fp8kit.io.translation import convert_checkpoint
from golden.generate import FOLDER, goldens
from golden.layout import codes, dense_tensors, fp8, scales, write

GOLDENS = goldens()

FLOAT8 = {"num_bits": 8, "type": "float"}
LEAST: dict[tuple[str, str], dict[str, Any]] = {
    ("compressed-tensors", "FP8_DYNAMIC"): {
        "format": "float-quantized",
        "weights": FLOAT8 | {"strategy": "channel"},
        "input_activations": FLOAT8 | {"strategy": "token", "dynamic": True},
    },
    ("compressed-tensors", "FP8"): {
        "format": "float-quantized",
        "weights": FLOAT8 | {"strategy": "tensor"},
        "input_activations": FLOAT8 | {"strategy": "tensor", "dynamic": False},
    },
    ("compressed-tensors", "MXFP8"): {
        "weights": FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    },
    ("fp8", "FP8_BLOCK"): {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ("mxfp8", "MXFP8"): {
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
    },
}


def lacks(config: dict[str, Any], least: dict[str, Any]) -> list[str]:
    """List the missing and differing entries; entries for groups must be in every group."""
    groups = list(config.get("config_groups", {}).values())
    found = []
    for key, value in least.items():
        for holder in groups if key in ("weights", "input_activations") else [config]:
            held = holder.get(key)
            if isinstance(value, dict) and isinstance(held, dict):
                found += [f"{key}.{k}" for k, v in value.items() if held.get(k) != v]
            elif held != value:
                found.append(key)
    return found


def vllm_scheme(config: dict[str, Any], group: dict[str, Any]) -> str:
    """Choose the scheme of a linear layer as ``CompressedTensorsConfig`` does."""
    w, x = group["weights"], group["input_activations"]
    is_float8 = w["num_bits"] == 8 and w.get("type") == "float" and w.get("symmetric", True)
    if is_float8 and w["strategy"] == "group" and w.get("group_size") == 32:
        return "W8A8Mxfp8" if w.get("scale_dtype") == "torch.uint8" else ""
    layout = group.get("format") or config.get("format")
    known = layout in ("float-quantized", "naive-quantized", "int-quantized")
    if not (known and is_float8 and w["strategy"] in ("tensor", "channel", "block")):
        return ""
    if w["strategy"] == "block" and not w.get("block_structure"):
        return ""
    if x is None:
        return "W8A16Fp8"
    return "W8A8Fp8" if x.get("dynamic") or x["strategy"] == "tensor" else ""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_configs_hold_the_least_that_is_needed(scheme: str, target: str) -> None:
    dialect = dialect_for(target, SCHEMES[scheme])
    config = dialect.render(Spec(SCHEMES[scheme], ("a.gate",)))
    least = LEAST.get((dialect.name, scheme), {})
    assert least or scheme in ("FP8_TENSOR", "FP8_WEIGHT_ONLY")
    assert lacks(config, least) == []
    if dialect.name == "compressed-tensors":
        assert config["quantization_status"] == "compressed"
        assert config["ignore"] == ["a.gate", "lm_head"]
        expected = {"MXFP8": "W8A8Mxfp8", "FP8_WEIGHT_ONLY": "W8A16Fp8"}.get(scheme, "W8A8Fp8")
        for group in config["config_groups"].values():
            assert group["targets"] == ["Linear"]
            assert vllm_scheme(config, group) == expected
    else:
        # vLLM reads the first, Transformers the second, SGLang either
        assert config["ignored_layers"] == config["modules_to_not_convert"] == ["a.gate", "lm_head"]


def test_the_search_for_missing_entries_can_fail() -> None:
    config = dialect_for("vllm", SCHEMES["FP8_DYNAMIC"]).render(Spec(SCHEMES["FP8_DYNAMIC"]))
    least = LEAST["compressed-tensors", "FP8_DYNAMIC"]
    del config["format"]
    config["config_groups"]["group_0"]["weights"]["type"] = "int"
    assert lacks(config, least) == ["format", "weights.type"]
    assert vllm_scheme(config, config["config_groups"]["group_0"]) == ""


SUFFIXES = {
    "compressed-tensors": {"weight", "weight_scale", "input_scale", "k_scale", "v_scale"},
    "fp8": {"weight", "weight_scale_inv"},
    "mxfp8": {"weight", "weight_scale_inv"},
}
# the other golden checkpoints have Mistral's names, no names, or only ragged blocks
SERVED = [n for n in GOLDENS if not re.match("mistral|comfyui|torchao|.*block", n)]


@pytest.mark.filterwarnings("ignore:activation_scale_ub = 1200.0 is not kept:UserWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*SERVED, "blocks"])
def test_no_tensor_is_written_that_engines_do_not_know(
    name: str, target: str, tmp_path: Path
) -> None:
    """vLLM raises for unexpected names; every matrix is FP8 or in the list of exceptions."""
    source = FOLDER / name
    if name == "blocks":
        source = tmp_path / "blocks"
        tensors = dense_tensors() | {
            "a.o_proj.weight": fp8(codes(256, 128)),
            "a.o_proj.weight_scale_inv": scales(2, 1),
        }
        golden = GOLDENS["fp8-block"]
        write(replace(golden, tensors=tensors), source)
    convert_checkpoint(source, tmp_path / "c", target=target)
    config = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    dialect = "compressed-tensors" if "ignore" in config else config["quant_method"]
    left = config.get("ignore") or config["ignored_layers"]
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        dtypes = {n: file.get_slice(n).get_dtype() for n in file.keys()}
    suffixes = SUFFIXES[dialect] | {"k_scale", "v_scale"}
    assert {n.rpartition(".")[2] for n in dtypes} <= suffixes
    for key, dtype in dtypes.items():
        if key.endswith("proj.weight") and dtype == "BF16":
            assert key.removesuffix(".weight") in left
        if "scale" in key:
            mx = dialect == "mxfp8" or config.get("format") == "mxfp8-quantized"
            assert dtype == ("U8" if mx and "weight_scale" in key else "F32")


def test_mx_beside_other_schemes_is_not_for_sglang(tmp_path: Path) -> None:
    for target in ("vllm", "transformers"):
        convert_checkpoint(FOLDER / "torchao", tmp_path / target, target=target)
    with pytest.raises(CheckpointError, match="it has no MX in this dialect"):
        convert_checkpoint(FOLDER / "torchao", tmp_path / "c", target="sglang")


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize("left", ["a.experts", "a.experts.3.w1", "a.experts.0.gate_proj"])
def test_dense_experts_are_asked_for_by_names_of_their_own(left: str, scheme: str) -> None:
    for target in TARGETS:
        spec = Spec(SCHEMES[scheme], ("a.experts_gate", left))
        config = dialect_for(target, SCHEMES[scheme]).render(spec)
        assert experts_are_dense(config, "a.experts")
        assert not experts_are_dense(config, "b.experts")


def test_merged_layers_are_listed_with_their_parts() -> None:
    parts = ("v.gate_proj", "v.up_proj", "v.attn.qkv", "w.gate_proj")
    for target, scheme in (("vllm", "FP8_DYNAMIC"), ("vllm", "FP8_BLOCK"), ("sglang", "MXFP8")):
        config = dialect_for(target, SCHEMES[scheme]).render(Spec(SCHEMES[scheme], parts))
        assert is_listed(config, "v.gate_up_proj")
        assert is_listed(config, "v.attn.qkv_proj")
        assert not is_listed(config, "w.gate_up_proj")
        assert linear_is_dense(config, "v.gate_up_proj")
        with pytest.raises(AssertionError, match="some of its parts"):
            linear_is_dense(config, "w.gate_up_proj")


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_what_an_engine_would_misread_is_named(scheme: str) -> None:
    dense = dict.fromkeys(["v.gate_proj", "v.up_proj", "v.experts.0.w1", "head", "q_proj"], True)
    dense |= dict.fromkeys(["v.down_proj", "w.experts.0.w1", "w.shared_experts.up_proj"], False)
    left = tuple(name for name, kind in dense.items() if kind)
    config = dialect_for("vllm", SCHEMES[scheme]).render(Spec(SCHEMES[scheme], left))
    assert disagreements(config, dense) == []
    wrong = dense | {"head": False, "v.down_proj": True, "w.experts.0.w1": True}
    assert disagreements(config, wrong) == [
        "w.experts is taken for FP8",
        "head is taken for dense",
        "v.down_proj is taken for FP8",
    ]
    part = {"w.gate_proj": False, "w.up_proj": True}
    config = dialect_for("vllm", SCHEMES[scheme]).render(Spec(SCHEMES[scheme], ("w.up_proj",)))
    assert "some of its parts are listed" in disagreements(config, part)[0]
