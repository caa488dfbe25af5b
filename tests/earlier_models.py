"""Models whose pickles of an earlier version are kept in ``tests/io/earlier_version``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Attention(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return self.q(hidden_states) + self.k(hidden_states) * self.v(hidden_states), None


class Mlp(nn.Module):
    """A gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """A decoder layer of the usual form."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = Mlp()
        self.act = nn.GELU()
        self.fc2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states))
        x = hidden_states + attended
        x = x + self.mlp(self.post_attention_layernorm(x))
        y: Tensor = x + self.fc2(self.act(x))
        return y


class Model(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def dense() -> Model:
    """Return the model that was converted, in bf16."""
    torch.manual_seed(0)
    return Model().to(torch.bfloat16)


def inputs() -> Tensor:
    """Return what the expected results were computed from."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
