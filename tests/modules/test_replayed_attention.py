"""Attention that runs between the recordings of a replayed layer: as itself, in any state."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import LlamaAttention

from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install
from replayed_layers import CALLS, is_replayed, of_attention, run


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


@pytest.fixture
def model(backends: CpuBackends) -> Any:
    return of_attention(LlamaAttention)


class Scaled(LlamaAttention):
    """Computes with a factor that tells whether it runs as itself, and with all of its state."""

    def factor(self, hidden_states: Tensor) -> float:
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        y, weights = super().forward(hidden_states, **kwargs)
        return y * self.factor(hidden_states), weights


class CountsByModule(Scaled):
    def factor(self, hidden_states: Tensor) -> float:
        counts[self] = counts.get(self, 0) + 1
        return counts[self]


counts: dict[nn.Module, int] = {}


class WithSlot(Scaled):
    __slots__ = ("gain",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = 2.0

    def factor(self, hidden_states: Tensor) -> float:
        return self.gain


class KeepsBoundMethod(Scaled):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls, self.count = 0, self.counted

    def counted(self) -> None:
        self.calls += 1

    def factor(self, hidden_states: Tensor) -> float:
        self.count()
        return self.calls


class WithProperty(Scaled):
    @property
    def total(self) -> int:
        return int(vars(self).get("total", 0))

    @total.setter
    def total(self, value: int) -> None:
        vars(self)["total"] = self.total + value

    def factor(self, hidden_states: Tensor) -> float:
        self.total = 1
        return self.total


class RemembersInput(Scaled):
    last: Tensor | None = None

    def factor(self, hidden_states: Tensor) -> float:
        seen, self.last = self.last is hidden_states, hidden_states
        return 2.0 if seen else 1.0


class BecomesAnother(Scaled):
    calls = 0

    def factor(self, hidden_states: Tensor) -> float:
        self.calls += 1
        if self.calls == CALLS:
            self.__class__ = CountsByModule  # type: ignore[assignment]
        return 1.0


class LooksUp(Scaled):
    def factor(self, hidden_states: Tensor) -> float:
        return float(self.get_submodule("q_proj") is self._modules["q_proj"])


class OwnCall(LlamaAttention):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().__call__(*args, **kwargs)
        return y * 2, weights


@pytest.mark.parametrize(
    "kind",
    [
        CountsByModule,
        WithSlot,
        KeepsBoundMethod,
        WithProperty,
        RemembersInput,
        BecomesAnother,
        LooksUp,
        OwnCall,
    ],
)
def test_attention_runs_as_itself(kind: type[LlamaAttention], backends: CpuBackends) -> None:
    counts.clear()
    together, separate = of_attention(kind), of_attention(kind, fuse="none")
    for _ in range(2 * CALLS):
        assert_bits_equal(run(together), run(separate))


def test_a_second_name_of_a_projection_is_no_other_layer(model: Any) -> None:
    expected = run(model)
    for layer in model.model.layers:
        layer.self_attn.query = layer.self_attn.q_proj
    for _ in range(CALLS):
        assert_bits_equal(run(model), expected)
    assert is_replayed(model)


def test_attention_may_call_the_model_again(model: Any) -> None:
    def again(attention: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not nested:
            nested.append(attention)
            inner.append(run(model))
            nested.clear()
        return sdpa_attention_forward(attention, *args, **kwargs)

    nested: list[nn.Module] = []
    inner: list[Tensor] = []
    expected = [run(model) for _ in range(CALLS)][-1]
    AttentionInterface.register("again", again)
    model.set_attn_implementation("again")
    assert_bits_equal(run(model), expected)
    for logits in inner:
        assert_bits_equal(logits, expected)


def test_what_attention_has_forgotten_is_freed(model: Any) -> None:
    for _ in range(CALLS):
        run(model)
    attention = model.model.layers[0].self_attn
    attention.extra = [torch.zeros(8)]
    old = weakref.ref(attention.extra[0])
    run(model)
    del attention.extra
    assert old() is None
