"""Experts on Hopper in every tile configuration, compared with ``slow_experts``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8kit import moe
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR
from fp8kit.moe import Activation, operators
from fp8kit.moe.hopper.tile_config import choose
from fp8kit.moe.problem import ExpertsProblem, GroupedProblem
from grouped_configs import CONFIGS
from numerics import SHORT_SUMS, assert_bits_equal
from slow_experts import (
    Layer,
    assert_experts,
    on_device,
    operator_arguments,
    random_layer,
    slow_experts,
)

hopper = pytest.importorskip("fp8kit.moe.hopper.experts", reason="no cuda-bindings")

BF16, F16 = torch.bfloat16, torch.float16
SWIGLU = Activation()
OSS = Activation("silu", interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0)
# groups of input and weights, activation, (E, H, I), dtype, other
CASES = {
    "rows": ((ROW, ROW), SWIGLU, (4, 272, 144), BF16, ()),
    "rows, short": ((ROW, ROW), SWIGLU, (3, 16, 16), F16, ("biases",)),
    "blocks": ((GROUP128, BLOCK), SWIGLU, (3, 160, 192), BF16, ("biases",)),
    "whole blocks": ((GROUP128, BLOCK), SWIGLU, (5, 400, 384), F16, ()),
    "groups by rows": ((GROUP128, ROW), SWIGLU, (3, 304, 208), BF16, ()),
    "tensors": ((ROW, TENSOR), Activation("gelu_tanh"), (4, 80, 256), BF16, ()),
    "static": ((TENSOR, TENSOR), OSS, (4, 96, 176), F16, ("static", "biases")),
    "gpt-oss": ((ROW, ROW), OSS, (5, 192, 320), BF16, ("biases",)),
    # rows of large tiles are copied before the first product, not in it
    "wide": ((ROW, ROW), SWIGLU, (3, 144, 528), BF16, ()),
    "wide, blocks": ((GROUP128, BLOCK), SWIGLU, (3, 128, 640), F16, ("biases",)),
    # each product of large tiles has a kernel of its own
    "long": ((ROW, ROW), SWIGLU, (2, 48, 2064), BF16, ()),
    "long, blocks": ((GROUP128, BLOCK), SWIGLU, (2, 128, 2176), F16, ("biases",)),
}
ROUTINGS = ("drawn", "one expert", "foreign", "int32")


def problem(**changes: Any) -> ExpertsProblem:
    """Describe a layer that the kernels support, with the given changes."""
    given = (SWIGLU, ROW, ROW, BF16, torch.float8_e4m3fn, "exact", False, False, False, False)
    found = ExpertsProblem(64, 128, 8, 2048, 768, *given, "cuda", (9, 0))
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"capability": (10, 0)}, "sm90"),
        ({"x_dtype": torch.float32}, "bf16 and fp16"),
        ({"w_dtype": torch.float8_e5m2}, "e4m3fn"),
        ({"x_group": MX, "w_group": MX}, "scales"),
        ({"x_group": None}, "scales"),
        ({"x_group": TENSOR}, "only if they are given"),
        ({"scale_rounding": "up"}, "rounds no scales up"),
        ({"activation": Activation("relu2", gated=False)}, "ungated relu2"),
        ({"activation": Activation("gelu")}, "has no gelu"),
        ({"activation": OSS, "x_group": GROUP128, "w_group": BLOCK}, "interleaved"),
        ({"router_weight_on_input": True}, "router"),
        ({"w_group": BLOCK}, "blocks of weights for tokens in groups"),
        ({"w_group": BLOCK, "x_group": TENSOR, "static_input": True}, "tokens in groups"),
        ({"w_group": BLOCK, "x_group": GROUP128, "static_intermediate": True}, "tokens in groups"),
        ({"m": 2**19}, "at most 2097152 pairs"),
        ({"experts": 1025}, "1 to 1024 experts"),
        ({"experts": 0}, "1 to 1024 experts"),
        ({"hidden": 0}, "not empty"),
        ({"intermediate": 200}, "multiples of 16"),
        ({"intermediate": 720, "x_group": GROUP128, "w_group": BLOCK}, "I of 64"),
        ({"hidden": 32768}, "at most 16384"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernels_lack_is_said(changes: dict[str, Any], lacking: str) -> None:
    assert hopper.supports(problem()) is None
    assert lacking in str(hopper.supports(problem(**changes)))


def test_single_products_go_to_another_backend() -> None:
    kinds = (ROW, ROW, torch.float8_e4m3fn, torch.float8_e4m3fn, BF16, False)
    product = GroupedProblem(64, 8, 256, 256, *kinds, "cuda", (9, 0))
    assert hopper.supports(product) == "computes whole layers"


def make(case: str, tokens: int, routing: str = "drawn") -> tuple[Layer, Tensor, Tensor, Tensor]:
    """Draw a layer, its input and its routes."""
    groups, activation, sizes, dtype, others = CASES[case]
    layer = random_layer(groups, activation, sizes, "biases" in others)
    if "static" in others:
        layer = layer._replace(input_scale=torch.full((1, 1), 0.02))
    ids = torch.randint(-1, sizes[0] + 1, (tokens, 3))
    if routing == "one expert":
        ids = torch.full_like(ids, sizes[0] - 1)
    elif routing == "foreign":
        ids = torch.where(torch.arange(tokens)[:, None] % 2 == 0, -1, ids)
    elif routing == "int32":
        ids = ids.int()
    return layer, torch.randn(tokens, sizes[1]).to(dtype), ids, torch.rand(tokens, 3)


def run(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, config: Any = None) -> Tensor:
    """Compute on the GPU, in memory that was full of NaN."""
    there = (on_device(layer, "cuda"), x.cuda(), ids.cuda(), weights.cuda())
    operands, described, _ = operators.described(operator_arguments(*there))
    assert hopper.supports(described) is None
    waste = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(2)]
    del waste
    y: Tensor = hopper.experts(operands, described, config)
    return y.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [2, 42, 45])  # up to 42, products of few tokens are one kernel
def test_every_configuration_computes_the_layer(tokens: int, case: str, routing: str) -> None:
    given = make(case, tokens, routing)
    slow, sums = slow_experts(*given), given[1].shape[1] + given[0].w2.shape[2]
    blocks = given[0].w13.group == BLOCK and given[0].w2.shape[2] % 128
    found = []
    for config in CONFIGS:
        if config.swap_ab or not blocks:
            found.append(run(*given, config))
            assert_experts(found[-1], slow, sums, SHORT_SUMS)
            assert_bits_equal(run(*given, config), found[-1])
    for other in found[1:]:
        assert_bits_equal(other, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["rows", "whole blocks", "gpt-oss"])
@pytest.mark.parametrize("tokens", [1, 42, 43, 170, 682, 683, 6000])
def test_tokens_have_the_bits_that_they_have_alone(case: str, tokens: int) -> None:
    layer, x, ids, weights = make(case, tokens)
    y = run(layer, x, ids, weights)
    for start in {0, tokens // 2, max(tokens - 40, 0)}:
        part = slice(start, start + 40)
        assert_bits_equal(run(layer, x[part], ids[part], weights[part]), y[part])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [37, 1024])
def test_experts_of_one_tile_may_lie_between_those_of_many(count: int) -> None:
    """The sort spreads them; each token keeps the bits that it has among few, which it leaves."""
    layer = random_layer((ROW, ROW), SWIGLU, (count, 32, 48), False)
    popularity = 1.0 / torch.arange(1, count + 1)
    ids = torch.multinomial(popularity[torch.randperm(count)].expand(840, -1), 3)
    x, weights = torch.randn(840, 32).to(BF16), torch.rand(840, 3)
    parts = [slice(start, start + 40) for start in range(0, 840, 40)]
    alone = torch.cat([run(layer, x[part], ids[part], weights[part]) for part in parts])
    for config in CONFIGS:
        assert_bits_equal(run(layer, x, ids, weights, config), alone)


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, 1),
        ({"hidden": 4080}, 0),
        ({"intermediate": 4096}, 2),
        ({"x_group": TENSOR, "w_group": TENSOR, "static_input": True}, 1),
        ({"x_group": GROUP128}, 0),
        ({"x_group": GROUP128, "w_group": BLOCK}, 0),
    ],
)
def test_tiles_are_wide_where_k_is_long(changes: dict[str, Any], tiles: int) -> None:
    assert hopper.wide_tiles(problem(**{"hidden": 4096, **changes})) == tiles


@pytest.mark.gpu
@pytest.mark.parametrize("each", [120, 128, 136])
def test_wide_tiles_are_chosen_and_give_the_bits_of_others(each: int) -> None:
    """Experts have fewer rows than a tile of 144, exactly 144, and more."""
    layer = random_layer((ROW, ROW), SWIGLU, (4, 4096, 144), False)
    tokens = 4 * each // 3
    ids = (torch.arange(tokens)[:, None] + torch.arange(3)) % 4
    ids[: each // 3] = torch.tensor([0, 1, 2])
    given = (layer, torch.randn(tokens, 4096).to(BF16), ids, torch.rand(tokens, 3))
    expected = run(*given, choose(1 << 20, 1))
    assert_bits_equal(run(*given), expected)
    assert_bits_equal(run(*given, choose(each, 1, wide_tiles=1)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [BF16, F16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ["rows, short", "gpt-oss"])
def test_biases_of_any_dtype_are_read(case: str, bias: torch.dtype) -> None:
    layer, *given = make(case, 20)
    rounded = {name: getattr(layer, name).to(bias) for name in ("bias13", "bias2")}
    expected = run(layer._replace(**{name: b.float() for name, b in rounded.items()}), *given)
    assert_bits_equal(run(layer._replace(**rounded), *given), expected)


@pytest.mark.gpu
def test_layers_that_follow_each_other_read_their_own_routes() -> None:
    layer, x, _, weights = make("rows", 5)
    there, x, weights = on_device(layer, "cuda"), x.cuda(), weights.cuda()
    routes = [torch.randint(-1, 5, (5, 3), device="cuda") for _ in range(32)]

    def compute(ids: Tensor) -> Tensor:
        return moe.experts(x, there.w13, there.w2, ids, weights, backend="hopper_experts")

    expected = []
    for ids in routes:
        expected.append(compute(ids))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [compute(ids).clone() for ids in routes]  # each takes the memory of the one before
    for _ in range(200):
        graph.replay()
        for y, alone in zip(found, expected, strict=True):
            assert_bits_equal(y, alone)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "tokens"),
    # where blocks fill all SMs, some of one layer wait while those of the other run
    [((4, 272, 144), 40), ((16, 1024, 1024), 400)],
    ids=["few pairs", "all SMs"],
)
def test_layers_on_two_streams_do_not_wait_for_each_other(
    sizes: tuple[int, int, int], tokens: int
) -> None:
    there = on_device(random_layer((ROW, ROW), sizes=sizes), "cuda")
    x, weights = torch.randn(tokens, sizes[1]).bfloat16().cuda(), torch.rand(tokens, 3).cuda()
    ids = torch.randint(-1, sizes[0] + 1, (tokens, 3)).cuda()
    expected = moe.experts(x, there.w13, there.w2, ids, weights, backend="hopper_experts")
    graphs, results, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for _ in range(20):
                y = moe.experts(x, there.w13, there.w2, ids, weights, backend="hopper_experts")
            graph.capture_end()
            graphs.append(graph)
            results.append(y)
    for _ in range(100):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for y in results:
        assert_bits_equal(y, expected)


@pytest.mark.gpu
def test_inputs_of_any_layout_are_taken() -> None:
    layer, x, ids, weights = make("rows", 20)
    expected = run(layer, x, ids, weights)
    wide = torch.randn(20, x.shape[1] + 3).to(x.dtype)
    for column in (0, 1):
        wide[:, column : column + x.shape[1]] = x
        assert_bits_equal(run(layer, wide[:, column : column + x.shape[1]], ids, weights), expected)
    assert_bits_equal(run(layer, x, ids.t().contiguous().t(), weights), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 60])
def test_a_graph_follows_its_routing(tokens: int) -> None:
    layer, x, ids, weights = make("rows", tokens)
    there, x, ids, weights = on_device(layer, "cuda"), x.cuda(), ids.cuda(), weights.cuda()

    def compute() -> Tensor:
        options = {"backend": "hopper_experts", "scheme": "FP8_DYNAMIC"}
        return moe.experts(x, there.w13, there.w2, ids, weights, **options)

    for _ in range(2):  # the second call loads weights early
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compute()
    for chosen in (ids.flip(0), torch.full_like(ids, 1), torch.full_like(ids, -1)):
        ids.copy_(chosen)
        graph.replay()
        assert_bits_equal(y, compute())


@pytest.mark.gpu
def test_ten_thousand_layers_have_the_same_bits() -> None:
    layer, x, ids, weights = make("rows", 30)
    there, x, ids, weights = on_device(layer, "cuda"), x.cuda(), ids.cuda(), weights.cuda()
    operands, described, _ = operators.described(operator_arguments(there, x, ids, weights))
    expected = hopper.experts(operands, described)
    wrong, last_wrong = torch.zeros((), dtype=torch.int64, device="cuda"), expected.clone()
    for _ in range(10_000):
        y = hopper.experts(operands, described)
        differs = (y != expected).any()
        wrong += differs
        last_wrong = torch.where(differs, y, last_wrong)
    assert_bits_equal(last_wrong, expected)
    assert wrong.item() == 0
