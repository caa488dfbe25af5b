"""The zoo's models of plain ``nn``: torch's own blocks, and typical hand-written ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zoo.architecture import Architecture

D = 128


class Mlp(nn.Module):
    """A gated feed-forward."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.gate_proj = nn.Linear(D, 2 * D, bias)
        self.up_proj = nn.Linear(D, 2 * D, bias)
        self.down_proj = nn.Linear(2 * D, D, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.proj(functional.scaled_dot_product_attention(q, k, v))


class Thin(nn.Linear):
    """A subclass of ``nn.Linear`` that spells out the formula of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Scaled(nn.Linear):
    """A subclass of ``nn.Linear`` with a different formula."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Recurrent(nn.Module):
    """Gates from linear layers, run step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D)
        self.cell = nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.cell(torch.sigmoid(self.read(step)) + self.write(state)))
        return state


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = self.first
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(torch.relu(self.first(x))))


class Experts(nn.Module):
    """Experts that are modules, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 128)
        self.experts = nn.ModuleList([Mlp(bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x)[..., :4].softmax(-1)
        return sum(e(x) * weights[..., i : i + 1] for i, e in enumerate(self.experts))


def _with(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.GELU(), layer(), nn.GELU(), nn.Linear(D, 2 * D))


class Both(nn.Module):
    """Passes its input twice to a module with two inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def _attention() -> nn.Module:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
            self.out = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.attention(x, x, x)[0])

    return Self()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(Mlp(), Mlp(bias=False)),
    "attention": lambda: nn.Sequential(Attention(), Mlp(), Attention()),
    "thin subclass": lambda: _with(lambda: Thin(D, D)),
    "subclass of its own": lambda: _with(lambda: Scaled(D, D)),
    "odd sizes": lambda: nn.Sequential(nn.Linear(D, 201), nn.GELU(), nn.Linear(201, 131)),
    "one layer": lambda: nn.Sequential(nn.Linear(D, D)),
    "shared layer": Shared,
    "recurrent": Recurrent,
    "experts": Experts,
    "nn.MultiheadAttention": _attention,
    "nn.TransformerEncoder": lambda: nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 256, batch_first=True), 2),
        nn.Linear(D, D),
    ),
    "nn.TransformerDecoder": lambda: Both(
        nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 256, batch_first=True), 2)
    ),
    "nn.Transformer": lambda: Both(nn.Transformer(D, 2, 1, 1, 256, batch_first=True)),
    "nn.LSTM": lambda: nn.Sequential(nn.Linear(D, D), nn.LSTM(D, D)),
    "nn.Bilinear": lambda: Both(nn.Bilinear(D, D, 2)),
    "convolutions": lambda: nn.Sequential(nn.Conv1d(16, 32, 3), nn.ReLU(), nn.Conv1d(32, 8, 3)),
    "weight norm": lambda: _with(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D))),
}


def architectures() -> list[Architecture]:
    """Return every model of the table."""
    return [Architecture(f"torch/{name}", partial(make), _rows) for name, make in MODELS.items()]


def _rows(_: Any) -> list[dict[str, Any]]:
    return [{"": (torch.randn(2, 16, D),)}]
