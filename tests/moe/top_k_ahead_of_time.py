"""Compile the router's kernel for Hopper without a GPU, and count registers, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ahead import resources, specialized
from fp8kit.moe import triton_top_k
from fp8kit.moe.top_k import Formula

VARIANTS = (
    ("softmax", 128, 8, torch.bfloat16, torch.bfloat16, False),
    ("softmax", 8, 2, torch.bfloat16, torch.float32, False),
    ("sigmoid", 256, 8, torch.float32, torch.float32, True),
    ("sigmoid", 1024, 32, torch.float32, torch.bfloat16, True),
    ("softmax", 60, 4, torch.float32, torch.float32, False),
    ("sigmoid", 16, 1, torch.bfloat16, torch.bfloat16, False),
    ("softmax", 1, 1, torch.bfloat16, torch.float32, False),
)


def main() -> None:
    """Print one JSON object: counts by variant."""
    found: dict[str, dict[str, int]] = {}

    def compiled(kernel: Any, blocks: int, *arguments: Any, **options: Any) -> None:
        constants = {n: options.pop(n) for n in kernel.arg_names[len(arguments) :]}
        source = specialized(kernel, arguments, constants, free=())
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        waits = made.asm["ptx"].count("griddepcontrol.wait")
        found[name] = {**resources(made.asm["cubin"]), "blocks": blocks, "waits": waits}

    triton_top_k.launch = compiled
    triton_top_k.overlaps = lambda _: True
    for scoring, experts, k, dtype, out, biased in VARIANTS:
        name = f"{scoring} {k} of {experts} {dtype} {out}"
        logits = torch.empty(16, experts, dtype=dtype, device="meta")
        bias = torch.empty(experts, device="meta") if biased else None
        triton_top_k.choose(logits, bias, Formula(k, scoring, True, 2.5, out))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
