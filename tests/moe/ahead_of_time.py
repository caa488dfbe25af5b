"""Compile the experts' Triton kernels for several GPUs without having one; print counts as JSON."""

from __future__ import annotations

import json
import sys

import torch

from ahead import compiled_for, counts, specialized
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, scale_dtype, scale_shape, stack_scale_shape
from fp8kit.matmul.triton_gemm import Device
from fp8kit.moe import triton as moe
from fp8kit.moe.activation import Activation
from fp8kit.moe.loop import Input
from fp8kit.moe.pairs import SortedPairs
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, ExpertWeights

E4M3 = torch.float8_e4m3fn
KB = 1024
DEVICES = {
    "sm80": ((8, 0), Device(108, 164 * KB)),
    "sm89": ((8, 9), Device(128, 100 * KB)),
    "sm90": ((9, 0), Device(132, 228 * KB)),
    "sm100": ((10, 0), Device(148, 228 * KB)),
}
SCALES = {"row": (ROW, ROW), "block": (GROUP128, BLOCK), "mx": (MX, MX), "16bit": (None, ROW)}
OSS = Activation(interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0)
# device, scales, tokens, activation
VARIANTS = (
    ("sm80", "block", 16, Activation()),
    ("sm89", "row", 4096, OSS),
    ("sm80", "16bit", 16, OSS),
    ("sm89", "16bit", 4096, Activation()),
    ("sm90", "block", 4096, Activation()),
    ("sm90", "row", 16, Activation()),
    ("sm90", "16bit", 4096, OSS),
    ("sm100", "mx", 16, Activation("gelu", gated=False)),
)
COUNTED = {
    "wgmma_fp8": r"wgmma\.mma_async\S*e4m3\.e4m3",
    "mma_fp8": r"mma\.sync\S*e4m3\.e4m3",
    "mma_16bit": r"mma\.sync\S*bf16\.bf16",
    "wgmma_16bit": r"wgmma\.mma_async\S*bf16\.bf16",
    "tcgen05_16bit": r"tcgen05\.mma\S*kind::f16",
    "tcgen05": r"tcgen05\.mma\S*f8f6f4",
}


def main() -> None:
    """Print one JSON object: counts by variant."""
    found = {}
    for device, scales, m, activation in VARIANTS:
        for launched in launches(device, scales, m, activation):
            name = launched.kernel.fn.__name__
            capability, facts = DEVICES[device]
            source = specialized(
                launched.kernel, launched.arguments, launched.constants, free=("TILES",)
            )
            kernel = compiled_for(capability, source, launched.options)
            room = {"room": facts.shared, "shared": kernel.metadata.shared}
            found[f"{device} {scales} {m} {name}"] = counts(kernel, COUNTED) | room
    sys.stdout.write(json.dumps(found) + "\n")


def launches(device: str, scales: str, m: int, activation: Activation) -> list[moe.Launch]:
    """Describe the two GEMMs of a layer of experts as large as those of Qwen3-30B-A3B."""
    count, k, hidden, inner = 128, 8, 2048, 768
    (capability, facts), (x_group, w_group) = DEVICES[device], SCALES[scales]

    def meta(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def weights(n: int, width: int) -> ExpertWeights:
        shape = stack_scale_shape((count, n, width), w_group)
        scale = meta(*shape, dtype=scale_dtype(w_group))
        return ExpertWeights(meta(count, n, width), scale, None, None)

    x = meta(m, hidden, dtype=torch.bfloat16)
    operands = ExpertOperands(
        x, weights(activation.columns(inner), hidden), weights(hidden, inner),
        meta(m, k, dtype=torch.int64), meta(m, k, dtype=torch.float32),
    )  # fmt: skip
    rounding = "floor" if x_group == MX else "exact"
    problem = ExpertsProblem(
        m, count, k, hidden, inner, activation, x_group, w_group, torch.bfloat16, E4M3, rounding,
        False, False, False, False, "cuda", capability,
    )  # fmt: skip
    source = Input(x, None, k)
    if x_group is not None:
        scale = meta(*scale_shape((m, hidden), x_group), dtype=scale_dtype(x_group))
        source = Input(meta(m, hidden), scale, k)
    pairs = SortedPairs(meta(m * k, dtype=torch.int64), meta(count + 1, dtype=torch.int64))
    h = moe.empty_intermediate(operands, problem)
    first = moe.activated_launch(operands, problem, source, pairs, h, facts)
    rows = meta(m * k, hidden, dtype=torch.bfloat16)
    second = moe.second_product(problem, m * k)
    return [
        first,
        moe.product_launch(second, h, operands.w2, pairs.offsets, pairs.order, rows, facts),
    ]


if __name__ == "__main__":
    main()
