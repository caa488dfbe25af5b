"""The fit of costs finds the costs from which the measurements were made."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import tiles as bench
from fp8kit.matmul.hopper.device import H200, Costs
from fp8kit.matmul.hopper.heuristics import candidates, choose, estimates

PROBLEMS = [(m, n, k) for m in (96, 256, 512) for n, k in ((4096, 4096), (10240, 8192))]
OTHER = replace(Costs(), epilogue=2.0, reduction=(0.5, 0.6, 0.7), steps=(0.1, 0.3, 0.6))


def as_if(costs: Costs) -> list[bench.Measured]:
    """Return the measurements of a GPU whose times are those that the costs predict."""
    return [
        bench.Measured(
            problem,
            H200,
            block_scales,
            estimates(problem, H200, block_scales, costs),
        )
        for problem in PROBLEMS
        for block_scales in (False, True)
    ]


def mean_loss(found: list[bench.Measured], costs: Costs) -> float:
    return sum(one.loss(costs) for one in found) / len(found)


def test_a_choice_by_the_true_costs_loses_nothing() -> None:
    assert mean_loss(as_if(OTHER), OTHER) == 0
    assert mean_loss(as_if(OTHER), Costs()) > 0.02


def test_a_choice_that_was_not_measured_is_no_gain() -> None:
    one = as_if(OTHER)[0]
    best = min(one.us, key=one.us.__getitem__)
    others = replace(one, us={config: us for config, us in one.us.items() if config != best})
    assert one.loss(OTHER) == 0 < others.loss(OTHER) == bench.UNMEASURED


def test_a_fit_comes_nearer_to_the_truth() -> None:
    found = as_if(OTHER)
    assert mean_loss(found, bench.fit(found, 300)) < mean_loss(found, Costs()) / 2


def test_costs_move_a_little_and_not_all_of_them() -> None:
    rng = random.Random(0)
    start = asdict(Costs())
    changed = [
        sum(asdict(bench.moved(Costs(), rng))[name] != start[name] for name in start)
        for _ in range(50)
    ]
    assert 0 < sum(changed) < 50 * len(start)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_chosen_is_promising(problem: tuple[int, int, int]) -> None:
    configs = bench.promising(problem, H200, False, 1.5)
    assert choose(*problem, H200, False) in configs
    assert len(bench.promising(problem, H200, False, 1.0)) <= len(configs)
    assert len(configs) < len(candidates(problem, H200, False))


def test_a_result_file_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {
            "shape": "8b.o",
            "scales": "block" if one.block_scales else "row",
            "sm_count": one.device.sm_count,
            **dict(zip("mnk", one.problem, strict=True)),
            "configs": [{"config": asdict(config), "us": us} for config, us in one.us.items()],
        }
        for one in as_if(OTHER)
    ]
    assert [bench.measured(row) for row in rows] == as_if(OTHER)
    path = tmp_path / "configs.json"
    bench.write_results(path, rows)
    bench.main(["fit", str(path), "--trials", "0"])
    printed = capsys.readouterr().out
    assert "today: " in printed
    assert f"reduction = {Costs().reduction}" in printed
    bench.report(rows[0])
    assert "8b.o" in capsys.readouterr().out
