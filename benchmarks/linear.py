"""Time whole linear layers, bf16 in and bf16 out: fp8kit, bf16, and the peers that are present.

    python benchmarks/linear.py OUT.json [--shapes 8b,dit] [--rows 1,16,64,256,1024,4096]

Peers, each optional: vLLM's compiled operators (VLLM_SO=/path/to/_C_stable_libtorch.abi3.so) and
DeepGEMM (DG_ROOT=the folder that holds deep_gemm, CUDA_HOME). They run as they ship, with fast
accumulation where that is their default; fp8kit runs with its default, precise. DeepGEMM has no
quantizer, so vLLM's group quantizer runs before it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from timing import Case, copies_past_l2, time_cases, write_results

SHAPES = {
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (28672, 4096),
    "8b.down": (4096, 14336),
    "70b.qkv": (10240, 8192),
    "70b.o": (8192, 8192),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
    "ds.gate_up": (4096, 7168),
    "ds.down": (7168, 2048),
    "dit.qkv": (9216, 3072),
}
BANDWIDTH, FLOPS = 4.3e12, 1400e12
E4M3 = torch.float8_e4m3fn
SCHEMES = {"row": fp8kit.ROW, "tensor": fp8kit.TENSOR, "block": fp8kit.BLOCK}


def main() -> None:
    """Measure, print a line per shape and M, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="8b")
    parser.add_argument("--rows", default="1,16,64,256,1024,4096")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    prefixes = tuple(arguments.shapes.split(","))
    vllm, deep_gemm = load_vllm(), load_deep_gemm()
    rows: list[dict[str, Any]] = []
    for name, (n, k) in SHAPES.items():
        if not (name.startswith(prefixes) or "all" in prefixes):
            continue
        copies = copies_past_l2(n * k)
        dense = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
        ]
        weights = {
            s: [fp8kit.quantize(w, g, role="weight") for w in dense] for s, g in SCHEMES.items()
        }
        for m in map(int, arguments.rows.split(",")):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            cases: dict[str, Case] = {"bf16": lambda i, x=x, d=dense: F.linear(x, d[i])}
            for scheme, quantized in weights.items():
                cases[f"fp8kit_{scheme}"] = lambda i, x=x, q=quantized: fp8kit.linear(x, q[i])
            if vllm is not None:
                cases |= vllm_cases(vllm, x, weights)
            if vllm is not None and deep_gemm is not None:
                cases["deepgemm_block"] = deep_gemm_case(vllm, deep_gemm, x, weights["block"])
            errors = check(cases, x, dense[0])
            times = time_cases(cases, copies)
            floor = max((n * k + m * k * 2 + m * n * 2) / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
            rows.append(
                {"shape": name, "m": m, "n": n, "k": k, "roofline_us": floor, "us": times}
                | {"relative_error": errors}
            )
            report(rows[-1])
        write_results(arguments.out, rows, what="linear, bf16 in and out, microseconds")
        del dense, weights
        torch.cuda.empty_cache()


def report(row: dict[str, Any]) -> None:
    """Print one measurement with ratios to bf16 and to the best peer."""
    times = row["us"]
    peers = [t for n, t in times.items() if not n.startswith(("fp8kit", "bf16"))]
    line = f"{row['shape']:>11} m={row['m']:<6} roof {row['roofline_us']:7.1f}"
    line += "".join(f"  {n} {t:.1f}" for n, t in times.items())
    if peers:
        line += f"  | best peer / fp8kit_row {min(peers) / times['fp8kit_row']:.2f}"
    line += f"  bf16 / fp8kit_row {times['bf16'] / times['fp8kit_row']:.2f}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def check(cases: dict[str, Case], x: Tensor, w: Tensor) -> dict[str, float]:
    """Compare every case with the fp32 product, so that no wrong kernel is timed."""
    exact = x.float() @ w.float().t()
    errors = {}
    for name, case in cases.items():
        y = case(0)
        assert isinstance(y, Tensor)
        errors[name] = float((y.float() - exact).norm() / exact.norm())
        limit = 0.01 if name == "bf16" else 0.06
        if not errors[name] < limit:
            raise SystemExit(f"{name} is wrong: relative error {errors[name]:.3f}")
    return errors


def load_vllm() -> Any:
    """Load vLLM's operator library, if it is given."""
    path = os.environ.get("VLLM_SO")
    if not path:
        return None
    torch.ops.load_library(path)
    return torch.ops._C


def load_deep_gemm() -> Any:
    """Import DeepGEMM, if it is given."""
    root = os.environ.get("DG_ROOT")
    if not root:
        return None
    sys.path.insert(0, root)
    import deep_gemm

    return deep_gemm


def vllm_cases(vllm: Any, x: Tensor, weights: dict[str, list[fp8kit.QTensor]]) -> dict[str, Case]:
    """Per-token quantizer and CUTLASS product, as vLLM calls them."""
    m, k = x.shape
    codes, scale = torch.empty(m, k, device="cuda", dtype=E4M3), torch.empty(m, 1, device="cuda")

    def linear(weight: list[fp8kit.QTensor]) -> Callable[[int], Tensor]:
        y = torch.empty(m, weight[0].shape[0], device="cuda", dtype=torch.bfloat16)

        def run(i: int) -> Tensor:
            vllm.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)
            vllm.cutlass_scaled_mm(y, codes, weight[i].data.t(), scale, weight[i].scale, None)
            return y

        return run

    return {"vllm_row": linear(weights["row"]), "vllm_tensor": linear(weights["tensor"])}


def deep_gemm_case(
    vllm: Any, deep_gemm: Any, x: Tensor, weights: list[fp8kit.QTensor]
) -> Callable[[int], Tensor]:
    """Group quantizer of vLLM, scales written column-major, and DeepGEMM's block product."""
    (m, k), n = x.shape, weights[0].shape[0]
    codes = torch.empty(m, k, device="cuda", dtype=E4M3)
    aligned = -(-m // 4) * 4
    scale = torch.empty(k // 128, aligned, device="cuda").t()[:m]
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> Tensor:
        vllm.per_token_group_fp8_quant(
            x, codes, scale, 128, 1e-10, -448.0, 448.0, False, True, True
        )
        deep_gemm.fp8_gemm_nt((codes, scale), (weights[i].data, weights[i].scale), y)
        return y

    return run


if __name__ == "__main__":
    main()
