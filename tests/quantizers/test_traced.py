"""Quantization that a compiler sees: the bits of the reference, and when it is chosen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fp8kit
from fp8kit import settings
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, min_scale
from fp8kit.matmul import dequantized
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.quantizers import reference, traced
from numerics import assert_bits_equal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (ROW, GROUP128, GroupShape(1, 64))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def rows(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Give rows of very different sizes, and rows with zeros, NaN and infinities."""
    spread = torch.exp(4 * torch.randn(64, 1))
    x = (torch.randn(64, 200) * spread).to(dtype)
    x[3], x[6], x[7] = 0, -0.0, x[7] * 1e-30
    x[4, 5], x[9, 1] = torch.nan, -torch.nan
    x[5, 7], x[8, 3] = torch.inf, -torch.inf
    return x.to(device)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("bounded", [False, True], ids=["", "scale_ub"])
@pytest.mark.parametrize("rounding", ["exact", "up"])
@pytest.mark.parametrize("codes", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_traced_equals_the_reference(
    group: GroupShape, codes: torch.dtype, rounding: str, bounded: bool, device: torch.device
) -> None:
    bound = torch.tensor(1.5, device=device) if bounded else None
    floor = min_scale(group, codes, "activation")
    for dtype in DTYPES:
        x = rows(dtype, device)
        found = traced.quantize(x, group, codes, floor, bound, rounding)
        expected = reference.quantize(x, group, codes, floor, bound, rounding)
        for a, b in zip(found, expected, strict=True):
            assert a.is_contiguous()
            assert_bits_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.01, 0.0, 1e-42, float("inf"), float("nan")])
def test_traced_static_equals_the_reference(
    scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    x, given = rows(dtype, device), torch.full((1, 1), scale, device=device)
    found = traced.quantize_static(x, given, E4M3)
    assert_bits_equal(found, reference.quantize_static(x, given, TENSOR, E4M3))


def test_quotients_next_to_the_middle_of_two_numbers_round_alike(device: torch.device) -> None:
    """Search operands whose quotient is as close to a rounding boundary as any can be."""
    denominators = torch.randint(2**23, 2**24, (4096, 1), device=device)
    # numerators nearest to (m + 1/2) times the denominator, for 25-bit middles m
    middles = torch.randint(2**24, 2**25, (4096, 64), device=device) | 1
    numerators = (middles * denominators / 2.0**25).round().clamp(2**23, 2**24 - 1)
    x, s = numerators.float(), denominators.float()
    assert_bits_equal(traced._divided(x, s), x / s)


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # what inductor warns about is not ours to fix
@pytest.mark.parametrize("group", [ROW, GROUP128], ids=str)
def test_inductor_keeps_the_bits(group: GroupShape, device: torch.device) -> None:
    compiled = torch.compile(traced.quantize, fullgraph=True, dynamic=True)
    floor = min_scale(group, E4M3, "activation")
    x = rows(torch.bfloat16, device)
    for part in (x, x[:7]):
        found = compiled(part, group, E4M3, floor, None, "exact")
        expected = reference.quantize(part, group, E4M3, floor, None, "exact")
        for a, b in zip(found, expected, strict=True):
            assert_bits_equal(a, b)


@needs_compiler
@pytest.mark.usefixtures("visible_quantizer")
@pytest.mark.filterwarnings("ignore")  # what inductor warns about is not ours to fix
@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_hand_scales_by_column_to_the_product(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = fp8kit.Fp8Linear(512, 128, False, "FP8_BLOCK").requires_grad_(False)
    dense = torch.randn(128, 512)
    layer.load_state_dict({"weight": dense})
    seen: list[tuple[int, ...]] = []
    run = dequantized.BACKEND.run

    def watched(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        seen.append(operands.x_scale.stride())
        return run(operands, problem)

    monkeypatch.setattr(dequantized.BACKEND, "run", watched)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for m in (64, 8):
        x = torch.randn(m, 512)
        with torch.no_grad():
            assert_bits_equal(compiled(x), layer(x))
        assert seen == [(1, m), (1, m)]
        seen.clear()


def visible(group: GroupShape, static: bool = False, where: str = "cpu") -> bool:
    return traced.is_visible(group, E4M3, static, torch.device(where))


def test_eager_calls_are_not_traced() -> None:
    assert not visible(ROW)


@pytest.mark.usefixtures("visible_quantizer")
def test_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "is_compiled", lambda: True)
    assert visible(ROW)
    assert visible(GROUP128)
    assert visible(TENSOR, static=True)
    assert not any(visible(group) for group in (TENSOR, BLOCK, MX))
    assert not traced.is_visible(ROW, torch.float8_e4m3fnuz, False, torch.device("cpu"))
    assert not visible(ROW, where="meta")
    monkeypatch.setattr(settings, "COMPILED_QUANTIZER", "opaque")
    assert not visible(ROW)


@pytest.mark.usefixtures("visible_quantizer")
@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), False), ((8, 9), True), ((9, 0), 1)])
def test_gpus_that_cannot_convert_keep_the_operator(
    capability: tuple[int, int], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(traced, "is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert visible(ROW, where="cuda:0") == wanted
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not visible(ROW, where="cuda:0")
