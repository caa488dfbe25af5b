"""Time whole linear layers, bf16 in and bf16 out: fp8kit, bf16, and the peers that are present.

    python benchmarks/linear.py OUT.json [--shapes 8b,odd.llama2 | all] [--rows 1,16,4096]
        [--cases row,block] [--torchao-rows 1,64,4096] [--seconds 500] [--quick] [--append]

fp8kit runs with its default, precise accumulation, except in cases named fast; peers run as they
ship. `peers.py` says how to make them available. Cases with a static scale or an input that is
already quantized are measured for a few row counts only. Every case is compared with the fp32
product before it is timed. OUT.json is written after every row, so an interrupted run loses
nothing; with `--append` a later run adds to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from checking import Checked, reason
from fp8kit.formats import E4M3FN
from fp8kit.perf.timing import QUICK, THOROUGH, Effort
from layers import SHAPES, chosen, roofline_us
from peers import Layer, Libraries, Peer, TorchAO, all_peers, load_libraries, peer_cases
from summary import COMPARISONS, ratios
from timing import Case, copies_past_cache, environment, time_cases, write_results

ROWS = "1,2,4,8,16,32,64,96,128,256,512,1024,4096,16384"
FEW_ROWS = (1, 64, 4096)
GROUPS = {"row": fp8kit.ROW, "tensor": fp8kit.TENSOR, "block": fp8kit.BLOCK}
# on normal data rounding to FP8 costs 3.8 %, and 5 % in the worst of a thousand parts of a result
DENSE_ERROR, FP8_ERROR = 0.01, 0.07
# two runs may share a result file only if these agree
MUST_AGREE = ("device", "torch", "cuda", "triton", "commit")

Row = dict[str, Any]


def always(m: int) -> bool:
    """Measure at any number of rows."""
    del m
    return True


@dataclass(frozen=True)
class Ours:
    """One case of fp8kit.

    Args:
        build: returns the case, a function to time, for a layer.
        serves: returns whether the case is measured at a row count.
    """

    build: Callable[[Layer], Case]
    serves: Callable[[int], bool] = always


def dynamic(granularity: str, **options: Any) -> Callable[[Layer], Case]:
    """Return a builder of ``fp8kit.linear`` on weights of one granularity, a key of ``GROUPS``."""

    def build(layer: Layer) -> Case:
        weights = layer.weights[granularity]
        return lambda i: fp8kit.linear(layer.x, weights[i], **options)

    return build


def static(layer: Layer) -> Case:
    """Build ``fp8kit.linear`` with a calibrated input scale."""
    weights, scale = layer.weights["tensor"], layer.x_scale
    return lambda i: fp8kit.linear(layer.x, weights[i], input_scale=scale)


def quantized(layer: Layer) -> Case:
    """Build ``fp8kit.scaled_mm`` on an input that is quantized beforehand."""
    weights = layer.weights["row"]
    return lambda i: fp8kit.scaled_mm(layer.x_q, weights[i])


OURS = {
    "row": Ours(dynamic("row")),
    "tensor": Ours(dynamic("tensor")),
    "block": Ours(dynamic("block")),
    "row_fast": Ours(dynamic("row", accum="fast"), lambda m: m >= 1024),
    "weight_only": Ours(dynamic("row", scheme="FP8_WEIGHT_ONLY"), lambda m: m <= 16),
    "static": Ours(static, FEW_ROWS.__contains__),
    "quantized": Ours(quantized, FEW_ROWS.__contains__),
}


@dataclass(frozen=True)
class Bench:
    """What a run measures.

    Args:
        cases: names in ``OURS``.
        peers: peers by their name in result files.
        libraries: the peers' libraries that could be loaded.
        torchao_rows: row counts that torchao is compiled for.
        device: where to measure.
        effort: how long to measure each case.
    """

    cases: Sequence[str]
    peers: Mapping[str, Peer]
    libraries: Libraries
    torchao_rows: Sequence[int]
    device: torch.device
    effort: Effort = THOROUGH

    def ours(self, m: int) -> list[str]:
        """Return the cases of fp8kit that are measured at a row count."""
        return [name for name in self.cases if OURS[name].serves(m)]

    def wanted(self, m: int) -> dict[str, Peer]:
        """Return the peers that are measured at a row count."""
        ours = ("", *self.ours(m))
        return {
            name: peer
            for name, peer in self.peers.items()
            if peer.beside in ours and ("torchao" not in peer.needs or m in self.torchao_rows)
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a line per shape and M, and write the result file."""
    arguments = parse(argv)
    device = torch.device(arguments.device)
    torchao = TorchAO(arguments.torchao_mode, arguments.torchao_seconds)
    libraries = load_libraries()
    effort = QUICK if arguments.quick else THOROUGH
    peers = all_peers(torchao)
    bench = Bench(arguments.cases, peers, libraries, arguments.torchao_rows, device, effort)
    earlier = earlier_run(arguments.out) if arguments.append else {"rows": []}
    rows = {(row["shape"], row["m"]): row for row in earlier["rows"]}
    versions = earlier.get("peers", {}) | libraries.versions()
    facts = {
        "what": "linear, bf16 in and out, microseconds",
        "peers": versions,
        "absent": {n: why for n, why in libraries.missing.items() if n not in versions},
        "torchao_mode": arguments.torchao_mode,
        "effort": f"{effort.rounds} rounds of {effort.round_ms:g} ms",
    }
    deadline = time.monotonic() + arguments.seconds
    broken: list[str] = []
    for row in measure_all(bench, chosen(arguments.shapes), arguments.rows, deadline):
        rows[row["shape"], row["m"]] = row
        report(row)
        broken += [f"{row['shape']} m={row['m']}: {name}" for name in own_failures(row)]
        write_results(arguments.out, in_order(rows), **facts)
    if broken:
        raise SystemExit("fp8kit failed, see above: " + "; ".join(broken))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path)
    add("--shapes", default="8b", help="starts of names in layers.py, or all")
    add("--rows", type=integers, default=integers(ROWS))
    add("--cases", type=case_names, default=list(OURS), help=f"of {', '.join(OURS)}")
    add("--torchao-rows", type=integers, default=[], help="compiled per shape, so few of them")
    add("--torchao-mode", default="max-autotune-no-cudagraphs")
    add("--torchao-seconds", type=float, default=180.0, help="of compiling, in all")
    add("--seconds", type=float, default=float("inf"), help="nothing starts later than this")
    add("--quick", action="store_true", help="a quarter of the time for each case")
    add("--append", action="store_true", help="keep what OUT has of other shapes and rows")
    add("--device", default="cuda", help="a CPU shows that everything runs, and no more")
    return parser.parse_args(argv)


def integers(text: str) -> list[int]:
    """Read numbers separated by commas."""
    return [int(word) for word in text.split(",")]


def case_names(text: str) -> list[str]:
    """Read names of cases separated by commas."""
    names = text.split(",")
    for name in names:
        if name not in OURS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OURS)}")
    return names


def measure_all(
    bench: Bench, shapes: Mapping[str, tuple[int, int]], counts: Sequence[int], deadline: float
) -> Iterator[Row]:
    """Yield a result row per layer and row count, until the deadline."""
    # a failed capture leaves the default generator unusable, so random numbers come from this one
    generator = torch.Generator(bench.device).manual_seed(0)
    for name, (n, k) in shapes.items():
        if time.monotonic() > deadline:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        dense = [
            normal(generator, n, k) * 0.02 for _ in range(copies_past_cache(n * k, bench.device))
        ]
        weights = {
            s: [fp8kit.quantize(w, g, role="weight") for w in dense] for s, g in GROUPS.items()
        }
        for m in counts:
            if time.monotonic() > deadline:
                print(f"{name} m={m}: skipped, out of time", flush=True)
                continue
            x = normal(generator, m, k)
            scale = (x.abs().max().float() / E4M3FN.max).reshape(1, 1)
            try:
                # hold no tensor here beyond this call: a large layer's weights fill the GPU
                found = measure(bench, Layer(x, dense, weights, scale, fp8kit.quantize(x)))
            except torch.OutOfMemoryError as broken:
                print(f"{name} m={m}: skipped, {reason(broken)}", flush=True)
                torch.cuda.empty_cache()
                continue
            yield {"shape": name, "m": m, "n": n, "k": k, **found}
        del dense, weights
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def measure(bench: Bench, layer: Layer) -> Row:
    """Check and time every case of one layer and row count, against each other."""
    x, dense = layer.x, layer.dense
    m, (n, k) = x.shape[0], dense[0].shape
    exact = x.float() @ dense[0].float().t()
    checked = Checked()
    checked.add("bf16", lambda i: F.linear(x, dense[i]), exact, DENSE_ERROR)
    for name in bench.ours(m):
        checked.add(f"fp8kit_{name}", OURS[name].build(layer), exact, FP8_ERROR)
    for name, case in peer_cases(bench.wanted(m), bench.libraries, layer, checked.failed):
        checked.add(name, case, exact, FP8_ERROR)
    del exact
    times = time_cases(checked.cases, len(dense), effort=bench.effort, device=bench.device)
    found: Row = {"roofline_us": roofline_us(m, n, k), "us": times}
    found["relative_error"] = checked.errors
    return found | ({"failed": checked.failed} if checked.failed else {})


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw a bf16 matrix."""
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


def own_failures(row: Row) -> list[str]:
    """Name the cases of fp8kit and bf16 that failed; unlike a peer's failure, that is an error."""
    return [n for n in row.get("failed", {}) if n.startswith(("fp8kit", "bf16"))]


def earlier_run(path: Path) -> dict[str, Any]:
    """Read the result file of an earlier run that this one may add to, if there is one.

    Raises:
        SystemExit: if that run had another device, commit or version.
    """
    if not path.is_file():
        return {"rows": []}
    found: dict[str, Any] = json.loads(path.read_text())
    now = environment()
    for key in MUST_AGREE:
        # writing the result file makes the tree dirty
        if str(found.get(key)).removesuffix("-dirty") != str(now[key]).removesuffix("-dirty"):
            raise SystemExit(
                f"{path} was measured with {key} {found.get(key)}, this is {now[key]}: "
                "write another file, or leave out --append"
            )
    return found


def in_order(rows: Mapping[tuple[str, int], Row]) -> list[Row]:
    """Sort rows by layer, in the order of ``SHAPES``, and M."""
    order = {name: i for i, name in enumerate(SHAPES)}
    return [rows[key] for key in sorted(rows, key=lambda key: (order[key[0]], key[1]))]


def report(row: Row) -> None:
    """Print one measurement: times, ratios to the best peers, what failed and why."""
    line = f"{row['shape']:>11} m={row['m']:<6} roof {row['roofline_us']:7.1f}"
    line += "".join(f"  {n} {t:.1f}" for n, t in row["us"].items())
    for kind in COMPARISONS:
        found = ratios(row, kind)
        if found is not None and found.peer:
            line += f"  | {found.peer} / {kind} {found.of_peer:.2f}"
    line += "".join(f"\n    failed {n}: {why}" for n, why in row.get("failed", {}).items())
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
