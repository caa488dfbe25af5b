"""Kernels are collected, then compiled in parallel; no launch runs before they are compiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import recorded_calls
from fp8kit.runtime import compile_ahead, weight_hazards
from fp8kit.runtime.replay_cache import Operator, ReplayCache

cuda_launch = pytest.importorskip("fp8kit.runtime.cuda_launch")
import launches  # noqa: E402
from runtime.test_cuda_launch import STREAM, FakeDriver  # noqa: E402


class Compiler:
    """Replaces NVRTC; compiles as many sources at once as the test says."""

    def __init__(self, together: int) -> None:
        self.barrier = threading.Barrier(together, timeout=20)
        self.sources: list[str] = []
        self.fails = ""

    def __call__(self, source: str, architecture: str) -> bytes:
        self.sources.append(source)
        if source == self.fails:
            raise RuntimeError("does not compile")
        self.barrier.wait()
        return architecture.encode()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]) -> FakeDriver:
    made = FakeDriver(cuda_launch.driver)
    made.kinds = [ctypes.c_int]
    faked_cuda(get_device_capability=lambda _: (9, 0))
    launches.on_driver(monkeypatch, made, STREAM)
    return made


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler(2)
    monkeypatch.setattr(cuda_launch.nvrtc, "cubin", made)
    return made


def kernel(source: str) -> Any:
    return cuda_launch.Kernel(source, "name", 32, 0, 0, torch.device("cuda", 0))


def launch(made: Any) -> None:
    made.launch(3, (ctypes.c_int(1),), overlap=False)


def test_noted_kernels_compile_together_and_launch_later(
    fake: FakeDriver, compiler: Compiler
) -> None:
    with compile_ahead.collecting():
        both = [kernel("a"), kernel("b")]
        for made in both:
            launch(made)
            assert made.most_blocks == 1
        assert compiler.sources == []
    assert sorted(compiler.sources) == ["a", "b"]  # each waited for the other
    assert fake.launched == []
    for made in both:
        launch(made)
    assert len(fake.launched) == 2
    assert compile_ahead.collected() is None


def test_a_kernel_that_is_there_is_not_launched_either(
    fake: FakeDriver, compiler: Compiler
) -> None:
    compiler.barrier = threading.Barrier(1)
    made = kernel("a")
    with compile_ahead.collecting():
        launch(made)
    assert fake.launched == []


def test_a_trial_inside_runs(fake: FakeDriver, compiler: Compiler) -> None:
    compiler.barrier = threading.Barrier(1)
    with compile_ahead.collecting(), compile_ahead.launching():
        launch(kernel("a"))
    assert len(fake.launched) == 1


def test_a_source_that_fails_is_told_of_now_and_at_each_launch(
    fake: FakeDriver, compiler: Compiler
) -> None:
    compiler.barrier, compiler.fails = threading.Barrier(1), "b"
    with pytest.raises(RuntimeError, match="does not compile"), compile_ahead.collecting():
        made = kernel("b")
    with pytest.raises(RuntimeError, match="does not compile"):
        launch(made)
    assert fake.launched == []


def test_other_threads_launch_what_one_has_noted(fake: FakeDriver, compiler: Compiler) -> None:
    compiler.barrier = threading.Barrier(1)
    with compile_ahead.collecting():
        made = kernel("a")
        other = threading.Thread(target=launch, args=(made,))
        other.start()
        other.join()
        assert len(fake.launched) == 1
        launch(made)
    assert len(fake.launched) == 1
    assert compiler.sources == ["a"]


def test_noted_calls_leave_neither_recordings_nor_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.record_on_cpu(monkeypatch)
    cache, x, weight = ReplayCache(), torch.ones(4), torch.ones(4)
    operator = Operator(torch.neg, torch.neg)
    with compile_ahead.collecting():
        for _ in range(3):
            cache.call(operator, (x,), (), ())
        weight_hazards.mark_synchronized(weight)
    assert not cache
    assert not weight_hazards.safe_to_prefetch(weight)
    cache.call(operator, (x,), (), ())
    weight_hazards.mark_synchronized(weight)
    assert len(cache) == 1
    assert weight_hazards.safe_to_prefetch(weight)
