"""A Llama-8B-shaped decoder layer, Transformers' own code, random weights; how to time it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from timing import time_cases

HIDDEN = 4096

Layer = Callable[..., object]


def llama_8b() -> LlamaConfig:
    """Return the configuration of one layer of Llama 8B."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    return config


def dense_layer(config: LlamaConfig, device: torch.device) -> nn.Module:
    """Return the bf16 layer with the same random weights at every call."""
    torch.manual_seed(0)
    with device:
        return LlamaDecoderLayer(config, 0).to(torch.bfloat16).eval()


@torch.no_grad()
def measure(layers: Mapping[str, Layer], config: LlamaConfig, m: int, device: torch.device) -> Any:
    """Run variants of one layer on ``m`` tokens, compare them with ``"bf16"``, and time them.

    Returns:
        A row of a result file: ``m``, microseconds and relative error by variant.
    """
    x = torch.randn(1, m, config.hidden_size, device=device, dtype=torch.bfloat16)
    with device:
        rotary = LlamaRotaryEmbedding(config)
    embeddings = rotary(x, torch.arange(m, device=device)[None])
    cases = {
        n: lambda _, run=run: first(run(x, position_embeddings=embeddings))
        for n, run in layers.items()
    }
    found = {name: case(0) for name, case in cases.items()}
    exact = found["bf16"].float()
    errors = {n: float((y.float() - exact).norm() / exact.norm()) for n, y in found.items()}
    times = time_cases(cases, copies=1, device=device)
    speed = {n: round(times["bf16"] / t, 3) for n, t in times.items()}
    print(m, {n: round(t, 1) for n, t in times.items()}, "speed-up", speed, flush=True)
    return {"m": m, "us": times, "relative_error": errors}


def first(result: object) -> Tensor:
    """Return the hidden states that a decoder layer returns, in any version of Transformers."""
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, Tensor)
    return found
