"""Scales follow the renames of their weight, where Transformers' rules name weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8kit
from checkpoint_samples import SHARD
from numerics import assert_bits_equal
from zoo import of_transformers

pytest.importorskip("transformers")
from transformers.core_model_loading import PrefixChange, WeightRenaming

from fp8kit.integrations.transformers_renames import with_scales

# a class, and a layer in the model and in files
RENAMED = [
    ("DeepseekV4ForCausalLM", "lm_head", "head"),
    (
        "UnlimitedOcrForConditionalGeneration",
        "model.multi_modal_projector",
        "model.projector.layers",
    ),
]


def converted(name: str, layer: str, scheme: str) -> Any:
    every = of_transformers.architectures()
    model: Any = next(a for a in every if a.name.endswith(f"/{name}")).model(torch.bfloat16)
    linear = model.get_submodule(layer)

    def calibrate(_: object) -> None:
        linear(torch.randn(4, linear.in_features, dtype=torch.bfloat16))

    static = calibrate if scheme == "FP8" else None
    fp8kit.convert(model, scheme, include=[layer], exclude=[], calibrate=static)
    return model


def assert_same(found: Any, wanted: Any) -> None:
    """Check that models hold the same numbers; a loader may keep dense ones in fp32."""
    theirs = wanted.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, tensor in found.state_dict().items():
        assert_bits_equal(tensor.float(), theirs[name].float())


@pytest.mark.parametrize(
    ("name", "layer", "on_disk", "scheme"),
    [(*r, s) for r in RENAMED for s in ("FP8_DYNAMIC", "FP8_TENSOR", "FP8")]
    + [(*RENAMED[1], "FP8_BLOCK")],
)
def test_a_layer_of_another_name_in_files_is_saved_and_loaded(
    name: str, layer: str, on_disk: str, scheme: str, tmp_path: Path
) -> None:
    model = converted(name, layer, scheme)
    fp8kit.save(model, tmp_path / "a")
    names = load_file(tmp_path / "a" / SHARD).keys()
    kinds = {n.removeprefix(f"{on_disk}.") for n in names if n.startswith(f"{on_disk}.")}
    scale = "weight_scale_inv" if scheme == "FP8_BLOCK" else "weight_scale"
    assert kinds - {"bias"} == {"weight", scale, *(["input_scale"] if scheme == "FP8" else [])}
    assert not any(n.startswith(f"{layer}.") and "scale" in n for n in names)
    loaded = fp8kit.load(tmp_path / "a")
    assert_same(loaded, model)
    fp8kit.save(loaded, tmp_path / "b")
    assert load_file(tmp_path / "b" / SHARD).keys() == names
    loaded.dequantize()
    model.dequantize()
    assert_same(loaded, model)


@pytest.mark.parametrize(("name", "layer", "on_disk"), RENAMED)
def test_scales_under_their_names_in_the_model_are_loaded_too(
    name: str, layer: str, on_disk: str, tmp_path: Path
) -> None:
    model = converted(name, layer, "FP8_DYNAMIC")
    fp8kit.save(model, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / SHARD)
    moved = {n.replace(f"{on_disk}.weight", f"{layer}.weight"): t for n, t in tensors.items()}
    assert moved.keys() != tensors.keys()
    save_file(moved, tmp_path / "a" / SHARD)
    assert_same(fp8kit.load(tmp_path / "a"), model)


RULES = [
    WeightRenaming(r"^layers", "model.layers"),
    WeightRenaming(r"^head\.weight", "lm_head.weight"),
    WeightRenaming(r"^weight", "proj.weight"),
    WeightRenaming(r"experts\.fc\.weight", "experts.down_proj"),
]
NAMES = [
    ("head.weight", "lm_head.weight"),
    ("head.weight_scale", "lm_head.weight_scale"),
    ("head.weight_scale_inv", "lm_head.weight_scale_inv"),
    ("head.input_scale", "lm_head.input_scale"),
    ("head.bias", "head.bias"),
    ("my_head.weight_scale", "my_head.weight_scale"),
    ("weight_scale", "proj.weight_scale"),
    ("layers.0.fc.input_scale", "model.layers.0.fc.input_scale"),
]


@pytest.mark.parametrize(("on_disk", "inside"), NAMES)
def test_rules_rename_scales_both_ways(on_disk: str, inside: str) -> None:
    rules = with_scales(RULES)
    name, back = on_disk, inside
    for rule in rules:
        name, _ = rule.rename_source_key(name)
    for rule in reversed(rules):
        back, _ = rule.reverse_transform().rename_source_key(back)
    assert (name, back) == (inside, on_disk)


def test_other_rules_stay_and_scopes_are_kept() -> None:
    prefix = PrefixChange(prefix_to_add="model", model_prefix="model")
    scoped = WeightRenaming(r"^head\.weight", "lm_head.weight")
    scoped.scope_prefix, scoped.base_model_prefix = "text", "model"
    kept, rule = with_scales([prefix, scoped])
    assert kept is prefix
    assert with_scales([rule]) == [rule]
    for name in ("text.head.input_scale", "model.text.head.input_scale"):
        assert rule.rename_source_key(name)[0] == name.replace("head", "lm_head")
    assert rule.rename_source_key("head.input_scale") == ("head.input_scale", None)
