"""Compile the Triton GEMM for several GPUs without having one; print counts as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ahead import compiled_for, counts, specialized
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, GroupShape, scale_dtype, scale_shape
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MatmulProblem
from fp8kit.matmul.triton_gemm_kernels import product_kernel

E4M3 = torch.float8_e4m3fn
PAIRS = {
    "row-row": (ROW, ROW),
    "groups-block": (GROUP128, BLOCK),
    "mx-mx": (MX, MX),
    "16bit-row": (None, ROW),
}
KB = 1024
DEVICES = {
    "sm80": ((8, 0), triton_gemm.Device(108, 164 * KB)),
    "sm89": ((8, 9), triton_gemm.Device(128, 100 * KB)),
    "sm90": ((9, 0), triton_gemm.Device(132, 228 * KB)),
    "sm100": ((10, 0), triton_gemm.Device(148, 228 * KB)),
}
# device, scales, rows, options
VARIANTS = (
    *((device, "row-row", 16, "") for device in DEVICES),
    *((device, "16bit-row", 16, "") for device in DEVICES),
    ("sm89", "row-row", 16, "fast"),
    ("sm90", "row-row", 16, "fast"),
    ("sm90", "row-row", 4096, ""),
    ("sm90", "groups-block", 64, ""),
    ("sm90", "groups-block", 4096, ""),
    ("sm100", "groups-block", 4096, ""),
    ("sm90", "row-row", 4096, "invariant"),
    ("sm90", "mx-mx", 64, ""),
    ("sm90", "16bit-row", 64, ""),
)
COUNTED = {
    "wgmma_fp8": r"wgmma\.mma_async\S*e4m3\.e4m3",
    "mma_fp8": r"mma\.sync\S*e4m3\.e4m3",
    "mma_16bit": r"mma\.sync\S*bf16\.bf16",
    "tcgen05": r"tcgen05\.mma\S*f8f6f4",
    "copies_of_16": r"cp\.async\.cg\.shared\.global[^;]*, 0x10",
    "copies_of_8": r"cp\.async\.ca\.shared\.global[^;]*, 0x8,",
    "additions": r"\badd(?:\.rn)?\.f32",
    "paired_decodes": r"cvt\.rn\.f16x2\.e4m3x2",
    "scalar_conversions": r"cvt\.rn\.bf16\.f(?:32|16)",
}


def main() -> None:
    """Print one JSON object: counts by variant."""
    found = {}
    for device, pair, m, option in VARIANTS:
        kernel = compiled(device, PAIRS[pair], m, option)
        found[f"{device} {pair} {m} {option}".strip()] = counts(kernel, COUNTED)
    sys.stdout.write(json.dumps(found) + "\n")


def compiled(device: str, groups: tuple[GroupShape | None, GroupShape], m: int, option: str) -> Any:
    """Compile one variant."""
    n, k = 4096, 4096
    capability, limits = DEVICES[device]
    w = torch.empty(n, k, dtype=E4M3, device="meta")
    x = torch.empty(m, k, dtype=torch.bfloat16 if groups[0] is None else E4M3, device="meta")
    scales = [
        None if g is None else torch.empty(scale_shape(t.shape, g), dtype=scale_dtype(g))
        for t, g in ((w, groups[1]), (x, groups[0]))
    ]
    problem = MatmulProblem(
        m, n, k, *groups, x.dtype, w.dtype, torch.bfloat16, False,
        "fast" if option == "fast" else "precise", option == "invariant", "cuda", capability,
    )  # fmt: skip
    tile = triton_gemm.choose_tile(problem, limits)
    y = torch.empty(0, dtype=torch.float32 if tile.splits > 1 else torch.bfloat16)
    arguments = triton_gemm.product_arguments((w, x, *scales, None, y), problem)
    constants = triton_gemm.product_constants(problem, tile)
    source = specialized(product_kernel, arguments, constants, free=("M",))
    return compiled_for(capability, source, triton_gemm.launch_options(problem, tile))


if __name__ == "__main__":
    main()
