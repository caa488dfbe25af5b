"""FP8 experts are saved one by one, and loaded from every form on disk."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.errors import CheckpointError, ConversionError
from numerics import assert_bits_equal, assert_same_tensors
from tiny_experts import tiny

transformers = pytest.importorskip("transformers")
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

SHARD = "model.safetensors"
IDS = torch.arange(10).view(5, 2) % 4
SCHEMES = ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "MXFP8", "FP8_WEIGHT_ONLY"]
# no engine supports experts in these schemes
ELSEWHERE = ("FP8_TENSOR", "FP8_WEIGHT_ONLY")


class Model(nn.Module):
    """A user's own module with experts."""

    def __init__(self, inner: int = 256) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            hidden_size=128,
            intermediate_size=inner,
            num_local_experts=4,
            experts_implementation="eager",
        )
        self.experts, self.proj = MixtralExperts(config), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.proj(x), IDS, torch.full(IDS.shape, 0.5))  # type: ignore


def dense(inner: int = 256, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model(inner)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.bfloat16()


def one_by_one(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split stacks into tensors for each expert, as trainers send them."""
    found = {n: t for n, t in state.items() if "experts" not in n}
    for expert in reversed(range(4)):
        gate, up = state["experts.gate_up_proj"][expert].chunk(2)
        found[f"experts.{expert}.w3.weight"] = up
        found[f"experts.{expert}.w1.weight"] = gate
        found[f"experts.{expert}.w2.weight"] = state["experts.down_proj"][expert]
    return found


def assert_same(model: nn.Module, other: nn.Module) -> None:
    state = other.state_dict()
    assert_same_tensors(model, state)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_come_back_bit_for_bit(scheme: str, tmp_path: Path) -> None:
    source, model = dense(), dense()
    fp8kit.convert(model, scheme)
    x = torch.randn(5, 128).bfloat16()
    y = model(x)
    if scheme in ELSEWHERE:
        with pytest.raises(CheckpointError, match="has no experts of"):
            fp8kit.save(model, tmp_path / "c")
    target = "transformers" if scheme in ELSEWHERE else "vllm"
    fp8kit.save(model, tmp_path / "c", target=target)
    names = load_file(tmp_path / "c" / SHARD).keys()
    parts = {f"experts.{e}.{p}_proj.weight" for e in range(4) for p in ("gate", "up", "down")}
    assert parts <= names
    assert not any(n.startswith("experts.gate_up") for n in names)
    again = dense()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8kit.load(tmp_path / "c", again)
    assert_same(model, again)
    assert_bits_equal(again(x), y)
    save_file(source.state_dict(), tmp_path / SHARD)
    with torch.device("meta"):
        online = Model().bfloat16()
    fp8kit.load(tmp_path, online, scheme=scheme)
    assert_same(model, online)


@pytest.mark.parametrize("inner", [128, 256])  # with 128, a block is the whole of proj and of down
@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_that_name_no_scheme_have_that_of_the_model(
    scheme: str, inner: int, tmp_path: Path
) -> None:
    source, model = dense(inner), dense(inner, seed=1)
    for each in (source, model):
        fp8kit.convert(each, scheme)
    save_file(source.state_dict(), tmp_path / SHARD)
    fp8kit.load(tmp_path, model)
    assert_same(model, source)


class Reading(Model):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.experts.gate_up_proj[0].T  # type: ignore[operator,index]


@pytest.mark.parametrize("reason", ["its forward was replaced", "Reading.forward reads its weight"])
def test_experts_that_other_code_runs_or_reads_are_loaded_dense(
    reason: str, tmp_path: Path
) -> None:
    source, model = dense(), dense(seed=1)
    fp8kit.convert(source)
    fp8kit.save(source, tmp_path / "fp8")
    if reason.startswith("Reading"):
        model.__class__ = Reading
    else:
        model.experts.forward = functools.partial(model.experts.forward)  # type: ignore
    with pytest.warns(UserWarning, match=f"experts: {reason}"):
        fp8kit.load(tmp_path / "fp8", model)
    assert type(model.experts) is MixtralExperts
    for name in ("gate_up_proj", "down_proj"):
        decoded = fp8kit.dequantize(source.experts.quantized(name), torch.bfloat16)  # type: ignore
        assert_bits_equal(model.experts.get_parameter(name), decoded)
    model(torch.randn(5, 128).bfloat16())


def test_two_scales_of_a_matrix_are_not_one(tmp_path: Path) -> None:
    source, model = dense(), dense(seed=1)
    for each in (source, model):
        fp8kit.convert(each, "FP8_TENSOR")
    before, name = (
        {n: t.clone() for n, t in model.state_dict().items()},
        "experts.gate_up_proj_scale",
    )
    scales = source.state_dict()[name].view(4, 1) * torch.tensor([1.0, 2.0])
    save_file({**source.state_dict(), name: scales}, tmp_path / SHARD)
    with pytest.raises(CheckpointError, match="FP8_DYNAMIC in the checkpoint and FP8_TENSOR"):
        fp8kit.load(tmp_path, model)
    assert_same_tensors(model, before)


@pytest.mark.parametrize("kept", ["down_proj", "up_proj"])
def test_an_expert_that_a_checkpoint_keeps_dense_is_not_quantized(
    kept: str, tmp_path: Path
) -> None:
    model, source = dense(), dense()
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / "c")
    tensors, name = load_file(tmp_path / "c" / SHARD), f"experts.3.{kept}"
    weight = source.experts.down_proj[3] if kept == "down_proj" else source.experts.gate_up_proj[3]
    tensors[f"{name}.weight"] = weight = weight[-tensors[f"{name}.weight"].shape[0] :].detach()
    del tensors[f"{name}.weight_scale"]
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "c" / SHARD)
    again = dense()
    with pytest.warns(UserWarning, match="holds 11 FP8 layers .* they were decoded to high"):
        fp8kit.load(tmp_path / "c", again)
    assert type(again.experts) is MixtralExperts
    stack = again.experts.down_proj if kept == "down_proj" else again.experts.gate_up_proj
    assert_bits_equal(stack[3, -len(weight) :], weight)
    q = model.experts.stored("down_proj")
    assert_bits_equal(again.experts.down_proj[0], fp8kit.dequantize(q).bfloat16()[0])
    if kept == "down_proj":  # half a matrix has no place in FP8 experts
        fp8kit.load(tmp_path / "c", model)


def test_static_experts_of_one_scale_each_are_saved_with_it(tmp_path: Path) -> None:
    tensors, weights = {}, one_by_one(dense().state_dict())
    for name, weight in weights.items():
        if "experts" in name:
            q = fp8kit.quantize(weight, fp8kit.TENSOR, role="weight")
            layer = name.removesuffix(".weight")
            tensors |= {name: q.data, f"{layer}.weight_scale": q.scale.reshape(())}
            tensors[f"{layer}.input_scale"] = torch.tensor(0.05)
        else:
            tensors[name] = weight
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / SHARD)
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["proj"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = fp8kit.load(tmp_path, dense())
    fp8kit.save(model, tmp_path / "c", target="vllm")
    words = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    written = load_file(tmp_path / "c" / SHARD)
    for name, tensor in tensors.items():
        on_disk = name
        for word, other in words.items():
            on_disk = on_disk.replace(f".{word}.", f".{other}.")
        assert_bits_equal(written[on_disk].reshape(tensor.shape), tensor)
    assert len(written) == len(tensors)
    x = torch.randn(5, 128).bfloat16()
    assert_bits_equal(fp8kit.load(tmp_path / "c", dense())(x), model(x))
    # Transformers merges them and leaves their input scales aside; no file loses them
    for target, make in (("t", fp8kit.save), ("u", fp8kit.convert_checkpoint)):
        make(model if target == "t" else tmp_path / "c", tmp_path / target, target="transformers")
        assert load_file(tmp_path / target / SHARD).keys() == written.keys()
        assert_bits_equal(fp8kit.load(tmp_path / target, dense())(x), model(x))
    model.experts.gate_up_proj_scale.data[1, 5] *= 2
    with pytest.raises(CheckpointError, match="no experts of row weights with static"):
        fp8kit.save(model, tmp_path / "d", target="vllm")


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR"])
def test_weights_arrive_in_any_form_any_number_of_times(scheme: str) -> None:
    source, model = dense(), dense()
    fp8kit.convert(model, scheme)
    wanted = copy.deepcopy(model)
    places = {n: t.data_ptr() for n, t in model.state_dict().items()}
    stacks, single = source.state_dict(), one_by_one(source.state_dict())
    for arriving in (single, stacks, model.state_dict(), single):
        weights = {n: t.clone() for n, t in arriving.items()}
        for name in ("gate_up_proj", "down_proj"):
            model.experts.codes(name).data.zero_()
            model.experts.beside(name, "scale").data.fill_(3)
        filled = fp8kit.load_weights(model, weights)
        assert {"experts.gate_up_proj", "experts.gate_up_proj_scale"} <= filled
        assert_same(wanted, model)
    assert {n: t.data_ptr() for n, t in model.state_dict().items()} == places


def test_experts_are_quantized_as_they_come_onto_meta() -> None:
    model, source = dense(), dense()
    fp8kit.convert(model)
    with torch.device("meta"):
        empty = Model().bfloat16()
    half = dict(list(one_by_one(source.state_dict()).items())[:7])
    fp8kit.load_weights(empty, half, scheme="FP8_DYNAMIC", partial=True)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj waits for experts\.\d"):
        fp8kit.load_weights(empty, {}, scheme="FP8_DYNAMIC")
    with torch.device("meta"):
        empty = Model().bfloat16()
    fp8kit.load_weights(empty, one_by_one(source.state_dict()), scheme="FP8_DYNAMIC")
    assert_same(model, empty)


def test_what_does_not_fit_is_refused() -> None:
    model = dense()
    fp8kit.convert(model)
    codes = {n: t.clone() for n, t in model.state_dict().items()}
    single = one_by_one(dense().state_dict())
    bad = {**single, "experts.1.w2.weight": torch.full((128, 256), torch.nan).bfloat16()}
    with pytest.raises(ConversionError, match=r"Expert 1 of experts\.down_proj holds NaN"):
        fp8kit.load_weights(model, bad)
    wrong = {**single, "experts.1.w2.weight": torch.zeros(64, 256).bfloat16()}
    with pytest.raises(CheckpointError, match=r"expert 1 of experts\.down_proj has shape"):
        fp8kit.load_weights(model, wrong)
    mixed = {n: t for n, t in single.items() if not n.startswith("experts.0.w1")}
    mixed["experts.0.w1.weight"] = codes["experts.gate_up_proj"][0, :256]
    mixed["experts.0.w1.weight_scale"] = codes["experts.gate_up_proj_scale"][0, :256]
    with pytest.raises(CheckpointError, match="gate or up is FP8 and the other is not"):
        fp8kit.load_weights(model, mixed)


def test_a_module_of_this_package_is_saved_and_filled_alike(tmp_path: Path) -> None:
    source = dense().experts
    stacks: tuple[Any, ...] = (source.gate_up_proj.detach(), source.down_proj.detach())
    model, again = (
        nn.ModuleDict({"experts": fp8kit.Fp8Experts.from_dense(*(scale * s for s in stacks))})
        for scale in (1, 2)
    )
    fp8kit.save(model, tmp_path / "c")
    assert "experts.3.up_proj.weight_scale" in load_file(tmp_path / "c" / SHARD)
    fp8kit.load(tmp_path / "c", again)
    assert_same(model, again)


@pytest.mark.parametrize("kept", ["0", "1"])
@pytest.mark.parametrize("target", ["vllm", "transformers"])
def test_experts_under_two_names_load_under_either(target: str, kept: str, tmp_path: Path) -> None:
    def shared() -> nn.Sequential:
        model = nn.Sequential(dense(), dense())
        model[1].experts = model[0].experts
        return model

    source, model = shared(), shared()
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / "c", target=target)
    files = load_file(tmp_path / "c" / SHARD)
    renamed = {n.replace("0.experts", f"{kept}.experts", 1): t for n, t in files.items()}
    save_file(renamed, tmp_path / "c" / SHARD)
    other = "01".replace(kept, "")
    state = {n: t for n, t in source.state_dict().items() if f"{other}.experts" not in n}
    save_file(state, tmp_path / SHARD)
    for again, path, scheme in (
        (shared(), tmp_path / "c", None),
        (shared(), tmp_path, "FP8_DYNAMIC"),
        (copy.deepcopy(model), tmp_path / "c", None),
    ):
        fp8kit.load(path, again, scheme=scheme)
        assert again[0].experts is again[1].experts
        assert_same(model, again)


def test_stacks_of_8_bits_in_a_file_run_in_8_bits(tmp_path: Path) -> None:
    """One scale for each matrix of a stack becomes one for each of its rows."""
    model = dense()
    fp8kit.convert(model, "FP8_TENSOR", include=["experts"])
    state = model.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        state[f"experts.{name}_scale"] = state[f"experts.{name}_scale"].reshape(4)
    save_file(state, tmp_path / SHARD)
    again = dense()
    fp8kit.load(tmp_path, again)
    x = torch.randn(5, 128).bfloat16()
    assert again.experts.scheme.name == "FP8_DYNAMIC"
    assert_bits_equal(again(x), model(x))


@pytest.mark.slow
def test_dense_stacks_that_transformers_would_draw_are_refused(tmp_path: Path) -> None:
    model, ids = tiny("Llama4Text"), torch.arange(16).view(2, 8)
    block = copy.deepcopy(model)
    stacks = ["*.experts", "*.experts.*"]
    fp8kit.convert(model, exclude=stacks)
    with pytest.raises(CheckpointError, match=r"one by one: it would draw these stacks at random"):
        fp8kit.save(model, tmp_path / "rows", target="transformers")
    fp8kit.save(model, tmp_path / "rows")
    assert_bits_equal(fp8kit.load(tmp_path / "rows")(ids).logits, model(ids).logits)
    fp8kit.convert(block, "FP8_BLOCK", exclude=stacks)
    fp8kit.save(block, tmp_path / "blocks", target="transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "blocks")
    own = dict(block.state_dict())
    for name, stack in again.state_dict().items():
        if ".experts." in name:
            assert_bits_equal(stack, own[name])
