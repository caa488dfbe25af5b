"""Every backend at every size where its tiles end, between rows of NaN that nothing may read.

`make test-gpu` takes a sample of the sizes; `make sweep` takes all of them.
"""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
import torch

import fp8kit
from edges import around, dealt, sampled
from fp8kit.dispatch.backends import choose
from fp8kit.formats import SCHEMES, GroupShape
from fp8kit.matmul.problem import BACKENDS, MatmulProblem
from numerics import assert_matmul

BACKEND_NAMES = [name for name, *_ in BACKENDS]
QUANTIZED = {name: (s.activation, s.weight) for name, s in SCHEMES.items() if s.activation}
# tiles of every kernel are made of these: 8 tokens and up, 64 weights and up, 128 of K
M_EDGES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
N_EDGES = (8, 16, 64, 128, 192, 256, 384, 512)
K_EDGES = (16, 32, 128, 256, 384, 512, 1024, 2048, 4096)
HANDS = 8
SAMPLE = 24
NAN_CODE = 0x7F


class Size(NamedTuple):
    """``x [m, k] @ w [n, k].T``."""

    m: int
    n: int
    k: int


def sizes() -> list[Size]:
    """Return sizes that meet every edge of M, of N and of K, and each of their neighbours.

    A third of the widths are multiples of 16, which is what the fastest kernels ask for.
    """
    shuffle = random.Random(0)
    ms, ns, ks = (around(edges, 4104) for edges in (M_EDGES, N_EDGES, K_EDGES))
    pairs = zip(ms, itertools.cycle(ns), strict=False)
    aligned = [Size(m, -(-n // 16) * 16, 16 * (1 + (7 * m + n) % 40)) for m, n in pairs]
    for values in (ms, ns, ks):
        shuffle.shuffle(values)
    count = max(map(len, (ms, ns, ks)))
    odd = [Size(ms[i % len(ms)], ns[i % len(ns)], ks[i % len(ks)]) for i in range(count)]
    return sorted({*aligned, *odd, *(Size(s.m, s.n, -(-s.k // 128) * 128) for s in odd)})


def between_nan(q: fp8kit.QTensor) -> fp8kit.QTensor:
    """Move codes to memory whose rows before the first and after the last are NaN."""
    rows, cols = q.data.shape
    room = torch.full((rows + 32, cols), NAN_CODE, dtype=torch.uint8, device=q.data.device)
    room[16:-16] = q.data.view(torch.uint8)
    return fp8kit.QTensor(room[16:-16].view(q.data.dtype), q.scale, q.group)


def operands(size: Size, groups: tuple[GroupShape, GroupShape]) -> tuple[fp8kit.QTensor, ...]:
    x = torch.randn(size.m, size.k, device="cuda")
    w = torch.randn(size.n, size.k, device="cuda")
    x *= torch.logspace(-1, 1, size.m, device="cuda")[:, None]
    found = fp8kit.quantize(x, groups[0]), fp8kit.quantize(w, groups[1], role="weight")
    return tuple(between_nan(q) for q in found)


def wrong(backend: str, pair: str, size: Size, out_dtype: torch.dtype) -> str:
    """Give how a backend misses the exact product; nothing if it does not, or declines the size."""
    groups = QUANTIZED[pair]
    x_q, w_q = operands(size, groups)
    problem = MatmulProblem.of(x_q.data, w_q.data, groups, out_dtype, None, "precise", False)
    if choose(BACKENDS, problem, backend).implementation is None:
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
    dtypes = (torch.bfloat16, torch.float16)
    said = [wrong(backend, pair, size, dtypes[i % 2]) for i, size in enumerate(found)]
    assert not any(said), "\n".join(filter(None, said))


def test_sizes_meet_every_edge_and_its_neighbours() -> None:
    found = sizes()
    for edge, values in ((M_EDGES, {s.m for s in found}), (K_EDGES, {s.k for s in found})):
        assert set(around(edge, 4104)) <= values
    assert set(around(N_EDGES, 4104)) <= {s.n for s in found}
    assert sum(s.k % 128 == 0 and s.n % 16 == 0 for s in found) > 20
