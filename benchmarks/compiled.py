"""Time one Llama-8B-shaped decoder layer under torch.compile, real Transformers code.

    python benchmarks/compiled.py OUT.json

Compares the eager FP8 layer whose norms and activations write FP8 themselves with the same layer
compiled in two ways: ``opaque``, where an operator quantizes and multiplies, and ``visible``, where
Inductor fuses the quantization with what comes before it. bf16, eager and compiled, is the base.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import nn

import fp8kit
from fp8kit import settings
from llama_layer import Layer, dense_layer, llama_8b, measure
from timing import write_results

ROWS = (4096, 64, 1)
MODES = {"compiled bf16": "opaque", "compiled opaque": "opaque", "compiled visible": "visible"}


def main() -> None:
    """Measure every M and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    # every variant counts against the limit of the one forward that they share
    torch._dynamo.config.recompile_limit = 64
    config, device = llama_8b(), torch.device("cuda")
    layers = variants(dense_layer(config, device))
    rows = [measure(layers, config, m, device) for m in ROWS]
    what = "one Llama-8B decoder layer, dynamic shapes, CUDA graph"
    write_results(arguments.out, rows[::-1], what=what)


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
    main()
