"""The activation between the two GEMMs of an expert, compared with the models that have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8kit.moe import Activation
from fp8kit.moe.activation import KINDS

OSS = Activation("silu", interleaved=True, limit=0.9, alpha=1.702, up_offset=1.0)
EVERY = (
    Activation(),
    Activation("gelu"),
    Activation("gelu_tanh", limit=0.7),
    Activation("relu2", gated=False),
    OSS,
)


@pytest.mark.parametrize(
    ("module", "name", "settings", "activation"),
    [
        ("gpt_oss", "GptOssExperts", {"limit": 0.9, "alpha": 1.702}, OSS),
        ("deepseek_v4", "DeepseekV4Experts", {"limit": 0.9}, Activation(limit=0.9)),
    ],
)
def test_formulas_are_those_of_the_models(
    module: str, name: str, settings: dict[str, float], activation: Activation
) -> None:
    models = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    experts: Any = getattr(models, name)
    theirs: Any = experts.__new__(experts)
    torch.nn.Module.__init__(theirs)
    theirs.act_fn = torch.nn.functional.silu
    for key, value in settings.items():
        setattr(theirs, key, value)
    x = torch.randn(7, 24, dtype=torch.float64) * 2
    torch.testing.assert_close(activation(x), experts._apply_gate(theirs, x))


def test_squared_relu_is_nemotron_s() -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.randn(5, 9)
    ours = Activation("relu2", gated=False)(x)
    torch.testing.assert_close(ours, activations.ACT2FN["relu2"](x))


def test_every_kind_is_tested() -> None:
    assert {activation.kind for activation in EVERY} == set(KINDS)


@pytest.mark.parametrize("activation", EVERY, ids=lambda a: f"{a.kind}-{a.limit}")
def test_gradients_are_those_of_autograd(activation: Activation) -> None:
    x = (torch.randn(6, 16, dtype=torch.float64) * 2).requires_grad_()
    grad = torch.randn(6, 16 // (2 if activation.gated else 1), dtype=torch.float64)
    (expected,) = torch.autograd.grad(activation(x), x, grad)
    torch.testing.assert_close(activation.backward(x.detach(), grad), expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "sylu"}, "Did you mean 'silu'"),
        ({"kind": "gelu", "alpha": 1.7}, "inside the sigmoid"),
        ({"gated": False, "interleaved": True}, "without a gate"),
        ({"limit": -1.0}, "positive and finite"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Activation(**settings)
