"""Layers of experts: every backend compared with ``slow_experts``; edges, gradients, compilers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8kit
from ahead import compiled_by
from fp8kit import moe
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.moe import operators
from fp8kit.moe.activation import KINDS
from fp8kit.moe.problem import ExpertsProblem, GroupedProblem
from numerics import EXPERTS_ERROR, SHORT_SUMS, assert_bits_equal, relative_error
from recorded_calls import record_on_cpu
from registered_calls import RegisteredCalls
from slow_experts import (
    Layer,
    assert_experts,
    dense_experts,
    dequantized,
    on_device,
    operator_arguments,
    random_layer,
)
from slow_experts import slow_experts as slowly

triton = pytest.importorskip("fp8kit.moe.triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

OSS = moe.Activation("silu", interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0)
# groups of input and weights, activation, (E, H, I), dtype, other
CASES = {
    "rows": ((ROW, ROW), moe.Activation(), (4, 64, 128), torch.bfloat16, ()),
    "blocks": ((GROUP128, BLOCK), moe.Activation(), (3, 160, 200), torch.bfloat16, ("biases",)),
    "mx": ((MX, MX), moe.Activation("gelu"), (3, 96, 160), torch.bfloat16, ()),
    "static": ((TENSOR, TENSOR), OSS, (4, 96, 72), torch.float16, ("static", "biases")),
    "tensors": ((ROW, TENSOR), moe.Activation("gelu_tanh"), (4, 80, 144), torch.float32, ()),
    "ungated": ((ROW, ROW), moe.Activation("relu2", gated=False), (1, 80, 72), torch.bfloat16, ()),
    "16bit": ((None, ROW), moe.Activation(), (3, 96, 72), torch.bfloat16, ("biases",)),
    "on input": ((GROUP128, BLOCK), moe.Activation(), (4, 128, 136), torch.bfloat16, ("input",)),
}


def test_every_kind_of_activation_is_run() -> None:
    assert {activation.kind for _, activation, *_ in CASES.values()} == set(KINDS)


def make(case: str, tokens: int = 6, top_k: int = 3) -> tuple[Layer, Tensor, Tensor, Tensor]:
    groups, activation, sizes, dtype, others = CASES[case]
    layer = random_layer(groups, activation, sizes, "biases" in others)
    if "static" in others:
        layer = layer._replace(input_scale=torch.full((1, 1), 0.02))
    layer = layer._replace(on_input="input" in others)
    x = torch.randn(tokens, sizes[1]).to(dtype)
    # ids include -1 and E, which are of no expert, and sometimes repeat
    return layer, x, torch.randint(-1, sizes[0] + 1, (tokens, top_k)), torch.rand(tokens, top_k)


def scheme_of(layer: Layer) -> fp8kit.Scheme:
    static = layer.input_scale is not None
    groups, ue8m0 = (layer.w13.group, layer.x_group), layer.rounding == "up"
    return fp8kit.Scheme("tested", *groups, static=static, ue8m0=ue8m0)


def compute(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Tensor:
    return moe.experts(
        x, layer.w13, layer.w2, ids, weights, activation=layer.activation,
        scheme=scheme_of(layer), bias13=layer.bias13, bias2=layer.bias2,
        input_scale13=layer.input_scale, input_scale2=layer.input_scale,
        router_weight_on_input=layer.on_input, **options,
    )  # fmt: skip


def in_triton(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run the kernels under the interpreter, although dispatch declines Triton on a CPU."""
    operands, problem, _ = operators.described(operator_arguments(layer, x, ids, weights))
    assert triton.supports(problem) is None
    result: Tensor = triton.experts(operands, problem)
    return result


def in_reference(*given: Any) -> Tensor:
    return compute(*given, backend="reference")


BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": in_reference,
    "by_expert": compute,
    "triton": in_triton,
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_backends_agree_with_a_slow_layer(case: str, backend: str) -> None:
    layer, x, ids, weights = make(case)
    slow = slowly(layer, x, ids, weights)
    y = BACKENDS[backend](layer, x, ids, weights)
    assert y.dtype == x.dtype
    assert_experts(y, slow, x.shape[1] + layer.w2.shape[2])


@every_backend
def test_scales_between_the_products_are_powers_of_two_too(backend: str) -> None:
    exact, *given = make("blocks")
    layer = exact._replace(rounding="up")
    y = BACKENDS[backend](layer, *given)
    error, other = (relative_error(y, slowly(each, *given).y) for each in (layer, exact))
    assert error < other / 5


@pytest.mark.parametrize("case", ["rows", "blocks", "mx"])
def test_a_layer_is_as_far_from_the_dense_one_as_fp8_is(case: str) -> None:
    layer, x, ids, weights = make(case, tokens=24)
    dense = dense_experts(layer, x.float(), ids, weights)
    lower, upper = EXPERTS_ERROR
    assert lower <= relative_error(compute(layer, x, ids, weights), dense) <= upper


def test_triton_refuses_an_activation_that_it_has_no_branch_for() -> None:
    layer, *given = make("rows")
    novel = dataclasses.replace(layer.activation)
    object.__setattr__(novel, "kind", "novel")
    operands, problem, _ = operators.described(operator_arguments(layer, *given))
    with pytest.raises(Exception, match="no such activation"):
        triton.experts(operands, dataclasses.replace(problem, activation=novel))


def test_the_check_of_a_layer_can_fail() -> None:
    layer, x, ids, weights = make("rows")
    slow = slowly(layer, x, ids, weights)
    wrong = compute(layer, x, ids.flip(1), weights)
    with pytest.raises(AssertionError, match="over"):
        assert_experts(wrong, slow, 192)
    with pytest.raises(AssertionError, match="over"):
        assert_experts(dense_experts(layer, x.float(), ids, weights).to(x.dtype), slow, 192)


@every_backend
def test_weights_of_a_router_may_be_tiny(backend: str) -> None:
    layer, x, ids, weights = make("rows")
    x, weights = x.half(), weights * 2**-20
    slow = slowly(layer, x, ids, weights)
    assert slow.y.abs().median() < torch.finfo(torch.float16).smallest_normal
    assert_experts(BACKENDS[backend](layer, x, ids, weights), slow, 192)


@every_backend
@pytest.mark.parametrize("scale", [0.0, 1e-38, math.nan])
def test_experts_that_nobody_takes_do_not_leak(backend: str, scale: float) -> None:
    layer, x, ids, weights = make("blocks")
    ids = torch.where(ids == 1, 2, ids)
    expected = BACKENDS[backend](layer, x, ids, weights)
    for w in (layer.w13, layer.w2):
        w.scale[1] = scale
        w.data.view(torch.uint8)[1] = 0x7F
    for bias in (layer.bias13, layer.bias2):
        assert bias is not None
        bias[1] = math.nan
    assert_bits_equal(BACKENDS[backend](layer, x, ids, weights), expected)


@every_backend
def test_pairs_of_strangers_count_as_zero_whatever_their_weight(backend: str) -> None:
    layer, x, ids, weights = make("rows")
    ids[0], ids[1, 0] = -1, 99
    weights = weights.masked_fill((ids < 0) | (ids >= 4), math.nan)
    y = BACKENDS[backend](layer, x, ids, weights)
    assert torch.equal(y[0], torch.zeros_like(y[0]))
    assert y.isfinite().all()


@every_backend
def test_a_token_that_is_nan_stays_alone(backend: str) -> None:
    layer, x, ids, weights = make("blocks")
    ids = ids.clamp(0, 2)
    x[2, 5] = math.nan
    y = BACKENDS[backend](layer, x, ids, weights)
    assert y[2].isnan().all()
    assert y[torch.arange(6) != 2].isfinite().all()


@every_backend
def test_one_expert_may_get_every_token(backend: str) -> None:
    layer, x, ids, weights = make("rows", tokens=40, top_k=1)
    ids = torch.full_like(ids, 2)
    y = BACKENDS[backend](layer, x, ids, weights)
    assert_experts(y, slowly(layer, x, ids, weights), 192)


@every_backend
def test_an_expert_taken_twice_counts_twice(backend: str) -> None:
    layer, x, _, _ = make("rows")
    ids, weights = torch.full((6, 2), 3), torch.full((6, 2), 0.5)
    once = BACKENDS[backend](layer, x, ids[:, :1], weights[:, :1] * 2)
    assert_bits_equal(BACKENDS[backend](layer, x, ids, weights), once)


@pytest.mark.parametrize("shape", [(0, 2), (5, 0)])
def test_no_tokens_or_no_ids_give_zeros(shape: tuple[int, int]) -> None:
    layer, _, _, _ = make("rows")
    ids = torch.zeros(shape, dtype=torch.int64)
    y = compute(layer, torch.randn(shape[0], 64), ids, ids.float())
    assert torch.equal(y, torch.zeros(shape[0], 64))


@every_backend
def test_a_token_s_bits_do_not_depend_on_the_others(backend: str) -> None:
    layer, x, ids, weights = make("rows", tokens=17)

    def computed(tokens: slice) -> Tensor:
        given = (layer, x[tokens], ids[tokens], weights[tokens])
        if backend == "triton":
            return in_triton(*given)
        return compute(*given, backend=backend, batch_invariant=True)

    together = computed(slice(None))
    for token in (0, 11):
        row = slice(token, token + 1)
        assert_bits_equal(computed(row), together[row])


def test_ids_are_translated_and_replicas_take_turns() -> None:
    layer, x, _, weights = make("rows")
    ids = torch.randint(0, 3, (6, 3), dtype=torch.int32)
    table = torch.tensor([[3, 1], [0, 0], [-1, -1]])
    turn = torch.arange(6)[:, None] % 2
    direct = compute(layer, x, table[ids.long(), turn], weights)
    assert_bits_equal(compute(layer, x, ids, weights, expert_map=table), direct)
    single = compute(layer, x, table[ids.long(), 0], weights)
    assert_bits_equal(compute(layer, x, ids, weights, expert_map=table[:, 0]), single)


@pytest.mark.parametrize("case", ["blocks", "static", "ungated", "on input"])
def test_gradients_are_those_of_the_dequantized_layer(case: str) -> None:
    layer, x, ids, weights = make(case)
    x, weights = x.float().requires_grad_(), weights.requires_grad_()
    grad = torch.randn(x.shape)
    dense = dense_experts(dequantized(layer), x, ids, weights)
    expected = torch.autograd.grad(dense, (x, weights), grad)
    found = torch.autograd.grad(compute(layer, x, ids, weights), (x, weights), grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_to_weights_are_refused() -> None:
    layer, x, ids, weights = make("blocks")
    assert layer.bias2 is not None
    bias = layer.bias2.requires_grad_()
    with pytest.raises(RuntimeError, match="Experts are frozen"):
        compute(layer._replace(bias2=bias), x, ids, weights).sum().backward()


def test_operators_are_registered_well() -> None:
    layer, x, ids, weights = make("blocks")
    weights = weights.requires_grad_()
    given = operator_arguments(layer, x.float().requires_grad_(), ids, weights)
    # not its schema: torch cannot compare FP8 tensors before and after
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.fp8kit.experts.default, given, test_utils=checks)


def test_compiled_and_exported_layers_compute_the_same() -> None:
    layer, x, ids, weights = make("blocks")
    expected = compute(layer, x, ids, weights)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return compute(layer, x, ids, weights)

    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    assert_bits_equal(compiled(x, ids, weights), expected)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    dynamic = ({0: tokens}, {0: tokens}, {0: tokens})
    program = torch.export.export(Module(), (x, ids, weights), dynamic_shapes=dynamic)
    assert_bits_equal(program.module()(x[:4], ids[:4], weights[:4]), expected[:4])


def test_autocast_gives_its_dtype() -> None:
    layer, x, ids, weights = make("tensors")
    with torch.autocast("cpu", torch.bfloat16):
        y = compute(layer, x, ids, weights)
    assert_bits_equal(y, compute(layer, x.bfloat16(), ids, weights))


def wrong_arguments() -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    tensor = torch.zeros
    return {
        "x": ({"x": tensor(2, 3, 64)}, ValueError, "Flatten the tokens"),
        "w13": ({"w13": fp8kit.quantize(tensor(4, 64, 128))}, ValueError, "Check the orientation"),
        "codes": ({"w2": tensor(4, 64, 128)}, TypeError, "It must be a QTensor"),
        "groups": (
            {"w2": fp8kit.quantize(tensor(4, 64, 128), fp8kit.TENSOR)},
            ValueError,
            "one granularity",
        ),
        "ids": ({"ids": tensor(6, 3)}, TypeError, "Ids are int32 or int64"),
        "weights": ({"weights": tensor(6, 2)}, ValueError, "Both have the shape"),
        "map": ({"expert_map": tensor(4)}, ValueError, "It must be int32 or int64"),
        "list": ({"expert_map": [0, 1]}, TypeError, "Got an expert_map of type list"),
        "activation": ({"activation": "silu"}, TypeError, "moe.Activation"),
        "bias": ({"bias13": tensor(4, 128)}, ValueError, r"needs \(4, 256\)"),
        "scale": ({"input_scale2": tensor(1, 1)}, ValueError, "positive and finite"),
        "backend": ({"backend": "triton_expert"}, ValueError, "Did you mean 'triton_experts'"),
    }


@pytest.mark.parametrize("name", wrong_arguments())
def test_what_does_not_fit_is_refused(name: str) -> None:
    changed, error, said = wrong_arguments()[name]
    layer, x, ids, weights = make("rows")
    given = {"x": x, "w13": layer.w13, "w2": layer.w2, "ids": ids, "weights": weights}
    with pytest.raises(error, match=said):
        moe.experts(**{**given, **changed})


# groups of rows and weights
PAIRS = {"rows": (ROW, ROW), "blocks": (GROUP128, BLOCK), "mx": (MX, MX), "one": (TENSOR, TENSOR)}


def grouped_in_triton(x_q: Any, w_q: Any, offsets: Tensor, bias: Tensor, dtype: Any) -> Tensor:
    from fp8kit.moe.problem import ExpertWeights, GroupedOperands, GroupedProblem

    problem = GroupedProblem.of(x_q.data, w_q.data, (x_q.group, w_q.group), dtype)
    weights = ExpertWeights(w_q.data, w_q.scale, bias, None)
    operands = GroupedOperands(x_q.data, x_q.scale, weights, offsets)
    result: Tensor = triton.grouped(operands, problem)
    return result


@every_backend
@pytest.mark.parametrize("pair", PAIRS)
def test_grouped_products_agree_with_products_one_by_one(pair: str, backend: str) -> None:
    groups = PAIRS[pair]
    layer = random_layer(groups, sizes=(5, 96, 36))
    x = torch.randn(33, 96)
    x[:2] = math.nan  # of no expert, as the last ones
    x[31:] = math.nan
    x_q = fp8kit.quantize(x, groups[0], scale=torch.full((1, 1), 0.01) if pair == "one" else None)
    offsets, bias = torch.tensor([2, 5, 5, 24, 30, 31], dtype=torch.int32), torch.randn(5, 72)
    if backend == "triton":
        y = grouped_in_triton(x_q, layer.w13, offsets, bias, torch.float32)
    else:
        options = {"out_dtype": torch.float32, "backend": backend}
        y = fp8kit.grouped_scaled_mm(x_q, layer.w13, offsets, bias, **options)
    expected = torch.zeros(33, 72).double()
    w, rows = (fp8kit.dequantize(q).double() for q in (layer.w13, x_q))
    for e in range(5):
        part = slice(int(offsets[e]), int(offsets[e + 1]))
        expected[part] = rows[part] @ w[e].t() + bias[e]
    # sums of 96 products in float32, whose errors add in quadrature, twice over
    size = 2 * math.sqrt(96) * torch.finfo(torch.float32).eps / 2
    error, scale = (y.double() - expected).norm(dim=1), expected.norm(dim=1)
    assert (error <= size * scale).all()


def empty_stack(*shape: int, device: torch.device) -> fp8kit.QTensor:
    codes = torch.zeros(shape, device=device).to(torch.float8_e4m3fn)
    return fp8kit.QTensor(
        codes, torch.ones(fp8kit.stack_scale_shape(shape, ROW), device=device), ROW
    )


def test_an_empty_sum_is_the_bias_of_the_expert(device: torch.device) -> None:
    offsets, bias = torch.tensor([1, 3, 3], device=device), torch.rand(2, 5, device=device)
    x_q = fp8kit.quantize(torch.randn(4, 0, device=device), ROW)
    w_q = empty_stack(2, 5, 0, device=device)
    y = fp8kit.grouped_scaled_mm(x_q, w_q, offsets, bias, out_dtype=torch.float32)
    zero = torch.zeros(1, 5, device=device)
    assert_bits_equal(y, torch.cat([zero, bias[:1], bias[:1], zero]))


def test_experts_without_features_give_their_biases(device: torch.device) -> None:
    x, ids = torch.randn(3, 16, device=device), torch.tensor([[0], [1], [-1]], device=device)
    first, second = (empty_stack(2, *s, device=device) for s in ((0, 16), (16, 0)))
    bias = torch.rand(2, 16, device=device)
    weights = torch.full((3, 1), 0.5, device=device)
    y = moe.experts(x, first, second, ids, weights, bias2=bias)
    assert_bits_equal(y, torch.cat([bias * 0.5, torch.zeros(1, 16, device=device)]))


def test_a_layer_without_experts_gives_zeros(device: torch.device) -> None:
    x, ids = torch.randn(3, 16, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device)
    first, second = (empty_stack(0, *s, device=device) for s in ((64, 16), (16, 32)))
    y = moe.experts(x, first, second, ids, torch.ones(3, 1, device=device))
    assert_bits_equal(y, torch.zeros(3, 16, device=device))


@pytest.mark.parametrize("sizes", [(0, 64, 32), (2, 64, 0)], ids=str)
def test_kernels_decline_empty_weights(sizes: tuple[int, int, int]) -> None:
    count, hidden, inner = sizes
    groups, kind = (ROW, ROW), (torch.bfloat16, torch.float8_e4m3fn)
    rest = ("exact", False, False, False, False, "cuda", (9, 0))
    problem = ExpertsProblem(4, count, 1, hidden, inner, moe.Activation(), *groups, *kind, *rest)
    assert "not empty" in str(triton.supports(problem))
    product = GroupedProblem(
        4, count, hidden, inner, *groups, kind[1], *kind[::-1], False, *rest[-2:]
    )
    assert "not empty" in str(triton.supports(product))


def test_grouped_products_refuse_what_does_not_fit() -> None:
    layer = random_layer((ROW, ROW), sizes=(3, 64, 32))
    x_q = fp8kit.quantize(torch.randn(8, 64))
    with pytest.raises(ValueError, match="where each expert begins"):
        fp8kit.grouped_scaled_mm(x_q, layer.w13, torch.tensor([3, 4, 8]))
    blocks = fp8kit.quantize(torch.randn(8, 64), BLOCK)
    with pytest.raises(ValueError, match="no scale in common"):
        fp8kit.grouped_scaled_mm(blocks, layer.w13, torch.tensor([0, 3, 4, 8]))
    with pytest.raises(ValueError, match="Sort the rows by expert"):
        fp8kit.grouped_scaled_mm(x_q, layer.w2, torch.tensor([0, 3, 4, 8]))
    for offsets in ([0, 4, 3, 8], [0, 3, 4, 9], [-1, 3, 4, 8]):
        with pytest.raises(ValueError, match="do not fall, and lie between 0 and 8"):
            fp8kit.grouped_scaled_mm(x_q, layer.w13, torch.tensor(offsets))
    with pytest.raises(TypeError, match="offsets of type list"):
        fp8kit.grouped_scaled_mm(x_q, layer.w13, [0, 3, 4, 8])  # type: ignore[arg-type]
    rest: Any = (x_q, layer.w13, torch.tensor([0, 3, 4, 8]))
    with pytest.raises(TypeError, match="Got bias of type list"):
        fp8kit.grouped_scaled_mm(*rest, [1.0])


def test_stacks_of_any_group_have_one_rule() -> None:
    for group in (ROW, TENSOR, BLOCK, MX, GroupShape(4, 32)):
        w = torch.randn(3, 200, 160)
        q = random_layer((ROW, group), sizes=(3, 160, 100)).w13
        assert tuple(q.scale.shape) == fp8kit.stack_scale_shape(q.shape, group)
        assert w.shape == q.shape
        one = fp8kit.dequantize(fp8kit.QTensor(q.data[1], q.scale[1], group))
        assert_bits_equal(fp8kit.dequantize(q)[1], one)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_computes_the_same(case: str) -> None:
    layer, x, ids, weights = make(case, tokens=40)
    slow, sums = slowly(layer, x, ids, weights), x.shape[1] + layer.w2.shape[2]
    there = (on_device(layer, "cuda"), x.cuda(), ids.cuda(), weights.cuda())
    y = compute(*there, backend="triton_experts")
    assert_experts(y.cpu(), slow, sums, SHORT_SUMS)
    assert_bits_equal(compute(*there, backend="triton_experts"), y)


@pytest.mark.gpu
def test_a_captured_layer_follows_its_routing() -> None:
    layer, x, ids, weights = make("blocks", tokens=40)
    there, x, ids, weights = on_device(layer, "cuda"), x.cuda(), ids.cuda(), weights.cuda()
    compute(there, x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compute(there, x, ids, weights)
    for chosen in (ids.flip(0), torch.full_like(ids, 1), torch.full_like(ids, -1)):
        ids.copy_(chosen)
        graph.replay()
        assert_bits_equal(y, compute(there, x, ids, weights))


def test_kernels_compile_for_every_gpu(tmp_path: Path) -> None:
    found = compiled_by(Path(__file__).with_name("ahead_of_time.py"), tmp_path)
    for name, counts in found.items():
        device, scales = name.split()[:2]
        multiplied = {k: v for k, v in counts.items() if "mma" in k or "tcgen05" in k}
        assert sum(multiplied.values()) > 0, name
        assert counts["shared"] <= counts["room"], name
        assert counts["stack"] == 0, f"{name}: {counts['stack']} bytes did not fit"
        expected = {"sm80": "mma_16bit", "sm89": "mma_fp8", "sm90": "wgmma_fp8"}
        if scales != "16bit" and device in expected:
            assert counts[expected[device]] > 0, name
        elif scales == "16bit":
            assert counts["mma_16bit"] + counts["wgmma_16bit"] > 0, name


def test_plain_calls_pass_the_registered_operator_by(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, ids, weights = make("rows")
    with RegisteredCalls() as seen:  # a mode sees the registered form
        expected = compute(layer, x, ids, weights)
    assert set(seen.names) == {"experts"}
    record_on_cpu(monkeypatch)
    given = (x, *operator_arguments(layer, x, ids, weights)[1:])
    assert operators.LAYER.form(given) is operators.experts
    assert_bits_equal(compute(layer, x, ids, weights), expected)
    assert operators.LAYER.form((x.clone().requires_grad_(), *given[1:])) is not operators.experts
    with RegisteredCalls() as seen:
        compute(layer, x, ids, weights)
    assert set(seen.names) == {"experts"}
