"""Time norms and activations that end in FP8: fused, unfused, and the norm or activation alone.

    python benchmarks/fused.py OUT.json [--rows 16,4096,16384] [--only "rms 4096,silu_mul 14336"]

Bandwidth counts the bytes that a fused pass must move: operands, codes and scales once each,
weights of K elements not at all. For M >= 4096 there are two targets: at least 85 % of 4.3 TB/s,
and no more time than the same norm or activation takes without a quantizer. Every case is compared
with the unfused one before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from fp8kit import fused
from timing import copies_past_cache, time_cases, write_results

BANDWIDTH, TARGET = 4.3e12, 0.85
JUDGED_ROWS = 4096
MOST_BYTES = 12 << 30  # of operand copies
STATIC_SCALE = 0.02
KINDS: dict[str, dict[str, Any]] = {
    "row": {"group": fp8kit.ROW},
    "group": {"group": fp8kit.GROUP128},
    "column": {"group": fp8kit.GROUP128, "scale_layout": "column"},  # as layers write them
    "static": {"group": fp8kit.TENSOR},
}


class Producer(NamedTuple):
    """A fused function, and torch's unfused one.

    Args:
        k: elements per row.
        reads: number of matrices [M, K] that are read.
        writes: number of 16-bit matrices [M, K] that are written besides the codes.
        fused: computes codes from operands [reads, M, K] and the options of ``quantize``.
        plain: computes the result before quantization from the same operands, in torch.
    """

    k: int
    reads: int
    writes: int
    fused: Callable[..., Any]
    plain: Callable[[Tensor], Tensor]


def vector(k: int) -> Tensor:
    """Return a weight, or one row of a modulation."""
    return torch.randn(k, device="cuda", dtype=torch.bfloat16) * 0.1 + 1


def norms(k: int) -> dict[str, Producer]:
    """RMS norm with and without a residual, and adaptive layer norm, for hidden size ``k``."""
    w, gain, shift = vector(k), vector(k)[None], vector(k)[None]

    def adaptive(x: Tensor) -> Tensor:
        return F.layer_norm(x[0], (k,), None, None, 1e-6) * (1 + gain) + shift

    def adaptive_fused(x: Tensor, **options: Any) -> Any:
        return fused.layer_norm_quantize(x[0][None], eps=1e-6, modulation=(gain, shift), **options)

    return {
        f"rms {k}": Producer(
            k,
            1,
            0,
            lambda x, **o: fused.rms_norm_quantize(x[0], w, 1e-6, **o),
            lambda x: F.rms_norm(x[0], (k,), w, 1e-6),
        ),
        f"add_rms {k}": Producer(
            k,
            2,
            1,
            lambda x, **o: fused.add_rms_norm_quantize(x[0], x[1], w, 1e-6, **o)[0],
            lambda x: F.rms_norm(x[0] + x[1], (k,), w, 1e-6),
        ),
        f"adaptive {k}": Producer(k, 1, 0, adaptive_fused, adaptive),
    }


def activations(k: int) -> dict[str, Producer]:
    """Gated and plain activations for intermediate size ``k``; gate and up are halves of one."""

    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.view(x.shape[1], 2 * k)
        return rows[:, :k], rows[:, k:]

    return {
        f"silu_mul {k}": Producer(
            k,
            2,
            0,
            lambda x, **o: fused.silu_mul_quantize(*halves(x), **o),
            lambda x: F.silu(halves(x)[0]) * halves(x)[1],
        ),
        f"gelu_mul {k}": Producer(
            k,
            2,
            0,
            lambda x, **o: fused.gelu_mul_quantize(*halves(x), **o),
            lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1],
        ),
        f"gelu {k}": Producer(
            k, 1, 0, lambda x, **o: fused.gelu_quantize(x[0], **o), lambda x: F.gelu(x[0])
        ),
        f"gelu_tanh {k}": Producer(
            k,
            1,
            0,
            lambda x, **o: fused.gelu_quantize(x[0], "tanh", **o),
            lambda x: F.gelu(x[0], approximate="tanh"),
        ),
    }


def main() -> None:
    """Measure, print a line per case, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="16,4096,16384")
    parser.add_argument("--only", default="", help="Functions and K, separated by commas.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    producers = norms(4096) | norms(8192) | {"rms 5120": norms(5120)["rms 5120"]}
    producers |= activations(14336) | {"silu_mul 28672": activations(28672)["silu_mul 28672"]}
    rows: list[dict[str, Any]] = []
    chosen = arguments.only.split(",") if arguments.only else list(producers)
    for name, producer in ((name, producers[name]) for name in chosen):
        for m in map(int, arguments.rows.split(",")):
            rows += measured(name, producer, m)
    write_results(arguments.out, rows, what="fused producers, bf16 in, e4m3 out, microseconds")
    missed = [r for r in rows if not all(r["targets"].values())]
    sys.stdout.write(f"{len(rows) - len(missed)} of {len(rows)} cases meet their targets\n")


def measured(name: str, producer: Producer, m: int) -> list[dict[str, Any]]:
    """Time one producer at one M: alone, and fused and unfused for every granularity."""
    shape = (producer.reads, m, producer.k)
    size = 2 * producer.reads * m * producer.k
    copies = max(1, min(copies_past_cache(size), MOST_BYTES // size))
    x = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    cases: dict[str, Callable[[int], object]] = {"alone": lambda i: producer.plain(x[i])}
    for kind, options in KINDS.items():
        if kind == "static":
            options = options | {"scale": torch.full((1, 1), STATIC_SCALE, device="cuda")}
        cases[kind] = lambda i, o=options: producer.fused(x[i], **o)
        cases[f"{kind} unfused"] = lambda i, o=options: fp8kit.quantize(producer.plain(x[i]), **o)
        check(name, cases[kind](0), cases[f"{kind} unfused"](0))
    times = time_cases(cases, copies)
    found = []
    for kind, options in KINDS.items():
        cols = options["group"].cols
        scales = 4 * m * (producer.k // cols if cols > 0 else 1)
        moved = m * producer.k * (2 * producer.reads + 2 * producer.writes + 1) + scales
        speed = moved / times[kind] * 1e6
        targets = {}
        if m >= JUDGED_ROWS:
            targets["bandwidth"] = speed >= TARGET * BANDWIDTH
            targets["no slower than alone"] = times[kind] <= times["alone"]
        row = {"case": name, "m": m, "group": kind, "us": times[kind], "tb_per_s": speed / 1e12}
        row |= {"unfused_us": times[f"{kind} unfused"], "alone_us": times["alone"]}
        found.append(row | {"targets": targets})
        report(found[-1])
    return found


def check(name: str, q: Any, expected: Any) -> None:
    """Compare a fused result with the unfused one, so that no wrong kernel is timed."""
    a, b = (fp8kit.dequantize(v).reshape(-1) for v in (q, expected))
    error = float((a - b).norm() / b.norm())
    # torch's fused norms round once, Llama's twice: codes may differ, each by one step at most
    if not error < 0.02:
        raise SystemExit(f"{name} is wrong: it differs from the unfused result by {error:.3f}")


def report(row: dict[str, Any]) -> None:
    """Print one measurement."""
    line = f"{row['case']:>15} m={row['m']:<6} {row['group']:>6} {row['us']:8.1f} us"
    line += f" {row['tb_per_s']:5.2f} TB/s  unfused / fused {row['unfused_us'] / row['us']:.2f}"
    line += f"  alone / fused {row['alone_us'] / row['us']:.2f}"
    line += "".join(f"  {'pass' if ok else 'FAIL'} {what}" for what, ok in row["targets"].items())
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
