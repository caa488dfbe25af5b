"""The configs of each dialect: their meaning, and which are refused, naming the reason.

Whole checkpoints of every dialect are in ``tests/golden``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fp8kit
from fp8kit.checkpoint.dialects import (
    DIALECTS,
    Announcement,
    Format,
    Source,
    Spec,
    detect,
    dialect_named,
    scheme_of,
)
from fp8kit.checkpoint.dialects.by_layer import scheme_of_plain
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape
from numerics import assert_bits_equal

ROOT = Path(__file__).parents[3]
E4, F32, E8 = torch.float8_e4m3fn, torch.float32, torch.float8_e8m0fnu
KINDS = {"a.weight": (E4, (256, 128))}
FP8 = {"quant_method": "fp8"}
AUTO_ROUND = {"quant_method": "auto-round"}
FPW8A16 = AUTO_ROUND | {"bits": 8, "data_type": "fp", "group_size": 0, "fmt": "e4m3"}
FPW8A16 |= {"activation_scheme": "dynamic"}
MX_FP = AUTO_ROUND | {"data_type": "mx_fp"}
MODELOPT = {"quant_method": "modelopt"}
MIXED = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION"}
QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
DYNAMIC = {"is_dynamic": True}
BLOCKS = {"qscheme": "per_block", "block_size": [128, 128]}
GROUPS = {"qscheme": "per_block", "block_size": [1, 32], "scale_type": "float8_e8m0fnu"}


def quark(weight: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"weight": {**QUARK, **weight}, "input_tensors": inputs and {**QUARK, **inputs}}
    return {"quant_method": "quark", "global_quant_config": group}


def read(config: dict[str, Any], scale: str = "weight_scale", **more: Any) -> tuple[str, Format]:
    """Return the dialect of a quantization config, and the scheme that it gives layer ``a``."""
    kinds = KINDS | {f"a.{scale}": (F32, ())}
    source = Source({"quantization_config": config} if config else {}, kinds, **more)
    dialect = dialect_of(source)
    return dialect.name, dialect.parse(source).format_of("a")


def test_a_file_of_modelopt_beside_another_config_is_not_read() -> None:
    left = {"hf_quant_config.json": {"quantization": {"quant_algo": "MXFP8"}}}
    static = FP8 | {"activation_scheme": "static"}
    assert read(static, documents=left) == ("autofp8", Format(static=True))


def dialect_of(source: Source) -> Any:
    found = detect(source)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("rotation_config", {"block_size": 32, "hadamard_type": "hadamard"}),
        ("spinquant_config", {"r4": True}),
        ("algo_config", [{"name": "rotation", "r1": True, "r4": True}]),
        ("algo_config", [{"name": "awq"}, {"name": "rotation", "online_r1_rotation": True}]),
    ],
)
def test_inputs_that_are_rotated_at_run_time_are_refused(key: str, config: Any) -> None:
    auto_round = {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8}
    base = quark({}) if key == "algo_config" else auto_round
    with pytest.raises(CheckpointError, match=f"has {key}.*: inputs of layers are rotated"):
        read({**base, key: config})


ROTATED = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}]}}}


@pytest.mark.parametrize(
    "config", [FP8, FP8 | {"weight_block_size": [1, 32]}, MODELOPT | {"quant_algo": "FP8"}]
)
def test_a_rotation_counts_in_the_config_of_any_method(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"has transform_config = .* is not computed"):
        read(config | {"transform_config": ROTATED})
    assert read(config | {"transform_config": {}}) == read(config)


def test_weights_that_quark_quantized_twice_are_refused() -> None:
    twice = [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4"}]
    with pytest.raises(CheckpointError, match=r"weight = \[.*int4.*not several\. .*not read"):
        read({"quant_method": "quark", "global_quant_config": {"weight": twice}})


@pytest.mark.parametrize("config", [None, [], [{"name": "rotation", "r1": True, "r4": False}]])
def test_rotations_that_are_part_of_the_weights_change_nothing(config: Any) -> None:
    assert read({**quark({}), "algo_config": config}) == read(quark({}))


@pytest.mark.parametrize(
    ("config", "name", "fmt"),
    [
        (FP8, "autofp8", Format(static=False)),
        (FP8 | {"activation_scheme": "static"}, "autofp8", Format(static=True)),
        (MX_FP | {"bits": 8, "act_bits": 8}, "mxfp8-weight-scale", Format(MX, MX)),
        (MX_FP | {"bits": 8}, "mxfp8-weight-scale", Format(MX, weight_only=True)),
        (MX_FP | {"bits": 4}, "mxfp8-weight-scale", Format(MX, MX)),
        ({"quant_method": "MXFP8"}, "mxfp8-weight-scale", Format(MX, MX)),
        ({"quant_method": "w8a8_fp8"}, "bare", Format(static=None)),
        (quark({}), "quark", Format(TENSOR, weight_only=True)),
        (quark({}, {}) | {"export": {}}, "quark", Format(TENSOR, weight_only=True)),
        (quark({}, DYNAMIC), "quark", Format(TENSOR, TENSOR)),
        (quark(BLOCKS, DYNAMIC), "quark", Format(BLOCK)),
        (quark(GROUPS, DYNAMIC), "quark", Format(MX)),
        (
            {"quant_method": "quark", "activation_scheme": "static"},
            "quark",
            Format(TENSOR, static=None),
        ),
        (FPW8A16, "fp8", Format(static=None, weight_only=True)),
        (
            MODELOPT | {"quantization": {"quant_algo": "fp8_pb_wo"}},
            "modelopt",
            Format(BLOCK, GROUP128),
        ),
        (
            MIXED | {"quantized_layers": {"b": {"quant_algo": "FP8"}}},
            "modelopt",
            Format(static=None),
        ),
    ],
)
def test_what_a_config_means(config: dict[str, Any], name: str, fmt: Format) -> None:
    assert read(config) == (name, fmt)


@pytest.mark.parametrize(
    ("config", "name", "fmt"),
    [
        (FP8, "fp8", Format(static=False)),
        (
            FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            "fp8",
            Format(BLOCK, GROUP128, ue8m0=True),
        ),
        (
            FP8 | {"weight_block_size": [32, 64]},
            "fp8",
            Format(GroupShape(32, 64), GroupShape(1, 64)),
        ),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "fp8", Format(static=False)),
        (FP8 | {"weight_block_size": [1, 32]}, "mxfp8", Format(MX, MX)),
    ],
)
def test_what_a_config_means_beside_inverse_scales(
    config: dict[str, Any], name: str, fmt: Format
) -> None:
    assert read(config, "weight_scale_inv") == (name, fmt)


@pytest.mark.parametrize("group", [TENSOR, ROW], ids=str)
def test_fpw8a16_of_auto_round_leaves_inputs_alone(group: GroupShape, tmp_path: Path) -> None:
    q = fp8kit.quantize(torch.randn(256, 128), group, role="weight")
    scale = q.scale.flatten().bfloat16()  # as it is written
    save_file({"0.weight": q.data, "0.weight_scale": scale}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FPW8A16}))
    model = fp8kit.load(tmp_path, nn.Sequential(nn.Linear(128, 256, bias=False)).bfloat16())
    assert model[0].scheme == scheme_of(group, None)
    weight = q.data.float() * scale.float().view(-1, 1)
    assert_bits_equal(model[0].to_linear(torch.float32).weight.detach(), weight)


@pytest.mark.parametrize(
    "said",
    [{"data_type": "mx_fp", "bits": 8}, {"packing_format": "auto_round:fp8", "data_type": "fp"}],
    ids=["mx", "fp8"],
)
def test_inputs_that_auto_round_leaves_alone_in_some_layers_are_said(said: dict[str, Any]) -> None:
    def unread(**more: Any) -> tuple[str, ...]:
        source = Source({"quantization_config": AUTO_ROUND | said | more}, KINDS)
        return dialect_of(source).parse(source).unread

    some = {"model.layers.0.mlp.up_proj": {"act_bits": 16}, "lm_head": {"bits": 16}}
    (sentence,) = unread(act_bits=8, extra_config=some)
    assert "model.layers.0.mlp.up_proj" in sentence
    assert "lm_head" not in sentence
    assert unread(act_bits=8, extra_config={"lm_head": {"bits": 16}}) == ()
    assert unread(act_bits=16, extra_config=some) == ()  # as all others


def test_flat_modelopt_counts_more_than_nested() -> None:
    nested = {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}
    assert read({}, documents=nested) == ("modelopt", Format(TENSOR, static=True))
    flat = MODELOPT | {"quant_algo": "MXFP8"}
    assert read(flat, documents=nested) == ("modelopt", Format(MX, MX))


def test_the_file_of_modelopt_may_be_flat_and_tells_what_its_config_leaves_out() -> None:
    """Cosmos' pipeline has a flat file; MIXED_PRECISION in ``config.json`` leaves layers to it."""
    static = Format(TENSOR, static=True)
    flat = {"hf_quant_config.json": MODELOPT | {"quant_algo": "FP8", "ignore": ["visual*"]}}
    assert read({}, documents=flat) == ("modelopt", static)
    layers = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}
    nested = {"hf_quant_config.json": {"quantization": layers}}
    assert read(MIXED, documents=nested) == ("modelopt", static)
    groups = {"group_0": {"targets": ["a"], "weights": {"num_bits": 8}}}
    assert read(MIXED | {"config_groups": groups}) == ("modelopt", Format(static=None))


def test_an_embedding_in_fp8_has_no_scale_of_inputs() -> None:
    """NVIDIA lists a Qwen's table of n-grams as FP8."""
    source = Source({"quantization_config": MODELOPT | {"quant_algo": "FP8"}}, KINDS)
    format_of = dialect_of(source).parse(source).format_of
    assert format_of("ple.ngram_embedding") == Format(TENSOR, static=None)
    assert format_of("q_proj") == Format(TENSOR, static=True)


def test_a_table_beside_blocks_has_one_scale() -> None:
    """Transformers stores a Qwen's table of n-grams so, with another name of the scale."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    kinds = {
        "q_proj.weight": (torch.float8_e4m3fn, (256, 256)),
        "q_proj.weight_scale_inv": (torch.float32, (2, 2)),
        "ple.ngram_embedding.weight": (torch.float8_e4m3fn, (512, 256)),
        "ple.ngram_embedding.weight_scale": (torch.float32, (1,)),
    }
    source = Source({"quantization_config": blocks}, kinds)
    assert dialect_of(source).name == "fp8"
    format_of = dialect_of(source).parse(source).format_of
    assert format_of("ple.ngram_embedding") == Format(TENSOR, static=None)
    assert format_of("q_proj") == Format(BLOCK, GROUP128)


def test_layers_that_quark_left_in_the_fp8_of_its_source_are_known_by_their_tensors() -> None:
    groups = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    config = quark(groups, DYNAMIC)
    assert read(config) == ("quark", Format(MX))
    assert read(config | {"exclude": ["lm_head", "a*"]}) == ("quark", Format(static=None))


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "int8"])
def test_activations_of_quark_in_another_dtype_are_said(dtype: str) -> None:
    source = Source({"quantization_config": quark({}, DYNAMIC | {"dtype": dtype})}, KINDS)
    (said,) = dialect_of(source).parse(source).unread
    assert f"says {dtype} for activations" in said
    # a layer without a weight may have several formats of inputs; it computes in high precision
    unweighted = {"*softmax": {"weight": None, "input_tensors": [{"dtype": dtype}]}}
    config = quark({}, DYNAMIC) | {"layer_quant_config": unweighted}
    source = Source({"quantization_config": config}, KINDS)
    assert dialect_of(source).parse(source).unread == ()


def test_layers_that_quark_quantized_otherwise_are_known_by_name() -> None:
    row = quark({"qscheme": "per_channel", "ch_axis": 0}, DYNAMIC)["global_quant_config"]
    common = quark({})
    assert read(common | {"layer_quant_config": {"*b": row}}) == read(common)
    found = read(common | {"layer_quant_config": {"*a": row}})[1]
    assert found.weight == ROW != read(common)[1].weight
    typed = common | {"layer_type_quant_config": {"Conv2d": {}, "Linear": row}}
    assert read(typed) == ("quark", found)
    dense = {"*a": {"weight": None, "input_tensors": None}}
    assert read(common | {"layer_quant_config": dense}) == ("quark", Format(static=None))


@pytest.mark.parametrize(("word", "static"), [("NO_SCALES", False), ("TENSOR", True), (None, None)])
def test_mistral_says_how_activations_are_scaled(word: str | None, static: bool | None) -> None:
    params = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": word}}
    found = read({}, "qscale_weight", documents={"params.json": params})
    assert found == ("mistral", Format(static=static))


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_mistral_may_hold_a_config_of_compressed_tensors(key: str) -> None:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    found = read({}, documents={"params.json": {key: said | {"ignore": ["output"]}}})
    assert found == ("mistral", Format(ROW, weight_only=True))
    with pytest.raises(CheckpointError, match="is not computed"):
        read({}, documents={"params.json": {key: said | {"transform_config": ROTATED}}})


def test_mistral_is_told_by_its_tensors() -> None:
    found = read({"quant_method": "awq"}, "qscale_weight")
    assert found == ("mistral", Format(static=None))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FP8 | {"activation_scheme": "magic"}, "activation_scheme = 'magic'"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2'"),
        (FP8 | {"scale_fmt": 3}, "scale_fmt = 3"),
        (FP8 | {"weight_scale_semantics": "inverse"}, "absent, for scales that multiply"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        (FP8 | {"weight_block_size": [0, 128]}, "two positive integers"),
        (FP8 | {"weight_block_size": "big"}, "two positive integers"),
        (FP8 | {"weight_block_size": ["128", 128]}, "two positive integers"),
        (FP8 | {"weight_block_size": [128.0, 128]}, "two positive integers"),
        (FP8 | {"ignored_layers": "lm_head"}, "a list of names"),
        (FP8 | {"weight_block_size": [9, 9], "expert_dtype": "fp6"}, "expert_dtype = 'fp6'"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 16]}, r"\[1, 32\]"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "a positive number"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "x"}, "a positive number"),
        (MODELOPT | {"quant_algo": ["FP8"]}, r"quant_algo = \['FP8'\]"),
        (MODELOPT | {"quant_algo": "W8A8_SQ_PER_CHANNEL"}, "other formats are not read: start"),
        (MIXED, "at least one layer"),
        ({"quant_method": "quark"}, "global_quant_config = None"),
        (quark({"dtype": "int8"}), "dtype = 'int8'"),
        (quark({"qscheme": "per_group", "group_size": 64}), "groups of 32"),
        (quark({"qscheme": "per_channel", "ch_axis": 1}), "per_channel over axis 0"),
        (quark({}, {"qscheme": "per_channel"}), "dynamic, or static per_tensor"),
        (quark({}, {"dtype": "fp8_e5m2"}), "static per_tensor in fp8_e4m3"),
        (quark({}, {"dtype": "int8"}), "static per_tensor in fp8_e4m3"),
        (quark({}) | {"export": {"weight_format": "fake_quantized"}}, "has no codes"),
        (quark({}) | {"export": 3}, "export = 3"),
        ({"quant_method": "torchao"}, "not describe torchao's tensors"),
        (AUTO_ROUND | {"data_type": "int", "bits": 8}, "quant_method = 'auto-round'"),
        ({"quant_method": "gptq"}, "quant_method = 'gptq'. This version reads compressed-tensors"),
        ({"quant_method": "quanto"}, "was written by quanto"),
        ({"bits": 4}, "quant_method = None"),
        ({"fp8_config": "E4M3", "scale_method": "maxabs_hw"}, r"weights lie as \[K, N\]"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config, "scales" if config.get("expert_dtype") is None else "weight_scale_inv")


@pytest.mark.parametrize(
    "said",
    [
        {"documents": {"quantization_config.json": {"fp8_config": "E4M3", "scale_method": "hw"}}},
        {"kinds": KINDS | {"a.quant_input.scale_inv": (F32, ())}},
    ],
)
def test_files_of_neural_compressor_are_known_without_a_config(said: dict[str, Any]) -> None:
    """A model of diffusers has its quantization config in a file of its own."""
    with pytest.raises(CheckpointError, match=r"Intel Neural Compressor.*weights lie as \[K, N\]"):
        detect(Source({}, **{"kinds": KINDS} | said))


@pytest.mark.parametrize(
    ("codes", "scale", "refused"),
    [
        ((256, 128), (256, 1), True),
        ((256, 256), (1, 256), True),  # with use_quantized_matmul weights are transposed
        ((256, 128), (1, 1), True),
        ((256, 2, 1024), (256, 2, 1), True),  # of wide layers SDNQ divides rows into groups
        ((256, 128), (2, 1), False),  # blocks, as DeepSeek's convert.py names their scales
        ((64, 128), (1, 1), False),
    ],
)
def test_weights_that_sdnq_may_have_rotated_or_transposed_are_refused(
    codes: tuple[int, ...], scale: tuple[int, ...], refused: bool
) -> None:
    source = Source({}, {"a.weight": (E4, codes), "a.scale": (F32, scale)})
    dialect = dialect_of(source)
    assert dialect.name == "bare"
    if not refused:
        assert dialect.parse(source).format_of("a") == Format(static=None)
        return
    with pytest.raises(CheckpointError, match=r"^a\.scale is .* SDNQ .*name these scales X\."):
        dialect.parse(source)


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"group_size": 64, "bits": 4}}])
def test_packed_weights_of_mlx_are_refused_by_name(config: dict[str, Any]) -> None:
    kinds = {"x.weight": (torch.uint32, (8, 8)), "x.scales": (torch.bfloat16, (8, 1))}
    with pytest.raises(CheckpointError, match=r"x\.weight is torch\.uint32.* so MLX packs"):
        detect(Source(config, kinds))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"qformat_weight": "int4"}, "params.json has qformat_weight = 'int4'"),
        ({"qscheme_act": "ROW"}, "params.json has qscheme_act = 'ROW'"),
        ({"qscheme_act": ["TENSOR"]}, r"qscheme_act = \['TENSOR'\]"),
    ],
)
def test_params_that_cannot_be_honoured(params: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read({}, "x", documents={"params.json": {"quantization": params}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a description of a tensor"),
        ("[]", "a description of a tensor"),
        ("[" * 100_000, "a description of a tensor"),
        (json.dumps({"_type": "Int4Tensor", "_data": {}}), "a Float8Tensor, or an MXTensor"),
        (json.dumps({"_type": "Float8Tensor", "_data": {}}), "'block_size'"),
        (json.dumps({"_type": "Float8Tensor", "_data": {"block_size": []}}), "a description of"),
    ],
)
def test_torchao_descriptions_that_cannot_be_read(text: str, message: str) -> None:
    kinds = {"a._weight_qdata": (E4, (4, 4)), "a._weight_scale": (F32, (4, 1))}
    source = Source({}, kinds, {}, {"tensor_names": "[]", "a.weight": text})
    format_of = dialect_of(source).parse(source).format_of
    with pytest.raises(CheckpointError, match=message):
        format_of("a")
    with pytest.raises(CheckpointError, match=r"has b\.weight = None"):
        format_of("b")


def test_torchao_blocks_and_groups() -> None:
    acts = {"granularity": {"_type": "PerBlock", "_data": {"block_size": [1, 128]}}}
    data = {"block_size": [128, 128], "act_quant_kwargs": {"_data": acts}}
    kinds = {"a._weight_qdata": (E4, (256, 256))}
    text = json.dumps({"_type": "Float8Tensor", "_data": data})
    source = Source({}, kinds, {}, {"tensor_names": "[]", "a.weight": text})
    found = dialect_of(source).parse(source).format_of("a")
    assert (found.weight, found.activation) == (BLOCK, GROUP128)


def test_static_scales_of_torchao_for_another_dtype_are_refused() -> None:
    """Such a scale maps the largest input to 57344: as e4m3 all inputs would saturate."""
    dtype = {"float8_dtype": {"_type": "torch.dtype", "_data": "float8_e5m2"}}
    acts = {"_data": {"granularity": {"_type": "PerTensor"}, **dtype}}
    data = {"block_size": [64, 64], "act_quant_kwargs": acts, "act_quant_scale": "its name"}
    text = json.dumps({"_type": "Float8Tensor", "_data": data})
    source = Source(
        {}, {"a._weight_qdata": (E4, (64, 64))}, {}, {"tensor_names": "[]", "a.weight": text}
    )
    with pytest.raises(CheckpointError, match="static scale is for activations in float8_e5m2"):
        dialect_of(source).parse(source).format_of("a")


def torchao_says(*inputs: dict[str, Any] | None) -> Announcement:
    """Read the descriptions of layers whose activations have these settings, ``None`` 16 bits."""
    kinds, texts = {}, {"tensor_names": "[]"}
    for i, more in enumerate(inputs):
        acts = None if more is None else {"_data": {"granularity": {"_type": "PerRow"}, **more}}
        kinds[f"{i}._weight_qdata"] = (E4, (64, 64))
        data = {"block_size": [1, 64], "act_quant_kwargs": acts}
        texts[f"{i}.weight"] = json.dumps({"_type": "Float8Tensor", "_data": data})
    source = Source({}, kinds, {}, texts)
    return dialect_of(source).parse(source)


def test_torchao_may_bound_activations_of_all_layers_alike() -> None:
    found = torchao_says({"hp_value_ub": 1200.0}, {"hp_value_ub": 1200.0})
    assert (found.scale_ub, found.unread) == (1200.0, ())
    assert (torchao_says({}).scale_ub, torchao_says({}).unread) == (None, ())


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (({"hp_value_ub": 2.0}, {}), "from above"),
        (({"hp_value_ub": 2.0}, None), "from above"),
        (({"hp_value_ub": 2.0}, {"hp_value_ub": 3.0}), "from above"),
        (({"hp_value_ub": [2.0]},), "from above"),
        (({"hp_value_ub": -1.0},), "from above"),
        (({"hp_value_lb": 1.0},), "from below"),
        (({"float8_dtype": {"_data": "float8_e5m2"}},), "say float8_e5m2"),
    ],
)
def test_what_torchao_does_with_activations_alone_is_said(inputs: Any, said: str) -> None:
    found = torchao_says(*inputs)
    assert found.scale_ub is None
    assert len(found.unread) == 1
    assert said in found.unread[0]


def test_fbgemm_has_a_bound() -> None:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    source = Source({"quantization_config": config})
    assert dialect_of(source).parse(source).scale_ub == 1200.0


@pytest.mark.parametrize(
    "changed",
    [
        {"scale_ub": None},
        {"kv_scales": "tensor"},
        {"others": {"lm_head": SCHEMES["FP8_DYNAMIC"]}},
        {"scheme": SCHEMES["FP8_BLOCK"]},
        {"scheme": scheme_of(ROW, ROW, ue8m0=True)},
        {"scheme": replace(SCHEMES["FP8_DYNAMIC"], dtype=torch.float8_e5m2)},
    ],
)
def test_fbgemm_refuses_what_it_cannot_say(changed: dict[str, Any]) -> None:
    spec = Spec(SCHEMES["FP8_DYNAMIC"], scale_ub=1200.0)
    assert dialect_named("fbgemm").render(spec)["activation_scale_ub"] == 1200.0
    with pytest.raises(CheckpointError, match=r"to write as fbgemm, with .*FP8_DYNAMIC everywhere"):
        dialect_named("fbgemm").render(replace(spec, **changed))


@pytest.mark.parametrize(
    ("dialect", "scheme"),
    [
        ("fp8", SCHEMES["FP8_DYNAMIC"]),
        ("fp8", SCHEMES["FP8_WEIGHT_ONLY"]),
        ("fp8", scheme_of(BLOCK, None)),
        ("fp8", scheme_of(TENSOR, None)),
        ("fp8", scheme_of(TENSOR, ROW, ue8m0=True)),
        ("autofp8", SCHEMES["FP8_BLOCK"]),
        ("autofp8", SCHEMES["FP8_DYNAMIC"]),
        ("autofp8", scheme_of(TENSOR, ROW, ue8m0=True)),
        ("autofp8", scheme_of(TENSOR, None)),
        ("autofp8", replace(scheme_of(TENSOR, ROW), dtype=torch.float8_e5m2)),
        ("fp8", replace(SCHEMES["FP8_BLOCK"], dtype=torch.float8_e5m2)),
        ("mxfp8", SCHEMES["FP8_BLOCK"]),
        ("mxfp8-weight-scale", scheme_of(MX, None)),
    ],
)
def test_dialects_refuse_what_they_cannot_say(dialect: str, scheme: Any) -> None:
    remedy = r"Write dialect compressed-tensors, or quantize the original to (FP8|MXFP8)"
    with pytest.raises(CheckpointError, match=rf"Got scheme .* to write as {dialect}\..*{remedy}"):
        dialect_named(dialect).render(Spec(scheme))


@pytest.mark.parametrize("scheme", ["FP8", "FP8_TENSOR"])
def test_fp8_without_blocks_has_one_scale(scheme: str) -> None:
    config = dialect_named("fp8").render(Spec(SCHEMES[scheme]))
    assert read(config, "weight_scale_inv") == ("fp8", Format(static=SCHEMES[scheme].static))


@pytest.mark.parametrize("name", ["fp8", "autofp8", "mxfp8"])
def test_dialects_of_one_scheme_refuse_others(name: str) -> None:
    scheme = SCHEMES["MXFP8" if name == "mxfp8" else "FP8_TENSOR"]
    with pytest.raises(CheckpointError, match="and others to write as"):
        dialect_named(name).render(Spec(scheme, others={"lm_head": scheme}))


def test_ignore_lists_are_written_for_every_reader() -> None:
    names = ["lm_head", "model.layers.0.mlp.gate"]
    for dialect, scheme in (("fp8", "FP8_BLOCK"), ("autofp8", "FP8"), ("mxfp8", "MXFP8")):
        found = dialect_named(dialect).render(Spec(SCHEMES[scheme], (names[1],)))
        assert found["ignored_layers"] == found["modules_to_not_convert"] == names


def test_a_list_of_names_may_lie_in_a_list() -> None:
    said = FP8 | {
        "activation_scheme": "static",
        "ignored_layers": [["lm_head", "b"]],
    }  # LightCompress
    source = Source({"quantization_config": said}, KINDS)
    assert dialect_of(source).parse(source).ignore == ("lm_head", "b")
    for odd in ([["a"], ["b"]], [[1]], [[["a"]]], ["a", ["b"]]):
        source = Source({"quantization_config": said | {"ignored_layers": odd}}, KINDS)
        with pytest.raises(CheckpointError, match="a list of names"):
            dialect_of(source).parse(source)


def test_what_engines_merge_in_linear_attention_is_listed_too() -> None:
    """Some of the engines' classes around a Qwen3.5 do not declare which layers they merge."""
    parts = ("x.in_proj_b", "x.in_proj_a", "x.in_proj_z")
    found = dialect_named("fp8").render(Spec(SCHEMES["FP8_BLOCK"], parts))
    assert found["ignored_layers"] == sorted({"lm_head", *parts, "x.in_proj_ba"})


def test_single_experts_have_no_merged_name() -> None:
    parts = ("x.experts.0.gate_proj", "x.experts.0.up_proj")
    found = dialect_named("fp8").render(Spec(SCHEMES["FP8_BLOCK"], parts))
    assert found["ignored_layers"] == sorted({"lm_head", *parts})


def test_dialects_that_are_only_read() -> None:
    only_read = {d.name for d in DIALECTS if not d.writable}
    assert only_read == {
        *("torchao", "mistral", "comfyui", "modelopt", "quark", "mxfp4", "bare", "fp8kit"),
    }
    for dialect in DIALECTS:
        if not dialect.writable:
            with pytest.raises(CheckpointError, match="read and not written"):
                dialect.render(Spec(SCHEMES["FP8"]))
            with pytest.raises(ValueError, match="It must be one of autofp8, compressed"):
                dialect_named(dialect.name)


def test_the_documents_list_every_dialect_and_which_are_written() -> None:
    table = (ROOT / "docs/checkpoints.md").read_text().partition("| dialect |")[2]
    rows = re.findall(r"^\| `([\w-]+)`.*\| ([^|]+) \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert {name for name, _ in rows} == {d.name for d in DIALECTS}
    # "by `save_pretrained`": diffusers and huggingface_hub write it, and no target does
    written = {name for name, said in rows if not said.startswith(("no", "by `save_pretrained`"))}
    assert written == {d.name for d in DIALECTS if d.writable}
    numbers = {6: "six", 7: "seven", 14: "fourteen", 15: "fifteen", 16: "sixteen"}
    said = f"reads {numbers[len(DIALECTS)]} dialects and writes {numbers[len(written)]}"
    assert said in (ROOT / "README.md").read_text()


def test_every_dialect_has_a_golden_checkpoint() -> None:
    folders = [path.parent for path in (ROOT / "tests/golden").glob("*/*.safetensors")]
    assert {fp8kit.inspect(each).dialect for each in folders} == {d.name for d in DIALECTS}


def test_misspelt_dialects() -> None:
    with pytest.raises(ValueError, match=r"Did you mean 'compressed-tensors'\?"):
        dialect_named("compressed_tensor")


def test_granularity_of_activations_follows_the_weight() -> None:
    found = {g: Format().scheme(g, has_input_scale=False).activation for g in (TENSOR, ROW, BLOCK)}
    assert found == {TENSOR: ROW, ROW: ROW, BLOCK: GROUP128}
    assert Format(static=None).scheme(TENSOR, has_input_scale=True) == SCHEMES["FP8"]
    assert Format(weight_only=True).scheme(ROW, has_input_scale=False) == SCHEMES["FP8_WEIGHT_ONLY"]


@pytest.mark.parametrize("scheme", [None, {}, 3, [1], {"weight": 1, "activation": None}])
def test_what_is_no_scheme_in_a_config_is_told(scheme: Any) -> None:
    with pytest.raises(CheckpointError, match=r"has scheme = .* the name of a preset"):
        scheme_of_plain(scheme)
    with pytest.raises(CheckpointError, match=r"has layers.a = .* a scheme"):
        read({"quant_method": "fp8kit", "layers": {"a": scheme}})
