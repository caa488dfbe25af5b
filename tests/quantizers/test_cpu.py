"""The quantizer for CPUs: bit-equal to the reference, and its chunks of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fp8kit
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.quantizers import cpu, reference
from fp8kit.quantizers.problem import QUANTIZER_BACKENDS, QuantizeProblem
from numerics import assert_bits_equal

GROUPS = (
    ROW,
    TENSOR,
    GROUP128,
    BLOCK,
    MX,
    GroupShape(1, 64),
    GroupShape(4, 32),
    GroupShape(4, -1),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CODES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
BAD = (float("nan"), -float("nan"), float("inf"), -float("inf"))


def agree(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype = torch.float8_e4m3fn,
    bound: float | None = None,
    rounding: str | None = None,
    quantize: Callable[..., tuple[Tensor, Tensor]] = cpu.quantize,
) -> None:
    rounding = rounding or ("floor" if group == MX else "exact")
    ub = None if bound is None else torch.tensor(bound)
    arguments = (x, group, dtype, 1e-10 / 448, ub, rounding)
    for found, wanted in zip(quantize(*arguments), reference.quantize(*arguments), strict=True):
        assert found.shape == wanted.shape
        assert_bits_equal(found, wanted)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("_PIECE", "_PIECE_PER_THREAD"):
        monkeypatch.setattr(cpu, size, 1000)


@pytest.mark.parametrize("inputs", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_bit_pattern(group: GroupShape, inputs: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16)[torch.randperm(2**16)]
    x = codes.view(torch.bfloat16 if inputs == torch.float32 else inputs).to(inputs)
    agree(x.reshape(128, 512), group)
    finite = x.nan_to_num(1.0, 2.0, -2.0).reshape(256, 256)
    for dtype in CODES:
        agree(finite, group, dtype)
        agree(finite, group, dtype, rounding="up")
        agree(x.reshape(256, 256), group, dtype, bound=3.0)


@given(
    group=st.sampled_from(GROUPS),
    shape=st.lists(st.integers(0, 300), min_size=2, max_size=3),
    inputs=st.sampled_from(DTYPES),
    bad=st.one_of(st.none(), st.sampled_from(BAD)),
    transposed=st.booleans(),
)
def test_any_shape(
    group: GroupShape, shape: list[int], inputs: torch.dtype, bad: float | None, transposed: bool
) -> None:
    if len(shape) == 3:
        shape[0] %= 4
    x = (torch.randn(shape) * 10.0 ** float(torch.randint(-9, 9, ()))).to(inputs)
    if bad is not None and x.numel():
        x.view(-1)[-1] = bad
    agree(x.transpose(-1, -2) if transposed else x, group)


@pytest.mark.parametrize("bad", [None, *BAD])
@pytest.mark.parametrize("inputs", DTYPES, ids=str)
def test_static_scales(inputs: torch.dtype, bad: float | None) -> None:
    x = (torch.randn(64, 100) * 100).to(inputs)
    if bad is not None:
        x[3, 7] = bad
    for value in (0.01, 1.0, 1e-30, float("nan")):
        scale = torch.full((1, 1), value)
        arguments = (x, scale, TENSOR, torch.float8_e4m3fn)
        assert_bits_equal(cpu.quantize_static(*arguments), reference.quantize_static(*arguments))


def test_dispatch_prefers_the_cpu_quantizer() -> None:
    problem = QuantizeProblem.of(torch.ones(2, 2), ROW, torch.float8_e4m3fn)
    assert choose(QUANTIZER_BACKENDS, problem).backend == "cpu"
    other = QuantizeProblem.of(torch.ones(2, 2).double(), ROW, torch.float8_e4m3fn)
    assert "reads no" in (cpu.supports(other) or "")


def test_the_input_is_left_alone() -> None:
    x = torch.randn(8, 256)
    before = x.clone()
    fp8kit.quantize(x, ROW)
    assert torch.equal(x, before)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_default_dtype_changes_no_code(group: GroupShape, default: torch.dtype) -> None:
    x = torch.linspace(-3, 5, 8 * 256).view(8, 256)
    expected = cpu.quantize(x, group, torch.float8_e4m3fn, 1e-10 / 448, None, "exact")
    torch.set_default_dtype(default)
    try:
        found = cpu.quantize(x, group, torch.float8_e4m3fn, 1e-10 / 448, None, "exact")
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, wanted in zip(found, expected, strict=True):
        assert_bits_equal(ours, wanted)


@pytest.mark.parametrize("part", [0, 1], ids=["codes", "scales"])
def test_the_comparison_can_fail(part: int) -> None:
    def wrong_in_one(*arguments: Any) -> tuple[Tensor, Tensor]:
        found = cpu.quantize(*arguments)
        found[part].view(torch.uint8)[0, 0] ^= 1
        return found

    x = -torch.rand(4, 64)
    agree(x, ROW)
    with pytest.raises(AssertionError):
        agree(x, ROW, quantize=wrong_in_one)
