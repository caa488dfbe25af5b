"""Time one Llama-8B-shaped decoder layer under torch.compile, real Transformers code.

    python benchmarks/compiled.py OUT.json

Compares the eager FP8 layer whose norms and activations write FP8 themselves with the same layer
compiled in two ways: ``opaque``, where an operator quantizes and multiplies, and ``visible``, where
Inductor fuses the quantization with what comes before it. bf16, eager and compiled, is the base.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import fp8kit
from decoder_layer import first
from fp8kit import settings
from timing import time_cases, write_results

ROWS = (4096, 64, 1)
MODES = {"compiled bf16": "opaque", "compiled opaque": "opaque", "compiled visible": "visible"}

Layer = Callable[..., object]


def main(out: Path) -> None:
    """Measure every M and write the result file."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
    )
    config._attn_implementation = "sdpa"
    # every variant counts against the limit of the one forward that they share
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    with torch.device("cuda"):
        dense = LlamaDecoderLayer(config, 0).to(torch.bfloat16).eval()
        rotary = LlamaRotaryEmbedding(config)
    rows = []
    layers = variants(dense)
    for m in ROWS:
        x = torch.randn(1, m, 4096, device="cuda", dtype=torch.bfloat16)
        embeddings = rotary(x, torch.arange(m, device="cuda")[None])
        with torch.no_grad():
            found = {n: first(run(x, position_embeddings=embeddings)) for n, run in layers.items()}
            exact = found["bf16"].float()
            errors = {n: float((y.float() - exact).norm() / exact.norm()) for n, y in found.items()}
            cases = {
                n: lambda _, run=run, x=x, e=embeddings: run(x, position_embeddings=e)
                for n, run in layers.items()
            }
            times = time_cases(cases, copies=1)
        rows.append({"m": m, "us": times, "relative_error": errors})
        speed = {n: round(times["bf16"] / t, 3) for n, t in times.items()}
        print(m, {n: round(t, 1) for n, t in times.items()}, "speed-up", speed, flush=True)
    write_results(out, rows[::-1], what="one Llama-8B decoder layer, dynamic shapes, CUDA graph")


def variants(dense: nn.Module) -> dict[str, Layer]:
    """Give the layer in every way that is compared, compiled on the first call."""
    fused = copy.deepcopy(dense)
    fp8kit.convert(fused)
    found: dict[str, Layer] = {"bf16": dense, "fused": fused}
    for name, mode in MODES.items():
        layer = copy.deepcopy(dense)
        if "bf16" not in name:
            fp8kit.convert(layer)
        found[name] = with_setting(mode, torch.compile(layer, fullgraph=True, dynamic=True))
    return found


def with_setting(mode: str, compiled: Layer) -> Layer:
    """Call a compiled layer under the setting it was traced with, which its guards ask for."""

    def run(*args: object, **kwargs: object) -> object:
        settings.COMPILED_QUANTIZER = mode
        return compiled(*args, **kwargs)

    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]))
