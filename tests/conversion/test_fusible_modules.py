"""A norm is recognised by a trial run, never by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import fp8kit
from fp8kit.conversion.fusible_modules import (
    can_produce,
    fuse_feed_forward,
    make_producer,
    recognize_norm,
)
from fp8kit.fused import reference
from fp8kit.modules.consumers import Consumers
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.shared_input import SharedInput


class Odd(LlamaRMSNorm):
    """Has the name of a known norm and another formula."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.05


class TwoInputs(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return super().forward(hidden_states) * gate


class L1Norm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * hidden_states / hidden_states.abs().mean(-1, keepdim=True)


class OwnEpsilon(nn.RMSNorm):
    """Uses the epsilon of the input's dtype, as torch's documentation promises."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (256,), self.weight, torch.finfo(x.dtype).eps)


CASES = {
    "llama": (LlamaRMSNorm(256, 1e-5), NormFormula("rms_norm", 1e-5)),
    "qwen3": (Qwen3RMSNorm(256, 1e-6), NormFormula("rms_norm", 1e-6)),
    "gemma": (GemmaRMSNorm(256, 1e-6), NormFormula("rms_norm", 1e-6, 1.0, "once")),
    "torch": (nn.RMSNorm(256, 1e-6), NormFormula("rms_norm", 1e-6, 0.0, "once")),
    "layer": (nn.LayerNorm(256), NormFormula("layer_norm", 1e-5)),
    "plain layer": (nn.LayerNorm(256, 1e-6, False), NormFormula("layer_norm", 1e-6)),
    "torch without epsilon": (nn.RMSNorm(256), NormFormula("rms_norm", 2**-23, 0.0, "once")),
    "no weight": (nn.RMSNorm(256, 1e-6, False), None),
    "another epsilon": (OwnEpsilon(256), None),
    "two dimensions": (nn.LayerNorm((4, 64)), None),
    "no dimension": (nn.LayerNorm(()), None),
    "no epsilon": (nn.PReLU(256), None),
    "batch": (nn.BatchNorm1d(256), None),
    "namesake": (Odd(256), None),
    "two inputs": (TwoInputs(256), None),
    "another statistic": (L1Norm(256), None),
    "linear": (nn.Linear(256, 256), None),
    "embedding": (nn.Embedding(16, 256), None),
}


@pytest.mark.parametrize("name", CASES)
def test_formulas(name: str) -> None:
    norm, expected = CASES[name]
    before = torch.get_rng_state()
    assert recognize_norm(norm) == expected
    assert can_produce(norm) == (expected is not None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_norm_without_epsilon_equals_its_formula(
    dtype: torch.dtype, device: torch.device
) -> None:
    norm = nn.RMSNorm(256, device=device, dtype=dtype)
    formula = recognize_norm(norm)
    assert formula is not None
    whole = torch.randint(-8, 9, (32, 256), device=device)  # sums are exact in any order
    for x in (whole.to(dtype), (whole * 2.0**-12).to(dtype)):  # epsilon matters in the second
        with torch.no_grad():
            expected = norm(x)
        settings = (formula.eps, formula.weight_offset, formula.rounding)
        assert torch.equal(reference.rms_normed(x, norm.weight, *settings), expected)


def test_a_norm_without_values_is_tried_too() -> None:
    assert recognize_norm(GemmaRMSNorm(256).to("meta")) == NormFormula(
        "rms_norm", 1e-6, 1.0, "once"
    )


def test_a_norm_is_left_as_it_was() -> None:
    norm = LlamaRMSNorm(256)
    weight, calls = norm.weight, []
    norm.register_forward_hook(lambda m, a, y: calls.append(y))
    recognize_norm(norm)
    assert norm.weight is weight
    assert bool((weight == 1).all())
    assert calls == []


def test_a_module_of_modules_is_asked_for_no_epsilon() -> None:
    """Models of diffusers warn if code reads an attribute that is in their config."""

    asked: list[str] = []

    class Model(nn.Sequential):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattr__(name)

    assert recognize_norm(Model(LlamaRMSNorm(256))) is None
    assert "eps" not in asked


def test_forwards_on_instances_are_left_alone() -> None:
    holder = nn.ModuleDict({"norm": LlamaRMSNorm(256), "fc": fp8kit.Fp8Linear(256, 64, False)})
    group = SharedInput([holder["fc"]])
    consumers = Consumers(group, [(holder, "fc", holder["fc"])])
    assert make_producer(holder["norm"], consumers) is not None
    holder["norm"].forward = holder["norm"].forward
    assert make_producer(holder["norm"], consumers) is None


def test_activations() -> None:
    assert can_produce(nn.SiLU())
    assert can_produce(nn.GELU("tanh"))
    assert not can_produce(nn.ReLU())
    assert not can_produce(nn.SiLU(inplace=True))  # its input may be read again

    class Louder(nn.SiLU):
        """A subclass, whose forward is unknown."""

    assert not can_produce(Louder())


class Mlp(nn.Module):
    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down_proj, self.act_fn = nn.Linear(8, 8), act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Dropping(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Swapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return y


def test_feed_forwards_are_tried() -> None:
    assert fuse_feed_forward(mlp := Mlp()) is not None
    with torch.device("meta"):
        assert fuse_feed_forward(mlp) is not None
    assert fuse_feed_forward(Mlp(nn.GELU("tanh"))) is not None
    assert fuse_feed_forward(Mlp(nn.ReLU())) is None
    assert fuse_feed_forward(Dropping().eval()) is None
    assert fuse_feed_forward(Swapped()) is None
    partial = Mlp()
    del partial.down_proj
    assert fuse_feed_forward(partial) is None
