"""Measure tile configurations of the Hopper GEMM, and fit the cost model that chooses among them.

    python benchmarks/tiles.py measure OUT.json [--shapes 8b,ds] [--rows 96,128,256,512]
        [--scales row,block] [--within 1.5] [--seconds 500]
    python benchmarks/tiles.py fit OUT.json [--trials 2000]

``measure`` times the GEMM alone, on quantized operands, in every configuration that may be the best
by the current costs, and writes OUT.json after every row. ``fit`` needs no GPU: it searches for
costs whose choices lose the least time against the best measured configuration. It prints them, and
the losses under the current and the fitted costs. The costs belong in ``device.Costs``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8kit
from checking import Checked
from fp8kit.matmul.hopper.device import Costs, Device, hopper
from fp8kit.matmul.hopper.heuristics import estimates
from fp8kit.matmul.hopper.tile_config import Epilogue, Launch, Layout, Pipeline, TileConfig
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.perf.timing import QUICK
from layers import chosen
from timing import Case, copies_past_cache, time_cases, write_results

ROWS = "96,128,192,256,384,512,1024"
PAIRS = {"row": (fp8kit.ROW, fp8kit.ROW), "block": (fp8kit.GROUP128, fp8kit.BLOCK)}
# against the exact product of the same operands: the rounding of a bf16 result is 1.7e-3
LARGEST_ERROR = 4e-3
UNMEASURED = 0.06
# a trial of the fit scales a cost by about this much, and this share of all costs
SPREAD, SHARE = 0.08, 0.3


@dataclass(frozen=True)
class Measured:
    """The measured configurations of one GEMM.

    Args:
        problem: ``(M, N, K)``.
        device: the GPU.
        block_scales: whether the operands have block scales.
        us: microseconds by configuration.
    """

    problem: tuple[int, int, int]
    device: Device
    block_scales: bool
    us: dict[TileConfig, float]

    def loss(self, costs: Costs) -> float:
        """Return the loss of the choice under these costs, relative to the best measured time.

        A choice that was not measured loses ``UNMEASURED``, so that a fit avoids the unknown.
        """
        found = estimates(self.problem, self.device, self.block_scales, costs)
        choice = min(found, key=found.__getitem__)
        return self.us[choice] / min(self.us.values()) - 1 if choice in self.us else UNMEASURED


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or fit."""
    arguments = parse(argv)
    if arguments.verb == "fit":
        report_fit(arguments.file, arguments.trials)
    else:
        measure(arguments)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    add = verbs.add_parser("measure").add_argument
    add("file", type=Path)
    add("--shapes", default="8b,ds,dit")
    add("--rows", default=ROWS)
    add("--scales", default="row,block")
    add("--seconds", type=float, default=float("inf"), help="nothing starts later than this")
    add("--within", type=float, default=1.5, help="of the best estimate; others are left out")
    add = verbs.add_parser("fit").add_argument
    add("file", type=Path)
    add("--trials", type=int, default=2000)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> None:
    """Time every problem, print a line of it, and write the result file."""
    deadline = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    for name, (n, k) in chosen(arguments.shapes).items():
        copies = copies_past_cache(n * k)
        dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        for scales in arguments.scales.split(","):
            w_q = fp8kit.quantize(dense, PAIRS[scales][1], role="weight")
            weights = [w_q, *(replace(w_q, data=w_q.data.clone()) for _ in range(copies - 1))]
            for m in map(int, arguments.rows.split(",")):
                if time.monotonic() > deadline:
                    print(f"{name} {scales} m={m}: skipped, out of time", flush=True)
                    continue
                row = measure_gemm(m, scales, weights, arguments.within)
                rows.append({"shape": name, "m": m, "n": n, "k": k, "scales": scales, **row})
                report(rows[-1])
                what = "tile configurations of the Hopper GEMM, microseconds"
                write_results(arguments.file, rows, what=what)


@torch.no_grad()
def measure_gemm(
    m: int, scales: str, weights: list[fp8kit.QTensor], within: float
) -> dict[str, Any]:
    """Check and time the configurations of one GEMM, against each other."""
    n, k = weights[0].data.shape
    x_q = fp8kit.quantize(torch.randn(m, k, device="cuda", dtype=torch.bfloat16), PAIRS[scales][0])
    exact = fp8kit.dequantize(x_q) @ fp8kit.dequantize(weights[0]).t()
    sm_count = torch.cuda.get_device_properties("cuda").multi_processor_count
    configs = promising((m, n, k), hopper(sm_count), scales == "block", within)
    checked = Checked()
    for i, config in enumerate(configs):
        checked.add(str(i), gemm_case(config, x_q, weights, scales), exact, LARGEST_ERROR)
    times = time_cases(checked.cases, len(weights), QUICK)
    found = [{"config": asdict(configs[int(i)]), "us": us} for i, us in times.items()]
    failed = {str(configs[int(i)]): why for i, why in checked.failed.items()}
    return {"sm_count": sm_count, "configs": found} | ({"failed": failed} if failed else {})


def promising(
    problem: tuple[int, int, int], device: Device, block_scales: bool, within: float
) -> list[TileConfig]:
    """Return the configurations whose estimate is near the best one."""
    found = estimates(problem, device, block_scales)
    best = min(found.values())
    return [config for config, estimate in found.items() if estimate <= within * best]


def gemm_case(
    config: TileConfig, x_q: fp8kit.QTensor, weights: list[fp8kit.QTensor], scales: str
) -> Case:
    """Bind operands to the Hopper GEMM in one configuration."""
    from fp8kit.matmul.hopper import gemm

    pair, out = PAIRS[scales], torch.bfloat16
    problem = MatmulProblem.of(x_q.data, weights[0].data, pair, out, None, "precise", False)

    def case(i: int) -> Tensor:
        operands = MatmulOperands(x_q.data, x_q.scale, weights[i].data, weights[i].scale)
        return gemm.run(operands, problem, config)

    return case


def report(row: dict[str, Any]) -> None:
    """Print the best configuration of one GEMM, what the choice loses, and what failed."""
    found = measured(row)
    best = min(found.us, key=found.us.__getitem__) if found.us else None
    line = f"{row['shape']:>11} {row['scales']:>5} m={row['m']:<5} {len(found.us)} configurations"
    if best is not None:
        line += f", best {found.us[best]:.1f}, the choice {found.loss(Costs()):+.1%}: {best}"
    line += "".join(
        f"\n    failed {config}: {why}" for config, why in row.get("failed", {}).items()
    )
    print(line, flush=True)


def measured(row: dict[str, Any]) -> Measured:
    """Read a row of a result file."""
    us = {config_of(entry["config"]): entry["us"] for entry in row["configs"]}
    problem = (row["m"], row["n"], row["k"])
    return Measured(problem, hopper(row["sm_count"]), row["scales"] == "block", us)


def config_of(parts: Mapping[str, Any]) -> TileConfig:
    """Read a configuration from the dict that ``asdict`` made; none of them quantizes its input."""
    return TileConfig(
        layout=Layout(**parts["layout"]),
        pipeline=Pipeline(**parts["pipeline"]),
        epilogue=Epilogue(**parts["epilogue"]),
        launch=Launch(**parts["launch"]),
    )


def report_fit(path: Path, trials: int) -> None:
    """Print the fitted costs, and the losses under the current and the fitted ones."""
    found = [measured(row) for row in json.loads(path.read_text())["rows"]]
    found = [one for one in found if len(one.us) > 1]
    fitted = fit(found, trials)
    for name, costs in (("today", Costs()), ("fitted", fitted)):
        losses = [one.loss(costs) for one in found]
        print(f"{name}: {sum(losses) / len(losses):.2%} in the mean, {max(losses):.1%} at most")
    for field in fields(Costs):
        print(f"    {field.name} = {getattr(fitted, field.name)}")


def fit(found: Sequence[Measured], trials: int) -> Costs:
    """Search for the costs with the least mean loss."""
    rng = random.Random(0)
    best = Costs()
    least = math.fsum(one.loss(best) for one in found)
    for _ in range(trials):
        trial = moved(best, rng)
        loss = math.fsum(one.loss(trial) for one in found)
        if loss <= least:
            best, least = trial, loss
    return best


def moved(costs: Costs, rng: random.Random) -> Costs:
    """Return the costs with some of them changed a little."""

    def near(value: float) -> float:
        if rng.random() > SHARE:
            return value
        return float(f"{value * math.exp(rng.gauss(0, SPREAD)):.3g}")

    def values() -> Iterator[tuple[str, Any]]:
        for field in fields(Costs):
            value = getattr(costs, field.name)
            yield field.name, tuple(map(near, value)) if isinstance(value, tuple) else near(value)

    return Costs(**dict(values()))


if __name__ == "__main__":
    main(sys.argv[1:])
