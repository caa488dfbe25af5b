"""A trial run shows if experts compute more than the known formula, which keeps them dense."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.conversion.experts import recognize

E, H, N = 6, 128, 64


class Loop(nn.Module):
    """Experts in a loop, as typical model files write them."""

    def __init__(self, act_fn: Any = None) -> None:
        super().__init__()
        self.num_experts, self.act_fn = E, act_fn or nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * N, H) / H**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, N) / N**0.5)

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate, up = (x @ self.gate_up_proj[expert].T).chunk(2, -1)
        y: Tensor = (self.act_fn(gate) * up) @ self.down_proj[expert].T
        return y

    def most(self, ids: Tensor) -> int | None:
        return None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            token, slot = token[: self.most(ids)], slot[: self.most(ids)]
            total.index_add_(0, token, self.one(x[token], expert) * weights[token, slot, None])
        return total


class Capacity(Loop):
    factor = 1.25

    def most(self, ids: Tensor) -> int | None:
        return math.ceil(self.factor * ids.numel() / self.num_experts)


class WideCapacity(Capacity):
    factor = 2.5  # of two experts for each token, no more than one can have


class Identity(Loop):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = (weights * (ids >= self.num_experts)).sum(1, keepdim=True)
        return super().forward(x, ids, weights) + x * own


class Gathered(Loop):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tknh->tkn", x, self.gate_up_proj[ids]).chunk(2, -1)
        y = torch.einsum("tkn,tkhn->tkh", self.act_fn(gate) * up, self.down_proj[ids])
        return (y * weights[..., None]).sum(1)


class Counting(Loop):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.load = torch.bincount(ids.flatten().clamp(min=0), minlength=E)
        return super().forward(x, ids, weights)


class Functional(Loop):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def one(self, x: Tensor, expert: int) -> Tensor:
        gate, up = (x @ self.gate_up_proj[expert].T).chunk(2, -1)
        return (nn.functional.gelu(gate) * up) @ self.down_proj[expert].T


def loop(**methods: Any) -> type[Loop]:
    return type("Experts", (Loop,), methods)


one, forward = Loop.one, Loop.forward
DENSE: dict[str, tuple[Any, str]] = {
    "arguments": (
        loop(forward=lambda own, x, ids, w, scale=1.0: forward(own, x, ids, w) * scale),
        "takes scale besides tokens, ids and weights; fp8kit.register_experts",
    ),
    "capacity": (Capacity, "something else where one expert has most tokens"),
    "wide-capacity": (WideCapacity, "something else where one expert has most tokens"),
    "identity": (Identity, "something else for ids past 5"),
    "negative": (Gathered, "something else for ids below zero"),
    "scaled": (
        loop(one=lambda own, x, e: one(own, x, e) * (1 + 3 * (e == 5))),
        "computes something else",
    ),
    "dead": (loop(one=lambda own, x, e: one(own, x, e) * (e != E - 1)), "computes something else"),
    "in-place": (loop(forward=lambda *a: a[1].copy_(forward(*a))), "writes into its arguments"),
    "dropout": (lambda: Loop(nn.Sequential(nn.SiLU(), nn.Dropout(0.5))), "computes something else"),
    "dtype": (
        loop(forward=lambda *a: forward(*a).float()),
        "gives torch.float32 for bfloat16 tokens",
    ),
    "state": (Counting, "leaves behind what other code may read: load"),
    "functional": (Functional, "computes something else; if .* tell fp8kit.register_experts"),
}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("training", [False, True])
def test_experts_that_compute_more_stay_dense(kind: str, training: bool) -> None:
    make, reason = DENSE[kind]
    module = make().train(training)
    found = recognize(module)
    assert isinstance(found, str)
    assert re.search(reason, found)


def test_experts_without_any_of_it_convert() -> None:
    assert recognize(Loop()) == fp8kit.ExpertStacks()


def test_zero_is_tried_as_no_limit() -> None:
    class Clamped(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.dropout, self.limit = 0.0, 7.0

        def _apply_gate(self, z: Tensor) -> Tensor:
            gate, up = z.clamp(max=self.limit).chunk(2, -1)
            h: Tensor = self.act_fn(gate) * up.clamp(min=-self.limit)
            return h

        def one(self, x: Tensor, expert: int) -> Tensor:
            return self._apply_gate(x @ self.gate_up_proj[expert].T) @ self.down_proj[expert].T

    found = recognize(Clamped())
    assert isinstance(found, fp8kit.ExpertStacks)
    assert found.activation == fp8kit.moe.Activation(limit=7.0)


def test_many_experts_are_tried_each() -> None:
    """The copy for the trial is small, but has all experts."""

    class Many(Loop):
        def __init__(self, odd: int) -> None:
            super().__init__()
            self.num_experts, self.odd = 40, odd
            self.gate_up_proj = nn.Parameter(torch.empty(40, 2 * N, H, device="meta"))
            self.down_proj = nn.Parameter(torch.empty(40, H, N, device="meta"))

        def one(self, x: Tensor, expert: int) -> Tensor:
            return super().one(x, expert) * (1 + (expert == self.odd))

    assert isinstance(recognize(Many(40)), fp8kit.ExpertStacks)
    for odd in (0, 3, 17, 39):
        assert isinstance(recognize(Many(odd)), str)


def test_experts_alike_are_tried_once() -> None:
    runs = []

    class Seen(Loop):
        factor = 1.0

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            runs.append(x.shape)
            return super().forward(x, ids, weights) * self.factor

    tried: dict[Any, Any] = {}
    assert isinstance(recognize(Seen(), tried), fp8kit.ExpertStacks)
    once = len(runs)
    assert isinstance(recognize(Seen(), tried), fp8kit.ExpertStacks)
    assert len(runs) == once
    other = Seen()
    other.factor = 2.0
    assert isinstance(recognize(other, tried), str)
    assert len(runs) > once
