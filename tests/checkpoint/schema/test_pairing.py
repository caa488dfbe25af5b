"""Codes and scales that do not fit are refused by name; all exporters' variants are understood."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fp8kit.checkpoint.dialects import Source
from fp8kit.checkpoint.dialects.base import TEXT_PARTS
from fp8kit.checkpoint.schema.decoding import decode_scale
from fp8kit.checkpoint.schema.pairing import Reading, interpret
from fp8kit.formats import GROUP128, SCHEMES, TENSOR, GroupShape

E4, E5, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
F32, BF16, U8, E8 = torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu
BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MX = {"quant_method": "mxfp8"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CHANNEL = {"quant_method": "fbgemm_fp8"}
Kind = tuple[torch.dtype, tuple[int, ...]]


def read(quantization: dict[str, Any] | None, config: Any = None, **kinds: Kind) -> Reading:
    """Interpret tensors; two underscores in a name stand for a dot."""
    found = {name.replace("__", "."): kind for name, kind in kinds.items()}
    config = {**(config or {}), **({"quantization_config": quantization} if quantization else {})}
    return interpret(Source(config, found))


def problem(found: Reading) -> str:
    assert len(found.problems) == 1, found.problems
    return found.problems[0]


W: Kind = (E4, (256, 128))


@pytest.mark.parametrize("quantization", [None, BLOCK, MX, STATIC, CHANNEL])
def test_a_weight_without_its_scale(quantization: Any) -> None:
    other = {} if quantization else {"b__weight": W, "b__weight_scale": (F32, (256, 1))}
    text = problem(read(quantization, a__weight=W, **other))
    assert text.startswith("a.weight is torch.float8_e4m3fn and has no a.weight_scale.")


def test_blocks_of_a_size_that_nothing_announces_are_told_apart() -> None:
    text = problem(read(None, a__weight=W, a__weight_scale=(F32, (4, 2))))
    assert text.startswith("a.weight_scale is torch.float32 of shape [4, 2], and no config says")
    assert "tensor [1], row [256, 1], 128x128 [2, 1], mx [256, 4]." in text
    sizes = {**BLOCK, "weight_block_size": [64, 64]}
    assert not read(sizes, a__weight=W, a__weight_scale_inv=(F32, (4, 2))).problems


@pytest.mark.parametrize("kinds", [{"a__weight": W}, {"a__weight": (E5, (256, 128))}, {}])
def test_plain_casts_are_told_from_codes_without_scales(kinds: dict[str, Kind]) -> None:
    found = read(None, a__bias=(E4, (256,)), norm__weight=(F32, (128,)), **kinds)
    text = problem(found)
    assert text.startswith(f"None of the FP8 tensors, such as a.{'weight' if kinds else 'bias'}, ")
    assert "cast every tensor of a plain cast to bfloat16, save that, and quantize it." in text


def test_scales_of_another_name_are_no_plain_casts() -> None:
    scales: dict[str, Kind] = {"a__weights_scaling_factor": (F32, (1,))}
    text = problem(read(None, a__weight=W, b__scaling=(F32, (1,)), **scales))
    assert text.startswith("a.weight is torch.float8_e4m3fn and has a.weights_scaling_factor")
    assert "TensorRT-LLM" in text
    assert "plain cast" not in text


@pytest.mark.parametrize("quantization", [None, STATIC, {"quant_method": "modelopt"}])
def test_a_layer_whose_input_is_scaled_before_it_is_quantized(quantization: Any) -> None:
    algorithm = {"quant_algo": "FP8"} if quantization and "modelopt" in str(quantization) else {}
    config = quantization and {**quantization, **algorithm}
    scales = {"a__weight_scale": (F32, ()), "a__input_scale": (F32, ())}
    text = problem(read(config, a__weight=W, a__pre_quant_scale=(BF16, (128,)), **scales))
    assert text.startswith("a.pre_quant_scale multiplies what goes into its layer")
    assert not read(config, a__weight=W, b__pre_quant_scale=(BF16, (128,)), **scales).problems


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        ("left_trans", "turns what goes into"),
        ("div.mul_scale", "multiplies what goes into"),
        ("weight_g_idx", "sorts the columns of"),
        ("weight_dual_scale", "multiplies the scales of"),
        ("svd_up", "adds to what"),
        ("svdquant_lora_a", "adds to what"),
    ],
)
def test_a_layer_that_computes_with_more_than_its_weight(kind: str, does: str) -> None:
    tensors = {f"a.{kind}": (BF16, (16, 16)), "a__weight_scale": (F32, ())}
    text = problem(read(None, a__weight=W, **tensors))
    assert text.startswith(f"a.{kind} {does} its layer")
    assert "without AWQ, SmoothQuant, FlatQuant, SVDQuant, dual scales or actorder" in text


def test_scales_of_inputs_beside_a_wrapped_layer() -> None:
    tensors = {"a.linear.weight": W, "a.linear.weight_scale": (F32, ())}
    found = read(None, **tensors, **{"a.div.mul_scale": (F32, (128,))})
    assert problem(found).startswith("a.div.mul_scale multiplies what goes into its layer")


@pytest.mark.parametrize("quantization", [None, BLOCK])
@pytest.mark.parametrize("name", ["a.weight", "a.qweight"])
def test_an_integer_weight_is_no_weight_in_high_precision(quantization: Any, name: str) -> None:
    other = {"b__weight": W, "b__weight_scale_inv": (F32, (2, 1))} if quantization else {}
    steps = {"norm__weight": (torch.int64, (3,)), "a__SCB": (F32, (256,))}
    text = problem(read(quantization, **other, **steps, **{name: (torch.int8, (256, 128))}))
    assert text.startswith(f"{name} is torch.int8. Weights are read that are FP8")


@pytest.mark.parametrize("weight", [None, (BF16, (256, 128))])
def test_a_scale_without_its_weight(weight: Kind | None) -> None:
    kinds = {"a__weight": weight} if weight else {}
    text = problem(read(BLOCK, a__weight_scale_inv=(F32, (2, 1)), **kinds))
    beside = f", but one of {weight[0]}" if weight else ""
    assert text.startswith(f"a.weight_scale_inv has no FP8 a.weight beside it{beside}.")
    assert ("of a model that it loaded in FP8 and decoded" in text) == (weight is not None)
    assert ("A shard may be missing" in text) == (weight is None)


def test_two_weights_for_one_layer() -> None:
    found = interpret(
        Source(
            {},
            {
                "a.weight": (BF16, (4, 4)),
                "a._weight_qdata": (E4, (4, 4)),
                "a._weight_scale": (F32, (4, 1)),
            },
            {},
            {"tensor_names": "[]", "a.weight": '{"_type": "Tensor"}'},
        )
    )
    assert "a.weight and a._weight_qdata are both the tensor a.weight." in found.problems[0]


def test_two_scales_for_one_weight() -> None:
    text = problem(
        read(BLOCK, a__weight=W, a__weight_scale=(F32, (2, 1)), a__weight_scale_inv=(F32, (2, 1)))
    )
    assert text.startswith("a.weight has a.weight_scale and a.weight_scale_inv beside it.")
    inputs = {"a__input_scale": (F32, ()), "a__activation_scale": (F32, ())}
    text = problem(read(STATIC, a__weight=W, a__weight_scale=(F32, ()), **inputs))
    assert "a.activation_scale and a.input_scale beside it" in text


@pytest.mark.parametrize(
    ("quantization", "scale"),
    [
        (BLOCK, (U8, (2, 1))),
        (CHANNEL, (U8, (256, 1))),
        (CHANNEL, (E8, (256, 1))),
        (MX, (F32, (256, 4))),
        (MX, (BF16, (256, 4))),
    ],
)
def test_bytes_and_numbers_are_not_mixed_up(quantization: Any, scale: Kind) -> None:
    text = problem(read(quantization, a__weight=W, a__weight_scale=scale))
    assert text.startswith(f"a.weight_scale is {scale[0]} of shape {list(scale[1])}.")
    assert "Exponent bytes and numbers are not cast into each other" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_numbers_of_other_dtypes_are_not_called_bytes(dtype: torch.dtype) -> None:
    text = problem(read(CHANNEL, a__weight=W, a__weight_scale=(dtype, (256, 1))))
    assert text.startswith(f"a.weight_scale is {dtype} of shape [256, 1].")
    assert text.endswith("Export again with scales in one of these dtypes.")


@pytest.mark.parametrize(
    ("quantization", "shape"),
    [
        (BLOCK, (1, 2)),
        (BLOCK, (256, 1)),
        (MX, (256, 3)),
        (CHANNEL, (128, 1)),
        (CHANNEL, (1,)),
    ],
)
def test_a_scale_of_the_wrong_shape(quantization: Any, shape: tuple[int, ...]) -> None:
    dtype = U8 if quantization is MX else F32
    text = problem(read(quantization, a__weight=W, a__weight_scale=(dtype, shape)))
    assert f"a.weight_scale is {dtype} of shape {list(shape)}. " in text
    assert "scales of a weight of [256, 128] are" in text
    assert "Correct the config if it names another scheme, or export again." in text


def test_scales_of_16_bit_are_read() -> None:
    assert read(CHANNEL, a__weight=W, a__weight_scale=(BF16, (256, 1))).problems == []


@pytest.mark.parametrize("dtype", [E5, torch.float8_e5m2fnuz])
def test_weights_of_another_format(dtype: torch.dtype) -> None:
    text = problem(read(DYNAMIC, a__weight=(dtype, (4, 4)), a__weight_scale=(F32, ())))
    assert text.startswith(f"a.weight is {dtype} of shape [4, 4]. FP8 weights are float8_e4m3fn")


def test_fp8_tensors_that_are_no_weights() -> None:
    text = problem(read(DYNAMIC, a__bias=(E4, (4,))))
    assert text.startswith("a.bias is torch.float8_e4m3fn and is not the weight of a layer.")


def test_static_layers_need_an_input_scale() -> None:
    text = problem(read(STATIC, a__weight=W, a__weight_scale=(F32, ())))
    assert text.startswith("An FP8 weight has no a.input_scale. FP8 needs it")
    dynamic = {"a__weight": W, "a__weight_scale": (F32, ()), "a__input_scale": (F32, ())}
    text = problem(read(DYNAMIC, **dynamic))
    assert text.startswith("a.input_scale is there, and the config says FP8_TENSOR.")
    wrong = dynamic | {"a__input_scale": (F32, (3,))}
    assert problem(read(STATIC, **wrong)).startswith("a.input_scale is torch.float32 of shape [3].")


def test_several_scales_of_the_cache() -> None:
    kinds = {"a__k_scale": (F32, ()), "a__k_proj__k_scale": (F32, ())}
    text = problem(read(STATIC, **kinds))
    assert text.startswith("The KV cache has a.k_proj.k_scale and a.k_scale for a.k_scale.")
    assert "a.k_scale (torch.float32 [7])" in problem(read(STATIC, a__k_scale=(F32, (7,))))


@pytest.mark.parametrize(
    ("scale", "scheme"),
    [
        ((F32, ()), "FP8_TENSOR"),
        ((F32, (1, 1)), "FP8_TENSOR"),
        ((F32, (256,)), "FP8_DYNAMIC"),
        ((BF16, (256, 1)), "FP8_DYNAMIC"),
        ((F32, (2, 1)), "FP8_BLOCK"),
        ((E8, (2, 1)), "FP8_BLOCK"),
        ((U8, (256, 4)), "MXFP8"),
        ((E8, (256, 4)), "MXFP8"),
    ],
)
def test_tensors_alone_say_the_scheme(scale: Kind, scheme: str) -> None:
    found = read(None, a__weight=W, a__weight_scale=scale)
    assert found.problems == []
    assert found.dialect is not None
    assert found.dialect.name == "bare"
    assert found.layers["a"].scheme == SCHEMES[scheme]


WORDS = ["weight_scale", "weight_scale_inv", "scale_weight", "qscale_weight", "scale"]


@pytest.mark.parametrize("word", [*WORDS, "weight__scale"])
@pytest.mark.parametrize("acts", ["input_scale", "activation_scale", "qscale_act", "scale_input"])
def test_every_word_for_a_scale_is_understood(word: str, acts: str) -> None:
    found = read(
        STATIC, a__weight=W, **{f"a__{word}": (F32, ()), f"a__{acts}": (F32, ())}, b=(F32, ())
    )
    assert found.problems == []
    assert found.layers["a"].scheme == SCHEMES["FP8"]
    assert found.tensors == {
        "a.weight": "a.weight",
        "a.weight_scale": f"a.{word.replace('__', '.')}",
        "a.input_scale": f"a.{acts}",
        "b": "b",
    }


def test_a_parameter_called_scale_is_no_scale_of_a_weight() -> None:
    found = read(BLOCK, a__scale=(F32, (4,)), a__weight=(F32, (4,)))
    assert found.problems == []
    assert found.layers == {}


@pytest.mark.parametrize(
    ("weight", "scale"),
    [("e.weight", ("e.scale", E8)), ("e._weight_qdata", ("e._weight_scale", F32))],
)
def test_packed_and_integer_weights_are_refused_by_name(
    weight: str, scale: tuple[str, torch.dtype]
) -> None:
    found = interpret(
        Source(
            {"quantization_config": BLOCK if scale[1] == E8 else {"quant_method": "torchao"}},
            {weight: (torch.int8, (8, 16)), scale[0]: (scale[1], (8, 1))},
            metadata={"tensor_names": "[]"},
        )
    )
    assert problem(found).startswith(f"{weight} is torch.int8, with scales beside it. Weights are")


def test_scales_that_nobody_set_beside_ragged_dense_weights() -> None:
    ragged = {"a__weight": (BF16, (160, 256)), "a__weight_scale_inv": (F32, (2, 2))}
    found = read(BLOCK, b__weight=W, b__weight_scale_inv=(F32, (2, 1)), **ragged)
    assert found.problems == []
    assert found.layers.keys() == {"b"}
    assert "a.weight_scale_inv" not in found.tensors.values()
    assert found.tensors["a.weight"] == "a.weight"
    assert found.spec is not None
    assert found.spec.unread == (
        "Scales beside weights in high precision say nothing here and are ignored: a.",
    )


def test_scales_of_what_layers_give_are_left_out() -> None:
    """Quark writes output scales for every layer; vLLM refuses a file that has them."""
    outputs = {f"{name}__output_scale": (F32, ()) for name in ("a", "l.v_proj", "dense")}
    found = read(BLOCK, a__weight=W, a__weight_scale_inv=(F32, (2, 1)), **outputs)
    assert found.problems == []
    assert set(found.tensors) >= {"l.v_scale", "dense.output_scale"}
    assert "a.output_scale" not in found.tensors.values()
    assert found.spec is not None
    assert found.spec.unread == (
        "Scales of what layers give say nothing here and are ignored: a.output_scale.",
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("l.self_attn.k_scale", ["l.self_attn.k_scale"]),
        ("l.self_attn.k_proj.k_scale", ["l.self_attn.k_scale"]),
        ("l.self_attn.qkv_proj.v_scale", ["l.self_attn.v_scale"]),
        ("l.self_attn.v_proj.output_scale", ["l.self_attn.v_scale"]),
        ("l.self_attn.q_proj.output_scale", ["l.self_attn.q_scale"]),
        ("l.self_attn.attn.k_scale", ["l.self_attn.k_scale"]),
        ("l.self_attn.qkqkv_proj.v_scale", ["l.self_attn.v_scale"]),
        ("l.self_attn.v_cache.scale", ["l.self_attn.v_scale"]),
        ("l.attention.k_fake_quantizer.qscale_act", ["l.attention.k_scale"]),
        ("l.self_attn.kv_scale", ["l.self_attn.k_scale", "l.self_attn.v_scale"]),
    ],
)
def test_every_name_of_a_scale_of_the_cache(name: str, ours: list[str]) -> None:
    found = interpret(Source({"quantization_config": DYNAMIC}, {name: (F32, (1,))}))
    assert found.problems == []
    assert list(found.kv_scales) == ours
    assert found.tensors == dict.fromkeys(ours, name)


def test_zeros_that_symmetric_attention_does_not_need_are_left_out() -> None:
    kinds = {f"l.self_attn.{x}_{word}": (E4 if word == "zero_point" else F32, (1,))
             for x in "qkv" for word in ("scale", "zero_point")}  # fmt: skip
    found = interpret(Source({"quantization_config": DYNAMIC}, kinds))
    assert found.problems == []
    assert found.tensors.keys() == {f"l.self_attn.{x}_scale" for x in "qkv"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1, 1)])
def test_the_scale_of_a_weight_that_is_one_block(shape: tuple[int, ...]) -> None:
    blocks = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    found = read(blocks, a__weight=(E4, (128, 128)), a__weight_scale=(F32, shape))
    assert found.problems == []
    assert found.layers["a"].scheme == SCHEMES["FP8_BLOCK"]


def test_parts_of_a_fused_matrix() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    scale = {"a__qkv_proj__weight": W, "a__qkv_proj__weight_scale": (F32, (3,))}
    found = read(DYNAMIC, heads, **scale)
    assert found.problems == []
    assert found.layers["a.qkv_proj"].widths == (128, 64, 64)
    assert found.layers["a.qkv_proj"].scheme == SCHEMES["FP8_DYNAMIC"]
    for part in TEXT_PARTS:
        assert read(DYNAMIC, {part: heads}, **scale).problems == []
    assert read(DYNAMIC, {**heads, "head_dim": 32}, **scale).problems == []
    narrow = {**heads, "head_dim": 16}  # and so the heads of values are of another size
    assert "of shape [3]" in problem(read(DYNAMIC, narrow, **scale))
    assert "qkv_proj.weight_scale is torch.float32 of shape [3]" in problem(read(DYNAMIC, **scale))
    gate = {"a__gate_up_proj__weight": W, "a__gate_up_proj__weight_scale": (F32, (2,))}
    found = read(STATIC, **gate, a__gate_up_proj__input_scale=(F32, (2,)))
    assert found.problems == []
    assert found.layers["a.gate_up_proj"].widths == (128, 128)
    wrong = scale | {"a__qkv_proj__weight_scale": (torch.int64, (3,))}
    assert "is torch.int64 of shape [3]" in problem(read(DYNAMIC, heads, **wrong))
    other = {"a__b_proj__weight": W, "a__b_proj__weight_scale": (F32, (2,))}
    assert "of shape [2]" in problem(read(DYNAMIC, **other))


def test_stacks_of_experts() -> None:
    found = read(
        DYNAMIC,
        e__down_proj=(E4, (4, 8, 16)),
        e__down_proj_scale=(F32, (4,)),
        e__gate_up_proj__weight=(E4, (4, 32, 8)),
        e__gate_up_proj__weight_scale=(F32, (4, 2)),
    )
    assert found.problems == []
    assert [layer.shape for layer in found.layers.values()] == [(4, 8, 16), (4, 32, 8)]
    assert {str(layer.group) for layer in found.layers.values()} == {"row"}
    assert found.tensors["e.down_proj_scale"] == "e.down_proj_scale"
    whole = (F32, (1, 1, 1))  # torchao's PerTensor
    assert read(DYNAMIC, e__up_proj=(E4, (4, 8, 16)), e__up_proj_scale=whole).problems == []


def test_a_checkpoint_may_hold_other_blocks() -> None:
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    found = read(config, a__weight=W, a__weight_scale_inv=(F32, (4, 2)))
    assert found.problems == []
    scheme = found.layers["a"].scheme
    assert (scheme.weight, scheme.activation) == (GroupShape(64, 64), GroupShape(1, 64))


def test_layers_of_two_schemes() -> None:
    found = read(
        None,
        a__weight=W,
        a__weight_scale=(F32, ()),
        b__weight=W,
        b__weight_scale=(F32, (256, 1)),
        c__weight=W,
        c__weight_scale=(F32, (256, 1)),
    )
    assert found.spec is not None
    assert found.spec.scheme == SCHEMES["FP8_DYNAMIC"]
    assert found.spec.others == {"a": SCHEMES["FP8_TENSOR"]}


def test_high_precision_is_left_alone() -> None:
    found = read(None, a__weight=(BF16, (4, 4)), a__scale=(F32, (4,)), a__weight_scale=(F32, (4,)))
    assert (found.dialect, found.problems, found.layers) == (None, [], {})
    assert len(found.tensors) == 3


def test_other_codes_without_a_config() -> None:
    found = read(None, a__weight=(torch.float8_e5m2fnuz, (4, 4)))
    assert "is not the weight of a layer" in problem(found)


def test_a_config_of_layers_that_are_not_there() -> None:
    found = read(BLOCK, a__weight=(BF16, (4, 4)))
    assert found.spec is not None
    assert found.spec.scheme == SCHEMES["FP8_BLOCK"]
    assert found.problems == []


def test_the_whole_model_may_be_one_layer() -> None:
    found = read(None, weight=W, weight_scale=(F32, (256, 1)))
    assert found.problems == []
    assert found.layers[""].scale == "weight_scale"


def test_the_name_of_a_layer_can_end_like_a_scale() -> None:
    found = read(DYNAMIC, a_scale__weight=W, a_scale__weight_scale=(F32, ()))
    assert list(found.layers) == ["a_scale"]
    assert re.match("FP8_TENSOR", found.layers["a_scale"].scheme.name)
    assert found.layers["a_scale"].group == TENSOR != GROUP128


def test_a_row_of_scales_is_a_column() -> None:
    for quantization in (None, CHANNEL):
        found = read(quantization, a__weight=W, a__weight_scale=(F32, (1, 256)))
        assert not found.problems
        assert found.layers["a"].scheme == SCHEMES["FP8_DYNAMIC"]
    # a scale that may be a row of blocks is taken for one, as in earlier versions
    found = read(None, a__weight=(E4, (32, 4096)), a__weight_scale=(F32, (1, 32)))
    assert found.layers["a"].scheme == SCHEMES["FP8_BLOCK"]


def test_widths_of_a_fused_layer_may_be_given() -> None:
    kinds = {"m.in_proj.weight": W, "m.in_proj.weight_scale": (F32, (3,))}
    found = interpret(Source({}, kinds, widths={"*.in_proj": [128, 64, 64]}))
    assert not found.problems
    layer = found.layers["m.in_proj"]
    assert layer.widths == (128, 64, 64)
    scale = decode_scale(layer, torch.tensor([1.0, 2.0, 3.0]), lambda: torch.empty(0), "s")
    assert scale.flatten().tolist() == [1.0] * 128 + [2.0] * 64 + [3.0] * 64
    for wrong in ([128, 128], [128, 64, 63], [256, 64, -64]):
        found = interpret(Source({}, kinds, widths={"in_proj": wrong}))
        assert "Widths are the rows of each part" in found.problems[0]
    assert "widths={name: rows}" in problem(interpret(Source({}, kinds)))
