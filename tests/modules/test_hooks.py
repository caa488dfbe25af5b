"""Hooks, buffers and attributes of users: converted layers keep them; some end no fusion."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils.output_capturing import install_output_capuring_hook

import fp8kit
from fp8kit.integrations.quantizer_of_layers import restore_dense
from fp8kit.modules.hooks import become, is_watched
from interrupts import interrupted
from numerics import assert_bits_equal, relative_error
from recorded_calls import install
from replayed_layers import CALLS, is_replayed, of_attention, run
from tiny_experts import tiny


class Hung(nn.Module):
    """Computes with attributes that it attaches to its layers, and without those that are gone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(128, 256), nn.Linear(256, 128)
        fc: Any = self.a
        fc.scale = 3.0
        fc.register_buffer("mask", (torch.rand(256) > 0.5).float())
        fc.register_buffer("shift", torch.ones(256), persistent=False)
        fc.gain, fc.act = nn.Parameter(torch.full((256,), 2.0)), nn.GELU().eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Any = self.a(x)
        for name in ("scale", "mask", "gain"):
            y = y * getattr(self.a, name, 1.0)
        act = getattr(self.a, "act", nn.Identity())
        z: Tensor = self.b(act(y + getattr(self.a, "shift", 0.0)))
        return z


X = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))


def test_what_hangs_on_a_layer_stays_there() -> None:
    model = Hung()
    dense, names = copy.deepcopy(model), set(model.state_dict())
    fp8kit.convert(model, exclude=[])
    assert isinstance(model.a, fp8kit.Fp8Linear)
    assert names < set(model.state_dict())
    assert model.a.act.training is False
    assert 1e-3 < relative_error(model(X), dense(X)) < 0.08
    y = model(X)
    restore_dense(model)
    assert type(model.a) is nn.Linear
    assert set(vars(model.a)) == set(vars(dense.a))
    assert set(model.state_dict()) == names
    assert 1e-3 < relative_error(model(X), y) < 0.08


def test_what_hangs_on_a_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    model = Hung()
    fp8kit.convert(model, exclude=[])
    model.a.get_buffer("mask")[:9] = 0.25  # a value that differs from a new model's
    fp8kit.save(model, tmp_path / "a")
    loaded = fp8kit.load(tmp_path / "a", model=Hung())
    assert torch.equal(loaded(X), model(X))


def test_hooks_of_state_dicts_stay() -> None:
    model, called = nn.Sequential(nn.Linear(128, 128)), list[str]()
    layer: Any = model[0]
    layer.register_state_dict_pre_hook(lambda *_: called.append("saving"))
    layer.register_load_state_dict_pre_hook(lambda *_: called.append("loading"))
    handle = layer.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
    fp8kit.convert(model)
    model.load_state_dict(model.state_dict())
    handle.remove()
    model.load_state_dict(model.state_dict())
    assert called == ["saving", "loading", "loaded", "saving", "loading"]


@pytest.mark.parametrize("name", ["shared", "scheme", "replays", "accum", "state_dict", "codes"])
def test_a_layer_that_uses_a_name_of_ours_stays_dense(name: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    setattr(model[0], name, {"of": "somebody"})
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["1"]
    assert [r.reason for r in report.skipped] == [f"it has {name} of its own, and an FP8 layer too"]


def test_a_scale_of_somebody_is_not_taken_for_ours() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[0].register_buffer("weight_scale", torch.ones(()))
    assert [r.name for r in fp8kit.convert(model).converted] == ["1"]


def test_an_interrupt_leaves_a_layer_dense_or_fp8() -> None:
    kinds = list[type]()
    for step in itertools.count():
        layer = nn.Linear(128, 128)
        y, made = layer(X), fp8kit.Fp8Linear.from_linear(layer)
        early = interrupted(lambda: become(layer, made), become, step=step)  # noqa: B023
        kinds.append(type(layer))
        assert relative_error(layer(X), y) < 0.08
        if not early:
            break
    assert kinds.count(nn.Linear) > 20
    assert kinds[-2:] == [fp8kit.Fp8Linear] * 2  # before its return, and not interrupted


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch)
    model = of_attention(LlamaAttention)
    for _ in range(CALLS):
        run(model)
    return model


def test_a_model_that_gave_hidden_states_is_still_replayed(replayed: Any) -> None:
    expected = run(replayed)
    replayed.set_attn_implementation("eager")
    seen = replayed(torch.tensor([[1]]), output_hidden_states=True, output_attentions=True)
    assert len(seen.hidden_states) == 3
    assert all(states.isfinite().all() for states in seen.hidden_states)
    assert [weights.unique().item() for weights in seen.attentions] == [1, 1]
    assert all(layer.self_attn._forward_hooks for layer in replayed.model.layers)
    replayed.set_attn_implementation("sdpa")
    assert is_replayed(replayed)
    assert_bits_equal(run(replayed), expected)


def test_a_hook_that_keeps_an_input_watches() -> None:
    for key, watches in (("attentions", False), ("hidden_states", True)):
        module = nn.Identity()
        install_output_capuring_hook(module, key, 0)
        assert is_watched(module)
        assert is_watched(module, inputs_alone=True) is watches
    module.register_forward_hook(lambda *_: None)
    assert is_watched(module, inputs_alone=True)


def put_back(model: nn.Module) -> nn.Module:
    """Do as tools that wrap each ``forward`` and then restore it."""
    for module in model.modules():
        module.forward = module.forward  # type: ignore[method-assign]
    return model


def test_a_forward_that_was_put_back_ends_no_replay(replayed: Any) -> None:
    expected = run(replayed)
    put_back(replayed)
    assert is_replayed(replayed)
    assert_bits_equal(run(replayed), expected)
    twin = copy.deepcopy(replayed)
    assert not is_watched(twin.model.layers[0].mlp.down_proj)
    replayed.model.layers[0].self_attn.v_proj.weight_scale.data.mul_(2)
    assert not torch.equal(run(replayed), expected)
    assert_bits_equal(run(twin), expected)


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
def test_a_model_whose_forwards_were_put_back_is_converted(kind: str) -> None:
    model, other = tiny(kind), put_back(tiny(kind))
    assert fp8kit.convert(other).summary() == fp8kit.convert(model).summary()
    assert not any("forward" in vars(m) for m in other.modules() if isinstance(m, nn.Linear))
    assert_bits_equal(run(other, 3), run(model, 3))
