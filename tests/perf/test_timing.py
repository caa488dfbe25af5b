"""How long a case is measured, and which time counts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8kit.perf import timing
from fp8kit.perf.timing import Effort, calls_for, copies_past_cache


def new_clock() -> Any:
    """Return the clock of one measurement, which remembers how long a start takes."""
    return timing._Clock()


def test_a_round_has_as_many_calls_as_fit_and_every_copy() -> None:
    effort = Effort(round_ms=4.0)
    assert calls_for(effort, 0.05, 2) == 80
    assert calls_for(effort, 10.0, 3) == 3
    assert calls_for(effort, 0.0, 2) == calls_for(effort, 1e-9, 2) < 1e6
    assert calls_for(effort, 10.0, 1024) == 1024


def test_the_weights_of_a_small_layer_leave_the_cache(faked_cuda: Callable[..., None]) -> None:
    h200 = SimpleNamespace(L2_cache_size=60 * 2**20)
    faked_cuda(get_device_properties=lambda _: h200)
    for n, k in ((960, 576), (512, 512), (4096, 14336)):
        assert copies_past_cache(n * k, torch.device("cuda")) * n * k > 2 * h200.L2_cache_size
    assert copies_past_cache(1, torch.device("cuda")) == 1024
    assert copies_past_cache(1, torch.device("cpu")) == 64


@pytest.mark.parametrize("late", [0, 2, 99])
def test_a_graph_that_came_too_late_is_timed_again(
    late: int, faked_cuda: Callable[..., None]
) -> None:
    sleeps: list[int] = []
    event = SimpleNamespace(
        record=lambda: None,
        synchronize=lambda: None,
        query=lambda: len(sleeps) <= late,  # the GPU has passed the start: it waited for the host
        elapsed_time=lambda _: float(len(sleeps)),
    )
    faked_cuda(_sleep=sleeps.append, Event=lambda **_: event)
    clock, graph = new_clock(), SimpleNamespace(replay=lambda: None)
    tries = clock.milliseconds(graph)
    assert tries == len(sleeps) == late + 1 if late < 99 else len(sleeps) < 20
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(sleeps))

    assert clock.milliseconds(graph) == tries + 1  # the next one is given as long at once
    assert sleeps[-1] == sleeps[-2]


@pytest.mark.gpu
def test_what_the_host_needs_does_not_decide_how_many_calls_a_graph_has() -> None:
    x = torch.zeros(16, device="cuda")

    def slow_to_launch(_: int) -> None:
        time.sleep(1e-3)
        x.add_(1)

    _, calls = timing._capture(slow_to_launch, 2, Effort(round_ms=1.0), new_clock())
    assert calls > 100  # of a microsecond or two on the GPU
