"""The kernels for a few tokens, compared with ``slow_experts``, and which layers they support."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ahead import cuda_resources, machine_code, resources, without_nvrtc
from fp8kit import moe
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR
from fp8kit.moe import Activation, operators
from numerics import SHORT_SUMS, assert_bits_equal
from slow_experts import (
    Layer,
    assert_experts,
    on_device,
    operator_arguments,
    random_layer,
    slow_experts,
)

dot_products = pytest.importorskip("fp8kit.moe.hopper.dot_products", reason="no cuda-bindings")
hopper = pytest.importorskip("fp8kit.moe.hopper.experts", reason="no cuda-bindings")
sources = pytest.importorskip("fp8kit.moe.hopper.source", reason="no cuda-bindings")
nvrtc = pytest.importorskip("fp8kit.runtime.nvrtc", reason="no cuda-bindings")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
OSS = Activation("silu", interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0)
# groups of input and weights, activation, (E, H, I), experts of the token, dtype, other
CASES: dict[str, tuple[Any, ...]] = {
    "rows": ((ROW, ROW), Activation(), (4, 272, 144), 3, BF16, ()),
    "least": ((ROW, ROW), Activation(), (3, 16, 16), 1, F16, ("biases",)),
    "blocks": ((GROUP128, BLOCK), Activation(), (3, 160, 192), 2, BF16, ("biases",)),
    "groups by rows": ((GROUP128, ROW), Activation(), (3, 304, 208), 3, BF16, ()),
    "tensors": ((ROW, TENSOR), Activation("gelu_tanh"), (4, 80, 256), 3, BF16, ()),
    "static": ((TENSOR, TENSOR), OSS, (4, 96, 176), 3, F16, ("static", "biases")),
    "gpt-oss": ((ROW, ROW), OSS, (5, 192, 320), 4, BF16, ("biases",)),
    "qwen3": ((ROW, ROW), Activation(), (9, 2048, 768), 8, BF16, ()),
    "spread": ((ROW, ROW), Activation(), (64, 512, 256), 8, BF16, ()),  # serves three tokens
    # blocks of the second kernel compute more than one tile
    "wide": ((ROW, ROW), Activation(), (3, 7168, 256), 8, F16, ("biases",)),
    "wide, blocks": ((GROUP128, BLOCK), Activation(), (3, 4096, 1408), 2, BF16, ("biases",)),
    "many experts": ((ROW, ROW), Activation(), (40, 128, 64), 32, BF16, ("biases",)),
    "odd experts": ((GROUP128, BLOCK), Activation(), (20, 128, 320), 19, BF16, ()),
}
ROUTINGS = ("drawn", "one expert", "foreign", "int32")


def make(
    case: str, routing: str = "drawn", tokens: int = 1
) -> tuple[Layer, Tensor, Tensor, Tensor]:
    """Draw a layer, its input and its routes."""
    groups, activation, sizes, top_k, dtype, others = CASES[case]
    layer = random_layer(groups, activation, sizes, "biases" in others)
    if "static" in others:
        layer = layer._replace(input_scale=torch.full((1, 1), 0.02))
    ids = torch.randint(-1, sizes[0] + 1, (tokens, top_k))
    if routing == "one expert":
        ids = torch.full_like(ids, sizes[0] - 1)
    elif routing == "foreign":
        ids = torch.full_like(ids, -1)
    elif routing == "int32":
        ids = ids.int()
    return layer, torch.randn(tokens, sizes[1]).to(dtype), ids, torch.rand(tokens, top_k)


def described(*given: Any) -> tuple[Any, Any]:
    """Return a layer's arguments in the form that backends get."""
    operands, problem, _ = operators.described(operator_arguments(*given))
    return operands, problem


@pytest.mark.parametrize("case", CASES)
def test_one_token_is_served(case: str) -> None:
    _, problem = described(*make(case))
    assert dot_products.serves(problem)


@pytest.mark.parametrize(
    ("tokens", "experts", "served"),
    [(2, 32, True), (2, 31, False), (8, 128, True), (8, 127, False), (16, 1024, False)],
)
def test_several_tokens_are_served_where_most_pairs_have_an_expert_alone(
    tokens: int, experts: int, served: bool
) -> None:
    _, problem = described(*make("qwen3"))
    assert problem.top_k == 8
    assert dot_products.serves(dataclasses.replace(problem, m=tokens, experts=experts)) is served


def test_wide_layers_are_not_served() -> None:
    problem = described(*make("rows"))[1]
    changed = [
        {"batch_invariant": True},
        {"top_k": 33},
        {"hidden": 16384},  # its gates and ups fill more than an SM
        {"intermediate": 14336},
    ]
    for change in changed:
        assert not dot_products.serves(dataclasses.replace(problem, **change)), change


@pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))
@pytest.mark.parametrize("kernel", ["gates_and_ups", "downs"])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_both_kernels_compile(case: str, tokens: int, kernel: str) -> None:
    operands, problem = described(*make(case, tokens=tokens))
    variant = dot_products.variant(operands, problem)
    found = cuda_resources(sources.dot_products_source(variant, kernel))
    assert_fits(problem, variant, kernel, found)


def assert_fits(problem: Any, variant: Any, kernel: str, found: dict[str, int]) -> None:
    """Check that an SM can run as many blocks as it should, given a kernel's ``cuda_resources``."""
    dynamic = {"downs": dot_products.down_bytes, "gates_and_ups": dot_products.gate_bytes}[kernel]
    blocks, warps = {"downs": (2, variant.down_warps), "gates_and_ups": (1, variant.gate_warps)}[
        kernel
    ]
    assert found["registers"] * 32 * warps * blocks <= 65536
    assert (found["shared"] + dynamic(problem) + 1024) * blocks <= 228 * 1024


def largest_served(problem: Any, size: str) -> Any:
    """Return the problem with the largest ``hidden`` or ``intermediate`` that is served."""
    sizes = (dataclasses.replace(problem, **{size: n}) for n in range(16384, 0, -64))
    return next(p for p in sizes if dot_products.serves(p))


@pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))
@pytest.mark.parametrize(
    ("case", "kernel", "size"),
    [
        ("rows", "gates_and_ups", "hidden"),
        ("blocks", "gates_and_ups", "hidden"),  # its factors are in shared memory
        ("gpt-oss", "downs", "intermediate"),
        ("many experts", "downs", "intermediate"),
    ],
)
def test_the_largest_layer_that_is_served_fits(case: str, kernel: str, size: str) -> None:
    operands, problem = described(*make(case))
    problem = largest_served(problem, size)
    variant = dot_products.variant(operands, problem)
    image, _ = nvrtc.compiled(sources.dot_products_source(variant, kernel), "sm_90a")
    found = resources(image)  # some of the largest spill a word or two
    assert_fits(problem, variant, kernel, found | {"shared": found["shared"] - 1024})


@pytest.mark.parametrize("top_k", range(1, 33))
def test_a_warp_of_downs_shares_one_pair_or_has_several(top_k: int) -> None:
    operands, problem = described(*make("rows"))
    problem = dataclasses.replace(problem, top_k=top_k)
    for inner in range(largest_served(problem, "intermediate").intermediate, 0, -128):
        variant = dot_products.variant(operands, dataclasses.replace(problem, intermediate=inner))
        at_once, rest = divmod(variant.down_warps, variant.warps_of_pair)
        assert not rest
        assert variant.down_warps <= 16
        turns = math.ceil(top_k / at_once)
        assert turns == 1 or variant.warps_of_pair == 1
        assert turns * math.ceil(math.ceil(inner / 128) / variant.warps_of_pair) <= 32


@pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("case", ["blocks", "gpt-oss", "static", "qwen3"])
def test_only_what_is_older_is_read_before_the_wait_and_from_l2(case: str, tokens: int) -> None:
    operands, problem = described(*make(case, tokens=tokens))
    variant = dot_products.variant(operands, problem)

    def loads_before_the_wait(kernel: str) -> list[str]:
        code = machine_code(sources.dot_products_source(variant, kernel))
        (wait,) = [i for i, line in enumerate(code) if "ACQBULK" in line]
        return [line for line in code[:wait] if re.search(r"\bLDG", line)]

    assert not loads_before_the_wait("gates_and_ups")
    early = loads_before_the_wait("downs")
    assert early
    for line in early:
        assert "STRONG.GPU" in line, line
        assert ".128" not in line, f"of the intermediate: {line}"


def run(*given: Any) -> Tensor:
    """Compute on the GPU, in memory that was full of NaN."""
    layer, *others = given
    operands, problem = described(on_device(layer, "cuda"), *(t.cuda() for t in others))
    served = dot_products.serves(problem)
    assert not served or hopper.supports(problem) is None
    waste = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(2)]
    del waste
    y: Tensor = (hopper if served else dot_products).experts(operands, problem)
    return y.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("case", CASES)
def test_the_layer_is_computed(case: str, routing: str, tokens: int) -> None:
    given = make(case, routing, tokens)
    slow, sums = slow_experts(*given), given[1].shape[1] + given[0].w2.shape[2]
    y = run(*given)
    assert_experts(y, slow, sums, SHORT_SUMS)
    assert_bits_equal(run(*given), y)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_alone_and_among_few(case: str) -> None:
    layer, *others = make(case, tokens=5)
    together = run(layer, *others)
    for i in range(5):
        assert_bits_equal(run(layer, *(t[i : i + 1] for t in others)), together[i : i + 1])


@pytest.mark.gpu
def test_rows_of_a_wider_tensor_are_read_in_place() -> None:
    layer, x, ids, weights = make("many experts", tokens=3)
    wide = torch.randn(3, 2 * x.shape[1]).to(x.dtype)
    wide[:, : x.shape[1]] = x
    operands, problem = described(
        on_device(layer, "cuda"), wide.cuda()[:, : x.shape[1]], ids.cuda(), weights.cuda()
    )
    assert not operands.x.is_contiguous()
    found = dot_products.experts(operands, problem).cpu()
    assert_bits_equal(found, run(layer, x, ids, weights))


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "tokens"), [("qwen3", 1), ("spread", 3)])
def test_a_graph_follows_the_routing_of_its_layers(case: str, tokens: int) -> None:
    layer, x, _, weights = (
        t if isinstance(t, Layer) else t.cuda() for t in make(case, tokens=tokens)
    )
    there = on_device(layer, "cuda")
    routes = [
        torch.randint(-1, len(layer.w13.data) + 1, (tokens, 8), device="cuda") for _ in range(32)
    ]

    def compute(ids: Tensor) -> Tensor:
        return moe.experts(x, there.w13, there.w2, ids, weights, backend="hopper_experts")

    for ids in routes[:2]:
        compute(ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [compute(ids).clone() for ids in routes]  # each takes the memory of the one before
    for turn in range(100):
        for ids in routes:
            ids.copy_(torch.randint(-1, len(layer.w13.data) + 1, (tokens, 8)))
        graph.replay()
        if turn % 10 == 0:
            for y, ids in zip(found, routes, strict=True):
                assert_bits_equal(y, compute(ids))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3", "rows"])  # of many blocks, and of fewer than SMs
def test_weights_written_before_the_layer_are_read(case: str) -> None:
    layer, x, _, weights = (t if isinstance(t, Layer) else t.cuda() for t in make(case))
    there = on_device(layer, "cuda")
    ids = torch.arange(weights.shape[1], device="cuda")[None]
    halved = there.w2.scale.div(2).cpu().pin_memory()
    whole = there.w2.scale.cpu().pin_memory()

    def compute() -> Tensor:
        return moe.experts(x, there.w13, there.w2, ids, weights, backend="hopper_experts")

    expected = compute()
    for _ in range(50):
        there.w2.data.view(torch.uint8).bitwise_xor_(0x80)  # signs; nobody waits for the host
        assert_bits_equal(compute(), expected.neg())
        there.w2.data.view(torch.uint8).bitwise_xor_(0x80)
        there.w2.scale.copy_(halved, non_blocking=True)
        assert_bits_equal(compute(), expected / 2)
        there.w2.scale.copy_(whole, non_blocking=True)
    assert_bits_equal(compute(), expected)
