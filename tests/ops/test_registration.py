"""Registered operators repeat recordings before torch's dispatcher, and Dynamo stays out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fp8kit
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install

X = torch.randn(3, 128).bfloat16()
WEIGHT = torch.randn(64, 128)
E4M3 = torch.float8_e4m3fn
CODES_FORMAT = (None, [1, -1], E4M3, 1e-12, None, "exact")
OPS = torch.ops.fp8kit


@pytest.fixture
def cpu_backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


def calls() -> dict[str, Callable[[Tensor], Any]]:
    """Return a call of each operator that repeats recordings, by the operator's name."""
    w = fp8kit.quantize(WEIGHT, role="weight")
    groups, x_q = ([1, -1], [1, -1]), fp8kit.quantize(X)
    static = torch.full((3, 1), 0.01)
    halves = ([*w.data.split(32)], [*w.scale.split(32)], [], None)  # neighbours, as a layer joins
    norm, ids = torch.rand(128).bfloat16(), torch.zeros(3, 1, dtype=torch.int64)
    w13 = fp8kit.quantize(torch.randn(2, 128, 128), role="weight")
    w2, probabilities = fp8kit.quantize(torch.randn(2, 128, 64), role="weight"), torch.ones(3, 1)
    return {
        "quantize": lambda x: OPS.quantize.default(x, groups[0], E4M3, 1e-12, None, "exact"),
        "quantize_static": lambda x: OPS.quantize_static.default(x, static, groups[0], E4M3),
        "linear": lambda x: OPS.linear.default(
            x, w.data, w.scale, None, None, None, *groups, "exact", "precise", False, None
        ),
        "joined_linear": lambda x: OPS.joined_linear.default(
            x, *halves, *groups, "exact", "precise", False, None
        ),
        "scaled_mm": lambda _: OPS.scaled_mm.default(
            x_q.data, x_q.scale, w.data, w.scale, None, *groups,
            torch.bfloat16, "precise", False, None,
        ),
        "experts": lambda x: OPS.experts.default(
            x, ids, probabilities, w13.data, w13.scale, None, None, w2.data, w2.scale, None, None,
            None, *groups, "exact", *fp8kit.moe.Activation().words(), False, False, None,
        ),
        "activation_quantize": lambda x: OPS.activation_quantize.default(
            x, None, "silu", *CODES_FORMAT
        ),
        "rms_norm_quantize": lambda x: OPS.rms_norm_quantize.default(
            x, None, norm, 1e-6, 0.0, "stepwise", *CODES_FORMAT
        ),
    }  # fmt: skip


def files_run(call: Callable[[], object]) -> set[str]:
    """Return the files whose functions a call enters."""
    entered = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("name", list(calls()))
def test_recordings_are_repeated_before_dispatch(name: str, cpu_backends: CpuBackends) -> None:
    call = calls()[name]
    wanted, autograds = call(X), 0
    for turn in range(4):
        cpu_backends.calls.clear()
        files = files_run(lambda: call(X))
        autograds += any(f.endswith("torch/_library/autograd.py") for f in files)
        if turn > 1:
            assert cpu_backends.calls == []
    assert autograds == 1  # the second call in all, which is recorded
    for mine, true in zip(flat(call(X)), flat(wanted), strict=True):
        assert_bits_equal(mine, true)


def test_modes_see_an_operator_that_was_recorded(cpu_backends: CpuBackends) -> None:
    call, seen = calls()["linear"], []
    for _ in range(3):
        call(X)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        call(X)
    assert "fp8kit.linear.default" in seen


def test_tracers_before_autograd_see_an_operator_that_was_recorded(
    cpu_backends: CpuBackends,
) -> None:
    call = calls()["quantize"]
    for _ in range(3):
        call(X)
    graph = make_fx(call, pre_dispatch=True)(X)
    for mine, true in zip(graph(2 * X.flip(0)), call(2 * X.flip(0)), strict=True):
        assert_bits_equal(mine, true)


@pytest.mark.parametrize("name", list(calls()))
def test_the_dispatcher_names_missing_arguments(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"fp8kit::{name}.. is missing value for argument"):
        getattr(OPS, name).default(X)


def test_autocast_and_names_of_arguments_reach_the_dispatcher(cpu_backends: CpuBackends) -> None:
    call = calls()["quantize"]
    wanted = call(X)
    for _ in range(3):
        call(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert any(f.endswith("torch/_library/autograd.py") for f in files_run(lambda: call(X)))
    named = OPS.quantize.default(
        x=X, group=[1, -1], dtype=E4M3, min_scale=1e-12, scale_ub=None,
        scale_rounding="exact",
    )  # fmt: skip
    for mine, true in zip(named, wanted, strict=True):
        assert_bits_equal(mine, true)
    w = fp8kit.quantize(WEIGHT, role="weight")
    linear = functools.partial(
        OPS.linear.default, X, w.data, w.scale, None, None, None, [1, -1], [1, -1],
        "exact", "precise", False,
    )  # fmt: skip
    for _ in range(3):
        linear()
    assert linear(out_dtype=torch.float32).dtype == torch.float32


def test_a_profiler_lists_an_operator_that_was_recorded(cpu_backends: CpuBackends) -> None:
    call = calls()["linear"]
    for _ in range(3):
        call(X)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call(X)
    assert "fp8kit::linear" in {event.name for event in profiled.events() or ()}


def test_a_recorded_operator_has_gradients(cpu_backends: CpuBackends) -> None:
    call, x = calls()["linear"], X.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            call(x)
        assert not call(x).requires_grad
    call(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    with pytest.raises(RuntimeError, match="A gradient through quantize"):
        fp8kit.quantize(x).scale.sum().backward()


def test_tensors_without_memory_reach_the_kernel(cpu_backends: CpuBackends) -> None:
    call = calls()["linear"]
    for _ in range(3):
        call(X)
    zeros = torch._efficientzerotensor(X.shape, dtype=X.dtype)
    assert_bits_equal(call(zeros), call(torch.zeros_like(X)))
    y = call(torch._to_functional_tensor(X))
    assert_bits_equal(torch._from_functional_tensor(y), call(X))


@pytest.mark.parametrize("recorded", [False, True])
def test_dynamo_stays_out_of_kernels(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if recorded:
        install(monkeypatch)
    counter = CompileCounter()

    @torch.compiler.disable(recursive=False)
    def behind_a_break(x: Tensor) -> Tensor:
        y: Tensor = OPS.quantize.default(x, [1, -1], E4M3, 1e-12, None, "exact")[0]
        return y

    @torch.compile(backend=counter)
    def function(x: Tensor) -> Tensor:
        return behind_a_break(x + 1).float()

    wanted = fp8kit.quantize(X + 1).data.float()
    for _ in range(4):
        assert_bits_equal(function(X), wanted)
    # the frame before the break and the one behind it
    assert (counter.frame_count, counter.op_count) == (2, 2)


def test_dynamo_stays_out_of_backwards() -> None:
    torch._dynamo.reset()
    counter, x = CompileCounter(), X.clone().requires_grad_()
    y = calls()["linear"](x)

    @torch.compiler.disable(recursive=False)
    def behind_a_break() -> Tensor:
        return torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]

    @torch.compile(backend=counter)
    def function(bias: Tensor) -> Tensor:
        return behind_a_break() + bias

    wanted = behind_a_break()
    assert_bits_equal(function(torch.zeros(128).bfloat16()), wanted)
    assert counter.op_count == 1  # that behind the break
