"""Which dialect each target gets, and what is refused with the reason and an alternative."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fp8kit.checkpoint.dialects import AUTOFP8, Spec, dialect_named, scheme_of
from fp8kit.checkpoint.schema.targets import TARGETS, check_layers, dialect_for, misfit
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, Scheme

DYNAMIC = SCHEMES["FP8_DYNAMIC"]
SHAPE = (256, 256)


@pytest.mark.parametrize(
    ("scheme", "vllm", "sglang", "transformers"),
    [
        ("FP8", *["compressed-tensors"] * 3),
        ("FP8_DYNAMIC", *["compressed-tensors"] * 3),
        ("FP8_TENSOR", *["compressed-tensors"] * 3),
        ("FP8_WEIGHT_ONLY", *["compressed-tensors"] * 3),
        ("FP8_BLOCK", *["fp8"] * 3),
        ("MXFP8", "compressed-tensors", "mxfp8", "mxfp8"),
    ],
)
def test_every_target_gets_a_dialect_that_holds_the_scheme(
    scheme: str, vllm: str, sglang: str, transformers: str
) -> None:
    found = [dialect_for(target, SCHEMES[scheme]) for target in TARGETS]
    assert [dialect.name for dialect in found] == [vllm, sglang, transformers]
    assert all(dialect.render(Spec(SCHEMES[scheme])) for dialect in found)


@pytest.mark.parametrize("target", TARGETS)
def test_powers_of_two_go_with_blocks(target: str) -> None:
    scheme = scheme_of(BLOCK, GROUP128, ue8m0=True)
    assert dialect_for(target, scheme).render(Spec(scheme))["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme("E5M2", ROW, ROW, dtype=torch.float8_e5m2), "float8_e4m3fn, not .*default dtype"),
        (scheme_of(BLOCK, None), "activations in 16 bit.*Convert the model with FP8_BLOCK"),
        (scheme_of(MX, None), "activations in 16 bit.*Convert the model with MXFP8"),
        (scheme_of(GROUP128, GROUP128), "dynamic 1x128 activations.*with FP8_DYNAMIC"),
        (scheme_of(ROW, ROW, ue8m0=True), "exist for blocks only.*with FP8_DYNAMIC"),
    ],
)
@pytest.mark.parametrize("target", ["sglang", "transformers"])
def test_what_no_target_loads_is_refused(scheme: Scheme, message: str, target: str) -> None:
    with pytest.raises(CheckpointError, match=f"for target {target}. It cannot load.*{message}"):
        dialect_for(target, scheme)


def test_mx_with_activations_in_16_bit_is_for_vllm() -> None:
    assert dialect_for("vllm", scheme_of(MX, None)).name == "compressed-tensors"


def test_unknown_target() -> None:
    with pytest.raises(ValueError, match="It must be one of vllm, sglang, transformers"):
        dialect_for("tgi", DYNAMIC)


@pytest.mark.parametrize(
    ("target", "name", "shape", "reason"),
    [
        ("vllm", "a.o_proj", (256, 128), ""),
        ("vllm", "a.kv_a_proj_with_mqa", (576, 256), ""),
        ("sglang", "a.kv_a_proj_with_mqa", (576, 256), "merges q_a_proj, kv_a_proj_with_mqa"),
        ("sglang", "a.o_proj", (576, 256), ""),
        ("vllm", "a.in_proj_b", (64, 256), "merges in_proj_b, in_proj_a and needs 128"),
        ("vllm", "a.o_proj", (256, 130), "to divide the columns"),
        ("vllm", "a.gate_proj", (320, 256), "merges gate_proj, up_proj and needs 128"),
        ("vllm", "a.up_proj", (320, 256), ""),
        ("transformers", "a.o_proj", (576, 256), "without ragged edges only; it is 576x256"),
    ],
)
def test_ragged_blocks(target: str, name: str, shape: tuple[int, int], reason: str) -> None:
    found = misfit(target, SCHEMES["FP8_BLOCK"], name, shape)
    assert reason in found if reason else not found
    assert not misfit(target, DYNAMIC, name, shape)


def test_mx_needs_whole_groups() -> None:
    assert not misfit("vllm", SCHEMES["MXFP8"], "a", (3, 64))
    assert "MX groups have 32 columns" in misfit("vllm", SCHEMES["MXFP8"], "a", (64, 72))


def test_misfits_are_refused_by_name() -> None:
    block = SCHEMES["FP8_BLOCK"]
    check_layers("vllm", block, {"a": SHAPE}, [])
    with pytest.raises(CheckpointError, match=re.escape("e.g. b. vllm needs 128")):
        check_layers("vllm", block, {"a": SHAPE, "b": (256, 130)}, [])


@pytest.mark.parametrize(
    "group",
    [
        *(("q_proj", "k_proj", "v_proj"), ("w1", "w3"), ("in_proj_qkv", "in_proj_z")),
        *(("query", "key", "value"), ("c_fc_0", "c_fc_1")),
    ],
)
def test_half_quantized_siblings_are_refused_where_they_merge(group: tuple[str, ...]) -> None:
    first, second, *_ = group
    layers, dense = {f"l.{first}": SHAPE}, [f"l.{second}", "l.o_proj"]
    message = f"l.{first} is FP8 and l.{second} is not. vllm merges"
    patterns = re.escape(str([f"*.{name}" for name in group]))
    with pytest.raises(CheckpointError, match=rf"{message}.* exclude={patterns}.*fp8kit.plan"):
        check_layers("vllm", DYNAMIC, layers, dense)
    check_layers("transformers", DYNAMIC, layers, dense)
    check_layers("vllm", DYNAMIC, layers, ["l.o_proj", f"other.{second}"])


def test_experts_are_quantized_together() -> None:
    layers = {"l.experts.0.down_proj": SHAPE}
    message = r"l\.experts\.1\.down_proj is not. sglang stacks.* target='transformers'"
    with pytest.raises(CheckpointError, match=message):
        check_layers("sglang", DYNAMIC, layers, ["l.experts.1.down_proj"])
    check_layers("sglang", DYNAMIC, layers, ["m.experts.1.down_proj", "l.gate"])
    check_layers("transformers", DYNAMIC, layers, ["l.experts.1.down_proj"])


@pytest.mark.parametrize("scheme", ["FP8_TENSOR", "FP8_WEIGHT_ONLY"])
def test_experts_of_a_kind_that_engines_lack(scheme: str) -> None:
    layers = {"l.experts.0.down_proj": SHAPE}
    with pytest.raises(CheckpointError, match=r"has no experts of .* in compressed-tensors"):
        check_layers("vllm", SCHEMES[scheme], layers, [])
    check_layers("vllm", SCHEMES[scheme], {"l.down_proj": SHAPE}, [])
    check_layers("transformers", SCHEMES[scheme], layers, [])


def test_autofp8_brings_experts_of_one_scale() -> None:
    layers = {"l.experts.0.down_proj": SHAPE}
    check_layers("vllm", SCHEMES["FP8_TENSOR"], layers, [], dialect=AUTOFP8)


@pytest.mark.parametrize(
    ("dialect", "target", "scheme", "better"),
    [
        ("autofp8", "transformers", "FP8_TENSOR", "compressed-tensors"),
        ("mxfp8", "vllm", "MXFP8", "compressed-tensors"),
        ("mxfp8-weight-scale", "transformers", "MXFP8", "mxfp8"),
        ("compressed-tensors", "sglang", "MXFP8", "mxfp8"),
        ("compressed-tensors", "transformers", "FP8_BLOCK", "fp8"),
    ],
)
def test_dialects_that_a_target_does_not_read(
    dialect: str, target: str, scheme: str, better: str
) -> None:
    layers = {"l.o_proj": SHAPE, "l.experts.0.down_proj": SHAPE}
    message = f"in dialect {dialect} for target {target}. It cannot load .*Write dialect {better}"
    with pytest.raises(CheckpointError, match=message):
        check_layers(target, SCHEMES[scheme], layers, [], dialect=dialect_named(dialect))


def test_transformers_loads_blocks_outside_of_experts() -> None:
    ct = dialect_named("compressed-tensors")
    check_layers("transformers", SCHEMES["FP8_BLOCK"], {"l.o_proj": SHAPE}, [], dialect=ct)


def test_embeddings_are_tables_and_not_projections() -> None:
    for name in ("model.embed_tokens", "wte", "bert.token_type_embeddings"):
        assert "reads embeddings in high precision" in misfit("vllm", DYNAMIC, name, SHAPE)
    for name in ("x_embedder", "gpt_neox.embed_out", "a.patch_embedding", "wte.proj"):
        assert not misfit("vllm", DYNAMIC, name, SHAPE)


def test_quantized_output_heads() -> None:
    check_layers("vllm", DYNAMIC, {"lm_head": SHAPE}, [])
    with pytest.raises(CheckpointError, match=r"lm_head is FP8\. sglang reads the output head"):
        check_layers("sglang", SCHEMES["FP8_BLOCK"], {"lm_head": SHAPE}, [])


def test_schemes_have_names() -> None:
    assert scheme_of(TENSOR, TENSOR).name == "FP8_TENSOR_BY_TENSOR"
    assert scheme_of(ROW, TENSOR, static=True).name == "FP8_ROW_BY_STATIC_TENSOR"
    assert scheme_of(BLOCK, None).name == "FP8_128X128_BY_16BIT"
    assert scheme_of(BLOCK, GROUP128, ue8m0=True).name == "FP8_BLOCK_UE8M0"
    assert scheme_of(MX, MX, ue8m0=True) is SCHEMES["MXFP8"]


def test_vllm_has_mixers_of_mamba_1_dense_and_of_mamba_2_in_fp8() -> None:
    mixer = "backbone.layers.0.mixer"
    first = {f"{mixer}.{n}" for n in ("in_proj", "x_proj", "dt_proj", "out_proj")}
    second = {f"{mixer}.in_proj", f"{mixer}.out_proj"}
    for scheme in map(Scheme.of, ("FP8_DYNAMIC", "FP8_BLOCK")):
        for name in first:
            assert "Mamba mixer" in misfit("vllm", scheme, name, (256, 256), first)
            assert not misfit("transformers", scheme, name, (256, 256), first)
        for name in second:
            assert not misfit("vllm", scheme, name, (256, 256), second)
        assert not misfit("vllm", scheme, "0.attn.in_proj", (256, 256), {"0.attn.x_proj"})
    plamo = {"0.mixer.in_proj", "0.mixer.bcdt_proj"}
    found = {n: misfit("vllm", Scheme.of("FP8_BLOCK"), n, (256, 256), plamo) for n in plamo}
    assert found["0.mixer.in_proj"]
    assert not found["0.mixer.bcdt_proj"]
    with pytest.raises(
        CheckpointError, match=r"or save for target='transformers'\. Of a .*unfit='dequantize'\.$"
    ):
        check_layers("vllm", DYNAMIC, {"a.mamba.in_proj": (64, 64)}, ["a.mamba.x_proj"])
    check_layers("vllm", DYNAMIC, {"a.mamba.in_proj": (64, 64)}, ["a.mamba.out_proj"])


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_blocks_of_query_key_value_load_where_it_is_cut_in_order(target: str) -> None:
    block = Scheme.of("FP8_BLOCK")
    for by_heads in ("h.0.self_attention", "gpt_neox.layers.0.attention"):
        assert "by heads" in misfit(target, block, f"{by_heads}.query_key_value", (384, 128))
        assert not misfit(target, DYNAMIC, f"{by_heads}.query_key_value", (384, 128))
    for in_order in ("model.layers.0.attention", "transformer.encoder.layers.0.self_attention"):
        assert not misfit(target, block, f"{in_order}.query_key_value", (384, 128))
        assert misfit(target, block, f"{in_order}.query_key_value", (192, 128))


def test_blocks_with_activations_in_16_bit_load_in_vllm_alone() -> None:
    scheme = scheme_of(BLOCK, None)
    assert dialect_for("vllm", scheme).name == "compressed-tensors"
    check_layers("vllm", scheme, {"a": SHAPE}, [])
    with pytest.raises(CheckpointError, match="no experts of 128x128 weights with activations in"):
        check_layers("vllm", scheme, {"a.experts.0.up_proj": SHAPE}, [])
    with pytest.raises(CheckpointError, match="needs 128 to divide the columns"):
        check_layers("vllm", scheme, {"a": (256, 64)}, [])


@pytest.mark.parametrize(
    "config",
    [{"model_type": "phi3"}, {"model_type": "voxtral", "text_config": {"model_type": "llama"}}],
    ids=lambda config: config["model_type"],
)
def test_sglang_renames_the_scales_of_llama(config: dict[str, Any]) -> None:
    """SGLang's LlamaForCausalLM renames weight_scale_inv, and then finds no such parameter."""
    block, other = Scheme.of("FP8_BLOCK"), {"model_type": "qwen3"}
    assert dialect_for("sglang", block, config).name == "compressed-tensors"
    assert dialect_for("sglang", block, other).name == "fp8"
    assert dialect_for("vllm", block, config).name == "fp8"
    assert dialect_for("sglang", Scheme.of("MXFP8"), other).name == "mxfp8"
    with pytest.raises(CheckpointError, match=r"reads no weight_scale_inv.*scheme='FP8_DYNAMIC'"):
        dialect_for("sglang", Scheme.of("MXFP8"), config)
    layers, fp8 = {"a": (128, 128)}, dialect_for("vllm", block)
    check_layers("sglang", block, layers, [], dialect=fp8, config=other)
    with pytest.raises(CheckpointError, match=r"no weight_scale_inv\. Write dialect compressed-te"):
        check_layers("sglang", block, layers, [], dialect=fp8, config=config)
