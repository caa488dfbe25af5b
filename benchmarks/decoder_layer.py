"""Time one Llama-8B-shaped decoder layer, real Transformers code, random weights.

    python benchmarks/decoder_layer.py OUT.json

Compares bf16 with three FP8 variants: linear layers that each quantize their own input, layers that
share quantized inputs and joined weights, and norms and activations that write FP8 themselves, with
row-wise and with block scales.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch

import fp8kit
from llama_layer import dense_layer, llama_8b, measure
from timing import write_results

ROWS = (1, 64, 4096)
VARIANTS = {
    "separate": ("FP8_DYNAMIC", "none"),
    "shared": ("FP8_DYNAMIC", "inputs"),
    "fused": ("FP8_DYNAMIC", "all"),
    "fused, block scales": ("FP8_BLOCK", "all"),
}


def main() -> None:
    """Measure every M and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    config, device = llama_8b(), torch.device("cuda")
    dense = dense_layer(config, device)
    variants = {"bf16": dense}
    for name, (scheme, fuse) in VARIANTS.items():
        variants[name] = copy.deepcopy(dense)
        fp8kit.convert(variants[name], scheme, fuse=fuse)
    rows = [measure(variants, config, m, device) for m in ROWS]
    what = "one Llama-8B decoder layer, CUDA graph, weights cold by size"
    write_results(arguments.out, rows, what=what)


if __name__ == "__main__":
    main()
