"""Products of the sizes of real models, by every backend, on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fp8kit
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import DECODING, MATMUL_BACKENDS, MatmulOperands, MatmulProblem
from numerics import assert_fast_sums, assert_matmul, assert_no_drift, exact_product

PAIRS = {"row": (ROW, ROW), "block": (GROUP128, BLOCK), "tensor": (TENSOR, TENSOR)}
SAMPLED = 257  # number of rows that are compared, including the first and the last
E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.gpu


def operands(
    m: int, n: int, k: int, pair: str, same_sign: bool = False
) -> tuple[fp8kit.QTensor, fp8kit.QTensor]:
    groups = PAIRS[pair]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-1, 1, m, device="cuda")[:, None].to(x.dtype)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    if same_sign:
        x, w = x.abs(), w.abs()
    return fp8kit.quantize(x, groups[0]), fp8kit.quantize(w, groups[1], role="weight")


def results(
    x_q: fp8kit.QTensor, w_q: fp8kit.QTensor, accum: str = "precise", decoding: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Multiply by every backend that supports the operands, in each of its configurations."""
    groups: tuple[GroupShape, GroupShape] = (x_q.group, w_q.group)
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, torch.bfloat16, None, accum, False)
    found = 0
    for backend, *_ in MATMUL_BACKENDS:
        module = choose(MATMUL_BACKENDS, problem, backend).implementation
        if module is None or (backend in DECODING and not decoding):
            continue
        for name in ("", *module.configurations(problem)):
            cut = dataclasses.replace(problem, configuration=name)
            found += 1
            operands = MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale)
            yield backend, module.run(operands, cut)
    assert found >= (2 if decoding else 1)


def sampled(m: int) -> Tensor:
    count = min(m, SAMPLED)
    return torch.arange(count, device="cuda") * (m - 1) // max(count - 1, 1)


def rows_of(x_q: fp8kit.QTensor, rows: Tensor) -> Tensor:
    codes = x_q.data.view(torch.uint8)[rows].view(E4M3)
    scale = x_q.scale if x_q.group == TENSOR else x_q.scale[rows]
    return fp8kit.dequantize(fp8kit.QTensor(codes, scale, x_q.group))


@pytest.mark.parametrize("k", [4096, 14336, 28672])
@pytest.mark.parametrize("m", [1, 4, 16, 64, 96, 128, 256, 512, 1024, 4096])
@pytest.mark.parametrize("pair", PAIRS)
def test_sums_of_one_sign_do_not_drift(pair: str, m: int, k: int) -> None:
    x_q, w_q = operands(m, 1536, k, pair, same_sign=True)
    rows = sampled(m)
    exact = exact_product(rows_of(x_q, rows), fp8kit.dequantize(w_q))
    for _, y in results(x_q, w_q):
        assert_no_drift(y[rows], exact)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 4112), (9216, 3072), (2560, 200)])
@pytest.mark.parametrize("m", [513, 1024, 4096, 16384])
@pytest.mark.parametrize("pair", PAIRS)
def test_many_rows_match_the_exact_product(pair: str, m: int, n: int, k: int) -> None:
    x_q, w_q = operands(m, n, k, pair)
    rows, w = sampled(m), fp8kit.dequantize(w_q)
    x = rows_of(x_q, rows)
    for backend, y in results(x_q, w_q):
        assert_matmul(y[rows], x, w, backend=backend)


@pytest.mark.parametrize("k", [200, 4096, 28672])
@pytest.mark.parametrize("m", [1, 16, 64, 128, 600, 4096])
@pytest.mark.parametrize("pair", ["row", "tensor"])
def test_fast_sums_lose_no_more_than_short_accumulators_do(pair: str, m: int, k: int) -> None:
    x_q, w_q = operands(m, 1040, k, pair)
    rows, w = sampled(m), fp8kit.dequantize(w_q)
    exact = exact_product(rows_of(x_q, rows), w)
    for _, y in results(x_q, w_q, "fast"):
        assert_fast_sums(y[rows], exact)


@pytest.mark.parametrize("pair", PAIRS)
def test_results_of_more_elements_than_32_bits_count(pair: str) -> None:
    m, n = 16384, 140032
    x_q, w_q = operands(m, n, 128, pair)
    rows, w = sampled(m), fp8kit.dequantize(w_q)
    x = rows_of(x_q, rows)
    for backend, y in results(x_q, w_q, decoding=False):
        assert y.numel() > 2**31
        assert_matmul(y[rows], x, w, backend=backend)
        del y
