"""Compile rotary embedding and attention for Hopper without a GPU, and count registers, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ahead import resources, specialized
from fp8kit.fused import triton_attention, triton_rotary


def main() -> None:
    """Print one JSON object: counts by variant."""
    found: dict[str, dict[str, int]] = {}

    def compiled(kernel: Any, blocks: int, *arguments: Any, **options: Any) -> None:
        constants = {n: options.pop(n) for n in kernel.arg_names[len(arguments) :]}
        free = ("tokens", "chunks", "stride_mb")
        source = specialized(kernel, arguments, constants, free=free)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        waits = made.asm["ptx"].count("griddepcontrol.wait")
        variant = f"{kernel.__name__} {name}"
        counts = {"blocks": blocks, "waits": waits, "tiles": made.metadata.shared}
        found[variant] = {**resources(made.asm["cubin"]), **counts}

    for module in (triton_attention, triton_rotary):
        module.launch = compiled  # type: ignore[attr-defined]
        module.overlaps = lambda _: True  # type: ignore[attr-defined]
    meta: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    for heads, shared, tokens, width in ((32, 8, 128, 128), (16, 2, 4096, 256)):
        name = f"{heads} of {shared}, {width}"
        q, k = (
            torch.empty(2, heads, 1, width, **meta),
            torch.empty(2, shared, tokens, width, **meta),
        )
        triton_attention.attend(q, k, k, torch.empty(2, 1, 1, tokens, device="meta").bool(), 0.1)
    name = "32 and 8, 128"
    angles = torch.empty(2, 1, 128, **meta)
    q, k = torch.empty(2, 32, 1, 128, **meta), torch.empty(2, 8, 1, 128, **meta)
    triton_rotary.rotate(q, k, angles, angles)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
