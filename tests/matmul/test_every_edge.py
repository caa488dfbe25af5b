"""Every backend at every size where its tiles end; operands lie between NaN that it must not read.

`make test-gpu` takes a sample of the sizes; `make sweep` takes all of them.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import NamedTuple

import pytest
import torch

import fp8kit
from edges import around, between_nan, changes, dealt, sampled
from fp8kit.dispatch.backends import choose
from fp8kit.formats import SCHEMES, GroupShape
from fp8kit.matmul.hopper import heuristics
from fp8kit.matmul.hopper.device import H200
from fp8kit.matmul.hopper.tile_config import FEW_ROWS, TILE_K
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulProblem, m_bucket
from fp8kit.matmul.tma_operands import ALIGN
from numerics import assert_matmul

triton_gemm = pytest.importorskip("fp8kit.matmul.triton_gemm")

BACKEND_NAMES = [name for name, *_ in MATMUL_BACKENDS]
QUANTIZED = {name: (s.activation, s.weight) for name, s in SCHEMES.items() if s.activation}
LAYERS = ((512, 512), (1536, 1024), (4096, 4096))  # N and K of which tiles are chosen
MOST = 4104
HANDS = 8
SAMPLE = 24
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Size(NamedTuple):
    """``x [m, k] @ w [n, k].T``."""

    m: int
    n: int
    k: int


class Edges(NamedTuple):
    """Sizes at which tiles end, or at which other tiles are chosen."""

    m: list[int]
    n: list[int]
    k: list[int]


@functools.cache
def edges() -> Edges:
    """Find the edges of the kernels that choose their own tiles: of Hopper's and of Triton's."""
    tokens, weights, depths, found = {FEW_ROWS}, {ALIGN}, {ALIGN}, Edges([], [], [])
    counts = [m for power in range(13) for m in {1 << power, 3 << power >> 1}]
    for (n, k), m in itertools.product(LAYERS, counts):
        for blocks in (False, True):
            config = heuristics.choose(m, n, k, H200, blocks)
            tokens.add(config.tokens)
            weights.add(config.weights)
        for groups in QUANTIZED.values():
            tile = triton_tile(m, n, k, groups)
            tokens.add(tile.rows)
            weights.add(tile.cols)
            depths.update((tile.depth, triton_tile(m, n, k - 1, groups).depth))
    for n, k in LAYERS:
        found.m.extend(changes(lambda m, n=n, k=k: heuristics.choose(m, n, k, H200, False), 256))
        found.n.extend(changes(lambda n, k=k: heuristics.choose(FEW_ROWS, n, k, H200, False), MOST))
        # the last K of each choice; choices depend on the number of whole tiles along K
        others = changes(
            lambda k, n=n: heuristics.choose(FEW_ROWS, n, k, H200, False), MOST, TILE_K
        )
        found.k.extend(k - TILE_K for k in others)
    for values, extents in zip(found, (tokens, weights, depths), strict=True):
        values.extend(times * extent for extent in extents for times in (1, 2, 3, 8))
    return Edges(*(sorted({e for e in values if e <= MOST}) for values in found))


def triton_tile(
    m: int, n: int, k: int, groups: tuple[GroupShape, GroupShape]
) -> triton_gemm.TritonTile:
    """Return the tile of Triton's GEMM for a product on an H200."""
    e4m3, place = torch.float8_e4m3fn, ("cuda", (9, 0))
    numbers = (e4m3, e4m3, torch.bfloat16, False, "precise", False)
    problem = MatmulProblem(m_bucket(m), n, k, *groups, *numbers, *place)
    return triton_gemm.choose_tile(problem, triton_gemm.Device(H200.sm_count, 228 * 1024))


def sizes() -> list[Size]:
    """Return sizes that meet every edge of M, of N and of K, and each of their neighbours.

    A third of the widths are multiples of 16, which the fastest kernels require.
    """
    shuffle = random.Random(0)
    ms, ns, ks = (around(values, MOST) for values in edges())
    pairs = zip(ms, itertools.cycle(ns), strict=False)
    aligned = [Size(m, -(-n // 16) * 16, 16 * (1 + (7 * m + n) % 40)) for m, n in pairs]
    for values in (ms, ns, ks):
        shuffle.shuffle(values)
    count = max(map(len, (ms, ns, ks)))
    odd = [Size(ms[i % len(ms)], ns[i % len(ns)], ks[i % len(ks)]) for i in range(count)]
    return sorted({*aligned, *odd, *(Size(s.m, s.n, -(-s.k // 128) * 128) for s in odd)})


def operands(
    size: Size, groups: tuple[GroupShape, GroupShape], device: str
) -> tuple[fp8kit.QTensor, ...]:
    """Draw operands whose codes and scales are surrounded by NaN."""
    x = torch.randn(size.m, size.k, device=device)
    w = torch.randn(size.n, size.k, device=device)
    x *= torch.logspace(-1, 1, size.m, device=device)[:, None]
    found = fp8kit.quantize(x, groups[0]), fp8kit.quantize(w, groups[1], role="weight")
    return tuple(fp8kit.QTensor(between_nan(q.data), between_nan(q.scale), q.group) for q in found)


def wrong(backend: str, pair: str, size: Size, out_dtype: torch.dtype, device: str = "cuda") -> str:
    """Return how a backend misses the exact product; empty if it does not, or declines the size."""
    groups = QUANTIZED[pair]
    x_q, w_q = operands(size, groups, device)
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, out_dtype, None, "precise", False)
    if choose(MATMUL_BACKENDS, problem, backend).implementation is None:
        return ""
    y = fp8kit.scaled_mm(x_q, w_q, out_dtype=out_dtype, backend=backend)
    try:
        assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q), backend=backend)
    except AssertionError as error:
        return f"{size} {out_dtype}: {error}"
    return ""


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hand", range(HANDS))
@pytest.mark.parametrize("pair", QUANTIZED)
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_every_size_is_within_the_bound(backend: str, pair: str, hand: int) -> None:
    found = dealt(sampled(sizes(), SAMPLE, f"{backend} {pair}"), HANDS)[hand]
    said = [wrong(backend, pair, size, DTYPES[i % 3]) for i, size in enumerate(found)]
    assert not any(said), "\n".join(filter(None, said))


def test_sizes_meet_every_edge_and_its_neighbours() -> None:
    found = sizes()
    for beside, values in zip(edges(), zip(*found, strict=True), strict=True):
        assert len(beside) > 10
        assert set(around(beside, MOST)) <= set(values)
    assert sum(s.k % 128 == 0 and s.n % 16 == 0 for s in found) > 20


@pytest.mark.parametrize("pair", QUANTIZED)
def test_the_sweep_runs_on_a_cpu(pair: str) -> None:
    for dtype in DTYPES:
        assert wrong("reference", pair, Size(9, 40, 161), dtype, "cpu") == ""


def test_what_lies_beside_operands_is_nan() -> None:
    x_q = operands(Size(5, 16, 256), QUANTIZED["FP8_BLOCK"], "cpu")[0]
    for tensor in x_q.data.float(), x_q.scale:
        assert tensor.isfinite().all()
    for tensor in x_q.data, x_q.scale:
        for row in (-1, tensor.shape[0]):
            start = tensor.storage_offset() + row * tensor.stride(0)
            beside = tensor.as_strided(tensor.shape[1:], tensor.stride()[1:], start)
            assert beside.float().isnan().all()
