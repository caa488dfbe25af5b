"""Whole models of all kinds, saved to disk and loaded again."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import fp8kit
from checkpoint_samples import (
    NANO,
    SHARD,
    Ragged,
    all_bytes,
    converted,
    edit_json,
    edit_tensors,
    ragged,
    saved,
)
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.formats import ROW, Scheme
from fp8kit.io.models import load, save
from fp8kit.modules.linear import Fp8Linear
from numerics import assert_bits_equal, assert_same_tensors, relative_error

IDS = torch.arange(97).view(1, -1)
SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_WEIGHT_ONLY")


def on_meta() -> Ragged:
    with torch.device("meta"):
        model = Ragged().bfloat16().eval()
    model.lm_head.weight = model.embed.weight
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    assert_same_tensors(a, b)
    with torch.no_grad():
        assert_bits_equal(a(IDS), b(IDS))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fresh", [ragged, on_meta])
def test_round_trip_is_exact(tmp_path: Path, scheme: str, fresh: Any) -> None:
    model = converted(scheme)
    save(model, tmp_path / "c")
    loaded = fresh()
    assert load(tmp_path / "c", loaded) is loaded
    assert_same(model, loaded)
    assert loaded.again is loaded.up
    assert loaded.lm_head.weight is loaded.embed.weight
    assert loaded.up.compute_dtype == torch.bfloat16
    assert not loaded.up.weight.requires_grad
    with pytest.raises(fp8kit.UnsupportedError, match=r"the weight of up \(Fp8Linear"):
        loaded.up.weight.float()


def test_second_save_is_identical(tmp_path: Path) -> None:
    saved(tmp_path / "a", max_shard_bytes=20_000)
    save(load(tmp_path / "a", ragged()), tmp_path / "b", max_shard_bytes=20_000)
    assert len(all_bytes(tmp_path / "a")) > 3
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")


def test_block_scheme_round_trip(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128)).bfloat16()
    fp8kit.convert(model, "FP8_BLOCK", exclude=[])
    save(model, tmp_path / "c")
    loaded = load(tmp_path / "c", nn.Sequential(nn.Linear(256, 384), nn.Linear(384, 128)))
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    assert_bits_equal(loaded(x), model(x))


def test_layers_with_weights_of_their_own_are_not_tied_by_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
    fp8kit.convert(model)
    save(model, tmp_path / "c")
    tied = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).bfloat16()
    tied[1].weight = tied[0].weight
    assert_same_tensors(load(tmp_path / "c", tied), model)


def test_a_model_from_no_directory_brings_no_files_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    assert not model.name_or_path
    fp8kit.convert(model)
    save(model, tmp_path / "c")
    assert not (tmp_path / "c" / "tokenizer.json").exists()


def test_a_layer_is_loaded_dense_whose_weight_another_needs(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
        model[1].weight = model[0].weight
        return model

    source, model = tied(), tied()
    (tmp_path / "dense").mkdir()
    state = {name: t for name, t in source.state_dict().items() if not name.startswith("1.")}
    save_file(state, tmp_path / "dense" / "model.safetensors")
    fp8kit.quantize_checkpoint(tmp_path / "dense", tmp_path / "fp8")
    with pytest.warns(UserWarning, match=r"0: its weight is tied to 1\.weight"):
        load(tmp_path / "fp8", model)
    first, second, third = model
    assert first.weight is second.weight
    assert type(third) is Fp8Linear
    assert relative_error(first.weight, source[0].weight) < 0.05


def test_tied_layers_that_join_parts_on_disk_are_fp8(tmp_path: Path) -> None:
    def attention(rows: dict[str, int]) -> nn.Module:
        parts = {name: nn.Linear(128, n, bias=False) for name, n in rows.items()}
        return nn.ModuleDict({"self_attn": nn.ModuleDict(parts)})

    apart = attention({"q_proj": 128, "k_proj": 128, "v_proj": 128})
    source = nn.Sequential(apart, copy.deepcopy(apart))
    fp8kit.convert(source)
    save(source, tmp_path / "fp8")
    model = nn.Sequential(*(attention({"qkv_proj": 384}) for _ in range(2)))
    first, second = (block["self_attn"]["qkv_proj"] for block in model)
    second.weight = first.weight
    load(tmp_path / "fp8", model)
    assert type(first) is type(second) is Fp8Linear


def test_a_tied_tensor_is_written_once(tmp_path: Path) -> None:
    tensors = open_checkpoint(saved(tmp_path / "c")).tensors
    assert "embed.weight" in tensors
    assert not {"lm_head.weight", "again.weight", "again.weight_scale"} & tensors.keys()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("scheme", [None, "FP8_DYNAMIC"])
def test_biases_that_layers_share_come_back_shared(
    tmp_path: Path, device: str, scheme: str | None
) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        model[1].bias = model[0].bias
        model.register_parameter("shift", model[0].bias)
        return model

    model = make()
    if scheme:
        state = {n: t for n, t in model.state_dict().items() if n in ("0.weight", "1.weight")}
        save_file(state | {"shift": model[0].bias.detach()}, tmp_path / SHARD)
    fp8kit.convert(model)
    source = tmp_path / SHARD if scheme else tmp_path / "c"
    if not scheme:
        save(model, source)
    with torch.device(device):
        loaded = make()
    load(source, loaded, scheme=scheme)
    assert_same_tensors(model, loaded)
    assert loaded[0].bias is loaded[1].bias is loaded.get_parameter("shift")


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float64, ": torch.float64 on disk; FP8 is made from"),
        (torch.int8, " is torch.int8. Weights are read that are FP8"),
    ],
)
def test_weights_that_fp8_is_not_made_from_are_named(
    tmp_path: Path, dtype: torch.dtype, said: str
) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    state = model.state_dict()
    save_file(state | {"0.weight": state["0.weight"].to(dtype)}, tmp_path / SHARD)
    with pytest.raises(CheckpointError, match=re.escape(f"0.weight{said}")):
        load(tmp_path, model, scheme="FP8_DYNAMIC")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("on_disk", "held", "said"),
    [
        ("module.", "", "The names that came begin with 'module.': rename them, or pass"),
        ("", "net.", r"lack 'net.': rename them, or pass model.get_submodule\('net'\)"),
    ],
)
def test_another_beginning_of_all_names_is_told(
    tmp_path: Path, on_disk: str, held: str, said: str
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128))

    state = {f"{on_disk}{name}": tensor for name, tensor in make().state_dict().items()}
    save_file(state, tmp_path / SHARD)
    model = nn.ModuleDict({held[:-1]: make()}) if held else make()
    with pytest.raises(CheckpointError, match=said) as caught:
        load(tmp_path, model, scheme="FP8_DYNAMIC")
    assert "missing=" not in str(caught.value)
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match=f"None of what came is in the model.*{said}"):
        fp8kit.load_weights(model, state)
    with pytest.warns(UserWarning, match="tensors that the model does not use"):
        fp8kit.load_weights(model, {"new.weight": torch.zeros(1)})


def test_an_expanded_buffer_is_filled(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(128, 128)) for _ in range(2)]
    for model, value in zip(models, (torch.ones(4), torch.zeros(4)), strict=True):
        model.register_buffer("positions", value.expand(3, 4))
    fp8kit.convert(models[0])
    save(models[0], tmp_path / "c")
    assert_same_tensors(models[0], load(tmp_path / "c", models[1]))


def test_a_dense_layer_may_hold_its_sizes_as_tensors(tmp_path: Path) -> None:
    """So do projections of vision towers that compute their input width with torch."""
    sizes = torch.tensor([128, 256])
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1])).bfloat16()
    wanted = nn.Sequential(Fp8Linear.from_linear(model[0]))
    save(wanted, tmp_path)
    load(tmp_path, model)
    assert_same_tensors(model.state_dict(), wanted.state_dict())


def test_layers_without_a_shape_are_not_filled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(128))
    with pytest.raises(ConversionError, match=r"0\.weight, 0\.bias have no shape yet"):
        load(saved(tmp_path / "c"), model)


def test_views_of_one_storage_are_written_in_full(tmp_path: Path) -> None:
    model = nn.Module()
    model.fc = nn.Linear(128, 256)
    both = torch.randn(2, 40)
    model.first, model.second = nn.Parameter(both[0]), nn.Parameter(both[1])
    fp8kit.convert(model)
    save(model, tmp_path / "c")
    found = {n: open_checkpoint(tmp_path / "c").read(n) for n in ("first", "second")}
    assert_bits_equal(found["second"], both[1])


def test_config_of_a_plain_module(tmp_path: Path) -> None:
    config = json.loads((saved(tmp_path / "c") / "config.json").read_text())
    assert config.keys() == {"dtype", "quantization_config"}
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]


@pytest.mark.parametrize("fresh", [ragged, on_meta])
def test_quantizing_while_loading_equals_converting(tmp_path: Path, fresh: Any) -> None:
    dense = ragged()
    state = {k: v for k, v in dense.state_dict().items() if not k.startswith(("lm_head", "again"))}
    save_file(state, tmp_path / SHARD)
    fp8kit.convert(dense, exclude=["down"])
    loaded = load(tmp_path, fresh(), scheme="FP8_DYNAMIC", exclude=["down"])
    assert type(loaded.down) is nn.Linear
    assert_same(dense, loaded)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_integers_become_the_numbers_that_a_model_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    bias = torch.arange(256) % 2
    save_file({"0.weight": torch.randn(256, 256), "0.bias": bias.to(dtype)}, tmp_path / SHARD)
    model = nn.Sequential(nn.Linear(256, 256, device="meta"))
    load(tmp_path, model, scheme="FP8_DYNAMIC")
    assert model[0].bias.dtype is torch.float32
    assert model[0].bias.tolist() == bias.tolist()


def test_dense_weights_reload_into_converted_layers(tmp_path: Path) -> None:
    dense = ragged()
    save_file({k: v.clone() for k, v in dense.state_dict().items()}, tmp_path / SHARD)
    model = converted()
    place = model.up.weight.data_ptr()
    load(tmp_path, model)
    assert model.up.weight.data_ptr() == place
    fp8kit.convert(dense)
    assert_same(dense, model)


def test_fp8_weights_reload_in_place(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    model = converted()
    place = model.up.weight.data_ptr()
    load(path, model)
    assert model.up.weight.data_ptr() == place
    assert_same(load(path, ragged()), model)


def test_siblings_share_their_input_after_loading(tmp_path: Path) -> None:
    def block() -> nn.Module:
        model = nn.Module()
        model.gate_proj, model.up_proj = nn.Linear(128, 256), nn.Linear(128, 256)
        return model

    model = block()
    fp8kit.convert(model)
    save(model, tmp_path / "c")
    loaded = load(tmp_path / "c", block())
    assert loaded.gate_proj.shared is loaded.up_proj.shared is not None


def test_dtype_and_training_are_kept(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    model = load(path, Ragged().train(), dtype=torch.float32)
    assert model.up.compute_dtype == torch.float32
    assert model.up.bias.dtype == model.norm.weight.dtype == torch.float32
    assert model.up.weight.dtype == torch.float8_e4m3fn
    assert model.up.training


def test_a_parameter_named_like_a_scale_has_the_asked_dtype(tmp_path: Path) -> None:
    source = Ragged().requires_grad_(False)
    source.logit_scale = nn.Parameter(torch.tensor(2.5))
    fp8kit.convert(source, exclude=[])
    fp8kit.save(source, tmp_path / "c")
    with torch.device("meta"):
        model = Ragged()
        model.logit_scale = nn.Parameter(torch.empty(()))
    load(tmp_path / "c", model, dtype=torch.bfloat16)
    assert model.logit_scale.dtype == model.up.bias.dtype == torch.bfloat16
    assert model.up.weight_scale.dtype == torch.float32


@pytest.mark.parametrize("scheme", [None, "FP8_DYNAMIC"], ids=["fp8", "dense"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_biases_stay_trained_or_frozen(scheme: str | None, device: str, tmp_path: Path) -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)).bfloat16()

    model = pair()
    if scheme is None:
        fp8kit.convert(model)
        save(model, tmp_path / "c")
    else:
        (tmp_path / "c").mkdir()
        save_file(model.state_dict(), tmp_path / "c" / "model.safetensors")
    filled = pair().to(device)
    filled[1].bias.requires_grad_(False)
    load(tmp_path / "c", filled, scheme=scheme)
    assert isinstance(filled[0], Fp8Linear)
    assert [n for n, p in filled.named_parameters() if p.requires_grad] == ["0.bias"]
    assert_bits_equal(filled[0].bias.detach(), model[0].bias.detach())


def test_hooks_are_kept(tmp_path: Path) -> None:
    model, seen = ragged(), []
    model.up.register_forward_hook(lambda *_: seen.append(1))
    load(saved(tmp_path / "c"), model)
    model(IDS)
    assert seen == [1, 1]


def untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    assert_same_tensors(model, before)


def test_missing_tensor_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_tensors(path, norm__bias=None)
    model = ragged()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"does not fit Ragged:\n  norm.bias: not on disk"):
        load(path, model)
    untouched(model, before)


def test_wrong_shape_is_named_and_nothing_changes(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_tensors(path, norm__bias=torch.ones(128))
    model = ragged()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"norm.bias: \[128\] on disk, \[129\] in the model"):
        load(path, model)
    untouched(model, before)


def test_shapes_of_a_conv1d_are_those_of_codes_or_of_what_it_held(tmp_path: Path) -> None:
    model = nn.Sequential(Conv1D(256, 128)).bfloat16()  # holds [128, 256]
    fp8kit.convert(model)
    turned = {"0.weight": torch.randn(256, 128), "0.bias": torch.zeros(256)}
    save_file(turned, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"\[256, 128\]. The model needs \[128, 256\]"):
        fp8kit.load_weights(model, turned)
    with pytest.raises(CheckpointError, match=r"\[256, 128\] on disk, \[128, 256\] in the model"):
        load(tmp_path, model)
    codes = {n: t.clone() for n, t in model.state_dict().items()}  # are [256, 128]
    save_file(codes, tmp_path / "model.safetensors")
    assert_same_tensors(load(tmp_path, model).state_dict(), codes)


def test_unused_tensors_are_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    edit_tensors(path, k_scale=torch.ones(1))
    with pytest.warns(UserWarning, match="tensors that the model does not use: k_scale"):
        load(path, ragged())
    with pytest.raises(CheckpointError, match="k_scale: not in the model"):
        load(path, ragged(), strict=True)


def test_a_load_that_quantizes_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^No layer becomes FP8: not in include \(28\)"):
        load(NANO, scheme="FP8_DYNAMIC", include=["lm_head"])
    model = load(NANO, scheme="FP8_DYNAMIC")
    with pytest.warns(UserWarning, match=r"28 layers stay.* FP8_DYNAMIC\. FP8_BLOCK is made"):
        load(NANO, model, scheme="FP8_BLOCK")
    with pytest.raises(TypeError, match=r"Got a OrderedDict as the model"):
        save(ragged().state_dict(), tmp_path / "c")  # type: ignore[arg-type]


def test_how_layers_run_is_not_saved(tmp_path: Path) -> None:
    model = converted("FP8_DYNAMIC")
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            layer.accum, layer.batch_invariant = "fast", True
    save(model, tmp_path / "c")
    found = [m for m in load(tmp_path / "c", ragged()).modules() if isinstance(m, Fp8Linear)]
    assert {(m.accum, m.batch_invariant) for m in found} == {("precise", False)}


def test_a_bound_on_activations_is_saved_and_loaded(tmp_path: Path) -> None:
    model = converted("FP8_DYNAMIC")
    layers = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    for layer in layers[1:]:
        layer.scale_ub = 0.5
    with pytest.raises(CheckpointError, match=r"scale_ub = 0.5, None"):
        save(model, tmp_path / "c")
    layers[0].scale_ub = 0.5
    for target in ("vllm", "sglang", "transformers"):
        save(model, tmp_path / target, target=target)
        config = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        assert config["quant_method"] == "fbgemm_fp8"
        assert config["activation_scale_ub"] == 0.5
        found = load(tmp_path / target, ragged())
        x = torch.randn(3, layers[0].in_features).bfloat16() * 4
        same = [m for m in found.modules() if isinstance(m, Fp8Linear)]
        assert torch.equal(same[0](x), layers[0](x))
        assert {m.scale_ub for m in same} == {0.5}
    with pytest.warns(UserWarning, match="activation_scale_ub = 0.5 is not kept"):
        fp8kit.convert_checkpoint(tmp_path / "vllm", tmp_path / "other", target="transformers")
    fp8kit.convert_checkpoint(tmp_path / "vllm", tmp_path / "same", dialect="fbgemm")
    assert load(tmp_path / "same", ragged()) is not None
    other = converted("FP8_TENSOR")
    for layer in other.modules():
        if isinstance(layer, Fp8Linear):
            layer.scale_ub = 0.5
    with pytest.raises(CheckpointError, match="FP8_DYNAMIC everywhere, with a bound"):
        save(other, tmp_path / "tensor")


def test_unread_config_is_said(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_json(path / "config.json", quantization_config=content | {"kv_cache_scheme": {"a": 1}})
    with pytest.warns(UserWarning, match="KV cache; only fp8kit.Fp8Cache uses its scales"):
        load(path, ragged())


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
        | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
    ids=lambda found: found["quant_method"],
)
def test_a_checkpoint_that_quantizes_the_cache_alone(tmp_path: Path, quantization: Any) -> None:
    """The model is dense and is loaded dense, with the scales for an FP8 cache."""
    model = nn.ModuleDict({"self_attn": nn.Sequential(nn.Linear(4, 4))})
    tensors = model.state_dict() | {"self_attn.k_scale": torch.tensor(0.5)}
    save_file(tensors, tmp_path / SHARD, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.warns(UserWarning, match=r"quantizes the KV cache alone.*loads as the dense model"):
        loaded = load(tmp_path, model)
    assert loaded["self_attn"].cache_scales["k_scale"].item() == 0.5
    for refused in (
        lambda: load(tmp_path, model, scheme="FP8_DYNAMIC"),
        lambda: fp8kit.convert_checkpoint(tmp_path, tmp_path / "d"),
        lambda: fp8kit.quantize_checkpoint(tmp_path, tmp_path / "d", fp8kit.Recipe()),
    ):
        with pytest.raises(CheckpointError, match=r"KV cache alone.*remove quantization_config"):
            refused()


def test_a_buffer_on_meta_that_is_not_saved(tmp_path: Path) -> None:
    model = on_meta()
    model.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    path = saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match="angles: a buffer on meta") as caught:
        load(path, model)
    assert "init_empty_weights(include_buffers=False)" in str(caught.value)
    assert "made from" not in str(caught.value)
    model.angles = torch.arange(3.0)
    load(path, model)
    assert model.angles.tolist() == [0, 1, 2]


def test_a_transformers_model_with_empty_weights_and_real_buffers() -> None:
    accelerate = pytest.importorskip("accelerate")
    config = AutoConfig.from_pretrained(NANO)
    with accelerate.init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    load(NANO, model, scheme="FP8_DYNAMIC")
    tokens = torch.arange(20)[None]
    expected = load(NANO, scheme="FP8_DYNAMIC")
    with torch.no_grad():
        assert_bits_equal(model.eval()(tokens).logits, expected(tokens).logits)


def test_fp8_into_another_kind_of_layer(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = ragged()
    model.down = Own(203, 129, bias=False)
    with pytest.raises(CheckpointError, match="down is FP8_DYNAMIC in the checkpoint and Own"):
        load(saved(tmp_path / "c"), model)


def test_a_bare_layer_is_not_a_model(tmp_path: Path) -> None:
    layer = Fp8Linear.from_linear(nn.Linear(128, 256))
    save(layer, tmp_path / "c")
    with pytest.raises(CheckpointError, match="The model itself is FP8_DYNAMIC"):
        load(tmp_path / "c", nn.Linear(128, 256))
    again = Fp8Linear(128, 256)
    load(tmp_path / "c", again)
    assert_bits_equal(again.weight, layer.weight)


def test_quantizing_again_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"Got scheme=FP8_BLOCK for .*, which is FP8_DYNAMIC"):
        load(path, ragged(), scheme="FP8_BLOCK")
    with pytest.raises(CheckpointError, match="which is FP8 already"):
        load(path, ragged(), exclude=["up"])
    load(path, ragged(), scheme="FP8_DYNAMIC")


def test_weights_with_nan_are_not_quantized(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in ragged().state_dict().items()}
    state["up.weight"][3, 3] = float("nan")
    state["again.weight"] = state["up.weight"].clone()
    save_file(state, tmp_path / SHARD)
    with pytest.raises(ConversionError, match=r"(up|again).weight holds NaN or infinities"):
        load(tmp_path, ragged(), scheme="FP8_DYNAMIC")


def two_schemes(second: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    model[3].to(second)
    fp8kit.convert(model, "FP8_DYNAMIC", include=["0", "1", "2"])
    fp8kit.convert(model, "FP8_TENSOR", include=["3"])
    return model


def test_two_schemes_are_announced_by_name(tmp_path: Path) -> None:
    model = two_schemes()
    save(model, tmp_path / "c")
    config = json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert [(g["weights"]["strategy"], g["targets"]) for g in groups] == [
        ("channel", ["Linear"]),
        ("tensor", ["3"]),
    ]
    loaded = load(tmp_path / "c", nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
    x = torch.randn(5, 128)
    assert [m.scheme for m in loaded] == [m.scheme for m in model]
    assert_bits_equal(loaded(x), model(x))


def test_blocks_are_announced_for_all_that_has_no_name(tmp_path: Path) -> None:
    """SGLang reads the block size only from the group for ``Linear``."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    fp8kit.convert(model, "FP8_DYNAMIC", include=["0", "1"])
    fp8kit.convert(model, "FP8_BLOCK", include=["2"])
    save(model, tmp_path / "c", target="sglang")
    config = json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    groups = config["config_groups"].values()
    assert [(g["weights"]["strategy"], g["targets"]) for g in groups] == [
        ("block", ["Linear"]),
        ("channel", ["0", "1"]),
    ]


def test_engines_do_not_merge_layers_of_two_schemes(tmp_path: Path) -> None:
    model = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        model.add_module(name, nn.Linear(128, 128))
    fp8kit.convert(model, "FP8_DYNAMIC", include=["q_proj", "k_proj"])
    fp8kit.convert(model, "FP8_TENSOR", include=["v_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj is FP8 and v_proj is FP8_TENSOR.*merges"):
        save(model, tmp_path / "c")
    save(model, tmp_path / "c", target="transformers")


def test_save_needs_tensors(tmp_path: Path) -> None:
    class Odd(Ragged):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Odd().bfloat16()
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match="_extra_state in the state_dict is dict"):
        save(model, tmp_path / "c")


def test_what_one_engine_does_not_load_is_saved_for_another(tmp_path: Path) -> None:
    model = nn.Module()
    model.mixer = nn.ModuleDict({n: nn.Linear(128, 128) for n in ("in_proj", "x_proj")})
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match=r"vllm loads .* or save for target='transformers'"):
        save(model, tmp_path / "c")
    save(model, tmp_path / "c", target="transformers")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (torch.eye(4).to_sparse(), "held in .* is a tensor of layout torch.sparse_coo"),
        (torch.zeros(4, dtype=torch.complex128), "The tensor 'held' is torch.complex128"),
        (TwoTensor(torch.eye(4), torch.eye(4)), "held in .* is TwoTensor, made of other tensors"),
    ],
)
def test_tensors_that_no_file_can_hold_are_refused(tmp_path: Path, held: Tensor, said: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    model.register_buffer("held", held)
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match=said):
        save(model, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8"])
def test_every_target_gets_blocks_and_mx(tmp_path: Path, target: str, scheme: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    fp8kit.convert(model, scheme)
    save(model, tmp_path / "c", target=target)
    again = load(tmp_path / "c", nn.Sequential(nn.Linear(256, 256, device="meta")))
    for name, tensor in model.state_dict().items():
        assert_bits_equal(again.state_dict()[name], tensor)


def test_half_converted_siblings(tmp_path: Path) -> None:
    model = nn.Module()
    model.q_proj, model.k_proj, model.v_proj = (nn.Linear(128, 128) for _ in range(3))
    fp8kit.convert(model, include=["q_proj"])
    with pytest.raises(CheckpointError, match=r"q_proj is FP8 and k_proj is not.*target='transf"):
        save(model, tmp_path / "c")
    save(model, tmp_path / "c", target="transformers")


NO_DTYPE: Any = "bfloat16"
NO_TARGET: Any = None


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda p: load(saved(p), converted("FP8_TENSOR")), CheckpointError,
         "and Fp8Linear FP8_TENSOR in the model"),
        (lambda _: load(NANO, nn.Linear(3, 3)), CheckpointError,
         r"in high precision, and no scheme.*FP8_DYNAMIC"),
        (lambda _: load(NANO, ragged(), scheme="FP8"), ConversionError,
         r"calibration.*calibrate=\.\.\."),
        (lambda _: load(NANO, scheme=Scheme("FP8_TENSOR", ROW, ROW)), ValueError,
         "a scheme of your own, 'FP8_TENSOR'"),
        (lambda _: load(NANO, scheme="FP8_DYNAMIC", dtype=torch.float8_e4m3fn), ValueError,
         "high precision of the model"),
        (lambda _: load(NANO, scheme="FP8_DYNAMIC", dtype=torch.int8), ValueError,
         "high precision of the model"),
        (lambda _: load(NANO, scheme="FP8_DYNAMIC", dtype=NO_DTYPE), TypeError,
         "high precision of the model"),
        (lambda p: save(converted(), p, target=NO_TARGET), ValueError,
         "It must be one of vllm, sglang, transformers"),
        (lambda p: save(ragged(), p), CheckpointError, "holds no FP8 layers"),
        (lambda p: save(two_schemes(torch.bfloat16), p), CheckpointError,
         r"compute in torch\.bfloat16 and torch\.float32.*one compute dtype"),
        (lambda p: save(converted().to("meta"), p), CheckpointError,
         r"up.weight.* on the meta device"),
        (lambda p: save(converted(), p, target="ollama"), ValueError,
         "It must be one of vllm, sglang, transformers"),
        (lambda p: save(converted(), p, max_shard_bytes="5GB"), ValueError,
         "max_shard_bytes='5GB'"),
        (lambda p: save(converted("FP8_BLOCK"), p), CheckpointError,
         r"needs 128 to divide the columns.*use FP8_DYNAMIC"),
        (lambda p: save(converted(), saved(p), source=p, overwrite=True), CheckpointError,
         "is or holds the source"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_or_saved_is_refused(
    call: Callable[[Path], object], kind: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=said):
        call(tmp_path / "c")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fp8kit.integrations.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"not installed.*pip install 'fp8kit\[transformers\]'"):
        load(NANO, scheme="FP8_DYNAMIC")


def test_with_an_unfit_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fp8kit.integrations.transformers", None)
    with pytest.raises(ImportError, match=r"Transformers is unfit: import of fp8kit"):
        load(NANO, scheme="FP8_DYNAMIC")
    model = AutoModelForCausalLM.from_pretrained(NANO)
    assert load(NANO, model, scheme="FP8_DYNAMIC") is model  # a model of one's own needs none
    assert any(isinstance(module, Fp8Linear) for module in model.modules())


def test_with_a_transformers_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fp8kit.integrations.transformers", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(ImportError, match=r"is unfit: cannot import name.* 5\.17 or later"):
        load(NANO, scheme="FP8_DYNAMIC")


class Attention(nn.Module):
    """One layer for q, k and v, or three."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        if joined:
            self.qkv_proj = nn.Linear(128, 512)
        else:
            self.q_proj, self.k_proj = nn.Linear(128, 256), nn.Linear(128, 128)
            self.v_proj = nn.Linear(128, 128)
        self.o_proj = nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv_proj"):
            qkv = self.qkv_proj(x)
        else:
            qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(qkv[..., :256] + qkv[..., 256:])


class Decoder(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.attn = Attention(joined)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


def decoder(joined: bool, device: str = "cpu") -> Decoder:
    with torch.device(device):
        return Decoder(joined).bfloat16().eval()


def fp8_decoder(scheme: str, joined: bool = False) -> Decoder:
    model = decoder(joined)
    calibrate = (lambda m: m(torch.randn(9, 128).bfloat16())) if scheme == "FP8" else None
    fp8kit.convert(model, scheme, exclude=[], calibrate=calibrate)
    return model


def values(model: Decoder, *names: str) -> torch.Tensor:
    layers = [model.get_submodule(f"attn.{n}") for n in names]
    return torch.cat([fp8kit.dequantize(layer.quantized_weight()) for layer in layers])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shard", [2**30, 30_000])
def test_separate_fp8_layers_load_into_a_joined_one(
    tmp_path: Path, scheme: str, shard: int
) -> None:
    source = fp8_decoder(scheme)
    save(source, tmp_path / "c", max_shard_bytes=shard)
    for device in ("meta", "cpu"):
        model = load(tmp_path / "c", decoder(True, device))
        joined = model.attn.qkv_proj
        assert isinstance(joined, Fp8Linear)
        assert_bits_equal(values(model, "qkv_proj"), values(source, "q_proj", "k_proj", "v_proj"))
        assert joined.scheme.activation == source.attn.q_proj.scheme.activation
        if scheme == "FP8":
            largest = max(source.attn.get_submodule(f"{n}_proj").input_scale for n in "qkv")
            assert_bits_equal(joined.input_scale, largest)
        x = torch.randn(3, 128, dtype=torch.bfloat16)
        assert_bits_equal(model(x), source(x))
        place = joined.weight.data_ptr()
        load(tmp_path / "c", model)
        assert joined.weight.data_ptr() == place
        assert_bits_equal(values(model, "qkv_proj"), values(source, "q_proj", "k_proj", "v_proj"))


def test_one_scale_for_three_is_the_largest(tmp_path: Path) -> None:
    source = fp8_decoder("FP8_TENSOR")
    save(source, tmp_path / "c")
    model = fp8_decoder("FP8_TENSOR", joined=True)
    load(tmp_path / "c", model)
    layer = model.attn.qkv_proj
    parts = [source.attn.get_submodule(f"{n}_proj") for n in "qkv"]
    scale = max(p.weight_scale for p in parts)
    assert_bits_equal(layer.weight_scale, scale)
    for part, codes in zip(parts, layer.weight.split([256, 128, 128]), strict=True):
        dense = fp8kit.dequantize(part.quantized_weight())
        assert_bits_equal(codes, fp8kit.quantize(dense, fp8kit.TENSOR, scale=scale).data)


@pytest.mark.parametrize("scheme", [*SCHEMES, "FP8_BLOCK"])
def test_a_joined_fp8_layer_loads_into_separate_ones(tmp_path: Path, scheme: str) -> None:
    source = fp8_decoder(scheme, joined=True)
    save(source, tmp_path / "c", target="transformers")
    model = load(tmp_path / "c", decoder(False, "meta"))
    assert_bits_equal(values(model, "q_proj", "k_proj", "v_proj"), values(source, "qkv_proj"))
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert_bits_equal(model(x), source(x))


def test_quantizing_a_joined_layer_from_parts(tmp_path: Path) -> None:
    source = decoder(False)
    save_file(source.state_dict(), tmp_path / SHARD)
    model = load(tmp_path, decoder(True, "meta"), scheme="FP8_DYNAMIC", exclude=[])
    fp8kit.convert(source, exclude=[])
    assert_bits_equal(values(model, "qkv_proj"), values(source, "q_proj", "k_proj", "v_proj"))


def test_fp8_and_dense_siblings_are_decoded_for_a_joined_layer(tmp_path: Path) -> None:
    source = decoder(False)
    fp8kit.convert(source, include=["q_proj", "o_proj"], exclude=[])
    save(source, tmp_path / "c", target="transformers")
    with pytest.warns(UserWarning, match=r"1 FP8 layers .* decoded to high precision: attn.q_proj"):
        model = load(tmp_path / "c", decoder(True, "meta"))
    q = fp8kit.dequantize(source.attn.q_proj.quantized_weight(), torch.bfloat16)
    wanted = torch.cat([q, source.attn.k_proj.weight, source.attn.v_proj.weight])
    assert type(model.attn.qkv_proj) is nn.Linear
    assert_bits_equal(model.attn.qkv_proj.weight, wanted)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "attn.qkv_proj.weight: attn.k_proj not on disk"),
        (127, r"256 \(attn.q_proj\) \+ 127 \(attn.k_proj\) \+ 128 .* rows on disk, 512 in the m"),
    ],
)
def test_misfits_of_joined_layers_are_named(tmp_path: Path, rows: int | None, message: str) -> None:
    state = decoder(False).state_dict()
    kept = state.pop("attn.k_proj.weight")
    if rows is not None:
        state["attn.k_proj.weight"] = kept[:rows].clone()
    save_file(state, tmp_path / SHARD)
    model = decoder(True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, model, scheme="FP8_DYNAMIC", exclude=[])
    untouched(model, before)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 256, 128))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.embed, self.fc = Experts(), nn.Embedding(256, 128), nn.Linear(128, 128)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fp8_where_no_linear_layer_is(tmp_path: Path, stacked: bool, device: str) -> None:
    source = nn.Module()
    source.fc = nn.Linear(128, 128)
    fp8kit.convert(source.bfloat16())
    save(source, tmp_path / "c")
    q = fp8kit.quantize(torch.randn(3, 256, 128), role="weight")
    e = fp8kit.quantize(torch.randn(256, 128), role="weight")
    tensors = {"embed.weight": e.data, "embed.weight_scale": e.scale}
    if stacked:
        tensors |= {"experts.gate_up_proj": q.data, "experts.gate_up_proj_scale": q.scale}
    else:
        for i, (first, name) in itertools.product(range(3), ((0, "gate_proj"), (128, "up_proj"))):
            key, rows = f"experts.{i}.{name}.weight", slice(first, first + 128)
            tensors |= {key: q.data[i, rows].clone(), f"{key}_scale": q.scale[i, rows].clone()}
    edit_tensors(tmp_path / "c", **{k.replace(".", "__"): t for k, t in tensors.items()})
    with torch.device(device):
        model = Mixture().bfloat16()
    count = 2 if stacked else 7
    with pytest.warns(UserWarning, match=rf"{count} FP8 layers .* decoded .*: embed, experts"):
        load(tmp_path / "c", model)
    assert_bits_equal(model.experts.gate_up_proj, fp8kit.dequantize(q, torch.bfloat16))
    assert_bits_equal(model.embed.weight, fp8kit.dequantize(e, torch.bfloat16))
    assert isinstance(model.fc, Fp8Linear)


class Casting(nn.Module):
    """Casts a layer's input to the dtype of its weight, like T5."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.wo(self.wi(x).to(self.wo.weight.dtype))
        return y


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_whose_weight_is_read_is_decoded(tmp_path: Path, device: str) -> None:
    source = nn.Module()
    source.wi, source.wo = nn.Linear(128, 128), nn.Linear(128, 128)
    fp8kit.convert(source.bfloat16(), exclude=[])
    save(source, tmp_path / "c")
    with torch.device(device):
        model = Casting().bfloat16()
    with pytest.warns(UserWarning, match=r"decoded .*: wo\. wo: .* the dtype of its weight"):
        load(tmp_path / "c", model)
    assert isinstance(model.wi, Fp8Linear)
    wanted = fp8kit.dequantize(source.wo.quantized_weight(), torch.bfloat16)
    assert_bits_equal(model.wo.weight, wanted)
    x = torch.randn(3, 128).bfloat16()
    assert_bits_equal(model(x), nn.functional.linear(source.wi(x), wanted, source.wo.bias))


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    fp8kit.convert(model, exclude=[])
    with pytest.raises(CheckpointError, match=r"There is no directory .*nowhere"):
        fp8kit.save(model, tmp_path / "out", source=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is too long"):
        fp8kit.save(model, tmp_path / "out", source=tmp_path / ("n" * 300))
    assert not (tmp_path / "out").exists()


class WithOwn(nn.Module):
    """A module with a layer, and a parameter whose name is one of checkpoint formats."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)
        self.register_parameter(name, nn.Parameter(torch.rand(shape)))


RESERVED = [
    ("weight_scale", (128,)), ("input_scale", ()), ("qscale_weight", (1,)), ("k_scale", (32,)),
    ("v_scale", ()), ("kv_scale", (1,)), ("scaled_fp8", (1,)), ("comfy_quant", (4,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), RESERVED)
def test_parameters_under_names_of_scales_are_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model = nn.ModuleList([WithOwn(name, shape)])
    fp8kit.convert(model)
    with pytest.raises(CheckpointError, match=rf"ModuleList has 0\.{name} of its own.*Rename"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "shape"), [("weight_exponents", (128,)), ("q_scale", (1,))])
def test_parameters_under_other_names_of_formats_come_back(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model, fresh = (nn.ModuleList([WithOwn(name, shape)]) for _ in range(2))
    fp8kit.convert(model)
    save(model, tmp_path / "out")
    load(tmp_path / "out", fresh, strict=True)
    assert_bits_equal(getattr(fresh[0], name).data, getattr(model[0], name).data)


@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_hooks_that_change_values_are_refused(name: str, tmp_path: Path) -> None:
    def change(module: nn.Module, state: Any, *_: Any) -> None:
        state[name] = state[name].flip(0)

    def copy(module: nn.Module, state: Any, *_: Any) -> None:
        state |= {n: t.detach().clone() for n, t in state.items()}

    model, fresh = (nn.Sequential(nn.Linear(128, 128)) for _ in range(2))
    fp8kit.convert(model)
    save(model, tmp_path / "fp8")
    for module in (model, fresh):
        module.register_state_dict_post_hook(copy)
    save(model, tmp_path / "copied")
    load(tmp_path / "copied", fresh)
    for module in (model, fresh):
        module.register_state_dict_post_hook(change)
    match = f"{name} in the state_dict of Sequential have other values than its tensors"
    for call in (lambda: save(model, tmp_path / "out"), lambda: load(tmp_path / "fp8", fresh)):
        with pytest.raises(CheckpointError, match=match):
            call()


@pytest.mark.parametrize("where", ["model", "layer", "parameter"])
def test_hooks_that_rename_tensors_are_refused(where: str, tmp_path: Path) -> None:
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in [n for n in state if where != "parameter" or n.endswith("bias")]:
            state[f"{prefix}other.{name}"] = state.pop(name)

    dense, model, fresh = (nn.Sequential(nn.Linear(128, 128)) for _ in range(3))
    fp8kit.convert(model)
    save(model, tmp_path / "fp8")
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    for module in (model, fresh):
        owner = module[0] if where == "layer" else module
        owner.register_state_dict_post_hook(rename)
    match = r"(?s)other.* in the state_dict of Sequential are no tensors of it.*hooks"
    for call in (
        lambda: save(model, tmp_path / "out"),
        lambda: load(tmp_path / "fp8", fresh),
        lambda: load(tmp_path / "dense.safetensors", fresh, scheme="FP8_DYNAMIC"),
    ):
        with pytest.raises(CheckpointError, match=match):
            call()


@pytest.mark.parametrize("scheme", [None, "FP8_DYNAMIC"])
def test_a_model_loaded_in_inference_mode_is_as_useful_as_any(
    scheme: str | None, tmp_path: Path
) -> None:
    source, x = tmp_path / "dir", torch.randn(3, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256))
    if scheme is None:
        fp8kit.save(fp8kit.convert(model, exclude=[], copy=True).model, source)
    else:
        source.mkdir()
        save_file(model.state_dict(), source / "model.safetensors")
    with torch.inference_mode():
        load(source, model, scheme=scheme, exclude=[] if scheme else None)
    assert isinstance(model[0], Fp8Linear)
    assert not any(p.is_inference() for p in model.parameters())
    model(x.requires_grad_()).sum().backward()
    fp8kit.load_weights(model, model.state_dict())


@pytest.mark.parametrize("inference", [False, True])
def test_a_model_made_in_inference_mode_loads_and_takes_weights(
    inference: bool, tmp_path: Path
) -> None:
    parts = {f"{n}.weight": torch.randn(4, 8) for n in ("gate_proj", "up_proj")}
    parts |= {"norm.weight": torch.full((8,), 2.0), "norm.bias": torch.zeros(8)}
    parts["fc.weight"] = torch.randn(256, 256)
    save_file(parts, tmp_path / "model.safetensors")
    with torch.inference_mode():
        model = nn.ModuleDict({"gate_up_proj": nn.Linear(8, 8, bias=False)})
        model.update({"norm": nn.LayerNorm(8), "fc": nn.Linear(256, 256, bias=False)})
    with torch.inference_mode(inference):
        load(tmp_path, model, scheme="FP8_DYNAMIC")
        fp8kit.load_weights(model, parts)
    assert_bits_equal(model["norm"].weight, parts["norm.weight"])
    assert_bits_equal(model["gate_up_proj"].weight, torch.cat([*parts.values()][:2]))
