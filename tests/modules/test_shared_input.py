"""Siblings that share an input compute the same bits as separate layers, in any call order."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import backend_tables
import fp8kit
from engine_formulas import on_gpu, plain
from fp8kit.dispatch.backends import choose
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.modules import pending, tracing
from fp8kit.modules.joining import can_join
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops import operators
from fp8kit.quantizers.problem import QUANTIZER_BACKENDS, QuantizeProblem
from fp8kit.runtime.replay_cache import ReplayCache
from groups import hand_over_codes
from numerics import assert_bits_equal

SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "FP8_TENSOR", "FP8_WEIGHT_ONLY")


def siblings(
    device: torch.device, scheme: str = "FP8_DYNAMIC", bias: bool = True
) -> list[fp8kit.Fp8Linear]:
    layers = [
        fp8kit.Fp8Linear.from_linear(
            nn.Linear(256, n, bias, device=device, dtype=torch.bfloat16), scheme
        )
        for n in (256, 128, 384)
    ]
    for layer in layers:
        layer.requires_grad_(False)  # as conversion leaves them
    return layers


def tokens(device: torch.device) -> Tensor:
    return torch.randn(2, 5, 256, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shared_equals_separate(scheme: str, bias: bool, device: torch.device) -> None:
    layers = siblings(device, scheme, bias)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers)
    for _ in range(2):
        for layer, expected in zip(layers, separate, strict=True):
            assert_bits_equal(layer(x), expected)


def test_shared_multiplies_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = siblings(device)
    x = tokens(device)
    calls: list[int] = []
    chosen = choose(MATMUL_BACKENDS, layers[0].problem(10)).implementation

    def counted(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        calls.append(problem.n)
        return chosen.run(operands, problem)

    backend = MatmulBackend(run=counted)
    backend_tables.install(monkeypatch, matmul={"reference": backend})
    for layer in layers:
        layer(x)
    assert calls == [256, 128, 384]
    calls.clear()
    SharedInput(layers)
    for layer in layers:
        layer(x)
    assert calls == [768]


@pytest.mark.parametrize("a_view", [False, True])
def test_shared_with_another_tensor_computes_alone(a_view: bool, device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    other = x[:1] if a_view else tokens(device)  # a view has the address and the version of x
    expected = layers[1](other)
    expected_last = layers[2](x)
    SharedInput(layers)
    layers[0](x)
    assert_bits_equal(layers[1](other), expected)
    assert_bits_equal(layers[2](x), expected_last)


@pytest.mark.parametrize("replaced", [False, True])
def test_shared_sees_an_input_changed_in_place(replaced: bool, device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device)
    layers[0](x)
    if replaced:
        x.data = x * 2
    else:
        x.mul_(2)
    fresh = siblings_alone(layers[1], x)
    assert_bits_equal(layers[1](x), fresh)


@pytest.mark.parametrize("rows", [5, 700])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_shared_sees_an_input_in_host_memory_that_is_changed_uncounted(
    scheme: str, rows: int
) -> None:
    layers = siblings(torch.device("cpu"), scheme)
    SharedInput(layers)
    buffer = np.random.default_rng(0).standard_normal((rows, 256)).astype(np.float32)
    x = torch.from_numpy(buffer)
    layers[0](x)
    x.data.mul_(3)
    assert_bits_equal(layers[1](x), siblings_alone(layers[1], x))
    for last in (2, 1):  # a run that left one out, and another input in the same memory
        layers[0](x)
        buffer[:] = np.random.default_rng(last).standard_normal(buffer.shape)
        assert_bits_equal(layers[last](x), siblings_alone(layers[last], x))


def siblings_alone(layer: fp8kit.Fp8Linear, x: Tensor) -> Tensor:
    return layer.compute(x)


def test_a_hook_that_writes_uncounted_is_seen_in_known_code() -> None:
    layers = siblings(torch.device("cpu"))
    SharedInput(layers, unchanging=True)
    x = tokens(torch.device("cpu"))

    def write(*_: object) -> None:
        x.data.mul_(3)

    layers[0].register_forward_hook(write)
    layers[0](x)
    assert_bits_equal(layers[1](x), siblings_alone(layers[1], x))


def test_shared_in_another_order(device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers)
    for i in (2, 1, 0, 0, 2, 1):
        assert_bits_equal(layers[i](x), separate[i])


def test_shared_keeps_no_result_after_the_last_sibling(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device)
    for layer in layers:
        layer(x)
    gone = weakref.ref(x)
    del x
    assert gone() is None


@pytest.mark.parametrize("unchanging", [True, False])
def test_shared_in_inference_mode(unchanging: bool, device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers, unchanging)
    with torch.inference_mode():
        inside = tokens(device).copy_(x)
        for layer, expected in zip(layers, separate, strict=True):
            assert_bits_equal(layer(inside), expected)


def test_inference_tensors_that_change_are_not_shared(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    with torch.inference_mode():
        x = tokens(device).clone()
        layers[0](x)
        x.mul_(2)
        assert_bits_equal(layers[1](x), siblings_alone(layers[1], x))


def test_a_result_without_gradient_is_not_handed_to_a_call_with_one(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device).requires_grad_()
    with torch.no_grad():
        layers[0](x)
    assert layers[1](x).requires_grad


def test_a_result_of_old_weights_is_not_handed_out(device: torch.device) -> None:
    layers, other = siblings(device), siblings(device)[1]
    SharedInput(layers)
    x = tokens(device)
    layers[0](x)
    layers[1].load_state_dict(other.state_dict())
    assert_bits_equal(layers[1](x), other(x))


@pytest.mark.parametrize("by", ["hook", "forward"])
def test_weights_that_arrive_with_the_call_are_not_read_before(
    by: str, device: torch.device
) -> None:
    """Offloading fills a layer before its call and empties it afterwards."""
    layers, x = siblings(device), tokens(device)
    wanted = [layer(x) for layer in layers]
    SharedInput(layers)
    for layer in layers:
        kept, own = layer.codes.detach().clone(), layer.forward

        def fill(layer: Any, _: Any, kept: Tensor = kept) -> None:
            layer.codes.data.view(torch.uint8).copy_(kept.view(torch.uint8))

        def empty(layer: Any, *_: Any) -> None:
            layer.codes.data.view(torch.uint8).fill_(0x7F)

        def wrapped(x: Tensor, layer: Any = layer, own: Any = own, fill: Any = fill) -> Tensor:
            fill(layer, x)
            y: Tensor = own(x)
            empty(layer)
            return y

        if by == "hook":
            layer.register_forward_pre_hook(fill)
            layer.register_forward_hook(empty)
        else:
            layer.forward = wrapped
        empty(layer)
    for _ in range(2):
        for layer, expected in zip(layers, wanted, strict=True):
            assert_bits_equal(layer(x), expected)


def test_shared_gradient_to_the_input(device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device).requires_grad_()
    sum(layer(x).float().sum() for layer in layers).backward()
    expected, x.grad = x.grad, None
    SharedInput(layers)
    sum(layer(x).float().sum() for layer in layers).backward()
    assert expected is not None
    assert x.grad is not None
    assert_bits_equal(x.grad, expected)


def test_shared_state_dict_is_unchanged(device: torch.device) -> None:
    model = nn.ModuleList(siblings(device))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    SharedInput(list(model))
    x = tokens(device)
    for layer in model:
        layer(x)
    after = model.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert_bits_equal(after[key], value)


def test_shared_weights_reload_in_place(device: torch.device) -> None:
    layers, others = siblings(device), siblings(device)
    x = tokens(device)
    SharedInput(layers)
    for layer in layers:
        layer(x)
    address = layers[1].weight.data_ptr()
    for layer, other in zip(layers, others, strict=True):
        layer.load_state_dict(other.state_dict())
    assert layers[1].weight.data_ptr() == address
    for layer, other in zip(layers, others, strict=True):
        assert_bits_equal(layer(x), other(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_shared_survives_copies(copied, device: torch.device) -> None:
    model = nn.ModuleList(siblings(device))
    x = tokens(device)
    separate = [layer(x) for layer in model]
    SharedInput(list(model))
    for layer in model:
        layer(x)
    twin = copied(model)
    assert twin[0].shared is not model[0].shared
    assert twin[0].shared.members[1] is twin[1]
    for layer, expected in zip(twin, separate, strict=True):
        assert_bits_equal(layer(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_one_sibling_is_alone(copied, device: torch.device) -> None:
    layers = siblings(device)
    group, x = SharedInput(layers, unchanging=True), tokens(device)
    for twin in (copied(layers[1]), copy.copy(layers[1])):
        assert twin.shared is None
        assert not twin.place
        assert_bits_equal(twin(x), layers[1](x))
    assert group.members == layers
    assert [layer.shared for layer in layers] == [group] * len(layers)


def test_shared_after_casts_and_moves(device: torch.device) -> None:
    model = nn.ModuleList(siblings(device))
    x = tokens(device)
    separate = [layer(x) for layer in model]
    SharedInput(list(model))
    for layer in model:
        layer(x)
    model.to("cpu").to(device).float().to(torch.bfloat16)
    for layer, expected in zip(model, separate, strict=True):
        assert_bits_equal(layer(x), expected)


def test_can_join_needs_block_edges() -> None:
    aligned = [fp8kit.Fp8Linear(256, n, False, "FP8_BLOCK") for n in (256, 100)]
    ragged = aligned[::-1]
    assert can_join(aligned)
    assert not can_join(ragged)


def test_can_join_needs_equal_layers() -> None:
    first = fp8kit.Fp8Linear(256, 128, False)
    assert can_join([first, fp8kit.Fp8Linear(256, 64, False)])
    assert not can_join([first, fp8kit.Fp8Linear(256, 128, True)])
    assert not can_join([first, fp8kit.Fp8Linear(256, 128, False, "MXFP8")])
    fast = fp8kit.Fp8Linear(256, 128, False)
    fast.accum = "fast"
    assert not can_join([first, fast])


def test_layers_whose_bits_may_not_depend_on_rows_share_their_codes_alone(
    device: torch.device,
) -> None:
    dense = [nn.Linear(2048, n, False, device=device, dtype=torch.bfloat16) for n in (64, 4224)]
    layers = [fp8kit.Fp8Linear.from_linear(layer) for layer in dense]
    for layer in layers:
        layer.batch_invariant = True
        layer.requires_grad_(False)
    assert not can_join(layers)
    SharedInput(layers)
    x = torch.randn(513, 2048, dtype=torch.bfloat16, device=device)
    many = [layer(x) for layer in layers]
    few = x[:3].clone()
    for layer, expected in zip(layers, many, strict=True):
        assert_bits_equal(layer(few), expected[:3])


class Trio(nn.Module):
    """Three siblings; ``between`` runs after the first, and may change the others' input."""

    def __init__(self, device: torch.device, scheme: str, unchanging: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = siblings(device, scheme)
        self.group = SharedInput([self.q, self.k, self.v], unchanging)
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        first = self.q(x)
        x = self.between(x)
        return torch.cat([first, self.k(x), self.v(x)], -1)


def compiled_trio(model: Trio, x: Tensor, dynamic: bool = True) -> tuple[Tensor, list[str]]:
    torch._dynamo.reset()
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        calls.extend(str(n.target) for n in graph.graph.nodes if n.op.startswith("call"))
        return graph.forward

    y = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)(x)
    assert tracing._left is None
    return y, calls


@pytest.mark.parametrize("unchanging", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shared_compiles_without_a_break(
    scheme: str, unchanging: bool, device: torch.device
) -> None:
    model, x = Trio(device, scheme, unchanging), tokens(device)
    expected = model(x)
    y, calls = compiled_trio(model, x)
    assert_bits_equal(y, expected)
    products = calls.count("fp8kit.scaled_mm") + calls.count("fp8kit.linear")
    assert products == 3
    shares = unchanging and scheme != "FP8_WEIGHT_ONLY"
    assert calls.count("fp8kit.quantize") == (1 if shares else 0)


def follow(part: Tensor, other: Tensor) -> bool:
    return other.data_ptr() == part.data_ptr() + part.nbytes


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_a_graph_of_few_rows_multiplies_once(scheme: str, device: torch.device) -> None:
    model, x = Trio(device, scheme, unchanging=True), tokens(device)
    y, calls = compiled_trio(model, x, dynamic=False)
    assert [c for c in calls if "fp8kit" in c] == ["fp8kit.joined_linear"]
    assert follow(model.q.weight, model.k.weight)
    assert_bits_equal(y, model(x))


def test_a_graph_of_many_rows_shares_codes(device: torch.device) -> None:
    model = Trio(device, "FP8_DYNAMIC", unchanging=True)
    x = tokens(device).flatten(0, -2)
    x = x.repeat(-(-513 // x.shape[0]), 1)
    y, calls = compiled_trio(model, x, dynamic=False)
    assert calls.count("fp8kit.quantize") == 1
    assert calls.count("fp8kit.scaled_mm") == 3
    assert_bits_equal(y, model(x))


def test_a_joined_graph_follows_its_layers(device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", unchanging=True), tokens(device)
    run = torch.compile(model, backend="eager", dynamic=False)
    assert_bits_equal(run(x), model(x))
    for change in (
        lambda: setattr(model.k, "weight", nn.Parameter(model.k.weight.detach().clone(), False)),
        lambda: model.v.weight_scale.mul_(2),
        lambda: setattr(model.v, "accum", "fast"),
        lambda: setattr(model.k, "out_dtype", torch.float32),
        lambda: setattr(model.v, "scale_ub", 0.25),
    ):
        change()
        expected = torch.cat([layer.compute(x) for layer in (model.q, model.k, model.v)], -1)
        assert_bits_equal(run(x), expected)


def doubled(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    module.weight_scale.mul_(2)


def shifted(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    module.bias.data.add_(1)


CHANGED: dict[str, Callable[[Trio], object]] = {
    "dense again": lambda m: setattr(m, "k", m.k.to_linear()),
    "quantized again": lambda m: setattr(m, "k", siblings(m.q.codes.device)[1]),
    "input hook": lambda m: m.k.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "weight hook": lambda m: m.v.register_forward_pre_hook(doubled),
    "bias hook": lambda m: m.k.register_forward_pre_hook(shifted),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_joined_graph_gives_each_layer_its_own_result(change: str, device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", unchanging=True), tokens(device)
    CHANGED[change](model)
    expected = copy.deepcopy(model)(x)
    y, _ = compiled_trio(model, x, dynamic=False)
    assert_bits_equal(y, expected)


@pytest.mark.parametrize("order", ["qv", "qkkv", "qkkkv", "qvk", "kqv", "qqkv"])
def test_a_joined_graph_may_be_called_in_any_order(order: str, device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", unchanging=True), tokens(device)

    def run(x: Tensor) -> list[Tensor]:
        return [getattr(model, name)(x) for name in order]

    for y, name in zip(torch.compile(run, backend="eager")(x), order, strict=True):
        assert_bits_equal(y, getattr(model, name).compute(x))


def test_joined_results_do_not_outlive_their_graph(device: torch.device) -> None:
    layers, x = siblings(device), tokens(device)
    SharedInput(layers, unchanging=True)
    for layer in layers:
        layer.compile(backend="eager", dynamic=False)
    for _ in range(2):
        layers[0](x)
        layers[1].weight_scale.mul_(2)
        assert_bits_equal(layers[1](x), layers[1].compute(x))
        layers[2].weight_scale.mul_(2)
        assert_bits_equal(layers[2](x), layers[2].compute(x))


def test_scales_of_one_column_are_joined_row_by_row() -> None:
    codes = [fp8kit.quantize(torch.randn(128, 256) * (i + 1), fp8kit.BLOCK) for i in range(2)]
    data = torch.cat([q.data.view(torch.uint8) for q in codes]).view(torch.float8_e4m3fn)
    scales = torch.cat([q.scale.reshape(2, 1) for q in codes])  # [1, 2] of each, strides (1, 1)
    layers = [
        fp8kit.Fp8Linear.from_quantized(
            fp8kit.QTensor(
                data[128 * i : 128 * i + 128], scales[2 * i : 2 * i + 2].t(), fp8kit.BLOCK
            ),
            scheme="FP8_BLOCK",
        )
        for i in range(2)
    ]
    x = torch.randn(3, 256)
    expected = [layer.compute(x) for layer in layers]
    SharedInput(layers, unchanging=True)
    for layer, y in zip(layers, expected, strict=True):
        assert_bits_equal(layer(x), y)


def test_weights_that_lie_apart_are_multiplied_one_by_one(device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", unchanging=True), tokens(device)
    operands = [layer.operands() for layer in (model.q, model.k, model.v)]
    assert not follow(model.q.weight, model.k.weight)
    parts = operators.joined_registered(x, operands, model.q.options())
    for part, layer in zip(parts, (model.q, model.k, model.v), strict=True):
        assert_bits_equal(part, layer.compute(x))


def test_a_graph_with_a_trained_bias_is_not_joined(device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", unchanging=True), tokens(device)
    assert model.v.bias is not None
    model.v.bias.requires_grad_()
    y, calls = compiled_trio(model, x, dynamic=False)
    assert "fp8kit.joined_linear" not in calls
    y.float().sum().backward()
    assert model.v.bias.grad is not None


def test_a_graph_shares_nothing_with_another_tensor(device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", True), tokens(device)
    model.between = lambda x: x + 1
    expected = torch.cat([model.q(x), siblings_alone(model.k, x + 1), model.v(x + 1)], -1)
    y, calls = compiled_trio(model, x)
    assert_bits_equal(y, expected)
    assert calls.count("fp8kit.quantize") + calls.count("fp8kit.linear") >= 3


def test_a_graph_shares_nothing_once_layers_are_grouped_without_a_promise(
    device: torch.device,
) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", True), tokens(device)
    SharedInput([model.q, model.k, model.v])  # their input may change in between
    expected = model(x)
    y, calls = compiled_trio(model, x)
    assert_bits_equal(y, expected)
    assert calls.count("fp8kit.linear") == 3


def test_a_graph_with_gradients_shares_nothing(device: torch.device) -> None:
    model, x = Trio(device, "FP8_DYNAMIC", True), tokens(device).requires_grad_()
    y, calls = compiled_trio(model, x)
    assert calls.count("fp8kit.linear") == 3
    assert y.requires_grad


@pytest.mark.gpu
def test_shared_is_captured_by_a_graph() -> None:
    device = torch.device("cuda")
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device)
    for layer in layers:
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [layer(x) for layer in layers]
    x.copy_(tokens(device))
    graph.replay()
    for layer, result in zip(layers, captured, strict=True):
        assert_bits_equal(result, siblings_alone(layer, x))


def test_shared_many_rows_quantize_once_and_multiply_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = siblings(device)
    x = torch.randn(600, 256, dtype=torch.bfloat16, device=device)
    separate = [layer(x) for layer in layers]
    quantized: list[Tensor] = []
    problem = QuantizeProblem.of(x, fp8kit.ROW, torch.float8_e4m3fn)
    chosen = choose(QUANTIZER_BACKENDS, problem).implementation

    def counted(x: Tensor, *others: Any) -> Any:
        quantized.append(x)
        return chosen.quantize(x, *others)

    backend = dataclasses.replace(chosen, supports=lambda _: None, quantize=counted)
    backend_tables.install(monkeypatch, quantizers={"reference": backend})
    SharedInput(layers)
    for layer, expected in zip(layers, separate, strict=True):
        y = layer(x)
        assert y.is_contiguous()
        assert_bits_equal(y, expected)
    assert len(quantized) == 1


def test_shared_many_rows_keep_the_gradient(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = torch.randn(600, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    for layer in layers:
        assert layer(x).requires_grad


def test_shared_siblings_keep_bias_gradients(device: torch.device) -> None:
    layers = siblings(device)
    for layer in layers:
        layer.bias.requires_grad_(True)
    SharedInput(layers)
    sum(layer(tokens(device)).float().sum() for layer in layers).backward()
    assert all(layer.bias.grad is not None for layer in layers)


def test_siblings_backward_one_by_one(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device).requires_grad_()
    for layer in layers:
        layer(x).float().sum().backward()
    assert x.grad is not None


def test_results_for_unknown_callers_are_contiguous(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device)
    assert all(layer(x).is_contiguous() for layer in layers)


def test_biases_of_two_dtypes_do_not_join(device: torch.device) -> None:
    layers = siblings(device)
    layers[1].bias = nn.Parameter(layers[1].bias.float(), requires_grad=False)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers, unchanging=True)
    for layer, expected in zip(layers, separate, strict=True):
        assert_bits_equal(layer(x), expected)


def test_autocast_between_siblings_is_noticed(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = tokens(device).float()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16
    assert layers[1](x).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("unchanging", [True, False])
def test_a_part_may_be_changed_in_place(rows: int, unchanging: bool, device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)[:1, :rows]
    expected = siblings_alone(layers[1], x)
    SharedInput(layers, unchanging)
    adapter = torch.randn(256, dtype=torch.bfloat16, device=device, requires_grad=True)
    q = layers[0](x)
    q += adapter
    assert_bits_equal(layers[1](x), expected)
    q.float().sum().backward()
    assert adapter.grad is not None
    assert (adapter.grad == rows).all()


@pytest.mark.parametrize("rows", [5, 600])
def test_shared_on_meta(rows: int) -> None:
    layers = siblings(torch.device("meta"))
    SharedInput(layers)
    x = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
    assert [layer(x).shape for layer in layers] == [(rows, 256), (rows, 128), (rows, 384)]


def test_a_fake_run_leaves_the_weights_alone(device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, 5, 256, dtype=torch.bfloat16, device=device)
        assert [layer(fake).shape[-1] for layer in layers] == [256, 128, 384]
    for layer, expected in zip(layers, separate, strict=True):
        assert_bits_equal(layer(x), expected)


def test_shared_is_traced_with_fake_tensors(device: torch.device) -> None:
    layers = siblings(device)
    SharedInput(layers, unchanging=True)
    x = tokens(device)

    def run(x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in layers], -1)

    with torch.no_grad():
        traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        x = tokens(device)
        assert_bits_equal(traced(x), run(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("unchanging", [False, True])
def test_a_trace_takes_other_rows(unchanging: bool) -> None:
    layers = siblings(torch.device("cpu"))
    SharedInput(layers, unchanging)
    model = nn.ModuleList(layers)
    model.forward = lambda x: torch.cat([layer(x) for layer in layers], -1)
    x = tokens(torch.device("cpu"))
    with torch.no_grad():
        traced = torch.jit.trace(model, x)
        for other in (x, x.transpose(0, 1), x[:1], x[0]):
            assert_bits_equal(traced(other), model(other))


@pytest.mark.parametrize("unchanging", [False, True])
def test_a_mapped_call_is_one_for_the_whole_batch(unchanging: bool, device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    separate = [layer(x) for layer in layers]
    SharedInput(layers, unchanging)
    torch._C._functorch._set_vmap_fallback_enabled(False)
    try:
        mapped = torch.vmap(lambda row: tuple(layer(row) for layer in layers))(x)
    finally:
        torch._C._functorch._set_vmap_fallback_enabled(True)
    for y, expected in zip(mapped, separate, strict=True):
        assert_bits_equal(y, expected)


@pytest.mark.parametrize("unchanging", [True, False])
def test_what_is_no_tensor(unchanging: bool) -> None:
    layers = siblings(torch.device("cpu"))
    SharedInput(layers, unchanging)
    for other in ([1.0], None):
        for layer in layers:
            with pytest.raises(TypeError, match="It must be a bfloat16, float16 or float32 tensor"):
                layer(other)


def test_shared_under_vmap(device: torch.device) -> None:
    layers = siblings(device)
    x = tokens(device)
    separate = torch.cat([layer(x) for layer in layers], -1)
    SharedInput(layers, unchanging=True)
    assert_bits_equal(torch.vmap(lambda x: torch.cat([y(x) for y in layers], -1))(x), separate)


def capturing(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make groups on a CPU believe that a graph is being captured; return what they asked about."""
    asked: list[Tensor] = []

    def watch(self: SharedInput, x: Tensor) -> None:
        asked.append(x)
        self._captured = True

    monkeypatch.setattr(SharedInput, "_watch_capture", watch)
    return asked


@pytest.mark.parametrize("offered", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("rows", [5, 600])
def test_weights_that_a_graph_has_captured_do_not_move(
    rows: int, offered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = siblings(device)
    group = SharedInput(layers)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
    separate = [siblings_alone(layer, x) for layer in layers]
    before = [layer.weight.data_ptr() for layer in layers]
    with monkeypatch.context() as patch:
        asked = capturing(patch)
        if offered:
            hand_over_codes(group, x, x)
        layers[0](x)
    assert asked
    for _ in range(2):
        for layer, expected in zip(layers, separate, strict=True):
            assert_bits_equal(layer(x[:5]), expected[:5])
    assert [layer.weight.data_ptr() for layer in layers] == before


def test_weights_that_were_joined_before_a_capture_stay_joined(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = siblings(device)
    SharedInput(layers)
    layers[0](tokens(device))
    before = [layer.weight.data_ptr() for layer in layers]
    capturing(monkeypatch)
    for layer in layers:
        layer(tokens(device))
    assert [layer.weight.data_ptr() for layer in layers] == before
    replaced = siblings(device)[1].weight
    layers[1].weight = replaced
    address = replaced.data_ptr()
    for layer in layers:
        layer(tokens(device))
    assert layers[1].weight.data_ptr() == address


def test_shared_runs_on_fake_tensors_of_a_gpu_that_is_not_there() -> None:
    with FakeTensorMode():
        layers = [
            fp8kit.Fp8Linear(256, n, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
            for n in (256, 128)
        ]
        SharedInput(layers)
        x = torch.empty(2, 5, 256, dtype=torch.bfloat16, device="cuda")
        assert [y(x).shape[-1] for y in layers] == [256, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 2000])
def test_a_graph_that_captured_weights_apart_is_replayed_after_other_calls(rows: int) -> None:
    device = torch.device("cuda")
    layers = siblings(device)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
    separate = [layer(x) for layer in layers]
    before = [layer.weight.data_ptr() for layer in layers]
    SharedInput(layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [layer(x) for layer in layers]
    for layer, expected in zip(layers, separate, strict=True):
        assert_bits_equal(layer(x), expected)
    layers[0](tokens(device))
    assert [layer.weight.data_ptr() for layer in layers] == before
    torch.full((2**24,), 7, dtype=torch.uint8, device=device)
    graph.replay()
    for result, expected in zip(captured, separate, strict=True):
        assert_bits_equal(result, expected)


@pytest.mark.parametrize("rows", [5, 600])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_result_of_replaced_parameters_is_not_handed_out(
    part: str, rows: int, device: torch.device
) -> None:
    layers, other = siblings(device), siblings(device)[1]
    SharedInput(layers)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
    layers[0](x)
    setattr(layers[1], part, getattr(other, part))
    assert_bits_equal(layers[1](x), siblings_alone(layers[1], x))


@pytest.mark.parametrize("rows", [5, 600])
@pytest.mark.parametrize("trained", ["input", "bias"])
def test_a_gradient_asked_for_between_siblings_flows(
    trained: str, rows: int, device: torch.device
) -> None:
    layers = siblings(device)
    SharedInput(layers)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
    layers[0](x)
    wanted = (x if trained == "input" else layers[1].bias).requires_grad_()
    layers[1](x).float().sum().backward()
    assert wanted.grad is not None


@pytest.mark.parametrize("offered", [False, True], ids=["values", "codes"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_siblings_of_a_layer_that_is_gone_compute_on(
    gone: int, offered: bool, device: torch.device
) -> None:
    layers = siblings(device)
    group = SharedInput(layers, unchanging=True)
    for _ in range(2):
        x = tokens(device)
        if offered:
            hand_over_codes(group, x, x)
        for layer in layers:
            assert_bits_equal(layer(x), siblings_alone(layer, x))
        if len(layers) == 3:
            del layer, layers[gone]
            assert group.members == layers


def test_threads_do_not_take_what_waits_for_another(device: torch.device) -> None:
    layers = siblings(device)
    group = SharedInput(layers)
    x = tokens(device)
    stand_in = torch.full_like(x, torch.nan)
    hand_over_codes(group, stand_in, x)
    other = threading.Thread(target=lambda: layers[0](tokens(device)))
    other.start()
    other.join()
    for layer in layers:
        assert_bits_equal(layer(stand_in), siblings_alone(layer, x))


class Streams:
    """Fakes the current stream, and collects the streams that memory is recorded on."""

    def __init__(self) -> None:
        self.now = "main"
        self.told: list[str] = []


@pytest.fixture
def streams(faked_cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    faked_cuda(current_stream=lambda _: made.now, is_current_stream_capturing=lambda: False)
    monkeypatch.setattr(pending, "_current_stream", lambda _: made.now)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: made.told.append(stream))
    return made


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_offered_codes_outlive_their_use_in_another_stream(scheme: str, streams: Streams) -> None:
    layers = siblings(torch.device("cpu"), scheme)
    group, x = SharedInput(layers), tokens(torch.device("cpu"))
    for order in (["main"] * 3, ["main", "side", "side"], ["side", "side", "main"]):
        streams.now, streams.told = "main", []
        stand_in = on_gpu(torch.full_like(x, torch.nan))
        group.offer(stand_in, layers[0].quantize_input(x))
        for layer, streams.now in zip(layers, order, strict=True):
            assert_bits_equal(plain(layer(stand_in)), siblings_alone(layer, x))
        assert {*streams.told} == {*order} - {"main"}


def test_offered_products_outlive_their_use_in_another_stream(streams: Streams) -> None:
    layers = siblings(torch.device("cpu"), "FP8_DYNAMIC")
    group, x = SharedInput(layers, unchanging=True), tokens(torch.device("cpu"))
    norm = nn.RMSNorm(x.shape[-1], dtype=x.dtype).requires_grad_(False)
    call = NormFormula("rms_norm", 1e-6).codes((x,), norm, layers[0].scheme)
    stand_in = on_gpu(torch.full_like(x, torch.nan))
    assert group.produce(stand_in, ReplayCache(), call) == []
    for layer, streams.now in zip(layers, ("main", "side", "other"), strict=True):
        assert plain(layer(stand_in)).isfinite().all()
    assert streams.told == ["side", "other"]


def test_results_that_stay_in_one_stream_are_told_to_none(streams: Streams) -> None:
    layers = siblings(torch.device("cpu"), "FP8_DYNAMIC")
    group = SharedInput(layers, unchanging=True)
    x, streams.now = on_gpu(tokens(torch.device("cpu"))), "side"
    for layer in layers:
        assert plain(layer(x)).isfinite().all()
    assert group.members == layers
    assert streams.told == []


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 600])
def test_a_sibling_on_another_stream_waits_for_no_result(rows: int) -> None:
    device = torch.device("cuda")
    layers = siblings(device)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=device)
    expected = [layer(x) for layer in layers]
    SharedInput(layers)
    other = -x
    for layer in layers:  # compile what is compiled once, and leave other numbers in memory
        layer(other)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # the first sibling computes after it
    found = [layers[0](x)]
    with torch.cuda.stream(side):
        found += [layer(x) + 0 for layer in layers[1:]]  # which is read before the first is done
    torch.cuda.synchronize()
    for y, wanted in zip(found, expected, strict=True):
        assert_bits_equal(y, wanted)
