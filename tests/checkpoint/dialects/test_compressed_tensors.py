"""compressed-tensors: which configs are read, written and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8kit.checkpoint.dialects import (
    COMPRESSED_TENSORS,
    Announcement,
    Format,
    Source,
    Spec,
    detect,
    quantization_config,
    scheme_of,
)
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, ROW, SCHEMES, TENSOR, GroupShape, Scheme

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
WEIGHTS = DYNAMIC["config_groups"]["group_0"]["weights"]  # type: ignore[index]
HELD = tuple(SCHEMES)


def announced(config: dict[str, Any]) -> Announcement:
    source = Source(config)
    assert detect(source) is COMPRESSED_TENSORS
    return COMPRESSED_TENSORS.parse(source)


def scheme_in(config: dict[str, Any], layer: str = "x") -> Scheme:
    fmt = announced(config).format_of(layer)
    assert fmt.weight is not None
    return fmt.scheme(fmt.weight, has_input_scale=False)


def changed(**group: Any) -> dict[str, Any]:
    found = copy.deepcopy(DYNAMIC)
    found["config_groups"]["group_0"].update(group)
    return {"quantization_config": found}


def rotated(*locations: object) -> dict[str, Any]:
    uses = [{"targets": ["Linear"], "location": word} for word in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": uses}}}


def test_rotations_that_are_part_of_the_weights_change_nothing() -> None:
    config = {**DYNAMIC, "transform_config": rotated("weight_output", "weight_input")}
    assert scheme_in({"quantization_config": config}) == SCHEMES["FP8_DYNAMIC"]


@pytest.mark.parametrize("target", ["LlamaAttention", r"re:.*self_attn$"])
def test_groups_of_attention_are_no_groups_of_layers(target: str) -> None:
    config = copy.deepcopy(DYNAMIC)
    inputs = {**config["config_groups"]["group_0"]["input_activations"], "strategy": "tensor"}
    group = {"targets": [target], "weights": None, "input_activations": inputs}
    config["config_groups"] = {"attention": group, **config["config_groups"]}
    found = announced({"quantization_config": config})
    assert found.format_of("model.layers.0.self_attn.q_proj") == Format(ROW, ROW)
    assert found.unread == ("The config quantizes attention; its scales are not used.",)


def test_render_writes_the_union_that_every_engine_needs() -> None:
    assert COMPRESSED_TENSORS.render(Spec(SCHEMES["FP8_DYNAMIC"])) == DYNAMIC


def test_render_block() -> None:
    group = COMPRESSED_TENSORS.render(Spec(SCHEMES["FP8_BLOCK"]))["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "block"
    assert group["weights"]["block_structure"] == [128, 128]
    assert group["input_activations"]["group_size"] == 128


def test_render_always_ignores_the_head() -> None:
    spec = Spec(SCHEMES["FP8_DYNAMIC"], ("model.layers.0.mlp.gate",))
    assert COMPRESSED_TENSORS.render(spec)["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize("name", HELD)
def test_parse_undoes_render(name: str) -> None:
    config = {
        "quantization_config": COMPRESSED_TENSORS.render(Spec(SCHEMES[name], ("a", "re:.*b")))
    }
    assert scheme_in(config) == SCHEMES[name]
    assert announced(config).ignore == ("a", "lm_head", "re:.*b")


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme("UE8M0", BLOCK, GROUP128, ue8m0=True),
        Scheme("E5M2", ROW, ROW, dtype=torch.float8_e5m2),
        Scheme("ODD", GROUP128, ROW),
    ],
    ids=str,
)
def test_render_refuses_what_it_cannot_say(scheme: Scheme) -> None:
    with pytest.raises(CheckpointError, match=r"cannot hold it.*Convert with FP8_DYNAMIC"):
        COMPRESSED_TENSORS.render(Spec(scheme))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("part", ["", "text_config", "llm_config", "language_config"])
def test_config_is_found_wherever_tools_put_it(part: str, key: str) -> None:
    config = {part: {key: DYNAMIC}} if part else {key: DYNAMIC}
    assert quantization_config(config) == DYNAMIC
    assert scheme_in(config) == SCHEMES["FP8_DYNAMIC"]


def test_old_config_without_a_method() -> None:
    old = {k: v for k, v in DYNAMIC.items() if k != "quant_method"}
    assert scheme_in({"compression_config": old}) == SCHEMES["FP8_DYNAMIC"]


def test_no_config_means_high_precision() -> None:
    assert detect(Source({"hidden_size": 4})) is None


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
    assert scheme_in(config) == SCHEMES["FP8_BLOCK"]


@pytest.mark.parametrize(
    ("weights", "inputs", "group", "activation"),
    [
        ({"block_structure": [64, 32]}, {"group_size": 32}, GroupShape(64, 32), GroupShape(1, 32)),
        ({"block_structure": "1x128"}, {"group_size": 128}, GroupShape(1, 128), GROUP128),
        ({"group_size": 64}, {"group_size": 128}, GroupShape(1, 64), GROUP128),
        ({"group_size": 128}, None, GroupShape(1, 128), None),
    ],
)
def test_blocks_and_groups_are_of_any_size(
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    group: GroupShape,
    activation: GroupShape | None,
) -> None:
    strategy = "block" if "block_structure" in weights else "group"
    args = {"num_bits": 8, "type": "float", "strategy": "group", "dynamic": True}
    config = changed(
        weights={**WEIGHTS, "strategy": strategy, **weights},
        input_activations={**args, **inputs} if inputs else None,
    )
    assert scheme_in(config) == scheme_of(group, activation)


def test_groups_may_differ_by_layer() -> None:
    config = changed()
    groups = config["quantization_config"]["config_groups"]
    for name, targets in (("one", ["a.down"]), ("two", ["re:b\\..*"])):
        groups[name] = copy.deepcopy(groups["group_0"])
        groups[name].update(input_activations=None, targets=targets)
    groups["two"]["weights"]["strategy"] = "tensor"
    found = {name: scheme_in(config, name).name for name in ("a.down", "b.up", "c.a.down", "a")}
    assert found == {
        "a.down": "FP8_WEIGHT_ONLY",
        "b.up": "FP8_TENSOR_BY_16BIT",
        "c.a.down": "FP8_DYNAMIC",
        "a": "FP8_DYNAMIC",
    }


def grouped(**strategies: list[str]) -> dict[str, Any]:
    """Make a config with a group for each weight strategy, in this order, given by its targets."""
    config = changed()
    groups = config["quantization_config"]["config_groups"]
    common = groups.pop("group_0")
    for strategy, targets in strategies.items():
        groups[strategy] = copy.deepcopy(common) | {"targets": targets}
        groups[strategy]["weights"]["strategy"] = strategy
    return config


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (grouped(channel=["re:.*proj"], tensor=["re:.*down_proj"]), "a.down_proj"),
        (grouped(channel=["Embedding"], tensor=["Linear"]), "model.layers.0.up_proj"),
        (grouped(channel=["Linear"], tensor=["Embedding"]), "model.embed_tokens"),
        (grouped(channel=["LlamaMLP"], tensor=["Module"]), "model.layers.0.up_proj"),
        (grouped(channel=["re:a.*"], tensor=["a.b"]), "a.b"),
    ],
    ids=["patterns", "classes", "embedding", "base", "name"],
)
def test_groups_that_overlap_count_as_in_the_library(config: dict[str, Any], layer: str) -> None:
    """The library sorts targets within names, patterns and classes, in any order of the groups."""
    assert scheme_in(config, layer) == SCHEMES["FP8_TENSOR"]
    lifecycle = pytest.importorskip("compressed_tensors.utils.match")
    groups = config["quantization_config"]["config_groups"].values()
    targets = [target for group in groups for target in group["targets"]]
    module = torch.nn.Embedding(2, 2) if "embed" in layer else torch.nn.Linear(2, 2)
    first, *_ = lifecycle.match_targets(layer, module, targets)
    assert first in config["quantization_config"]["config_groups"]["tensor"]["targets"]


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ("model.layers.0.mlp.up_proj", "re:model.language_model.layers.*mlp"),
        ("language_model.model.layers.0.mlp.up_proj", "re:model.language_model.layers.*mlp"),
        ("visual.blocks.0.mlp.up_proj", "re:model.visual.*mlp"),
        ("vision_tower.vision_model.layers.0.mlp.up_proj", "re:model.vision_tower.layers.*mlp"),
    ],
)
def test_groups_name_layers_as_in_the_model_in_memory(saved: str, target: str) -> None:
    """llm-compressor writes them so; Transformers renames the layers when it saves them."""
    config = grouped(channel=["Linear"], tensor=[target])
    assert scheme_in(config, saved) == SCHEMES["FP8_DYNAMIC"]  # a text model has no other names
    config["text_config"] = {}
    assert scheme_in(config, saved) == SCHEMES["FP8_TENSOR"]
    assert scheme_in(config, saved.replace("mlp", "attn")) == SCHEMES["FP8_DYNAMIC"]


def test_a_layer_of_no_group_is_not_guessed() -> None:
    with pytest.raises(CheckpointError, match=r"'re:a.*'.*one of which is for c, which is FP8"):
        scheme_in(grouped(channel=["re:a.*"], tensor=["re:b.*"]), "c")
    assert scheme_in(grouped(tensor=["re:a.*"]), "c") == SCHEMES["FP8_TENSOR"]


def test_render_names_the_layers_of_other_schemes() -> None:
    others = {"b": SCHEMES["MXFP8"], "a": SCHEMES["FP8"], "c": SCHEMES["FP8"]}
    found = COMPRESSED_TENSORS.render(Spec(SCHEMES["FP8_DYNAMIC"], others=others))
    assert found["format"] == "mixed-precision"
    targets = [g["targets"] for g in found["config_groups"].values()]
    assert targets == [["Linear"], ["a", "c"], ["b"]]
    formats = [g["format"] for g in found["config_groups"].values()]
    assert formats == ["float-quantized", "float-quantized", "mxfp8-quantized"]
    config = {"quantization_config": found}
    for name in ("a", "b", "c", "d"):
        assert scheme_in(config, name) == others.get(name, SCHEMES["FP8_DYNAMIC"])


def test_render_mx() -> None:
    found = COMPRESSED_TENSORS.render(Spec(SCHEMES["MXFP8"]))
    common = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    assert found["format"] == "mxfp8-quantized"
    assert found["config_groups"] == {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**common, "dynamic": False},
            "input_activations": {**common, "dynamic": True},
        }
    }


def test_the_library_that_defines_the_format_accepts_what_is_written() -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for scheme in (
        *SCHEMES.values(),
        scheme_of(TENSOR, TENSOR),
        scheme_of(ROW, TENSOR, static=True),
    ):
        found = COMPRESSED_TENSORS.render(Spec(scheme, kv_scales="attn_head"))
        read = quantization.QuantizationConfig.model_validate(found)
        assert read.format == found["format"]
        assert read.kv_cache_scheme.num_bits == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": [1]}, r"quantization_config = \[1\]"),
        ({"quantization_config": {**DYNAMIC, "config_groups": {}}}, "at least one group"),
        ({"quantization_config": {**DYNAMIC, "config_groups": {"a": 3}}}, "config_groups.a = 3"),
        ({"quantization_config": {**DYNAMIC, "ignore": "lm_head"}}, "a list of names"),
        (changed(targets=["re:("]), "names or regular expressions"),
        (changed(targets="Linear"), "a list of names"),
        ({"quantization_config": {**DYNAMIC, "transform_config": {"a": 1}}}, "transform_config"),
        ({"quantization_config": {**DYNAMIC, "sparsity_config": {"format": "2:4"}}}, "2:4"),
        ({"quantization_config": {**DYNAMIC, "transform_config": rotated()}}, "is not computed"),
        *(
            ({"quantization_config": {**DYNAMIC, "transform_config": wrong}}, "is not computed")
            for wrong in (
                rotated("output"),
                rotated("weight_input", None),
                rotated("weight_input", "an unknown one"),
                {"config_groups": {**rotated("weight_input")["config_groups"], "R2": 3}},
            )
        ),
        (
            {"quantization_config": {**DYNAMIC, "format": "int-quantized"}},
            r"other formats are not read: start from the high-precision",
        ),
        (changed(weights=4), r"weights = 4"),
        (changed(weights=None), "8-bit symmetric floats"),
        (changed(weights={**WEIGHTS, "num_bits": 4}), "8-bit symmetric floats"),
        (changed(weights={**WEIGHTS, "symmetric": False}), "8-bit symmetric floats"),
        (changed(weights={**WEIGHTS, "type": "int"}), "8-bit symmetric floats"),
        (changed(weights={**WEIGHTS, "group_size": [[]]}), "8-bit symmetric floats"),
        *(
            (changed(weights={**WEIGHTS, "strategy": "block", "block_structure": sides}), "two pos")
            for sides in ([64], [64, 0], [64, "64"], "64", 64)
        ),
        *(
            (changed(weights={**WEIGHTS, "strategy": "group", "group_size": size}), "a positive")
            for size in (None, 0, -1, True, "64")
        ),
        (changed(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        announced(config)


def test_unread_parts_are_said() -> None:
    found = {**DYNAMIC, "kv_cache_scheme": {"num_bits": 8}}
    assert announced({"quantization_config": found}).unread == (
        "The config quantizes the KV cache; only fp8kit.Fp8Cache uses its scales.",
    )


def test_merged_layers_of_another_scheme_are_targets_too() -> None:
    """SGLang looks merged layers up by their own names, and treats unnamed ones as any Linear."""
    parts = ("a.q_proj", "a.k_proj", "a.v_proj", "b.gate_proj", "b.up_proj", "c.q_proj")
    spec = Spec(SCHEMES["FP8_DYNAMIC"], others=dict.fromkeys(parts, SCHEMES["FP8_BLOCK"]))
    first, second = COMPRESSED_TENSORS.render(spec)["config_groups"].values()
    assert first["targets"] == ["Linear"]
    assert second["targets"] == sorted({*parts, "a.qkv_proj", "b.gate_up_proj"})
