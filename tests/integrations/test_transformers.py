"""Transformers models: quantized while loading, loaded from FP8, saved for all targets."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8kit
import tiny_experts
from checkpoint_samples import NANO, SHARD, all_bytes, edit_json, edit_tensors
from fp8kit.errors import CheckpointError, ConversionError, UnsupportedError
from fp8kit.formats import ROW
from fp8kit.io.models import load, save
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.linear import Fp8Linear
from numerics import (
    assert_bits_equal,
    assert_logits_of_one_checkpoint,
    assert_matmul,
    assert_same_tensors,
    relative_error,
)
from zoo import of_transformers

transformers = pytest.importorskip("transformers")
from fp8kit.integrations import transformers as plugin  # noqa: E402
from fp8kit.integrations import transformers_saving  # noqa: E402
from fp8kit.integrations.quantizer_of_layers import refuse_codes  # noqa: E402

IDS = torch.arange(60).view(1, -1) * 37 % 4096


def stock(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def assert_same(a: Any, b: Any, ids: Tensor = IDS) -> None:
    assert_same_tensors(a, b)
    assert_bits_equal(logits(a, ids), logits(b, ids))


def converted(scheme: str = "FP8_DYNAMIC") -> Any:
    model = stock(NANO)
    calibrate = (lambda m: m(IDS)) if scheme == "FP8" else None
    fp8kit.convert(model, scheme, calibrate=calibrate)
    return model


def dequantized(model: Any, dtype: torch.dtype) -> Any:
    dense = stock(NANO, dtype=dtype)
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            dense.get_submodule(name).weight.data = module.to_linear(dtype).weight.data
    return dense


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nano") / "fp8"
    save(converted(), path)
    return path


def tiny(kind: str, tmp_path: Path, **changes: Any) -> Path:
    """Return the folder of a random checkpoint in bf16."""
    changes = {"intermediate_size": 256, "num_attention_heads": 4, **changes}
    tiny_experts.tiny(kind, **changes).save_pretrained(tmp_path / kind)
    return tmp_path / kind


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK"])
def test_reload_is_exact(tmp_path: Path, scheme: str) -> None:
    model = converted(scheme)
    names = save(model, tmp_path / "c")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < set(names)
    loaded = load(tmp_path / "c")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(model, loaded)
    assert loaded.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16
    assert not any(m.weight.requires_grad for m in loaded.modules() if isinstance(m, Fp8Linear))


def test_every_way_to_blocks_for_sglang_gives_what_its_llama_loads(tmp_path: Path) -> None:
    fp8kit.save(converted("FP8_BLOCK"), tmp_path / "vllm")
    fp8kit.save(converted("FP8_BLOCK"), tmp_path / "saved", target="sglang")
    fp8kit.convert_checkpoint(tmp_path / "vllm", tmp_path / "converted", target="sglang")
    recipe = fp8kit.Recipe("FP8_BLOCK", target="sglang")
    fp8kit.quantize_checkpoint(NANO, tmp_path / "streamed", recipe, progress=False)
    for way in ("saved", "converted", "streamed"):
        assert fp8kit.inspect(tmp_path / way).dialect == "compressed-tensors"


def test_an_announced_format_that_no_weight_has_is_told(tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "c")
    left = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(tmp_path / "c" / "config.json", quantization_config=left)
    with pytest.warns(UserWarning, match="announced as FP8_BLOCK, and none of its weights is FP8"):
        load(tmp_path / "c")


def test_an_fp8_head_is_not_tied_to_embeddings(tmp_path: Path) -> None:
    """ModelOpt and Quark quantize the head of a tied model without changing its config."""
    save(converted("FP8_DYNAMIC"), tmp_path / "c")
    weight = load_file(tmp_path / "c" / "model.safetensors")["model.embed_tokens.weight"]
    q = fp8kit.quantize(weight, fp8kit.ROW, role="weight")
    edit_tensors(tmp_path / "c", lm_head__weight=q.data, lm_head__weight_scale=q.scale)
    loaded = load(tmp_path / "c")
    assert isinstance(loaded.lm_head, Fp8Linear)
    assert_bits_equal(loaded.model.embed_tokens.weight.detach(), weight)
    assert not loaded.config.tie_word_embeddings


def test_config_is_what_every_engine_needs(nano: Path) -> None:
    config = json.loads((nano / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["format"] == "float-quantized"
    before = json.loads((NANO / "config.json").read_text())
    changed = {k for k in config if config[k] != before.get(k)}
    assert changed <= {"quantization_config", "transformers_version"}
    assert before.keys() <= config.keys()


def test_generation_config_is_the_models(tmp_path: Path) -> None:
    model = converted()
    model.generation_config.max_new_tokens = 7
    save(model, tmp_path / "c")
    assert load(tmp_path / "c").generation_config.max_new_tokens == 7


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_codes_do_not_fill_a_dense_model_as_numbers(kind: str) -> None:
    model = tiny_experts.tiny(kind)
    state = model.state_dict()
    fill = functools.partial(type(model).from_pretrained, None, config=model.config)
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match=f"FP8 weights, such as .* {type(model).__name__} is"):
        fill(state_dict=model.state_dict())
    # without scales they may be numbers that were cast
    cast = state | {n: t.to(torch.float8_e4m3fn) for n, t in state.items() if "q_proj" in n}
    assert_same_tensors(fill(state_dict=state), state)
    fill(state_dict=cast)


def test_codes_fill_buffers_of_codes() -> None:
    holder = nn.Module()
    codes, scale = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(4, 1)
    state = {"weight": codes, "weight_scale": scale}
    for name, tensor in state.items():
        holder.register_buffer(name, tensor)
    assert refuse_codes(lambda model, given: given, holder, state) is state


def test_second_save_is_identical(tmp_path: Path, nano: Path) -> None:
    save(load(nano), tmp_path / "c")
    assert all_bytes(tmp_path / "c") == all_bytes(nano)


def test_shards(tmp_path: Path) -> None:
    model = converted()
    names = save(model, tmp_path / "c", max_shard_bytes=1_000_000)
    assert len([n for n in names if n.endswith(".safetensors")]) > 3
    assert_same(model, load(tmp_path / "c"))
    assert stock(tmp_path / "c").config.quantization_config is not None


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_TENSOR"])
def test_stock_transformers_computes_the_same(tmp_path: Path, scheme: str) -> None:
    model = converted(scheme)
    save(model, tmp_path / "c", target="transformers")
    other, info = stock_with_info(tmp_path / "c")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    unrounded = logits(dequantized(model, torch.bfloat16))
    assert_logits_of_one_checkpoint(logits(model), logits(other), unrounded)


def stock_with_info(path: Path) -> tuple[Any, dict[str, Any]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return model.eval(), info


def test_stock_weight_only_computes_the_same(tmp_path: Path) -> None:
    model = converted("FP8_WEIGHT_ONLY")
    save(model, tmp_path / "c")
    exact = logits(dequantized(model, torch.float32))
    for read in (load, stock):
        found = read(tmp_path / "c", dtype=torch.float32)
        torch.testing.assert_close(logits(found), exact, rtol=1e-4, atol=1e-4)


def test_a_stock_model_is_filled_once_it_is_decoded(nano: Path) -> None:
    other = stock(nano)
    with pytest.raises(CheckpointError, match=r"checkpoint and Linear \(torch.float8_e4m3fn\) in"):
        load(nano, other)
    logits(other)  # it decompresses its weights on the first call
    assert_bits_equal(logits(load(nano, other)), logits(load(nano)))


def test_stock_transformers_multiplies_the_same_numbers(nano: Path) -> None:
    ours, other = load(nano, dtype=torch.float32), stock(nano, dtype=torch.float32)
    logits(other)  # it decompresses its weights on the first call
    checked = 0
    for name, layer in ours.named_modules():
        if not isinstance(layer, Fp8Linear):
            continue
        x = torch.randn(1, 9, layer.in_features)
        rounded = fp8kit.dequantize(fp8kit.quantize(x, ROW))[0]
        weight = fp8kit.dequantize(layer.quantized_weight())
        with torch.no_grad():
            assert_matmul(other.get_submodule(name)(x)[0], rounded, weight)
            assert_matmul(layer(x)[0], rounded, weight)
        checked += 1
    assert checked == 28


def test_quantizing_while_loading_equals_converting(tmp_path: Path, nano: Path) -> None:
    model = load(NANO, scheme="FP8_DYNAMIC")
    direct = converted()
    assert_same(model, direct)
    report = model.hf_quantizer.report
    assert [r.name for r in report.skipped] == ["lm_head"]
    assert len(report.converted) == 28
    parts = (*model.parameters(), *model.buffers())
    assert report.model_bytes_after == sum(t.nbytes for t in parts)
    assert len(report.groups) == 8
    assert model.model.layers[0].mlp.up_proj.shared is not None
    save(model, tmp_path / "c")
    assert all_bytes(tmp_path / "c") == all_bytes(nano)


def test_include_and_exclude(tmp_path: Path) -> None:
    model = load(NANO, scheme="FP8_TENSOR", include=["*.mlp.*"], exclude=["down_proj"])
    found = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert found == {"gate_proj", "up_proj"}
    save(model, tmp_path / "c", source=NANO)
    content = json.loads((tmp_path / "c" / "config.json").read_text())
    ignored = content["quantization_config"]["ignore"]
    assert "model.layers.3.self_attn.o_proj" in ignored
    assert len(ignored) == 1 + 4 * 5
    assert_same(model, load(tmp_path / "c"))


def test_patterns_without_a_match() -> None:
    with pytest.raises(ConversionError, match="matches no linear layer"):
        load(NANO, scheme="FP8_DYNAMIC", exclude=["*.nothing"])


def test_layers_that_are_shared_are_told_when_saving(tmp_path: Path) -> None:
    def made() -> Any:
        model = stock(NANO)
        model.model.layers[1] = model.model.layers[0]
        return model

    model, fresh = made(), made()
    fp8kit.convert(model)
    with pytest.warns(UserWarning, match=r"layers\.1\.\S+.* are tensors of other modules, too"):
        save(model, tmp_path / "out")
    for parameter in fresh.parameters():
        parameter.data.zero_()
    assert_same(load(tmp_path / "out", fresh), model)


def test_a_tied_head_stays_dense_even_when_asked_for() -> None:
    model = load(NANO, scheme="FP8_DYNAMIC", exclude=[])
    assert type(model.lm_head) is nn.Linear
    record = next(r for r in model.hf_quantizer.report.skipped if r.name == "lm_head")
    assert "tied" in record.reason
    with pytest.raises(ConversionError, match="lm_head: its weight is tied"):
        load(NANO, scheme="FP8_DYNAMIC", exclude=[], strict=True)


def test_untied_head_can_be_asked_for(tmp_path: Path) -> None:
    path = tiny("Llama", tmp_path, tie_word_embeddings=False)
    assert type(load(path, scheme="FP8_DYNAMIC").lm_head) is nn.Linear
    model = load(path, scheme="FP8_DYNAMIC", exclude=[])
    assert isinstance(model.lm_head, Fp8Linear)
    save(model, tmp_path / "c", target="transformers")
    assert_same(model, load(tmp_path / "c"), IDS % 160)


def test_bias(tmp_path: Path) -> None:
    path = tiny("Llama", tmp_path, attention_bias=True, mlp_bias=True)
    state = load_file(path / SHARD)
    for name in state:
        if name.endswith(".bias"):
            edit_tensors(path, **{name.replace(".", "__"): torch.randn_like(state[name].float())})
    model = load(path, scheme="FP8_DYNAMIC")
    assert model.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16
    save(model, tmp_path / "c")
    assert_same(model, load(tmp_path / "c"), IDS % 160)
    stock(tmp_path / "c")


MOE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}


def test_excluded_experts_and_routers_stay_in_high_precision(tmp_path: Path) -> None:
    path = tiny("Qwen3Moe", tmp_path, **MOE)
    model = load(path, scheme="FP8_DYNAMIC", exclude=["*.experts"])
    skipped = {r.name: r.reason for r in model.hf_quantizer.report.skipped}
    assert "model.layers.0.mlp.experts" in skipped
    save(model, tmp_path / "c")
    tensors = load_file(tmp_path / "c" / SHARD)
    dense = load_file(path / SHARD)
    for kind in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{kind}.weight"
        assert_bits_equal(tensors[name], dense[name])
    content = json.loads((tmp_path / "c" / "config.json").read_text())
    ignored = content["quantization_config"]["ignore"]
    layers = [
        f"model.layers.{i}.mlp.{n}"
        for i in range(2)
        for n in (
            "gate",
            *(f"experts.{e}.{k}_proj" for e in range(4) for k in ("gate", "up", "down")),
        )
    ]
    patterns = [rf"re:model\.layers\.{i}\.mlp\.experts\..*" for i in range(2)]
    assert ignored == sorted(["lm_head", *layers, *patterns])
    other, info = stock_with_info(tmp_path / "c")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = IDS % 160
    assert_same(model, load(tmp_path / "c"), ids)
    bf16 = stock(path)
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            bf16.get_submodule(name).weight.data = module.to_linear().weight.data
    assert_logits_of_one_checkpoint(logits(model, ids), logits(other, ids), logits(bf16, ids))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR"])
def test_save_pretrained_loads_everywhere(tmp_path: Path, scheme: str) -> None:
    model = load(tiny("Qwen3Moe", tmp_path, **MOE), scheme=scheme, exclude=["*.0.self_attn.*"])
    model.save_pretrained(tmp_path / "c")
    content = json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]
    assert content["quant_method"] == "compressed-tensors"
    assert "model.layers.0.mlp.gate" in content["ignore"]
    assert "model.layers.0.self_attn.o_proj" in content["ignore"]
    assert "model.layers.1.self_attn.o_proj" not in content["ignore"]
    assert not any("experts" in name for name in content["ignore"])
    _, info = stock_with_info(tmp_path / "c")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(model, load(tmp_path / "c"), IDS % 160)


def test_save_pretrained_names_a_quantized_head(tmp_path: Path) -> None:
    path = tiny("Qwen3", tmp_path, tie_word_embeddings=False)
    config = plugin.Fp8KitConfig("FP8_DYNAMIC", exclude=[])
    model = stock(path, quantization_config=config, dtype=torch.bfloat16)
    assert isinstance(model.lm_head, Fp8Linear)
    for name in ("c", "again"):  # as quantized here, and as loaded from FP8
        model.save_pretrained(tmp_path / name)
        content = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert content["ignore"] == []
        assert content["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
        model = load(tmp_path / name)
    other, info = stock_with_info(tmp_path / "c")
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (logits(other, IDS % 160) - logits(model, IDS % 160)).abs().amax() < 0.1


def test_from_pretrained_with_our_config(nano: Path) -> None:
    model = stock(NANO, quantization_config=plugin.Fp8KitConfig("FP8_DYNAMIC"))
    assert_same(model, load(nano))


def test_a_config_takes_a_scheme_as_all_functions_do() -> None:
    config = plugin.Fp8KitConfig(fp8kit.SCHEMES["FP8_BLOCK"])
    assert config.to_dict() == plugin.Fp8KitConfig("FP8_BLOCK").to_dict()
    mine = fp8kit.Scheme("MINE", ROW, fp8kit.GROUP128)
    model = stock(NANO, quantization_config=plugin.Fp8KitConfig(mine))
    assert model.model.layers[0].self_attn.o_proj.scheme == mine
    with pytest.raises(ValueError, match="calibrat"):
        plugin.Fp8KitConfig(fp8kit.SCHEMES["FP8"])


@pytest.mark.parametrize("read", [lambda d: d, plugin.Fp8KitConfig.from_dict], ids=["", "read"])
def test_a_config_survives_a_dictionary(read: Callable[[Any], Any], tmp_path: Path) -> None:
    config = plugin.Fp8KitConfig("FP8_TENSOR", ["*.mlp.*"], exclude=["*.down_proj"], strict=True)
    said = json.loads(config.to_json_string())
    model = stock(NANO, quantization_config=read(said))
    assert_same(model, stock(NANO, quantization_config=config))
    found = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert found == {"gate_proj", "up_proj"}
    assert model.hf_quantizer.quantization_config.strict
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["quant_method"] == "compressed-tensors"
    assert config.to_dict() == said
    everything = plugin.Fp8KitConfig(exclude=[]).to_dict()  # also what stays dense by default
    assert everything["exclude"] == plugin.Fp8KitConfig.from_dict(everything).exclude == []


def test_a_config_with_a_function_is_no_dictionary() -> None:
    config = plugin.Fp8KitConfig(exclude=lambda name, _: "o_proj" in name)
    model = stock(NANO, quantization_config=config)
    assert not isinstance(model.model.layers[0].self_attn.o_proj, Fp8Linear)
    assert "a function" in str(model.config)
    again = plugin.Fp8KitConfig.from_dict(config.to_dict())
    with pytest.raises(TypeError, match=r"Got exclude='a function: pass the Fp8KitConfig itself"):
        stock(NANO, quantization_config=again)


def test_loaded_weights_do_not_depend_on_the_files(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    model = load(tmp_path / "c")
    before = logits(model)
    content = (tmp_path / "c" / SHARD).read_bytes()
    with (tmp_path / "c" / SHARD).open("r+b") as file:
        file.write(b"\x55" * len(content))
    assert_bits_equal(logits(model), before)


def test_gradients_flow_to_inputs(nano: Path) -> None:
    model = load(nano)
    embedded = model.get_input_embeddings()(IDS[:, :5]).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.isfinite().all()


def test_missing_tensor(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    edit_tensors(tmp_path / "c", model__norm__weight=None)
    said = r"model.norm.weight are in the model and not in the.*fp8kit\.load\(dir, model\) joins"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path / "c")


def test_unused_tensor(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    edit_tensors(tmp_path / "c", odd=torch.ones(2))
    with pytest.warns(UserWarning, match="tensors that the model does not use: odd"):
        load(tmp_path / "c")
    with pytest.raises(CheckpointError, match="odd are not used by the model"):
        load(tmp_path / "c", strict=True)


@pytest.mark.parametrize("by_transformers", [False, True])
def test_another_head_goes_on_a_saved_model(
    by_transformers: bool, nano: Path, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(nano, num_labels=3, pad_token_id=0)
    kind = transformers.LlamaForSequenceClassification
    if by_transformers:
        config.quantization_config["ignore"].append("score")
        model = kind.from_pretrained(nano, config=config, dtype=torch.bfloat16)
        assert model.score.weight.dtype == torch.bfloat16
        model(IDS)
        return
    del config.quantization_config
    model = kind._from_config(config, dtype=torch.bfloat16).eval()
    before = model.score.weight.clone()
    with pytest.raises(CheckpointError, match=r"(?s)score\.weight: not on.*missing=\['score'\]"):
        load(nano, model)
    with pytest.raises(CheckpointError, match="missing: 'scores' matches no layer of the model"):
        load(nano, model, missing=["score", "scores"])
    assert load(nano, model, missing=["score"]) is model
    assert_bits_equal(model.score.weight, before)
    assert isinstance(model.model.layers[0].mlp.up_proj, Fp8Linear)
    with torch.no_grad():
        assert_bits_equal(model.model(IDS)[0], load(nano).model(IDS)[0])
    model.save_pretrained(tmp_path)
    assert "score" in config_of(tmp_path)["ignore"]
    assert_same(load(tmp_path), model)
    with pytest.raises(ValueError, match=r"missing=\['score'\] and no model.*Build the model"):
        load(nano, missing=["score"])


@pytest.mark.parametrize(
    "named", [None, [], ["NoSuchModel"], ["pipeline"], ["AutoModel"], "x", [3]]
)
def test_unknown_architecture(tmp_path: Path, nano: Path, named: object) -> None:
    shutil.copytree(nano, tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", architectures=named)
    with pytest.raises(CheckpointError, match=r"has no model class of this name.*model=\.\.\."):
        load(tmp_path / "c")


def test_a_model_of_diffusers_is_named(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", architectures=None, _class_name="FluxTransformer")
    with pytest.raises(CheckpointError, match=r"a FluxTransformer of diffusers.*model=kind"):
        load(tmp_path / "c")


def test_a_folder_without_a_config(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    (tmp_path / "c" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"c has no config\.json.*fp8kit\.load\(dir, model="):
        fp8kit.load(tmp_path / "c")


def test_weights_arrive_one_by_one(tmp_path: Path) -> None:
    path = tiny("Qwen3Moe", tmp_path, **MOE)
    wanted = load(path, scheme="FP8_DYNAMIC")
    state = list(load_file(path / SHARD).items())
    random.shuffle(state)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    fp8kit.load_weights(model, state, scheme="FP8_DYNAMIC")
    assert_same(model, wanted, IDS % 160)
    places = {name: t.data_ptr() for name, t in model.state_dict().items()}
    for part in (state[::2], state[1::2]):  # experts of one stack come in two parts
        fp8kit.load_weights(model, [(n, t + 1) for n, t in part], partial=True)
    fp8kit.load_weights(model, [])
    fp8kit.load_weights(model, reversed(state))
    assert_same(model, wanted, IDS % 160)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == places


def test_loading_again_into_the_same_model(nano: Path) -> None:
    model = load(nano)
    before = logits(model)
    places = {name: t.data_ptr() for name, t in model.state_dict().items()}
    for _ in range(2):
        fp8kit.load_weights(model, stock(NANO).state_dict().items())
        assert_bits_equal(logits(model), before)
        assert load(nano, model) is model
        assert_bits_equal(logits(model), before)
    assert {name: t.data_ptr() for name, t in model.state_dict().items()} == places


@pytest.mark.parametrize("kind", ["Mixtral", "GPTNeoX", "Ernie4_5_Moe"])
def test_a_model_is_filled_from_files_that_have_other_names(kind: str, tmp_path: Path) -> None:
    source = tiny(kind, tmp_path)
    wanted = load(source, scheme="FP8_DYNAMIC")
    save(wanted, tmp_path / "fp8")
    on_disk = {**load_file(source / SHARD), **load_file(tmp_path / "fp8" / SHARD)}
    assert not on_disk.keys() >= {*wanted.state_dict(), *stock(source).state_dict()}
    for path, scheme in ((source, "FP8_DYNAMIC"), (tmp_path / "fp8", None)):
        model = stock(source)
        for parameter in model.parameters():
            parameter.data.zero_()
        for _ in range(2):  # into a dense model, and into one that is FP8
            assert load(path, model, scheme=scheme, strict=True) is model
            assert_same(model, wanted, IDS % 160)


def test_a_model_is_filled_from_files_that_join_its_layers(tmp_path: Path) -> None:
    """Transformers splits a file's qkv_proj into three parts, and its up_gate_proj into two."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 96}
    config = transformers.GteConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    dense, model = (transformers.GteModel(config).bfloat16() for _ in range(2))
    dense.save_pretrained(tmp_path / "dense")
    fp8kit.convert(dense)
    save(dense, tmp_path / "fp8", target="vllm")
    assert "encoder.layer.0.mlp.up_gate_proj.weight_scale" in load_file(tmp_path / "fp8" / SHARD)
    for path, scheme in ((tmp_path / "dense", "FP8_DYNAMIC"), (tmp_path / "fp8", None)):
        for _ in range(2):  # into a dense model, and into one that is FP8
            load(path, model, scheme=scheme, strict=True)
            assert_same_tensors(model, dense.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            r"has num_hidden_layers = 1000000000. The files hold",
        ),
        ({"num_hidden_layers": 6}, r"in the model and not in the checkpoint"),
        ({"hidden_size": 0}, r"cannot (build|read) .*config.json"),
        ({"num_attention_heads": 0}, r"cannot (build|read) .*config.json"),
        ({"hidden_act": "nonsense"}, r"cannot (build|read) .*config.json"),
        ({"vocab_size": 4000}, r"has shape \[4096, 256\]. LlamaForCausalLM.* needs \[4000, 256\]"),
        ({"hidden_size": 2**40}, r"LlamaForCausalLM, built from config.json, needs \[4096, 1099"),
        ({"intermediate_size": 2**70}, r"cannot (build|read) .*config.json"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fp8", [False, True])
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, nano: Path, changes: dict[str, Any], message: str, fp8: bool
) -> None:
    shutil.copytree(nano if fp8 else NANO, tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "c", scheme=None if fp8 else "FP8_DYNAMIC")


def test_unreadable_model_config(tmp_path: Path, nano: Path) -> None:
    shutil.copytree(nano, tmp_path / "c")
    edit_json(tmp_path / "c" / "config.json", model_type="no-such-model")
    with pytest.raises(CheckpointError, match=r"cannot read config.json of .*no-such-model"):
        load(tmp_path / "c")


def test_nan_weights_are_not_quantized(tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "c")
    weight = load_file(NANO / SHARD)["model.layers.0.mlp.up_proj.weight"]
    weight[5, 5] = float("nan")
    edit_tensors(tmp_path / "c", model__layers__0__mlp__up_proj__weight=weight)
    with pytest.raises(ConversionError, match=r"0.mlp.up_proj.weight holds NaN or infinities"):
        load(tmp_path / "c", scheme="FP8_DYNAMIC")


def test_static_scheme_needs_calibration() -> None:
    with pytest.raises(ValueError, match=r"calibration.*calibrate=\.\.\."):
        load(NANO, scheme="FP8")


def test_old_transformers_is_refused(outdate: Callable[[ModuleType], None]) -> None:
    # its first processor is imported with another `transformers` in sys.modules from then on
    outdate(transformers_saving.transformers)
    with pytest.raises(UnsupportedError, match=r"Transformers is 0.1.0. .* 5.17 and later"):
        load(NANO, scheme="FP8_DYNAMIC")


def test_a_model_quantized_by_others_is_refused(tmp_path: Path, nano: Path) -> None:
    model = stock(nano)
    model.extra = Fp8Linear.from_linear(nn.Linear(128, 128))
    with pytest.raises(CheckpointError, match="was quantized by CompressedTensorsConfig too"):
        save(model, tmp_path / "c")


def test_a_model_cannot_replace_its_own_source(nano: Path) -> None:
    with pytest.raises(CheckpointError, match="is or holds the source"):
        save(load(nano), nano, overwrite=True)


SAVED = ["FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY"]


def config_of(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("scheme", SAVED)
def test_a_converted_model_saves_itself_as_we_would(tmp_path: Path, scheme: str) -> None:
    model = converted(scheme)
    model.save_pretrained(tmp_path / "theirs")
    save(model, tmp_path / "ours", target="transformers" if scheme == "MXFP8" else "vllm")
    assert config_of(tmp_path / "theirs") == config_of(tmp_path / "ours")
    assert_same_tensors(*(load_file(tmp_path / name / SHARD) for name in ("ours", "theirs")))
    assert_same(model, load(tmp_path / "theirs"))


def assert_stock_loads(model: Any, path: Path, ids: Tensor = IDS) -> None:
    other, info = stock_with_info(path)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    unrounded = logits(dequantized(model, torch.bfloat16), ids)
    assert_logits_of_one_checkpoint(logits(model, ids), logits(other, ids), unrounded)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_a_converted_model_saves_itself_in_shards(tmp_path: Path, scheme: str) -> None:
    model = converted(scheme)
    model.save_pretrained(tmp_path / "c", max_shard_size="1MB", state_dict=model.state_dict())
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 3
    assert_same(model, load(tmp_path / "c"))
    if scheme == "FP8_DYNAMIC":  # of the others a CPU gets a dense model
        assert_stock_loads(model, tmp_path / "c")


@pytest.mark.parametrize("scheme", ["FP8", "FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize("storage", ["discard", "keep"])
def test_a_state_dict_is_what_is_saved(scheme: str, storage: str, tmp_path: Path) -> None:
    def made(**options: Any) -> Any:
        model = stock(NANO)
        fp8kit.convert(model, scheme, calibrate=lambda m: m(IDS), **options)
        return model

    model, other = made(weight_storage=storage), stock(NANO)
    own = {n: (t, t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    kept = {m: m.original_weight for m in model.modules() if isinstance(m, fp8kit.Fp8Linear)}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    given = {n: t.clone() for n, t in other.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=given)
    wanted = made()
    wanted.load_state_dict(given, strict=False)
    wanted.save_pretrained(tmp_path / "wanted")
    assert all_bytes(tmp_path / "given") == all_bytes(tmp_path / "wanted")
    held = model.state_dict(keep_vars=True)
    for name, (tensor, bits) in own.items():
        assert held[name] is tensor
        assert_bits_equal(tensor, bits)
    assert all(layer.original_weight is weight for layer, weight in kept.items())
    assert all((weight is None) == (storage == "discard") for weight in kept.values())
    part = {
        n: t for n, t in given.items() if ".layers.1." in n and not n.endswith("up_proj.weight")
    }
    model.save_pretrained(tmp_path / "part", state_dict=part)
    whole = load_file(tmp_path / "wanted" / SHARD)
    found = load_file(tmp_path / "part" / SHARD)
    assert {n for n in whole if ".layers.1." in n and ".up_proj." not in n} == found.keys()
    assert_same_tensors(found, {name: whole[name] for name in found})


def test_a_state_dict_with_one_name_of_tied_tensors_gives_both(tmp_path: Path) -> None:
    model = converted()
    given = {"lm_head.weight": model.lm_head.weight.detach() * 2}
    model.save_pretrained(tmp_path, state_dict=given)
    (saved,) = load_file(tmp_path / SHARD).values()
    assert_bits_equal(saved, given["lm_head.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_state_dict_of_another_model_is_refused(tmp_path: Path) -> None:
    model = converted()
    with pytest.raises(
        CheckpointError, match=r"state_dict has a\.b\. It holds tensors of the model"
    ):
        model.save_pretrained(tmp_path / "c", state_dict={"a.b": torch.ones(1)})
    norm, wrong = model.model.norm.weight, {"model.norm.weight": torch.ones(3)}
    with pytest.raises(
        CheckpointError, match=r"does not fit: size mismatch for model\.norm\.weight"
    ):
        model.save_pretrained(tmp_path / "c", state_dict=wrong)
    assert model.model.norm.weight is norm
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = {**model.state_dict(), name: stock(NANO).state_dict()[name]}
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is .* comes with a weight_scale"):
        model.save_pretrained(tmp_path / "c", state_dict=wrong)
    model.save_pretrained(tmp_path / "d", is_main_process=False, state_dict={})
    assert not list((tmp_path / "d").iterdir())
    model = load(tiny("Qwen3Moe", tmp_path, **MOE), scheme="FP8_DYNAMIC")
    given = {n: t for n, t in model.state_dict().items() if "layers.1.mlp.experts" not in n}
    with pytest.raises(
        CheckpointError, match=r"lacks model\.layers\.1\.mlp\.experts.* all those of"
    ):
        model.save_pretrained(tmp_path / "c", state_dict=given)


def test_two_conversions_are_saved_as_two_schemes(tmp_path: Path) -> None:
    model = stock(NANO)
    fp8kit.convert(model, "FP8_DYNAMIC", include=["*.mlp.*"])
    fp8kit.convert(model, "FP8_BLOCK", include=["*.self_attn.*"])
    model.save_pretrained(tmp_path / "c")
    assert len(config_of(tmp_path / "c")["config_groups"]) == 2
    assert_same(model, load(tmp_path / "c"))
    assert_stock_loads(model, tmp_path / "c")


@pytest.mark.parametrize(
    "copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize(
    "part",
    [lambda m: m.model, lambda m: m.model.layers, lambda m: nn.ModuleDict({"language": m})],
    ids=["base", "layers", "around"],
)
def test_a_model_converted_in_part_or_within_another(
    part: Callable[[Any], nn.Module], copied: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = stock(NANO)
    fp8kit.convert(part(model))
    model = copied(model)
    model.save_pretrained(tmp_path / "c")
    assert config_of(tmp_path / "c")["ignore"] == ["lm_head"]
    assert_same(model, load(tmp_path / "c"))
    model.model.save_pretrained(tmp_path / "base")
    assert config_of(tmp_path / "base")["quant_method"] == "compressed-tensors"
    model.save_pretrained(tmp_path / "again")
    assert all_bytes(tmp_path / "again") == all_bytes(tmp_path / "c")


def test_a_part_of_a_model_announces_itself_alone(tmp_path: Path) -> None:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(
            vocab_size=160, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
            num_attention_heads=4, head_dim=64,
        ),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            image_size=32, patch_size=16,
        ),
    )  # fmt: skip
    model = transformers.LlavaForConditionalGeneration(config).bfloat16()
    fp8kit.convert(model.model.language_model)
    model.model.language_model.save_pretrained(tmp_path / "part")
    assert config_of(tmp_path / "part")["quant_method"] == "compressed-tensors"
    model.save_pretrained(tmp_path / "whole")
    content = json.loads((tmp_path / "whole/config.json").read_text())
    assert content["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in content["text_config"]
    loaded = load(tmp_path / "whole")
    assert_same_tensors(model, loaded)


def test_saving_says_nothing_of_a_dense_model_of_the_same_config(tmp_path: Path) -> None:
    model = stock(NANO)
    dense = type(model)(model.config)
    fp8kit.convert(model)
    model.save_pretrained(tmp_path / "fp8")
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert_same(dense, stock(tmp_path / "dense"))
    model.save_pretrained(tmp_path / "again")
    assert all_bytes(tmp_path / "again") == all_bytes(tmp_path / "fp8")


def test_dense_again(tmp_path: Path) -> None:
    model = converted()
    model.save_pretrained(tmp_path / "fp8")
    wanted = dequantized(model, torch.bfloat16)
    dense = model.dequantize()
    assert not any(isinstance(m, (Fp8Linear, Fused)) for m in dense.modules())
    assert_same(dense, wanted)
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert_same(stock(tmp_path / "dense"), wanted)


def test_dense_models_are_saved_as_ever(tmp_path: Path) -> None:
    converted()  # some other model
    model = stock(NANO)
    assert not hasattr(model, "hf_quantizer")
    model.save_pretrained(tmp_path / "c")
    assert_same(model, stock(tmp_path / "c"))
    fp8kit.convert(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Fp8Linear):
            model.set_submodule(name, module.to_linear())
    assert not hasattr(model, "hf_quantizer")


def test_what_transformers_could_not_load_is_not_saved(tmp_path: Path) -> None:
    model = stock(tiny("Qwen3", tmp_path, tie_word_embeddings=False))
    fp8kit.convert(model, "FP8_BLOCK", exclude=[])
    with pytest.raises(CheckpointError, match=r"do not load in transformers, e\.g\. lm_head"):
        model.save_pretrained(tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())


def test_numbers_beyond_fp16(tmp_path: Path) -> None:
    model = converted()
    save(model, tmp_path / "a")
    assert load(tmp_path / "a", dtype=torch.float16).dtype == torch.float16
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    save(model, tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight have numbers beyond 65504"):
        load(tmp_path / "b", dtype=torch.float16)


def test_a_first_weight_that_is_fp8_is_no_dtype(tmp_path: Path) -> None:
    class Bare(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any, bias: bool = True) -> None:
            super().__init__(config)
            self.layer = nn.Linear(128, 128, bias=bias)
            self.post_init()

    model = Bare(transformers.PretrainedConfig())
    fp8kit.convert(model)
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path / "c")
    assert load_file(tmp_path / "c" / "model.safetensors")["layer.weight"].dtype in (
        torch.float8_e4m3fn,
    )
    model = Bare(transformers.PretrainedConfig(), bias=False)
    model.layer = Fp8Linear.from_linear(model.layer)  # convert would leave it dense
    with pytest.raises(CheckpointError, match=r"first tensor of Bare is FP8.*fp8kit\.save"):
        model.save_pretrained(tmp_path / "d")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "scheme"),
    [(4096 + 64, "FP8_DYNAMIC"), (4096 - 128, "FP8_WEIGHT_ONLY"), (4096, "FP8_DYNAMIC")],
)
def test_a_model_with_an_fp8_head_gets_other_words(words: int, scheme: str, tmp_path: Path) -> None:
    model = stock(NANO, tie_word_embeddings=False)
    fp8kit.convert(model, scheme, exclude=[])
    before, dtype = logits(model), model.lm_head.compute_dtype
    model.resize_token_embeddings(words)
    head, kept = model.lm_head, min(words, 4096)
    assert isinstance(head, Fp8Linear)
    assert (head.out_features, head.compute_dtype) == (words, dtype)
    assert not any(p.requires_grad for p in head.parameters())
    after = logits(model)
    assert after.shape[-1] == words
    assert after.isfinite().all()
    assert relative_error(after[..., :kept], before[..., :kept]) < 2 * torch.finfo(dtype).eps
    model.save_pretrained(tmp_path)
    assert_bits_equal(logits(load(tmp_path)), after)


def test_layers_whose_weight_is_read_are_decoded(tmp_path: Path) -> None:
    """T5 casts to the dtype of the weight of ``wo``, which exporters quantize nevertheless."""
    config = transformers.T5Config(
        d_model=128, d_kv=64, d_ff=128, num_layers=1, num_heads=2, vocab_size=64
    )
    source = transformers.T5EncoderModel(config).bfloat16().eval()
    fp8kit.convert(source, exclude=[])
    fp8kit.save(source, tmp_path / "c")
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    q = fp8kit.quantize(source.get_parameter(name).detach(), role="weight")
    edit_tensors(tmp_path / "c", **{name.replace(".", "__"): q.data, f"{name}_scale": q.scale})
    with pytest.warns(UserWarning, match=r"1 FP8 layers .* asks for the dtype of its weight"):
        model = fp8kit.load(tmp_path / "c")
    assert_bits_equal(model.get_parameter(name), fp8kit.dequantize(q, torch.bfloat16))
    kept = [n for n, m in model.named_modules() if isinstance(m, fp8kit.Fp8Linear)]
    assert kept == [n for n, m in source.named_modules() if isinstance(m, fp8kit.Fp8Linear)]
    assert kept
    assert model(input_ids=torch.arange(8).view(1, -1)).last_hidden_state.isfinite().all()


def test_fp8_weights_that_other_layers_have_too_are_decoded(tmp_path: Path) -> None:
    """Zamba has one block under several names, and its files contain only the first name."""
    (zamba,) = (a for a in of_transformers.architectures() if a.name.endswith("/ZambaForCausalLM"))
    zamba.model(torch.bfloat16).save_pretrained(tmp_path)
    name = "model.layers.1.shared_transf.feed_forward.up_proj"
    weight = load_file(tmp_path / SHARD)[f"{name}.weight"]
    q = fp8kit.quantize(weight, ROW, role="weight")
    added = {f"{name}.weight": q.data, f"{name}.weight_scale": q.scale}
    edit_tensors(tmp_path, **added)
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": None}
    edit_json(tmp_path / "config.json", quantization_config=quantization)
    with pytest.warns(UserWarning, match=rf"decoded to high.*{name}: its weight is tied to model"):
        model = load(tmp_path)
    wanted = fp8kit.dequantize(q, torch.bfloat16)
    for holder in (name, name.replace("layers.1", "layers.3")):
        assert_bits_equal(model.get_submodule(holder).weight.detach(), wanted)
    assert logits(model, IDS % 64).isfinite().all()
