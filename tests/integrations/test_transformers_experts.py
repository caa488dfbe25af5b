"""Experts and KV cache scales in other libraries' checkpoints, written and read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8kit
import tiny_experts
from checkpoint_samples import SHARD, edit_json
from engines import experts_are_dense, modules_of_experts
from fp8kit.checkpoint.inspection import inspect
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.errors import CheckpointError, UnsupportedError
from fp8kit.io.checkpoints import quantize_checkpoint, verify_checkpoint
from fp8kit.io.translation import convert_checkpoint
from numerics import assert_bits_equal, assert_same_tensors

transformers = pytest.importorskip("transformers")
from transformers.quantizers.quantizer_finegrained_fp8 import (  # noqa: E402
    FineGrainedFP8HfQuantizer,
)

from fp8kit.integrations.transformers import Fp8KitConfig  # noqa: E402
from fp8kit.integrations.transformers_saving import names_on_disk  # noqa: E402

IDS = torch.arange(40).view(1, -1)
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mixtral": {"num_local_experts": 4},
    "Phimoe": {"num_local_experts": 4},
    "MiniMax": {"num_local_experts": 4, "layer_types": ["full_attention"]},
    "GraniteMoe": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
}
MIXED = [k for k in KINDS if k != "Llama"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


def tiny(kind: str, folder: Path) -> Path:
    """Return a checkpoint in bf16 with one layer."""
    path = folder / kind
    if not path.exists():
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
        made = tiny_experts.tiny(kind, num_hidden_layers=1, **sizes, **KINDS[kind])
        made.save_pretrained(path)
    return path


def stock(path: Path) -> Any:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def quantization(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


def assert_same_files(a: Path, b: Path) -> None:
    assert_same_tensors(load_file(a / SHARD), load_file(b / SHARD))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("kind", MIXED)
def test_engines_are_told_that_experts_are_dense(
    kind: str, scheme: str, folder: Path, tmp_path: Path
) -> None:
    model = stock(tiny(kind, folder))
    fp8kit.convert(model, scheme, exclude=["*.experts"])
    fp8kit.save(model, tmp_path / "c")
    experts = modules_of_experts(load_file(tmp_path / "c" / SHARD))
    assert len(experts) == 1
    assert all(experts_are_dense(quantization(tmp_path / "c"), name) for name in experts)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_a_converted_model_is_saved_as_the_stream_writes_it(
    scheme: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    """Experts have the names, codes and scales that engines are known to load."""
    source = tiny(kind, folder)
    model = stock(source)
    fp8kit.convert(model, scheme)
    for target in ("vllm", "transformers"):
        fp8kit.save(model, tmp_path / target, target=target)
        quantize_checkpoint(source, tmp_path / f"{target}-stream", Recipe(scheme, target=target))
        assert_same_files(tmp_path / target, tmp_path / f"{target}-stream")
    experts = modules_of_experts(load_file(tmp_path / "vllm" / SHARD))
    assert [experts_are_dense(quantization(tmp_path / "vllm"), name) for name in experts] == [False]
    stock(tmp_path / "transformers")  # nothing missing, nothing drawn at random


def decoded(module: Any, name: str) -> Tensor:
    return fp8kit.dequantize(module.quantized(name), torch.bfloat16)


@pytest.mark.parametrize("kind", ["Mixtral", "GraniteMoe", "GptOss"])
def test_experts_are_read_one_by_one_or_by_transformers_alike(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    source = tiny(kind, folder)
    model = fp8kit.load(source, scheme="FP8_DYNAMIC")
    other = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=Fp8KitConfig()
    )
    assert [r.experts for r in other.hf_quantizer.report.stacks] == [4]
    state = model.state_dict()
    assert sum(n.endswith("experts.gate_up_proj_scale") for n in state) == 1
    assert_same_tensors(other, state)
    if kind == "Mixtral":
        other.save_pretrained(tmp_path / "c")
        fp8kit.save(model, tmp_path / "d")
        assert_same_files(tmp_path / "c", tmp_path / "d")
        return
    for save in (
        lambda: model.save_pretrained(tmp_path / "c"),
        lambda: fp8kit.save(model, tmp_path / "c", target="transformers"),
    ):
        with pytest.raises(CheckpointError, match="would draw them at random"):
            save()
    with pytest.warns(UserWarning, match="stacks of codes, which fp8kit.load reads"):
        fp8kit.save(model, tmp_path / "d")
    assert_same_tensors(fp8kit.load(tmp_path / "d"), state)


def test_an_expert_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny("Qwen3Moe", folder), tmp_path / "c")
    tensors = load_file(tmp_path / "c" / SHARD)
    for name in [n for n in tensors if ".experts.2.up_proj" in n]:
        del tensors[name]
    save_file(tensors, tmp_path / "c" / SHARD, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj not on disk"):
        fp8kit.load(tmp_path / "c")


def test_a_stack_that_is_missing_is_named_while_experts_are_quantized(tmp_path: Path) -> None:
    tiny_experts.tiny("Qwen3Moe", num_hidden_layers=1).save_pretrained(tmp_path)
    tensors = {n: t for n, t in load_file(tmp_path / SHARD).items() if "down_proj" not in n}
    save_file(tensors, tmp_path / SHARD, metadata={"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(UnsupportedError, match=r"experts\.down_proj could not be .* lacks them"):
        load(tmp_path, dtype=torch.bfloat16, quantization_config=Fp8KitConfig())


def mixed(kind: str, projection: str, folder: Path, path: Path) -> str:
    """Write FP8 experts of which one keeps a projection in bf16, and return its name."""
    quantize_checkpoint(tiny(kind, folder), path)
    tensors = load_file(path / SHARD)
    ending = rf"layers\.0.*\.experts\.2\.{projection}\.weight$"
    (name,) = (n for n in tensors if re.search(ending, n))
    tensors[name] = tensors[name].bfloat16()
    del tensors[f"{name}_scale"]
    save_file(tensors, path / SHARD, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(("kind", "projection"), [("Qwen3Moe", "up_proj"), ("Mixtral", "w3")])
def test_a_projection_in_high_precision_leaves_all_experts_so(
    kind: str, projection: str, folder: Path, tmp_path: Path
) -> None:
    """This also holds if Transformers renames the experts of the checkpoint."""
    name = mixed(kind, projection, folder, tmp_path / "c")
    with pytest.warns(UserWarning, match="holds 11 FP8 layers .* they were decoded to high"):
        model = fp8kit.load(tmp_path / "c")
    stack = model.model.layers[0].mlp.experts.gate_up_proj[2]
    weight = load_file(tmp_path / "c" / SHARD)[name]
    assert_bits_equal(stack[-len(weight) :].detach(), weight)


def test_an_expert_too_many_is_not_used(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny("Qwen3Moe", folder), tmp_path / "c")
    tensors = load_file(tmp_path / "c" / SHARD)
    there = [n for n in tensors if ".experts.0." in n]
    more = {n.replace(".experts.0.", ".experts.99."): tensors[n].clone() for n in there}
    save_file(tensors | more, tmp_path / "c" / SHARD, metadata={"format": "pt"})
    unused = re.escape(f"that the model does not use: {min(more)}, ")
    with pytest.warns(UserWarning, match=unused) as told:
        fp8kit.load(tmp_path / "c")
    assert not any("decoded" in str(w.message) for w in told)
    with pytest.raises(CheckpointError, match=r"experts\.99\..* not used by the model"):
        fp8kit.load(tmp_path / "c", strict=True)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("kind", MIXED)
def test_a_directory_tells_engines_what_its_experts_are(
    kind: str, scheme: str, folder: Path, tmp_path: Path
) -> None:
    source = tiny(kind, folder)
    quantize_checkpoint(source, tmp_path / "c", scheme)
    experts = modules_of_experts(load_file(tmp_path / "c" / SHARD))
    kept = kind in ("GraniteMoe", "GptOss")  # of which no engine loads FP8
    assert [experts_are_dense(quantization(tmp_path / "c"), n) for n in experts] == [kept]
    if not kept:
        recipe = Recipe(scheme, exclude=["*.experts.*"])
        quantize_checkpoint(source, tmp_path / "d", recipe)
        assert all(experts_are_dense(quantization(tmp_path / "d"), name) for name in experts)


def test_save_pretrained_lists_experts_by_their_names_on_disk(folder: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny("Mixtral", folder), quantization_config=Fp8KitConfig(exclude=["*.experts"])
    )
    model.save_pretrained(tmp_path / "c")
    assert experts_are_dense(
        quantization(tmp_path / "c"), "model.layers.0.block_sparse_moe.experts"
    )
    assert "model.layers.0.block_sparse_moe.gate" in quantization(tmp_path / "c")["ignore"]


def test_experts_beyond_256_keep_their_names_while_16_bit_is_the_default() -> None:
    """Names are numbers on the way, which a 16-bit default dtype, as loaders set, would round."""
    model = tiny_experts.tiny("Llama4Text", num_local_experts=120)
    stack = "model.layers.0.feed_forward.experts.gate_up_proj"
    wanted = {stack: (140, ("gate_proj", "up_proj"))}
    expected = names_on_disk(model, wanted)
    assert len(set(expected[stack])) == 280
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert names_on_disk(model, wanted) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_router_is_listed_by_the_name_of_its_module_too(folder: Path, tmp_path: Path) -> None:
    """Engines that run Transformers' model look its modules up by name."""
    quantize_checkpoint(tiny("Phimoe", folder), tmp_path / "c")
    listed = quantization(tmp_path / "c")["ignore"]
    assert {"model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"} <= set(listed)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_that_transformers_quantized(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers writes codes expert by expert, and their scales in stacks."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    source, written = tiny(kind, folder), tmp_path / "fp8"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=transformers.FineGrainedFP8Config()
    )
    theirs.save_pretrained(written)
    monkeypatch.undo()
    assert any(n.endswith("gate_up_proj_scale_inv") for n in load_file(written / SHARD))
    assert inspect(written).problems == []
    assert verify_checkpoint(source, written).problems == []
    ours = fp8kit.load(written)
    experts, expected = ours.model.layers[0].mlp.experts, theirs.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        assert_bits_equal(experts.codes(name), getattr(expected, name))
        assert_bits_equal(experts.beside(name, "scale"), getattr(expected, f"{name}_scale_inv"))
    convert_checkpoint(written, tmp_path / "t", target="transformers")
    again = stock(tmp_path / "t")
    for name in ("gate_up_proj", "down_proj"):
        assert_bits_equal(getattr(again.model.layers[0].mlp.experts, name), decoded(experts, name))
    convert_checkpoint(written, tmp_path / "v", target="vllm")
    assert not any("proj_scale_inv" in name for name in load_file(tmp_path / "v" / SHARD))
    assert inspect(tmp_path / "v").problems == []


def as_modules(name: str) -> str:
    """Name a tensor of Mixtral like exporters that walk Transformers' modules."""
    for ours, theirs in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name.replace("block_sparse_moe", "mlp")


def renamed(source: Path, destination: Path, **changes: Tensor) -> Path:
    shutil.copytree(source, destination)
    tensors = load_file(source / SHARD) | changes
    tensors = {as_modules(n): t for n, t in tensors.items()}
    save_file(tensors, destination / SHARD, metadata={"format": "pt"})
    return destination


@pytest.mark.parametrize("target", ["vllm", "transformers"])
def test_experts_get_the_names_that_are_loaded(target: str, folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny("Mixtral", folder), tmp_path / "c", Recipe(target=target))
    source = renamed(tmp_path / "c", tmp_path / "modules")
    convert_checkpoint(source, tmp_path / "d", target=target)
    assert_same_files(tmp_path / "d", tmp_path / "c")
    assert "model.layers.0.block_sparse_moe.gate" in quantization(tmp_path / "d")["ignore"]
    with torch.no_grad():
        assert_bits_equal(fp8kit.load(source)(IDS).logits, fp8kit.load(tmp_path / "c")(IDS).logits)


def test_names_of_experts_that_nobody_knows_are_said(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(tiny("Qwen3Moe", folder), tmp_path / "c")
    tensors = load_file(tmp_path / "c" / SHARD)
    odd = {n.replace(".experts.0.up_proj", ".experts.0.lift"): t for n, t in tensors.items()}
    save_file(odd, tmp_path / "c" / SHARD, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"experts\.0\.lift and 0 more .* no engine is known"):
        convert_checkpoint(tmp_path / "c", tmp_path / "d")


def test_input_scales_of_experts_are_written_for_transformers_too(
    folder: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny("Mixtral", folder), tmp_path / "c")
    tensors = load_file(tmp_path / "c" / SHARD)
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        tensors[name] = tensors[name].amax().reshape(1)
        tensors[name.replace("weight_scale", "input_scale")] = torch.full((1,), 0.02)
    save_file(tensors, tmp_path / "c" / SHARD, metadata={"format": "pt"})
    config = quantization(tmp_path / "c")
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["config_groups"]["group_0"] |= {
        "weights": activations,
        "input_activations": activations,
    }
    edit_json(tmp_path / "c" / "config.json", quantization_config=config)
    convert_checkpoint(tmp_path / "c", tmp_path / "t", target="transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    ours = fp8kit.load(tmp_path / "t")
    theirs, said = load(tmp_path / "t", dtype=torch.bfloat16, output_loading_info=True)
    # Transformers does not quantize inputs of experts, and so has no use for these scales
    assert all(n.endswith(".input_scale") for n in said.pop("unexpected_keys"))
    assert not any(said.values())
    for name in ("gate_up_proj", "down_proj"):
        dense = getattr(theirs.model.layers[0].mlp.experts, name)
        assert_bits_equal(decoded(ours.model.layers[0].mlp.experts, name), dense)
    static = fp8kit.load(tmp_path / "c").model.layers[0].mlp.experts
    assert static.scheme.static
    for name in ("gate_up_proj", "down_proj"):
        assert_bits_equal(static.beside(name, "input_scale"), torch.full((1, 1), 0.02))
    x, ids = torch.randn(3, 256).bfloat16(), torch.tensor([[0, 1], [1, 2], [3, 0]])
    assert static(x, ids, torch.full((3, 2), 0.5)).isfinite().all()
    schemes = {layer.scheme for layer in inspect(tmp_path / "t").layers}
    assert len(schemes) == 1
    convert_checkpoint(tmp_path / "c", tmp_path / "v", target="vllm")
    for target in ("t", "v"):
        kept = load_file(tmp_path / target / SHARD)
        assert sum("experts" in n and n.endswith("input_scale") for n in kept) == 12


HEADS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "attn_head",
    "dynamic": False,
}


def with_cache(folder: Path, path: Path, kinds: str, heads: bool, attention: bool) -> Path:
    """Return a checkpoint with scales of its KV cache, as llm-compressor writes them."""
    quantize_checkpoint(tiny("Llama", folder), path)
    tensors = load_file(path / SHARD)
    for i, kind in enumerate(kinds):
        shape = (4 if kind == "q" else 2, 1, 1) if heads else (1,)
        values = torch.arange(1, shape[0] + 1, dtype=torch.bfloat16) / 64 + i
        tensors[f"model.layers.0.self_attn.{kind}_scale"] = values.reshape(shape)
    save_file(tensors, path / SHARD, metadata={"format": "pt"})
    config = quantization(path)
    args = HEADS if heads else HEADS | {"strategy": "tensor"}
    if attention:
        group = {"targets": ["LlamaAttention"], "weights": None, "input_activations": args}
        config["config_groups"]["group_1"] = group
    else:
        config["kv_cache_scheme"] = args
    edit_json(path / "config.json", quantization_config=config)
    return path


@pytest.mark.parametrize("attention", [False, True], ids=["cache", "attention"])
@pytest.mark.parametrize("heads", [False, True], ids=["tensor", "heads"])
def test_scales_of_the_cache_keep_their_strategy(
    heads: bool, attention: bool, folder: Path, tmp_path: Path
) -> None:
    source = with_cache(folder, tmp_path / "c", "qkv" if attention else "kv", heads, attention)
    assert inspect(source).problems == []
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    strategy = "attn_head" if heads else "tensor"
    assert quantization(tmp_path / "d")["kv_cache_scheme"]["strategy"] == strategy
    before, after = load_file(source / SHARD), load_file(tmp_path / "d" / SHARD)
    for name in (n for n in before if n.endswith(("q_scale", "k_scale", "v_scale"))):
        assert_bits_equal(after[name], before[name].float())
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(tmp_path / "d", output_loading_info=True)
    unread, name = info.pop("unexpected_keys"), "model.layers.0.self_attn.k_scale"
    assert not any(info.values())
    if name in load(source, output_loading_info=True)[1]["unexpected_keys"]:
        return  # Transformers 5.24 reads no scales of a cache, whoever wrote them
    assert all(other.endswith("q_scale") for other in unread)
    assert_bits_equal(model.state_dict()[name].flatten(), before[name].flatten())


@pytest.mark.parametrize("heads", [False, True], ids=["tensor", "heads"])
def test_scales_of_the_cache_survive_load_and_save(
    heads: bool, folder: Path, tmp_path: Path
) -> None:
    source = with_cache(folder, tmp_path / "c", "qkv", heads, attention=True)
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    with pytest.warns(UserWarning, match="quantizes attention; its scales are not used"):
        model = fp8kit.load(source)
    attention = model.model.layers[0].self_attn
    assert set(attention.cache_scales) == {"q_scale", "k_scale", "v_scale"}
    assert not any(n.endswith(("q_scale", "k_scale", "v_scale")) for n in model.state_dict())
    fp8kit.save(model.to(torch.float16), tmp_path / "e", target="vllm")
    saved = load_file(tmp_path / "e" / SHARD)
    assert saved.keys() == load_file(tmp_path / "d" / SHARD).keys()
    for kind, scale in attention.cache_scales.items():
        assert_bits_equal(saved[f"model.layers.0.self_attn.{kind}"], scale)
    assert quantization(tmp_path / "e") == quantization(tmp_path / "d")


def test_scales_of_the_cache_survive_in_a_module_of_ones_own(folder: Path, tmp_path: Path) -> None:
    source = with_cache(folder, tmp_path / "c", "kv", heads=False, attention=False)
    model = stock(tiny("Llama", folder))
    with pytest.warns(UserWarning, match="quantizes the KV cache"):
        fp8kit.load(source, model=model, strict=True)
    fp8kit.save(model, tmp_path / "d")
    assert quantization(tmp_path / "d")["kv_cache_scheme"]["strategy"] == "tensor"
    name = "model.layers.0.self_attn.v_scale"
    assert_bits_equal(
        load_file(tmp_path / "d" / SHARD)[name],
        model.get_submodule("model.layers.0.self_attn").cache_scales["v_scale"],
    )
    with pytest.warns(UserWarning, match="quantizes"):
        fp8kit.load(source, model=model)
    fp8kit.load(tiny("Llama", folder), model=model)  # a later load leaves nothing of an earlier one
    fp8kit.save(model, tmp_path / "e")
    assert name not in load_file(tmp_path / "e" / SHARD)


def test_scales_per_head_have_one_dialect(folder: Path, tmp_path: Path) -> None:
    source = with_cache(folder, tmp_path / "c", "kv", heads=True, attention=False)
    tensors = load_file(source / SHARD)
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        tensors[name] = tensors[name].amax().reshape(1)
    save_file(tensors, source / SHARD, metadata={"format": "pt"})
    config = quantization(source)
    config["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    edit_json(source / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError, match="scales per head, to write as autofp8"):
        convert_checkpoint(source, tmp_path / "d", dialect="autofp8")


def test_a_block_may_draw_the_weights_of_its_experts(tmp_path: Path) -> None:
    """The class initialises the stacks of a submodule that reads them directly from the file."""
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs

    torch.manual_seed(0)
    text = configs.Qwen3OmniMoeTextConfig(
        vocab_size=160,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=4,
        moe_intermediate_size=128,
    )
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    audio = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2}
    config = configs.Qwen3OmniMoeThinkerConfig(
        text_config=text.to_dict(),
        vision_config={**vision, "out_hidden_size": 128, "deepstack_visual_indexes": [0]},
        audio_config={**audio, "encoder_ffn_dim": 64, "output_dim": 128},
    )
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config).bfloat16().eval()
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / "c")
    again = fp8kit.load(tmp_path / "c").state_dict()
    for name, tensor in model.state_dict().items():
        assert_bits_equal(again[name], tensor)
