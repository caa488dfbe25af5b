"""Experts at every number of pairs, experts and features at which the tiling changes.

Inputs and weights are such that the tensor core's short sums hold the first GEMM's result exactly,
so that only fp32 rounding can change a code of the intermediate. Operands are surrounded by NaN,
and the weights of experts without tokens are NaN.

`make test-gpu` takes a sample of the cases; `make sweep` takes all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fp8kit
from edges import E8M0_NAN, around, between_nan, changes, dealt, sampled
from fp8kit import moe
from fp8kit.dispatch.backends import choose
from fp8kit.formats import BLOCK, FP8_FORMATS, GROUP128, MX, ROW, TENSOR, GroupShape, QTensor
from fp8kit.matmul.hopper.tile_config import TILE_K, round_up
from fp8kit.matmul.problem import MatmulProblem, m_bucket
from fp8kit.moe import operators, reference
from fp8kit.moe.hopper import tile_config
from fp8kit.moe.problem import (
    MOE_BACKENDS,
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedOperands,
    GroupedProblem,
)
from numerics import SHORT_SUM, assert_bits_equal, assert_matmul
from slow_experts import (
    Layer,
    Yardstick,
    assert_experts,
    operator_arguments,
    slow_by_expert,
    slow_experts,
    stack,
)

triton = pytest.importorskip("fp8kit.moe.triton")
from fp8kit.matmul.triton_gemm import Device  # noqa: E402

E4M3 = torch.float8_e4m3fn
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
H200 = Device(132, 228 * 1024)
MOST_TOP_K = 8
MOST = 7  # of integers: the codes of a group whose largest is 7 are exact
STATIC = 2**-6
HANDS = 8
SAMPLE = 24
FEW_EXPERTS = 32


class Kind(NamedTuple):
    """The properties of a case except its sizes; ``integral``: scales are powers of two."""

    groups: tuple[GroupShape | None, GroupShape]
    activation: moe.Activation = moe.Activation()
    dtype: torch.dtype = BF16
    biases: bool = False
    integral: bool = False

    @property
    def static(self) -> bool:
        return self.groups[0] == TENSOR

    def on_hopper(self, hidden: int, inner: int) -> bool:
        """Return whether the Hopper kernels support these sizes."""
        multiple = tile_config.HALF if self.groups[1] == BLOCK else 16
        known = self.groups[0] not in (None, MX)
        return known and hidden % 16 == 0 and inner % multiple == 0


OSS = moe.Activation("silu", interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0)
KINDS = {
    "rows": Kind((ROW, ROW)),
    "blocks": Kind((GROUP128, BLOCK)),
    "blocks with biases": Kind((GROUP128, BLOCK), dtype=F16, biases=True),
    "groups by rows": Kind((GROUP128, ROW), dtype=F16),
    "tensors": Kind((ROW, TENSOR), moe.Activation("gelu_tanh"), F16, True),
    "static": Kind((TENSOR, TENSOR), integral=True),
    "gpt-oss": Kind((ROW, ROW), OSS, biases=True),
    "static gpt-oss": Kind((TENSOR, ROW), OSS, F16, True, integral=True),
    "mx": Kind((MX, MX), moe.Activation("gelu"), integral=True),
    "16 bit": Kind((None, ROW), biases=True),
}
PRODUCTS = {"rows": (ROW, ROW), "blocks": (GROUP128, BLOCK), "mx": (MX, MX), "one": (TENSOR, ROW)}
SWEEPS = [
    (backend, name)
    for name, kind in KINDS.items()
    for backend in ("hopper_experts", "triton_experts")
    if backend == "triton_experts" or kind.groups[0] not in (None, MX)
]


class Case(NamedTuple):
    """A layer and its routes.

    Args:
        hidden: H.
        inner: I.
        top_k: pairs per token.
        counts: number of pairs of each expert.
        strangers: number of pairs whose id is of no expert.
    """

    hidden: int
    inner: int
    top_k: int
    counts: tuple[int, ...]
    strangers: int

    def __str__(self) -> str:
        used = {e: n for e, n in enumerate(self.counts) if n}
        few = f"{dict(itertools.islice(used.items(), 20))}{' and more' if len(used) > 20 else ''}"
        return (
            f"H={self.hidden} I={self.inner}, top {self.top_k}, pairs of {len(self.counts)} "
            f"experts {few}, of none {self.strangers}"
        )


class Routes(NamedTuple):
    """The number of pairs of each expert, and of pairs without an expert."""

    counts: tuple[int, ...]
    strangers: int = 0


@functools.cache
def tiles() -> dict[int, int]:
    """Return the tokens of each chosen tile, with the largest pairs per expert that choose it."""
    chosen = {each: tile_config.choose(each, 1).tokens for each in range(1, 1025)}
    last = {tokens: each for each, tokens in chosen.items()}
    return {tokens: min(each, 2 * tokens) for tokens, each in last.items()}


def cut_of_pairs(pairs: int, experts: int) -> object:
    """Return the choices that depend on the number of pairs: how they are sorted and multiplied."""
    blocks = 1 if pairs <= tile_config.PAIRS_OF_BLOCK else tile_config.SORT_CLUSTER
    return (
        tile_config.choose(pairs, experts),
        pairs <= tile_config.FEW_PAIRS,
        -(-pairs // (blocks * tile_config.SORT_THREADS)),
        rows_in_triton(m_bucket(-(-pairs // experts))),
    )


@functools.cache
def rows_in_triton(each: int) -> int:
    """Return the rows of a tile of Triton's kernel for ``each`` rows per expert on an H200."""
    dense = MatmulProblem(
        1, 256, 256, ROW, ROW, E4M3, E4M3, BF16, False, "precise", False, "cuda", (9, 0)
    )
    rows: int = triton.cut_product(dense, each, H200, 0).rows
    return rows


def cut_of_tokens(hidden: int) -> object:
    """Return the choices that decide how kernels besides the GEMMs read and write a token."""
    vectors = hidden // tile_config.VECTOR
    threads = min(tile_config.THREADS, round_up(vectors, 32))
    return -(-vectors // tile_config.THREADS), threads


def spread(pairs: int, experts: int, among: int, draw: random.Random) -> Routes:
    """Assign pairs to some of the experts at random, and one in nine to no expert."""
    chosen = draw.sample(range(experts), among)
    counts = [0] * experts
    for _ in range(pairs - pairs // 9):
        counts[draw.choice(chosen)] += 1
    return Routes(tuple(counts), pairs // 9)


@functools.cache
def routes() -> list[Routes]:
    """Return routes around the edges of the numbers of pairs, experts, and tiles of one expert."""
    draw, found = random.Random(0), []
    # the number of pairs, which decides the configuration, for one expert, a few and many
    for experts in (1, 5, 2 * 32 + 1):
        most = max(
            max(tiles().values()) * experts + 8,
            tile_config.SORT_CLUSTER * tile_config.SORT_THREADS + 8 if experts > 32 else 0,
            tile_config.PAIRS_OF_BLOCK + 8,
        )
        for pairs in around(changes(lambda n, e=experts: cut_of_pairs(n, e), most), most):
            found.append(spread(pairs, experts, -(-experts // draw.choice((1, 1, 3))), draw))
    # the number of experts, which are found by binary search, up to the most that are supported
    edges = changes(lambda n: (n - 1).bit_length(), tile_config.MOST_EXPERTS)
    for experts in around([1, *edges, tile_config.MOST_EXPERTS], tile_config.MOST_EXPERTS):
        found.append(spread(2 * experts + draw.randrange(90), experts, experts, draw))
    # the rows of an expert around a multiple of a tile, in a layer that uses such tiles
    for tokens, times in itertools.product(tiles(), (0, 1, 2)):
        beside = [n for d in range(-7, 8) if (n := tokens * times + d) > 0]
        for strangers in range(MOST_TOP_K):
            pairs = sum(beside) + strangers
            fits = (
                e
                for e in range(len(beside), pairs)
                if tile_config.choose(pairs, e).tokens == tokens
            )
            for experts in itertools.islice(fits, 1):
                counts = beside + [0] * (experts - len(beside))
                draw.shuffle(counts)
                found.append(Routes(tuple(counts), strangers))
    # one expert that has all pairs
    for pairs in around(tiles(), max(tiles()) + 7):
        counts = [0] * 7
        counts[draw.randrange(7)] = pairs
        found.append(Routes(tuple(counts)))
    return found


@functools.cache
def aligned_sizes() -> list[tuple[int, int]]:
    """Return all H and I that Hopper's kernels support, up to sizes with full pipelines."""
    stages = max(
        tile_config.choose(each, 1).stages(products)
        for each in tiles().values()
        for products in tile_config.Products
    )
    short = range(16, (stages + 1) * TILE_K + 1, 16)
    longest = 8 * tile_config.VECTOR * tile_config.THREADS
    long = around(changes(cut_of_tokens, longest, 16), longest, 16)
    hidden = sorted({*short, *long})
    inner = [16 * (1 + 37 * i % (len(short))) for i in range(len(hidden))]
    return [(h, i if h <= short[-1] else i % 400 + 16) for h, i in zip(hidden, inner, strict=True)]


@functools.cache
def odd_sizes() -> list[tuple[int, int]]:
    """Return H and I around the ends of tiles and of steps along K, with all remainders."""
    edges = changes(lambda k: (-(-k // TILE_K), k.bit_length()), 8 * TILE_K + 8)
    found = around(edges, 8 * TILE_K + 8)
    others = found[:]
    random.Random(1).shuffle(others)
    return list(zip(found, others, strict=True))


def cases(name: str) -> list[Case]:
    """Return cases of a kind, with every second of the routes; other kinds have the rest."""
    kind, turn = KINDS[name], list(KINDS).index(name)
    draw, multiple = random.Random(name), tile_config.HALF if KINDS[name].groups[1] == BLOCK else 16
    small = [size for size in aligned_sizes() if max(size) <= 4 * TILE_K]
    found = []
    for counts, strangers in routes()[turn % 2 :: 2]:
        hidden, inner = draw.choice(small)
        size = (hidden, round_up(inner, multiple))
        few = len(counts) <= 2 * 64
        found.append(routed(size if few else (16, multiple), counts, strangers, draw))
    sizes = [(h, round_up(i, multiple)) for h, i in aligned_sizes()] + odd_sizes()
    means = list(tiles().values())
    for i, size in enumerate(sizes):
        experts = 1 + i % 5
        many = means[i % len(means)] * experts
        given = spread(max(1, many - i % 3), experts, experts, draw)
        found.append(routed(size, *given, draw))
    return found if kind.groups[0] not in (None, MX) else found[::2]


def routed(
    size: tuple[int, int], counts: tuple[int, ...], strangers: int, draw: random.Random
) -> Case:
    """Make a case whose top k is the largest divisor of the number of pairs up to eight."""
    pairs = sum(counts) + strangers
    top_k = draw.choice([k for k in range(1, MOST_TOP_K + 1) if pairs % k == 0])
    return Case(*size, top_k, counts, strangers)


def integers(*shape: int, device: str) -> Tensor:
    """Draw integers up to seven; every group of 128 has a seven, and half of them are halved.

    128 products of such numbers have a sum of less than 14 bits: at most 28^2 times the least one,
    and with random signs 2^11 times, as a rule.
    """
    found = torch.randint(-MOST, MOST + 1, shape, device=device).float()
    found[..., ::TILE_K] = MOST
    groups = -(-shape[-1] // TILE_K)
    halves = 0.5 ** torch.randint(0, 2, (*shape[:-1], groups), device=device)
    return found * halves.repeat_interleave(TILE_K, -1)[..., : shape[-1]]


def factors(*shape: int, integral: bool, device: str) -> Tensor:
    """Draw factors that scales must compensate: numbers around one, or one and a half of it."""
    if integral:
        return 0.5 ** torch.randint(0, 2, shape, device=device)
    return 0.5 + torch.rand(shape, device=device)


def matrices(count: int, rows: int, cols: int, kind: Kind, device: str) -> Tensor:
    """Draw weights of experts whose codes are exact."""
    group = kind.groups[1]
    size = 2.0 ** round(math.log2(cols**-0.5 / 9))
    high, wide = (1, cols) if group in (ROW, MX) else (rows, cols)
    if group == BLOCK:
        high = wide = BLOCK.rows
    shape = (count, -(-rows // high), -(-cols // wide))
    found = factors(*shape, integral=group == MX, device=device)
    found = found.repeat_interleave(high, 1)[:, :rows].repeat_interleave(wide, 2)[:, :, :cols]
    return integers(count, rows, cols, device=device) * found * size


def drawn(kind: Kind, case: Case, device: str) -> tuple[Layer, Tensor, Tensor, Tensor]:
    """Draw a layer, its input and its routes; experts without tokens are NaN."""
    hidden, inner, top_k, counts, strangers = case
    count = len(counts)
    gate_up = matrices(count, kind.activation.columns(inner), hidden, kind, device)
    down = matrices(count, hidden, inner, kind, device)
    idle = torch.tensor(counts, device=device) == 0
    w13, w2 = (poisoned(stack(w, kind.groups[1]), idle) for w in (gate_up, down))
    biases = (
        between_nan(torch.randn(w.shape[:2], device=device).masked_fill_(idle[:, None], torch.nan))
        if kind.biases
        else None
        for w in (gate_up, down)
    )
    scale = torch.full((1, 1), STATIC, device=device) if kind.static else None
    layer = Layer(gate_up, down, w13, w2, kind.groups[0], kind.activation, *biases, scale)
    flat = torch.tensor(
        [e for e, n in enumerate(counts) for _ in range(n)]
        + [(-1, count, 2**20)[i % 3] for i in range(strangers)],
        dtype=(torch.int64, torch.int32)[strangers % 2],
        device=device,
    )
    ids = flat[torch.randperm(flat.numel(), device=device)].view(-1, top_k)
    x = integers(ids.shape[0], hidden, device=device)
    x = x * factors(ids.shape[0], 1, integral=kind.integral, device=device)
    weights = torch.rand(ids.shape, device=device)
    return layer, between_nan(x.to(kind.dtype)), ids, weights


def poisoned(q: QTensor, rows: Tensor) -> QTensor:
    """Return codes and scales surrounded by NaN, with these rows NaN; a single scale stays."""
    data, scale = q.data.view(torch.uint8).clone(), q.scale.clone()
    data[rows] = FP8_FORMATS[q.data.dtype].nan_code
    if scale.shape[0] == rows.shape[0]:
        scale[rows] = E8M0_NAN if scale.dtype == torch.uint8 else torch.nan
    return QTensor(between_nan(data.view(q.data.dtype)), between_nan(scale), q.group)


Compute = Callable[[ExpertOperands, ExpertsProblem], Tensor]
Product = Callable[[GroupedOperands, GroupedProblem], Tensor]


def problems_of(name: str, case: Case, compute: Compute, device: str) -> str:
    """Return what is wrong with a layer; empty if all is well.

    Tokens must have the values of the slow layer, the same bits at a second call, and the same bits
    if other tokens are NaN.
    """
    layer, x, ids, weights = drawn(KINDS[name], case, device)

    def computed(x: Tensor) -> Tensor:
        operands, problem, _ = operators.described(operator_arguments(layer, x, ids, weights))
        return compute(operands, problem)

    y = computed(x)
    slow = Yardstick(*(t.to(device) for t in slow_by_expert(*quick_place(layer, x, ids, weights))))
    beside = torch.arange(x.shape[0], device=device) % 3 == 1
    among_nan = between_nan(x.masked_fill(beside[:, None], torch.nan))
    try:
        assert_experts(y, slow, case.hidden + case.inner, SHORT_SUM)
        assert_bits_equal(computed(x), y)
        assert_bits_equal(computed(among_nan)[~beside], y[~beside])
    except AssertionError as error:
        return f"{name}, {case}: {str(error)[:400] or 'other bits'}"
    return ""


def quick_place(layer: Layer, *others: Tensor) -> tuple[Any, ...]:
    """Move a layer of many experts to the CPU: on a GPU each expert takes several waits."""
    if layer.w13.data.shape[0] <= FEW_EXPERTS:
        return layer, *others
    on_cpu = (
        QTensor(each.data.cpu(), each.scale.cpu(), each.group)
        if isinstance(each, QTensor)
        else each.cpu()
        if isinstance(each, Tensor)
        else each
        for each in layer
    )
    return Layer(*on_cpu), *(each.cpu() for each in others)


def problems_of_product(name: str, case: Case, turn: int, compute: Product, device: str) -> str:
    """Return what is wrong with one grouped GEMM ``[rows, H] @ [H, I]``."""
    groups, k, n = PRODUCTS[name], case.hidden, case.inner
    before, rows = case.strangers // 2, sum(case.counts) + case.strangers
    ends = list(itertools.accumulate(case.counts, initial=before))
    offsets = torch.tensor(ends, device=device)
    place = torch.arange(rows, device=device)
    nobody = (place < before) | (place >= ends[-1])
    scale = torch.full((1, 1), 0.02, device=device) if groups[0] == TENSOR else None
    x = fp8kit.quantize(torch.randn(rows, k, device=device), groups[0], scale=scale)
    w = stack(torch.randn(len(case.counts), n, k, device=device) * k**-0.5, groups[1])
    w = poisoned(w, offsets.diff() == 0)
    bias = torch.randn(len(case.counts), n, device=device) if turn % 2 else None
    dtype = (BF16, F16, F32)[turn % 3]

    def computed(x: QTensor) -> Tensor:
        problem = GroupedProblem.of(x.data, w.data, groups, dtype)
        weights = ExpertWeights(w.data, w.scale, bias, None)
        return compute(GroupedOperands(x.data, x.scale, weights, offsets), problem)

    y, beside = computed(poisoned(x, nobody)), place % 3 == 1
    slow = "cpu" if len(case.counts) > FEW_EXPERTS else device
    dense_x, dense_w, slow_y = (t.to(slow) for t in (fp8kit.dequantize(x), fp8kit.dequantize(w), y))
    slow_bias = None if bias is None else bias.to(slow)
    try:
        for e, (start, stop) in enumerate(itertools.pairwise(ends)):
            if start < stop:
                added = None if slow_bias is None else slow_bias[e]
                operands = (dense_x[start:stop], dense_w[e], added)
                assert_matmul(slow_y[start:stop], *operands, backend="triton_experts")
        assert_bits_equal(y[nobody], torch.zeros_like(y[nobody]))
        assert_bits_equal(computed(poisoned(x, nobody)), y)
        assert_bits_equal(computed(poisoned(x, nobody | beside))[~beside], y[~beside])
    except AssertionError as error:
        return f"{name}, {case} {dtype}: {str(error)[:400] or 'other bits'}"
    return ""


def dispatched(backend: str) -> Compute:
    """Return a function that computes by one backend; declining is an error."""

    def compute(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
        choice = choose(MOE_BACKENDS, problem, backend)
        assert choice.implementation is not None, str(choice)
        found: Tensor = choice.implementation.experts(operands, problem)
        return found

    return compute


def multiplied(operands: GroupedOperands, problem: GroupedProblem) -> Tensor:
    """Multiply by Triton's kernel; declining is an error."""
    choice = choose(MOE_BACKENDS, problem, "triton_experts")
    assert choice.implementation is not None, str(choice)
    found: Tensor = choice.implementation.grouped(operands, problem)
    return found


def taken(backend: str, name: str) -> list[Case]:
    """Return the cases that a backend must compute."""
    if backend != "hopper_experts":
        return cases(name)
    return [case for case in cases(name) if KINDS[name].on_hopper(case.hidden, case.inner)]


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hand", range(HANDS))
@pytest.mark.parametrize(("backend", "name"), SWEEPS)
def test_every_layer_is_within_the_bound(backend: str, name: str, hand: int) -> None:
    if backend == "hopper_experts" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("written for sm90 (wgmma)")
    found = dealt(sampled(taken(backend, name), SAMPLE, f"{backend} {name}"), HANDS)[hand]
    said = [problems_of(name, case, dispatched(backend), "cuda") for case in found]
    assert not any(said), "\n".join(filter(None, said))


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hand", range(HANDS))
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_grouped_product_is_within_the_bound(name: str, hand: int) -> None:
    found = list(enumerate(cases("rows")))
    found = dealt(sampled(found, SAMPLE, f"products {name}"), HANDS)[hand]
    said = [problems_of_product(name, case, turn, multiplied, "cuda") for turn, case in found]
    assert not any(said), "\n".join(filter(None, said))


def test_cases_meet_every_edge() -> None:
    found = {name: cases(name) for name in KINDS}
    layers = list(itertools.chain(*found.values()))
    assert {case.top_k for case in layers} == set(range(1, MOST_TOP_K + 1))
    experts = {len(case.counts) for case in layers}
    assert {1, 31, 32, 33, 40, tile_config.MOST_EXPERTS} <= experts
    pairs = {sum(case.counts) + case.strangers for case in layers}
    for edge in (tile_config.FEW_PAIRS, tile_config.PAIRS_OF_BLOCK):
        assert set(range(edge - 6, edge + 9)) <= pairs
    for tokens in tiles():
        rows = set[int]()
        for case in layers:
            count = sum(case.counts) + case.strangers
            if tile_config.choose(count, len(case.counts)).tokens == tokens:
                rows.update(case.counts)
        assert set(range(tokens - 7, tokens + 8)) <= rows
    multiples = {case.hidden % 128 for case in found["rows"]}
    assert multiples >= {*range(8), *range(121, 128), *range(0, 128, 16)}


@pytest.mark.parametrize("name", KINDS)
def test_hopper_takes_the_cases_that_it_must(name: str) -> None:
    hopper = pytest.importorskip("fp8kit.moe.hopper.experts", reason="no cuda-bindings")
    kind, declined = KINDS[name], 0
    for case in cases(name)[::7]:
        problem = ExpertsProblem(
            m_bucket((sum(case.counts) + case.strangers) // case.top_k), len(case.counts),
            case.top_k, case.hidden, case.inner, kind.activation, *kind.groups, kind.dtype, E4M3,
            "exact", kind.static, kind.static, False, False, "cuda", (9, 0),
        )  # fmt: skip
        said = hopper.supports(problem)
        assert (said is None) == kind.on_hopper(case.hidden, case.inner), f"{case}: {said}"
        declined += said is not None
    assert 0 < declined


SMALL = Case(48, 40, 3, (3, 0, 9, 1), 2)


@pytest.mark.parametrize("name", KINDS)
def test_the_sweep_runs_on_a_cpu(name: str) -> None:
    assert problems_of(name, SMALL, reference.BACKEND.experts, "cpu") == ""
    assert problems_of(name, SMALL, triton.experts, "cpu") == ""


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_sweep_of_products_runs_on_a_cpu(name: str) -> None:
    for turn in range(3):
        assert problems_of_product(name, SMALL, turn, triton.grouped, "cpu") == ""


def test_layers_expert_by_expert_are_those_pair_by_pair() -> None:
    for name in ("blocks with biases", "static gpt-oss"):
        given = drawn(KINDS[name], SMALL, "cpu")
        for quick, slow in zip(slow_by_expert(*given), slow_experts(*given), strict=True):
            torch.testing.assert_close(quick, slow, rtol=1e-6, atol=1e-6)


def test_the_sweep_can_fail() -> None:
    def leaking(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
        return reference.BACKEND.experts(operands, problem) + operands.x.sum() * 0

    def shifted(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
        return reference.BACKEND.experts(operands, problem).roll(1, 0)

    assert "H=48 I=40, top 3" in problems_of("rows", SMALL, leaking, "cpu")
    assert "over" in problems_of("rows", SMALL, shifted, "cpu")
