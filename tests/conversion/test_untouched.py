"""Planning runs the model's classes on random numbers, and changes neither model nor seeds."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.nn import qat
from torch.ao.quantization import get_default_qat_qconfig
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

import fp8kit
from fp8kit.conversion.experts import recognize
from fp8kit.conversion.fusible_modules import fuse_feed_forward, recognize_norm
from fp8kit.conversion.routers import recognize_router
from fp8kit.modules.decoder_layer import find_flow
from fp8kit.modules.dense import unlike_linear

D = 192
CONFIG = LlamaConfig(
    hidden_size=D,
    intermediate_size=D,
    num_attention_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
)


class Counts:
    """Changes a buffer, a list, a child and the seeds when it runs."""

    def mark(self: Any) -> None:
        if "marks" not in vars(self):
            return
        self.marks.append(torch.rand(2))
        self.amax.fill_(7.0)
        if "observer" in self._modules:
            self.observer(torch.randn(4, 3))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.mark()
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class Observed(Counts, nn.Linear): ...


class Norm(Counts, LlamaRMSNorm): ...  # type: ignore[misc]


class Layer(Counts, LlamaDecoderLayer): ...  # type: ignore[misc]


class Mlp(Counts, LlamaMLP): ...  # type: ignore[misc]


class Router(Counts, MixtralTopKRouter): ...  # type: ignore[misc]


class Experts(Counts, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * D, D))
        self.down_proj = nn.Parameter(torch.randn(4, D, D))

    def _apply_gate(self, h: Tensor) -> Tensor:
        self.mark()
        return nn.functional.silu(h[..., :D]) * h[..., D:]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.mark()
        return x


TRIALS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: Observed(D, D), unlike_linear),
    "norm": (lambda: Norm(D), recognize_norm),
    "layer": (lambda: Layer(CONFIG, 0), find_flow),
    "mlp": (lambda: Mlp(CONFIG), fuse_feed_forward),
    "router": (lambda: Router(CONFIG), recognize_router),
    "experts": (Experts, recognize),
}


@pytest.mark.parametrize("kind", TRIALS)
def test_a_trial_leaves_no_mark(kind: str) -> None:
    make, recognise = TRIALS[kind]
    module = make()
    module.marks, module.amax = [], torch.zeros(())  # attributes: buffers rule some trials out
    if kind in ("linear", "layer", "mlp"):
        module.observer = nn.BatchNorm1d(3)
    before = pickle.dumps([vars(module)[n] for n in ("marks", "amax", "_parameters", "_modules")])
    seeds = torch.get_rng_state()
    recognise(module)
    now = pickle.dumps([vars(module)[n] for n in ("marks", "amax", "_parameters", "_modules")])
    assert now == before
    assert torch.equal(torch.get_rng_state(), seeds)
    module.mark()  # the marks would have shown
    assert module.marks
    assert not torch.equal(torch.get_rng_state(), seeds)


def test_observers_of_a_model_see_no_random_numbers() -> None:
    model = nn.Sequential(qat.Linear(D, D, qconfig=get_default_qat_qconfig()), nn.Linear(D, D))
    x = torch.randn(8, D)
    model(x)
    dense = copy.deepcopy(model)
    fp8kit.plan(model)
    for name, tensor in dense.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model.eval()(x), dense.eval()(x))


def test_a_layer_that_cannot_be_copied_stays_dense() -> None:
    layer = Observed(D, D)
    layer.lock = threading.Lock()  # type: ignore[assignment]
    (record, *_) = fp8kit.plan(nn.Sequential(layer, nn.Linear(D, D))).report.skipped
    assert record.reason.startswith("Observed is a subclass of nn.Linear that cannot be copied to")
    experts = Experts()
    experts.lock = threading.Lock()  # type: ignore[assignment]
    assert "stacks of Experts, which cannot be copied to be tried" in str(recognize(experts))


def test_layers_that_are_alike_are_tried_once() -> None:
    runs = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(x)
            return super().forward(x) * getattr(self, "factor", 1)

    model = nn.Sequential(Seen(D, D), Seen(D, D), Seen(D, D))
    fp8kit.plan(model[:1])
    once = len(runs)
    assert [r.name for r in fp8kit.plan(model).report.converted] == ["0", "1", "2"]
    assert len(runs) == 2 * once
    model[1].factor = 2  # type: ignore[assignment]
    assert [r.name for r in fp8kit.plan(model).report.converted] == ["0", "2"]
