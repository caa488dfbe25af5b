"""Time modules with an MXFP8 weight against the same weight in FP8_DYNAMIC and bf16.

    python benchmarks/mx_speed.py OUT.json [--shapes 8b,ds | all] [--rows 1,16,64,4096] [--quick]
        [--seconds 100] [--device cuda]

The MXFP8 weight computes in the form that ``fp8kit.load`` would give it on this device. Every layer
is compared with the fp32 product before it is timed, and the weights are cold. Prints a line per
layer and row count, then all comparisons by row count: geometric mean, least and largest ratio.

Humming, which vLLM uses for MXFP8 on Hopper, is timed too if ``peers.py`` can load it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fp8kit
from checking import Checked, reason
from fp8kit.modules.mx_forms import set_forms
from fp8kit.perf.timing import QUICK, THOROUGH, Effort
from layers import chosen
from linear import DENSE_ERROR, FP8_ERROR, integers
from peers import Libraries, humming_mx, load_libraries
from summary import MX_COMPARISONS, Row, compared
from timing import copies_past_cache, time_cases, write_results

ROWS = "1,4,16,64,256,1024,4096,16384"
SCHEMES = ("FP8_DYNAMIC", "MXFP8")
PEERS = ("humming",)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a line per shape and M and a summary, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", default="8b", help="starts of names in layers.py, or all")
    parser.add_argument("--rows", type=integers, default=integers(ROWS))
    parser.add_argument("--quick", action="store_true", help="a quarter of the time for each case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing starts later")
    parser.add_argument("--device", default="cuda", help="a CPU shows that everything runs")
    arguments = parser.parse_args(argv)
    effort, device = QUICK if arguments.quick else THOROUGH, torch.device(arguments.device)
    deadline = time.monotonic() + arguments.seconds
    rows: list[Row] = []
    libraries = load_libraries(PEERS)
    torch.manual_seed(0)
    for name, shape in chosen(arguments.shapes).items():
        if time.monotonic() > deadline:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        for row in measured(shape, arguments.rows, effort, device, libraries):
            rows.append({"shape": name, **row})
            print(told(rows[-1]), flush=True)
            what = "layers as modules, bf16 in and out, weights cold, microseconds"
            write_results(arguments.out, rows, what=what, peers=libraries.versions())
    for line in summed_up(rows):
        print(line, flush=True)
    stop_if_broken(rows)


@torch.no_grad()
def measured(
    shape: tuple[int, int],
    counts: Sequence[int],
    effort: Effort,
    device: torch.device,
    libraries: Libraries,
) -> Iterator[Row]:
    """Yield a row for each row count of one layer."""
    n, k = shape
    layers = layers_of(shape, copies_past_cache(n * k, device), device)
    form = layers["MXFP8"][0].form_note
    declined = {}
    for peer in libraries.found:
        try:
            layers[peer] = [humming_mx(mx_weight(dense)) for dense in layers["bf16"]]
        except Exception as broken:
            # a peer that does not serve a shape is a result
            declined[peer] = reason(broken)
    for m in counts:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        exact = x.float() @ layers["bf16"][0].weight.float().t()
        checked = Checked()
        for name, copies in layers.items():
            limit = DENSE_ERROR if name == "bf16" else FP8_ERROR
            checked.add(name, lambda i, of=copies, x=x: of[i](x), exact, limit)
        del exact
        us = time_cases(checked.cases, len(layers["bf16"]), effort, device)
        row: Row = {"m": m, "n": n, "k": k, "us": us, "relative_error": checked.errors}
        failed = checked.failed | declined
        yield row | {"form": form} | ({"failed": failed} if failed else {})
    del layers
    if device.type == "cuda":
        torch.cuda.empty_cache()


def layers_of(shape: tuple[int, int], copies: int, device: torch.device) -> dict[str, list[Any]]:
    """Return copies of a bf16 layer with random weights, and its FP8 layers, by scheme."""
    n, k = shape
    found: dict[str, list[Any]] = {name: [] for name in ("bf16", *SCHEMES)}
    for _ in range(copies):
        dense = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        nn.init.normal_(dense.weight, std=0.02)
        found["bf16"].append(dense)
        for scheme in SCHEMES:
            found[scheme].append(fp8kit.Fp8Linear.from_linear(dense, scheme))
    set_forms({str(i): layer for i, layer in enumerate(found["MXFP8"])})
    return found


def mx_weight(dense: nn.Linear) -> fp8kit.QTensor:
    """Return the MXFP8 weight that a checkpoint of the layer would hold."""
    return fp8kit.quantize(dense.weight, fp8kit.MX, role="weight")


def told(row: Row) -> str:
    """Return one measurement as a line."""
    us = row["us"]
    line = f"{row['shape']:>11} m={row['m']:<6}" + "".join(f"  {n} {t:.2f}" for n, t in us.items())
    for name, (over, under) in MX_COMPARISONS.items():
        if {over, under} <= us.keys():
            line += f"  | {name} {us[over] / us[under]:.3f}"
    return line + "".join(f"\n    failed {n}: {why}" for n, why in row.get("failed", {}).items())


def stop_if_broken(rows: Sequence[Row]) -> None:
    """End with an error if a layer of ours, or a dense one, could not be timed."""
    failed = [
        (row, {n: w for n, w in row.get("failed", {}).items() if n not in PEERS}) for row in rows
    ]
    broken = [f"{row['shape']} m={row['m']}: {whys}" for row, whys in failed if whys]
    if broken:
        raise SystemExit("a layer failed: " + "; ".join(broken))


def summed_up(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each comparison and row count: geometric mean, least and largest."""
    for name, (over, under) in MX_COMPARISONS.items():
        for m, (mean, least, most) in compared(rows, over, under).items():
            span = f"{least[0]:.3f} ({least[1]}) to {most[0]:.3f} ({most[1]})"
            yield f"{name} m={m:<6} {mean:.3f}, {span}"


if __name__ == "__main__":
    main(sys.argv[1:])
