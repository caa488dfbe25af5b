"""Quantization configs: read, written, refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

from fp8kit.checkpoint.dialects import DIALECTS, Spec, Source, detect, quantization_config
from fp8kit.checkpoint.targets import TARGETS, check_layers, dialect_for
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, ROW, SCHEMES, TENSOR, Scheme

DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}
HELD = ("FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "FP8_WEIGHT_ONLY")


def changed(**group: Any) -> dict[str, Any]:
    found = copy.deepcopy(DYNAMIC)
    found["config_groups"]["group_0"].update(group)
    return {"quantization_config": found}


def test_render_writes_the_union_that_every_engine_needs() -> None:
    assert DIALECTS[0].render(Spec(SCHEMES["FP8_DYNAMIC"])) == DYNAMIC


def test_render_block() -> None:
    group = DIALECTS[0].render(Spec(SCHEMES["FP8_BLOCK"]))["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "block"
    assert group["weights"]["block_structure"] == [128, 128]
    assert group["input_activations"]["group_size"] == 128


def test_render_always_ignores_the_head() -> None:
    spec = Spec(SCHEMES["FP8_DYNAMIC"], ("model.layers.0.mlp.gate",))
    assert DIALECTS[0].render(spec)["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize("name", HELD)
def test_parse_undoes_render(name: str) -> None:
    config = {"quantization_config": DIALECTS[0].render(Spec(SCHEMES[name], ("a", "re:.*b")))}
    dialect, spec = detect(config) or pytest.fail("not detected")
    assert dialect is DIALECTS[0]
    assert spec == Spec(SCHEMES[name], ("a", "lm_head", "re:.*b"))


@pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["MXFP8"],
        Scheme("UE8M0", BLOCK, GROUP128, ue8m0=True),
        Scheme("E5M2", ROW, ROW, dtype=torch.float8_e5m2),
        Scheme("ODD", GROUP128, ROW),
        Scheme("TENSOR_DYNAMIC", TENSOR, TENSOR),
    ],
    ids=str,
)
def test_render_refuses_what_it_cannot_say(scheme: Scheme) -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold it.*Convert with FP8_DYNAMIC"):
        DIALECTS[0].render(Spec(scheme))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "text"])
def test_config_is_found_wherever_tools_put_it(key: str) -> None:
    config = {"text_config": {"quantization_config": DYNAMIC}} if key == "text" else {key: DYNAMIC}
    assert quantization_config(config) == DYNAMIC
    assert detect(config) is not None


def test_old_config_without_a_method() -> None:
    old = {k: v for k, v in DYNAMIC.items() if k != "quant_method"}
    assert detect({"compression_config": old}) is not None


def test_no_config_means_high_precision() -> None:
    assert detect({"hidden_size": 4}) is None


def test_spellings_that_exporters_use() -> None:
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": "128x128",
        "group_size": None,
        "observer": "minmax",
    }
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128}
    config = changed(weights=weights, input_activations={**inputs, "dynamic": True})
    config["quantization_config"]["quant_method"] = "compressed_tensors"
    _, spec = detect(config) or pytest.fail("not detected")
    assert spec.scheme == SCHEMES["FP8_BLOCK"]


def test_differing_groups_are_refused() -> None:
    config = changed()
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = copy.deepcopy(groups["group_0"])
    assert detect(config) is not None
    groups["group_1"]["input_activations"] = None
    with pytest.raises(CheckpointError, match=r"differ \(group_0: FP8_DYNAMIC, group_1: FP8_WEI"):
        detect(config)


WEIGHTS = DYNAMIC["config_groups"]["group_0"]["weights"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": [1]}, r"quantization_config = \[1\]"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'"),
        ({"quantization_config": {**DYNAMIC, "config_groups": {}}}, "at least one group"),
        ({"quantization_config": {**DYNAMIC, "config_groups": {"a": 3}}}, "config_groups.a = 3"),
        ({"quantization_config": {**DYNAMIC, "ignore": "lm_head"}}, "a list of names"),
        ({"quantization_config": {**DYNAMIC, "format": "mxfp8-quantized"}}, "mxfp8-quantized"),
        ({"quantization_config": {**DYNAMIC, "transform_config": {"a": 1}}}, "transform_config"),
        ({"quantization_config": {**DYNAMIC, "sparsity_config": {"format": "2:4"}}}, "2:4"),
        (changed(weights=4), r"weights = 4"),
        (changed(weights=None), "reads the combinations"),
        (changed(weights={**WEIGHTS, "num_bits": 4}), "reads the combinations"),
        (changed(weights={**WEIGHTS, "symmetric": False}), "reads the combinations"),
        (changed(weights={**WEIGHTS, "type": "int"}), "reads the combinations"),
        (changed(weights={**WEIGHTS, "group_size": [[]]}), "reads the combinations"),
        (changed(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        detect(config)


def test_unread_parts_are_said() -> None:
    found = {**DYNAMIC, "kv_cache_scheme": {"num_bits": 8}}
    _, spec = detect({"quantization_config": found}) or pytest.fail("not detected")
    assert spec.unread == ("The config quantizes the KV cache; its scales are not used.",)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", HELD)
def test_every_target_gets_a_dialect_that_holds_the_scheme(target: str, name: str) -> None:
    assert dialect_for(target, SCHEMES[name]).render(Spec(SCHEMES[name]))


@pytest.mark.parametrize("target", TARGETS)
def test_mx_is_refused_with_an_alternative(target: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot load there.*FP8_DYNAMIC"):
        dialect_for(target, SCHEMES["MXFP8"])


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="Known targets are vllm, sglang, transformers"):
        dialect_for("tgi", SCHEMES["FP8_DYNAMIC"])


def test_ragged_blocks_are_refused() -> None:
    block = SCHEMES["FP8_BLOCK"]
    check_layers("vllm", block, {"a": (256, 128)}, [])
    with pytest.raises(CheckpointError, match=re.escape("e.g. b. vllm loads 128x128 blocks")):
        check_layers("vllm", block, {"a": (256, 128), "b": (256, 130)}, [])


def test_half_quantized_siblings_are_refused_where_they_merge() -> None:
    layers, dense = {"l.q_proj": (64, 64), "l.v_proj": (64, 64)}, ["l.k_proj", "l.o_proj"]
    with pytest.raises(CheckpointError, match=r"l.q_proj is FP8 and l.k_proj is not. vllm merges"):
        check_layers("vllm", SCHEMES["FP8_DYNAMIC"], layers, dense)
    check_layers("transformers", SCHEMES["FP8_DYNAMIC"], layers, dense)
    check_layers("vllm", SCHEMES["FP8_DYNAMIC"], layers, ["l.o_proj", "other.k_proj"])
