"""Time the quantizers on bf16 input; compare the times with targets and with vLLM's operators.

    python benchmarks/quantizers.py OUT.json [--only per_token,groups]

VLLM_SO=/path/to/_C_stable_libtorch.abi3.so adds vLLM's operators to the same rounds, and compares
scales and codes with theirs. Before a case is timed, its codes and scales are compared with the
reference, bit for bit. Inputs and outputs alternate between more copies than the L2 cache holds.
Bandwidth counts 2 bytes read and 1 byte written per element.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, min_scale
from fp8kit.quantizers import reference, triton
from peers import load_libraries
from timing import Case, copies_past_cache, time_cases, write_results

E4M3 = torch.float8_e4m3fn
QuantizeInto = Callable[[Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class Kind:
    """One way to quantize, with its targets.

    Args:
        group: elements per scale.
        terabytes: target bandwidth from 4096 rows, in TB/s.
        speedup: target of vLLM's time divided by ours from 4096 rows; 0 if vLLM has no operator.
        layout: layout of the scales: ``"row"`` or ``"column"``.
        static: whether the scale is given.
    """

    group: GroupShape
    terabytes: float
    speedup: float = 0.0
    layout: str = "row"
    static: bool = False


KINDS = {
    "per_token": Kind(ROW, 4.1, 1.4),
    "groups": Kind(GROUP128, 3.9, 2.4),
    "groups_column": Kind(GROUP128, 3.9, 2.4, "column"),
    "tensor_static": Kind(TENSOR, 4.1, 1.0, static=True),
    "tensor_dynamic": Kind(TENSOR, 2.4, 1.0),
    "mx": Kind(MX, 3.7),
    "block": Kind(BLOCK, 3.7),
}
LARGE = {
    "per_token": [
        (4096, 4096),
        (4096, 5120),
        (4096, 8192),
        (4096, 14336),
        (4096, 28672),
        (16384, 4096),
        (16384, 28672),
    ],
    "groups": [(4096, 4096), (4096, 7168), (4096, 14336), (16384, 4096)],
    "groups_column": [(4096, 4096), (4096, 7168), (4096, 14336), (16384, 4096)],
    "tensor_static": [(4096, 4096), (4096, 14336), (16384, 28672)],
    "tensor_dynamic": [(4096, 4096), (4096, 14336), (16384, 28672)],
    "mx": [(4096, 4096), (4096, 14336)],
    "block": [(4096, 4096), (14336, 4096), (57344, 8192)],
}
SMALL_US = 1.7
SMALL_KINDS = ("per_token", "groups_column", "tensor_static")
SMALL = list(itertools.product((1, 16, 64), (4096, 14336, 28672)))


def main() -> None:
    """Check, measure, print a line per case, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(KINDS))
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    torch.manual_seed(0)
    vllm = load_libraries(["vllm"]).found.get("vllm")
    shapes = [(n, *s) for n in KINDS for s in LARGE[n]]
    shapes += [(n, *s) for n in SMALL_KINDS for s in SMALL]
    rows: list[dict[str, Any]] = []
    for name, m, k in shapes:
        if name in only:
            rows.append(measure(name, m, k, vllm))
            report(rows[-1])
    what = "quantizers, bf16 to e4m3, microseconds"
    write_results(arguments.out, rows, what=what, vllm=vllm is not None)
    failed = sum(not row["passed"] for row in rows)
    sys.stdout.write(f"{len(rows) - failed} of {len(rows)} reach their targets\n")


def measure(name: str, m: int, k: int, vllm: Any) -> dict[str, Any]:
    """Time one kind on one shape and judge it."""
    kind = KINDS[name]
    first = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    given = reference.quantize(first, kind.group, E4M3, floor(kind), None, rounding(kind))[1]
    data, scale = ours(kind, first, given)
    check(kind, first, given, data, scale)
    # a small input was just written by the previous layer, and is still in the L2 cache
    copies = copies_past_cache(3 * m * k) if m > 64 else 1
    inputs = [first, *(torch.randn_like(first) for _ in range(copies - 1))]
    kept: list[Any] = [None] * copies

    def fp8kit(i: int) -> None:
        # holding each result until its slot is reused makes outputs alternate like inputs
        kept[i] = ours(kind, inputs[i], given)

    cases: dict[str, Case] = {"fp8kit": fp8kit}
    agreement: dict[str, Any] = {}
    into = vllm_operator(vllm, name)
    if into is not None:
        outputs = [(torch.empty_like(data), empty_scale(kind, m, k, given)) for _ in range(copies)]
        into(first, *outputs[0])
        agreement = compare(data, scale, *outputs[0])
        cases["vllm"] = lambda i: into(inputs[i], *outputs[i])
    times = time_cases(cases, copies)
    us, vllm_us = times["fp8kit"], times.get("vllm")
    row = {"kernel": name, "m": m, "k": k, "us": us, "tbps": 3 * m * k / us * 1e-6}
    row |= {"vllm_us": vllm_us, "agreement_with_vllm": agreement}
    return row | judge(row, kind)


def judge(row: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Compare a measurement with its targets."""
    speedup = row["vllm_us"] / row["us"] if row["vllm_us"] else None
    if row["m"] <= 64:
        target = f"{SMALL_US} us"
        passed = row["us"] <= SMALL_US
    else:
        target = f"{kind.terabytes} TB/s"
        passed = row["tbps"] >= kind.terabytes
        if kind.speedup:
            target += f", {kind.speedup}x"
        if speedup is not None:
            passed = passed and speedup >= kind.speedup
    return {"speedup": speedup, "target": target, "passed": bool(passed)}


def report(row: dict[str, Any]) -> None:
    """Print one measurement."""
    line = f"{row['kernel']:>14} {row['m']:>6} x {row['k']:<6} {row['us']:8.2f} us "
    line += f"{row['tbps']:5.2f} TB/s"
    line += "  vLLM    -   " if row["speedup"] is None else f"  vLLM {row['speedup']:5.2f}x "
    line += f" target {row['target']:<15} {'pass' if row['passed'] else 'FAIL'}"
    found = row["agreement_with_vllm"]
    if found:
        line += f"  equal scales {found['equal_scales']:.4%}, codes {found['equal_codes']:.4%}"
        line += f", furthest {found['largest_code_distance']}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def floor(kind: Kind) -> float:
    """Return the least scale of a kind."""
    return min_scale(kind.group, E4M3, "activation")


def rounding(kind: Kind) -> str:
    """Return the default rounding of a scale."""
    return "floor" if kind.group == MX else "exact"


def ours(kind: Kind, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with fp8kit's kernels."""
    if kind.static:
        return triton.quantize_static(x, scale, kind.group, E4M3), scale
    return triton.quantize(x, kind.group, E4M3, floor(kind), None, rounding(kind), kind.layout)


def check(kind: Kind, x: Tensor, given: Tensor, data: Tensor, scale: Tensor) -> None:
    """Compare with the reference, so that no wrong kernel is timed."""
    expected = reference.quantize_static(x, given, kind.group, E4M3)
    if not torch.equal(data.view(torch.uint8), expected.view(torch.uint8)):
        raise SystemExit(f"{kind}: codes differ from the reference")
    if not torch.equal(scale, given):
        raise SystemExit(f"{kind}: scales differ from the reference")


def empty_scale(kind: Kind, m: int, k: int, given: Tensor) -> Tensor:
    """Return the scale that one of vLLM's operators reads or writes."""
    if kind.static:
        return given.reshape(1)
    if kind.layout == "column":
        return torch.empty(k // 128, -(-m // 4) * 4, device="cuda").t()[:m]
    return torch.empty_like(given).reshape(-1 if kind.group == TENSOR else given.shape)


def vllm_operator(vllm: Any, name: str) -> QuantizeInto | None:
    """Wrap the operator of vLLM for a kind, if it has one."""
    if vllm is None:
        return None

    def groups(x: Tensor, data: Tensor, scale: Tensor) -> None:
        column = scale.stride(-1) != 1
        vllm.per_token_group_fp8_quant(
            x, data, scale, 128, 1e-10, -448.0, 448.0, False, column, column
        )

    operators: dict[str, QuantizeInto] = {
        "per_token": lambda x, data, scale: vllm.dynamic_per_token_scaled_fp8_quant(
            data, x, scale, None
        ),
        "tensor_static": lambda x, data, scale: vllm.static_scaled_fp8_quant(data, x, scale),
        "tensor_dynamic": lambda x, data, scale: vllm.dynamic_scaled_fp8_quant(data, x, scale),
        "groups": groups,
        "groups_column": groups,
    }
    return operators.get(name)


def compare(data: Tensor, scale: Tensor, other: Tensor, other_scale: Tensor) -> dict[str, Any]:
    """Return the shares of equal scales and codes, and the largest distance of two codes."""
    ours_, theirs = ordinal(data), ordinal(other)
    same = scale.reshape(other_scale.shape) == other_scale
    return {
        "equal_scales": same.float().mean().item(),
        "equal_codes": (ours_ == theirs).float().mean().item(),
        "largest_code_distance": int((ours_ - theirs).abs().max()),
    }


def ordinal(data: Tensor) -> Tensor:
    """Return the rank of each code in the order of values."""
    code = data.view(torch.uint8).to(torch.int16)
    return torch.where(code < 128, code, 128 - code)


if __name__ == "__main__":
    main()
