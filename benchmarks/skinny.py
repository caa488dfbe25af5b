"""Time GEMMs with few rows: every backend and scheme, and other tiles of the Triton GEMM.

    python benchmarks/skinny.py OUT.json [--shapes 8b] [--rows 1,4,16,64,256] [--sweep]

Operands are quantized beforehand, except in the cases named ``linear``, which quantize per token
first and let the GEMM start early. Each result is compared with the exact product before it is
timed. A case that fails is reported with its error and left out. With ``--sweep`` the Triton GEMM
also runs with other tiles than ``choose_tile`` returns; ``best`` then names the fastest. What is
not measured after ``--seconds`` is skipped and reported.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from checking import Checked
from fp8kit.dispatch.backends import choose
from fp8kit.formats import GroupShape
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulOperands, MatmulProblem
from layers import BANDWIDTH, FLOPS, chosen
from timing import Case, copies_past_cache, time_cases, write_results

SCHEMES: dict[str, tuple[GroupShape | None, GroupShape]] = {
    "row": (fp8kit.ROW, fp8kit.ROW),
    "block": (fp8kit.GROUP128, fp8kit.BLOCK),
    "mx": (fp8kit.MX, fp8kit.MX),
    "weight_only": (None, fp8kit.ROW),
}
SWEPT = ("row", "block", "weight_only")
TIMED = tuple(name for name, *_ in MATMUL_BACKENDS if name != "reference")
# against the exact product of the same operands: the rounding of a bf16 result is 1.7e-3
LARGEST_ERROR = 4e-3


class Operands(NamedTuple):
    """One activation and several equal-sized weights of one scheme."""

    x: Tensor
    x_scale: Tensor | None
    weights: list[fp8kit.QTensor]
    groups: tuple[GroupShape | None, GroupShape]

    def problem(self, batch_invariant: bool = False) -> MatmulProblem:
        """Describe the product."""
        w, out = self.weights[0].data, torch.bfloat16
        return MatmulProblem.of(self.x, w, self.groups, out, None, "precise", batch_invariant)


def main() -> None:
    """Measure, print a line per shape and M, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="8b")
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=85.0)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    deadline = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    for name, (n, k) in chosen(arguments.shapes).items():
        copies = copies_past_cache(n * k)
        dense = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)
        ]
        weights = {
            s: [fp8kit.quantize(w, g, role="weight") for w in dense]
            for s, (_, g) in SCHEMES.items()
        }
        for m in map(int, arguments.rows.split(",")):
            if time.monotonic() > deadline:
                sys.stdout.write(f"{name} m={m}: skipped, out of time\n")
                continue
            rows.append({"shape": name, "m": m, "n": n, "k": k, **roofline(m, n, k)})
            rows[-1] |= measure(m, dense, weights, arguments.sweep, deadline)
            report(rows[-1])
            write_results(arguments.out, rows, what="products for few rows, microseconds")
        del dense, weights
        torch.cuda.empty_cache()


def roofline(m: int, n: int, k: int) -> dict[str, float]:
    """Return the least microseconds that memory or tensor cores allow."""
    return {
        "roofline_us": max((n * k + m * k + 2 * m * n) / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6
    }


def measure(
    m: int,
    dense: list[Tensor],
    weights: dict[str, list[fp8kit.QTensor]],
    sweep: bool,
    deadline: float,
) -> dict[str, Any]:
    """Time every case of one shape and M together, so that drift hits them alike."""
    x = torch.randn(m, dense[0].shape[1], device=dense[0].device, dtype=torch.bfloat16)
    kept, swept = Checked({"bf16": lambda i: F.linear(x, dense[i])}), Checked()
    for scheme, groups in SCHEMES.items():
        x_q = None if groups[0] is None else fp8kit.quantize(x, groups[0])
        data, x_scale = (x, None) if x_q is None else (x_q.data, x_q.scale)
        operands = Operands(data, x_scale, weights[scheme], groups)
        exact = exact_product(operands)
        found = dict(backend_cases(scheme, operands))
        if scheme == "row":
            found["linear/triton_gemm"] = linear_case(x, operands)
        for name, case in found.items():
            kept.add(name, case, exact, LARGEST_ERROR)
        if sweep and scheme in SWEPT and time.monotonic() < deadline:
            for name, case in swept_cases(scheme, operands):
                swept.add(name, case, exact, LARGEST_ERROR)
    times = time_cases(kept.cases | swept.cases, len(dense))
    best = {
        scheme: min((n for n in times if n.startswith(f"{scheme}/triton_gemm")), key=times.get)
        for scheme in SWEPT
        if any(n.startswith(f"{scheme}/triton_gemm") for n in times)
    }
    failed = kept.failed | swept.failed
    return {"us": times, "failed": failed} | ({"best": best} if sweep else {})


def exact_product(operands: Operands) -> Tensor:
    """Multiply what the operands stand for, in fp32 without TF32."""
    x = operands.x.float()
    if operands.x_scale is not None and operands.groups[0] is not None:
        q = fp8kit.QTensor(operands.x, operands.x_scale, operands.groups[0])
        x = fp8kit.dequantize(q)
    return x @ fp8kit.dequantize(operands.weights[0]).t()


def backend_cases(scheme: str, operands: Operands) -> Iterator[tuple[str, Case]]:
    """Return a case for every backend that supports the operands, and a batch-invariant one."""
    for name in TIMED:
        for invariant in (False, True) if name == "triton_gemm" else (False,):
            problem = operands.problem(invariant)
            backend = choose(MATMUL_BACKENDS, problem, name).implementation
            if backend is not None:
                label = f"{scheme}/{name}" + ("_invariant" if invariant else "")
                yield label, run_case(backend.run, operands, (problem,))


def linear_case(x: Tensor, operands: Operands) -> Case:
    """Quantize per token, then multiply with a GEMM that starts early."""
    problem = operands.problem()

    def run(i: int) -> Tensor:
        x_q, w_q = fp8kit.quantize(x), operands.weights[i]
        return triton_gemm.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)

    return run


def swept_cases(scheme: str, operands: Operands) -> Iterator[tuple[str, Case]]:
    """Return the Triton GEMM with tiles near the chosen one."""
    problem = operands.problem()
    if triton_gemm.supports(problem) is not None:
        return
    chosen = triton_gemm.choose_tile(problem, triton_gemm.device_facts(operands.x.device))
    for tile in candidates(chosen, triton_gemm.decoded(problem), problem):
        label = "x".join(map(str, tile[:3])) + "".join(
            f" {f}{v}" for f, v in zip(("split", "chunk", "warp", "stage"), tile[3:], strict=True)
        )
        yield (
            f"{scheme}/triton_gemm {label}",
            run_case(triton_gemm.run_tile, operands, (problem, tile)),
        )


def candidates(
    chosen: triton_gemm.TritonTile, decoded: bool, problem: MatmulProblem
) -> list[triton_gemm.TritonTile]:
    """Vary one or two properties of a tile at a time."""
    found = [chosen]
    for splits in {1, chosen.splits * 2, max(1, chosen.splits // 2), 4} - {chosen.splits}:
        if -(-problem.k // chosen.depth) >= 2 * splits:
            found.append(chosen._replace(splits=splits))
    found += [chosen._replace(stages=s) for s in {3, 5, 8} - {chosen.stages}]
    if triton_gemm.most_step_columns(problem) > chosen.depth:
        found.append(chosen._replace(depth=2 * chosen.depth, stages=max(2, chosen.stages // 2)))
    if decoded:
        found += [chosen._replace(cols=32), chosen._replace(cols=32, warps=4, stages=4)]
        found.append(chosen._replace(rows=16))
    elif problem.m <= 64:
        found.append(chosen._replace(cols=128, stages=4))
        found += [chosen._replace(cols=32, warps=2), chosen._replace(rows=8, warps=2)]
    else:
        found += [chosen._replace(rows=64), chosen._replace(rows=128, cols=64, warps=4, stages=4)]
        found += [chosen._replace(rows=256, cols=64, warps=8, stages=3)]
    return list(dict.fromkeys(found))


def run_case(run: Callable[..., Tensor], operands: Operands, last: tuple[Any, ...]) -> Case:
    """Bind operands to a product; the result's argument selects the copy of the weight."""

    def case(i: int) -> Tensor:
        w_q = operands.weights[i]
        return run(MatmulOperands(operands.x, operands.x_scale, w_q.data, w_q.scale), *last)

    return case


def report(row: dict[str, Any]) -> None:
    """Print one shape and M: times, failures and, after a sweep, the fastest tiles."""
    times = row["us"]
    line = f"{row['shape']:>11} m={row['m']:<5} roof {row['roofline_us']:6.1f}"
    line += "".join(f"  {n} {t:.1f}" for n, t in times.items() if " " not in n)
    for scheme, name in row.get("best", {}).items():
        line += f"\n    best {scheme}: {name.partition(' ')[2] or 'chosen'} {times[name]:.1f}"
    line += "".join(f"\n    failed {n}: {why}" for n, why in row["failed"].items())
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
