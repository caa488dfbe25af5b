"""Variants in processes of their own: one that fails empties its own column and delays nothing."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import processes
from processes import Case, Plan, Prepared

FAST, SLOW = Case("eager", 2, 3), Case("compiled", 2, 3)
CPU = torch.device("cpu")


def subject(us: float, *results: float) -> Callable[[], Any]:
    """Return a subject that another process can build, with two cases, one of which may fail."""
    found = [Prepared(9.0, 1.5, [result, 0.0]) for result in results]
    ready = dict(zip((FAST, SLOW), found, strict=False))
    return functools.partial(
        SimpleNamespace,
        about=functools.partial(dict, weights_gb=us),
        prepare=ready.__getitem__,
        measure=dict.fromkeys((FAST, SLOW), us).__getitem__,
    )


@pytest.mark.slow
def test_variants_are_measured_in_processes_of_their_own() -> None:
    both, written = (FAST, SLOW), list[Any]()
    plans = [
        Plan("bf16", both, subject(8.0, 2.0, 1.0)),
        Plan("fp8kit", both, subject(4.0, 2.5)),
        Plan("unbuilt", both, functools.partial(int, "x")),
        Plan("dead", (SLOW,), os.abort),
        Plan("late", (FAST,), functools.partial(time.sleep, 600)),
    ]
    start = time.perf_counter()
    processes.compare(
        plans, [[FAST], [SLOW]], lambda *found: written.append(found), rounds=2, limit_s=40
    )
    assert time.perf_counter() - start < 120
    first, (rows, about) = written
    assert len(first[0]) == 2  # what is known to fail is written with the first line
    assert about == {"bf16": {"weights_gb": 8.0}, "fp8kit": {"weights_gb": 4.0}}
    fast, slow = rows
    assert (fast["way"], fast["batch"], fast["tokens"]) == ("eager", 2, 3)
    assert fast["us"] == {"bf16": 8.0, "fp8kit": 4.0}
    assert fast["relative_error"] == {"bf16": 0.0, "fp8kit": 0.25}
    assert fast["peak_gb"] == {"bf16": 1.5, "fp8kit": 1.5}
    assert set(fast["failed"]) == {"unbuilt", "late"}
    assert "invalid literal" in fast["failed"]["unbuilt"]
    assert "not ready in time" in fast["failed"]["late"]
    assert slow["us"] == {"bf16": 8.0}
    assert slow["relative_error"] == {"bf16": 0.0}
    assert set(slow["failed"]) == {"unbuilt", "dead", "fp8kit"}
    assert "the process has ended" in slow["failed"]["dead"]
    assert "KeyError" in slow["failed"]["fp8kit"]


def test_the_median_of_the_rounds_counts() -> None:
    table = processes.Table([FAST, SLOW])
    table.prepared(FAST, "bf16", Prepared(1.0, 0.0, [1.0]))
    for us in (5.0, 1.0, 2.0):
        table.measured(FAST, "bf16", us)
    (row,) = table.rows()
    assert row["us"] == {"bf16": 2.0}
    assert not table.can_measure(SLOW, "bf16")
    table.failed(FAST, "bf16", "gone")
    assert not table.can_measure(FAST, "bf16")


def test_a_result_that_is_not_finite_is_no_result() -> None:
    found = processes.run_first_calls(lambda: torch.ones(2, 3), CPU)
    assert found.result == [1.0] * 6
    assert found.ready_s * 1e6 >= found.first_us > 0
    with pytest.raises(ArithmeticError, match="not finite"):
        processes.run_first_calls(lambda: torch.tensor([1.0, float("nan")]), CPU)


def test_memory_counts_each_tensor_once() -> None:
    model = torch.nn.ModuleList(torch.nn.Linear(4, 8, bias=False) for _ in range(2))
    model[1].weight = model[0].weight
    model.register_buffer("codes", torch.zeros(16).to(torch.float8_e4m3fn))
    found = processes.memory(model)
    assert found == pytest.approx({"weights_gb": (4 * 8 * 4 + 16) / 1e9, "fp8_gb": 16 / 1e9})


def test_a_model_that_is_not_what_its_column_says_is_refused() -> None:
    dense = torch.nn.Linear(4, 8)
    processes.check_fp8(dense, wanted=False)
    with pytest.raises(ValueError, match="GB are FP8"):
        processes.check_fp8(dense, wanted=True)
    dense.register_buffer("codes", torch.zeros(16).to(torch.float8_e4m3fn))
    processes.check_fp8(dense, wanted=True)
    with pytest.raises(ValueError, match="GB are FP8"):
        processes.check_fp8(dense, wanted=False)


def test_calls_in_a_row_count_one_by_one() -> None:
    calls = []

    def call() -> None:
        calls.append(time.sleep(0.002))

    us = processes.wall_us(call, torch.device("cpu"), seconds=0, in_a_row=8)
    assert len(calls) == 8
    assert 2000 <= us < 20_000
