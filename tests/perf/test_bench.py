"""``fp8kit bench``: its cases and its output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import torch

from fp8kit.formats import SCHEMES, Scheme
from fp8kit.perf import bench
from fp8kit.perf.timing import Case, Effort


def timer(
    cases: Mapping[str, Case], copies: int, effort: Effort, device: torch.device
) -> dict[str, float]:
    for case in cases.values():
        case(copies - 1)
    return {"copy": 10.0, "product": 1.0, "fp8": 4.0, "bf16": 6.0}


def test_every_scheme_is_timed_against_bf16() -> None:
    for name in SCHEMES:
        found = bench.bench([(64, 128)], [3], Scheme.of(name), torch.device("cpu"), timer=timer)
        (timing,) = found
        assert (timing.m, timing.n, timing.k, timing.scheme) == (3, 64, 128, name)
        assert (timing.us, timing.bf16_us, timing.backend) == (4.0, 6.0, "dequantized")
        moved = 64 * 128 + 2 * 3 * 128 + 2 * 3 * 64
        assert timing.roofline_us > moved / (2 * 512 * 4096 * 2 / 10.0) * 0.99


def test_the_table_shows_ratios() -> None:
    row = bench.Timing(16, 4096, 4096, "FP8_DYNAMIC", "hopper_gemm", 8.0, 12.0, 4.0)
    lines = bench.render([row]).splitlines()
    assert lines[2].split() == "4096x4096 16 FP8_DYNAMIC hopper_gemm 8.0 12.0 1.50 50%".split()
    assert json.loads(json.dumps([dataclasses.asdict(row)]))[0]["roofline_us"] == 4.0
