"""Layers that are converted in place keep hooks, buffers and attributes that users attached."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.integrations.quantizer_of_layers import restore_dense
from numerics import relative_error


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
