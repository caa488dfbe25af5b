"""Trial loads: before a checkpoint is written, Transformers' own loader loads it without data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fp8kit
from fp8kit.errors import CheckpointError
from fp8kit.modules.linear import Fp8Linear
from tiny_experts import tiny

transformers = pytest.importorskip("transformers")
from fp8kit.integrations.transformers_trial import accepted, accepted_of  # noqa: E402

SHARD = "model.safetensors"
KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys")
SIZES = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_attention_heads=2)
    return transformers.BertForMaskedLM(config).bfloat16().eval()


def save(model: Any, folder: Path) -> Path:
    fp8kit.convert(model)
    fp8kit.save(model, folder / "fp8", target="transformers")
    return folder / "fp8"


def quantize(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "dense")
    recipe = fp8kit.Recipe(target="transformers")
    fp8kit.quantize_checkpoint(folder / "dense", folder / "fp8", recipe)
    return folder / "fp8"


def translate(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "dense")
    fp8kit.quantize_checkpoint(folder / "dense", folder / "vllm")
    fp8kit.convert_checkpoint(folder / "vllm", folder / "fp8", target="transformers")
    return folder / "fp8"


def save_and_translate(model: Any, folder: Path) -> Path:
    fp8kit.convert(model)
    fp8kit.save(model, folder / "vllm")
    fp8kit.convert_checkpoint(folder / "vllm", folder / "fp8", target="transformers")
    return folder / "fp8"


ROUTES = [save, quantize, translate, save_and_translate]
Route = Callable[[Any, Path], Path]


@pytest.mark.parametrize("route", ROUTES)
def test_heads_that_files_call_otherwise_are_ignored(route: Route, tmp_path: Path) -> None:
    model = bert()
    dense = model(torch.arange(8)[None]).logits
    path = route(model, tmp_path)
    again, info = transformers.BertForMaskedLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[k] for k in KEYS)
    ours = fp8kit.load(path)(torch.arange(8)[None]).logits
    theirs = again.eval()(torch.arange(8)[None]).logits
    assert (ours - theirs).norm() < 0.1 * (dense - dense.mean()).norm()


@pytest.mark.parametrize("route", ROUTES)
def test_experts_without_a_rule_are_refused(route: Route, tmp_path: Path) -> None:
    config = transformers.Qwen3VLMoeTextConfig(
        **SIZES,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
    )
    model = transformers.Qwen3VLMoeTextModel(config).bfloat16()
    with pytest.raises(CheckpointError, match=r"no rule to load these: it would draw"):
        route(model, tmp_path)
    assert not (tmp_path / "fp8").exists()


def test_stacks_outside_of_experts_are_refused_where_they_were_cut(tmp_path: Path) -> None:
    model = tiny("GraniteMoe").bfloat16()
    fp8kit.convert(model)
    with pytest.warns(UserWarning, match="written as stacks of codes"):
        fp8kit.save(model, tmp_path / "vllm")
    with pytest.raises(CheckpointError, match=r"it would draw .*gate_up_proj.* at random"):
        fp8kit.convert_checkpoint(tmp_path / "vllm", tmp_path / "fp8", target="transformers")


def test_experts_of_two_kinds_in_one_stack_are_refused(tmp_path: Path) -> None:
    """Tools write such stacks if they are told to skip one expert."""
    path = quantize(tiny("Qwen3Moe").bfloat16(), tmp_path)
    tensors, config = load_file(path / SHARD), json.loads((path / "config.json").read_text())
    dense = "model.layers.0.mlp.experts.1.down_proj"
    codes, scale = tensors[f"{dense}.weight"], tensors.pop(f"{dense}.weight_scale")
    tensors[f"{dense}.weight"] = (codes.float() * scale).bfloat16()
    save_file(tensors, path / SHARD)
    config["quantization_config"]["ignore"].append(dense)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"{dense}.weight are in high precision, and others"):
        fp8kit.convert_checkpoint(path, tmp_path / "other", target="transformers")
    with pytest.warns(UserWarning, match="decoded to high precision"):
        model = fp8kit.load(path)
    fp8kit.save(model, tmp_path / "saved", target="transformers")
    kinds = {n: t.dtype for n, t in load_file(tmp_path / "saved" / SHARD).items()}
    assert {d for n, d in kinds.items() if "layers.0.mlp.experts" in n} == {torch.bfloat16}


@pytest.mark.parametrize(
    "route", [*ROUTES, lambda m, p: fp8kit.convert(m) and m.save_pretrained(p)]
)
def test_layers_whose_rules_know_no_scales_are_refused(route: Route, tmp_path: Path) -> None:
    config = transformers.Dinov2Config(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    with pytest.raises(CheckpointError, match=r"does not load these FP8 layers into Dinov2Model"):
        route(transformers.Dinov2Model(config).bfloat16(), tmp_path)


def test_layers_that_the_model_does_not_use_stay(tmp_path: Path) -> None:
    """Layers that predict further tokens are no part of the model's class, and are not missed."""
    model = bert()
    path = save(model, tmp_path)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    files = load_file(path / "model.safetensors")
    kinds = {n: (t.dtype, tuple(t.shape)) for n, t in files.items()}
    extra = {
        "mtp.0.weight": (torch.float8_e4m3fn, (8, 8)),
        "mtp.0.weight_scale": (torch.float32, (8, 1)),
    }
    assert accepted_of(model, config, kinds | extra, torch.bfloat16) == config
    first = next(n for n in kinds if n.endswith("weight_scale"))
    lost = {n: k for n, k in kinds.items() if n != first}
    with pytest.raises(CheckpointError, match=r"would draw .*weight_scale at random"):
        accepted_of(model, config, lost, torch.bfloat16)
    flat = kinds | {first: (torch.float32, (7, 1))}
    with pytest.raises(CheckpointError, match=r"\[7, 1\], not \["):
        accepted_of(model, config, flat, torch.bfloat16)


def test_what_cannot_be_checked_is_told() -> None:
    def build() -> Any:
        raise ValueError("no such model")

    config = {"quant_method": "fp8", "modules_to_not_convert": []}
    with pytest.warns(UserWarning, match=r"is not checked: no such model"):
        assert accepted(build, config, {}) == config
    assert accepted(build, {"quant_method": "fbgemm_fp8"}, {}) == {"quant_method": "fbgemm_fp8"}


def test_mx_of_a_model_in_fp32_runs_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **heads)).eval()
    fp8kit.convert(model, "MXFP8")
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(8)[None]
    assert again.dtype == torch.float32
    assert (again(ids).logits - model(ids).logits).norm() < 0.1 * model(ids).logits.norm()


def test_groups_name_layers_as_in_the_model_and_as_in_files(tmp_path: Path) -> None:
    """A model of several parts is saved under names that differ from those in memory."""
    text = transformers.LlamaConfig(**SIZES, num_attention_heads=2)
    vision = transformers.CLIPVisionConfig(hidden_size=96, num_hidden_layers=1, image_size=32)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    model = transformers.LlavaForConditionalGeneration(config).bfloat16()
    fp8kit.convert(model, include=["*language_model*mlp*"], exclude=[])
    fp8kit.convert(model, "FP8_WEIGHT_ONLY", include=["*language_model*self_attn*"], exclude=[])
    wanted = {n: str(m.scheme) for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert {*wanted.values()} == {"FP8_DYNAMIC", "FP8_WEIGHT_ONLY"}
    fp8kit.save(model, tmp_path / "vllm")
    fp8kit.convert_checkpoint(tmp_path / "vllm", tmp_path / "fp8", target="transformers")
    for folder in ("vllm", "fp8"):
        assert wanted.keys().isdisjoint(
            name.removesuffix(".weight") for name in load_file(tmp_path / folder / SHARD)
        )
        read = fp8kit.load(tmp_path / folder)
        assert wanted == {n: str(read.get_submodule(n).scheme) for n in wanted}
    theirs = type(model).from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    for name, scheme in wanted.items():
        inputs = theirs.get_submodule(name).quantization_scheme.input_activations
        assert (inputs is None) == (scheme == "FP8_WEIGHT_ONLY"), name


class Unanswered(TorchDispatchMode):
    """Collective operations raise; those of the faked process group would return at once."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace not in ("c10d", "_c10d_functional"), f"{func} waits for the others"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "route", [save, quantize, lambda m, p: fp8kit.convert(m) and m.save_pretrained(p)]
)
def test_one_process_of_many_saves_alone(route: Route, tmp_path: Path) -> None:
    model = bert()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with Unanswered():
            route(model, tmp_path)
            with pytest.raises(AssertionError, match="waits for the others"):
                dist.barrier()
    finally:
        dist.destroy_process_group()
