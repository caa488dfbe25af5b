"""Time one Llama-8B-shaped decoder layer under torch.compile, real Transformers code.

    python benchmarks/compiled.py OUT.json

Compares the eager FP8 layer, whose norms and activations write FP8 themselves, with the same layer
compiled, where one operator per linear layer quantizes and multiplies. The baseline is bf16, eager
and compiled.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import nn

import fp8kit
from llama_layer import Layer, dense_layer, llama_8b, measure
from timing import write_results

ROWS = (4096, 64, 1)


def main() -> None:
    """Measure every M and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    # all variants share one forward, and so one recompile limit
    torch._dynamo.config.recompile_limit = 64
    config, device = llama_8b(), torch.device("cuda")
    layers = variants(dense_layer(config, device))
    rows = [measure(layers, config, m, device) for m in ROWS]
    what = "one Llama-8B decoder layer, dynamic shapes, CUDA graph"
    write_results(arguments.out, rows[::-1], what=what)


def variants(dense: nn.Module) -> dict[str, Layer]:
    """Return the compared variants of the layer; compiled ones compile at their first call."""
    fused = copy.deepcopy(dense)
    fp8kit.convert(fused)
    found: dict[str, Layer] = {"bf16": dense, "fused": fused}
    for name in ("compiled bf16", "compiled fp8"):
        layer = copy.deepcopy(dense)
        if name == "compiled fp8":
            fp8kit.convert(layer)
        found[name] = torch.compile(layer, fullgraph=True, dynamic=True)
    return found


if __name__ == "__main__":
    main()
