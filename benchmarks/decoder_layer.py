"""Time one Llama-8B-shaped decoder layer, real Transformers code, random weights.

    python benchmarks/decoder_layer.py OUT.json

Compares bf16 with FP8 layers that quantize each input on its own, with layers that share
quantized inputs and joined weights, and with norms and activations that write FP8 themselves.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import fp8kit
from timing import time_cases, write_results

ROWS = (1, 64, 4096)


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
    torch.manual_seed(0)
    with torch.device("cuda"):
        dense = LlamaDecoderLayer(config, 0).to(torch.bfloat16).eval()
        rotary = LlamaRotaryEmbedding(config)
    variants = {"bf16": dense}
    for name, options in {
        "separate": {"fuse": "none"},
        "shared": {"fuse": "inputs"},
        "fused": {"fuse": "all"},
    }.items():
        variants[name] = copy.deepcopy(dense)
        fp8kit.convert(variants[name], **options)
    rows = []
    for m in ROWS:
        x = torch.randn(1, m, 4096, device="cuda", dtype=torch.bfloat16)
        positions = torch.arange(m, device="cuda")[None]
        embeddings = rotary(x, positions)

        def run(layer: nn.Module, x: torch.Tensor = x, e: object = embeddings) -> object:
            return layer(x, position_embeddings=e)

        with torch.no_grad():
            reference = first(run(dense)).float()
            errors = {
                n: float((first(run(v)).float() - reference).norm() / reference.norm())
                for n, v in variants.items()
            }
            cases = {n: lambda _, v=v: run(v) for n, v in variants.items()}
            times = time_cases(cases, copies=1)
        rows.append({"m": m, "us": times, "relative_error": errors})
        speed = {n: round(times["bf16"] / t, 3) for n, t in times.items()}
        print(m, {n: round(t, 1) for n, t in times.items()}, "speed-up", speed, flush=True)
    write_results(out, rows, what="one Llama-8B decoder layer, CUDA graph, weights cold by size")


def first(result: object) -> torch.Tensor:
    """Unpack what a decoder layer returns in different Transformers versions."""
    return result[0] if isinstance(result, tuple) else result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
