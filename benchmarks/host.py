"""Time the host's part of a call: how long until the CPU may go on, not until the GPU is done.

    python benchmarks/host.py OUT.json [--device cuda] [--profile]

Layers are so small that the GPU finishes before the next call arrives. Calls come in batches that
fit the launch queue; the synchronization between batches is not timed. Batches of all cases
alternate, and the median batch counts. On a CPU the figures include the computation itself, so they
show little more than that everything runs.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.shared_input import SharedInput
from fp8kit.runtime.replay_cache import ReplayCache
from timing import write_results

ROWS = (1, 16, 64, 256)
# N and K of the layers, batches, calls in a batch
SIZES = {"cuda": (512, 41, 100), "cpu": (64, 5, 10)}
SIBLINGS = 3
RMS = NormFormula("rms_norm", 1e-6)
SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR")


def main() -> None:
    """Measure every scheme and row count, print ratios to F.linear, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="Say where the host's time goes.")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    side = SIZES[device.type][0]
    dense = nn.Linear(side, side, bias=False, device=device, dtype=torch.bfloat16)
    layers = {s: fp8kit.Fp8Linear.from_linear(dense, s) for s in SCHEMES}
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for m in ROWS:
            x = torch.randn(m, side, device=device, dtype=torch.bfloat16)
            times = measure(cases(x, dense, layers), device)
            captured = {s: layer.replays.launches(x.shape) for s, layer in layers.items()}
            rows.append({"m": m, "n": side, "k": side, "us": times, "taped_launches": captured})
            report(rows[-1])
        if arguments.profile:
            x = torch.randn(1, side, device=device, dtype=torch.bfloat16)
            profile(lambda: layers["FP8_DYNAMIC"](x), device)
    write_results(arguments.out, rows, what="host time of a call, microseconds")


def cases(
    x: Tensor, dense: nn.Linear, layers: dict[str, fp8kit.Fp8Linear]
) -> dict[str, Callable[[], object]]:
    """Return the calls: dense layers, FP8 layers, the function under them, norms and siblings.

    Siblings are three layers that read the same input, called one after the other. ``norm`` is a
    fused norm, which writes codes.
    """
    found: dict[str, Callable[[], object]] = {
        "F.linear": lambda: F.linear(x, dense.weight),
        "nn.Linear": lambda: dense(x),
    }
    for scheme, layer in layers.items():
        found[scheme] = lambda layer=layer: layer(x)
        w_q = layer.quantized_weight()
        found[f"{scheme} operator"] = lambda w=w_q, s=scheme: fp8kit.linear(x, w, scheme=s)
    found["F.linear siblings"] = lambda: [F.linear(x, dense.weight) for _ in range(SIBLINGS)]
    norm = nn.RMSNorm(x.shape[1], device=x.device, dtype=x.dtype).requires_grad_(False)
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK"):
        replays, how = ReplayCache(), ((x,), norm, layers[scheme].scheme)
        found[f"{scheme} norm"] = lambda r=replays, h=how: RMS.codes(*h).run(r)
        members = [fp8kit.Fp8Linear.from_linear(dense, scheme) for _ in range(SIBLINGS)]
        group = SharedInput(members, unchanging=True)
        codes, stand_in = members[0].quantize_input(x), x.expand(x.shape)
        found[f"{scheme} siblings"] = lambda m=members: [layer(x) for layer in m]
        found[f"{scheme} siblings from codes"] = lambda g=group, m=members, c=codes, s=stand_in: (
            g.offer(s, c),
            [layer(s) for layer in m],
        )
        found[f"{scheme} siblings behind a norm"] = (
            lambda g=group, m=members, s=stand_in, r=replays, h=how: (
                g.produce(s, r, RMS.codes(*h)),
                [layer(s) for layer in m],
            )
        )
    return found


def measure(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median microseconds of a call, over batches that alternate between the cases."""
    batches: dict[str, list[float]] = {name: [] for name in calls}
    _, rounds, count = SIZES[device.type]
    for turn in range(rounds + 1):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            spent = time.perf_counter() - start
            if turn:  # the first batch compiles and records
                batches[name].append(spent / count * 1e6)
    synchronize(device)
    return {name: statistics.median(found) for name, found in batches.items()}


def report(row: dict[str, Any]) -> None:
    """Print one row count."""
    times = row["us"]
    line = f"m={row['m']:<4}"
    line += "".join(f"  {n} {t:.1f} ({t / times['F.linear']:.2f}x)" for n, t in times.items())
    sys.stdout.write(f"{line}  replayed launches {row['taped_launches']}\n")
    sys.stdout.flush()


def profile(call: Callable[[], object], device: torch.device) -> None:
    """Print the functions that take most of the host's time in a call."""
    for _ in range(10):
        call()
    synchronize(device)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(2000):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
