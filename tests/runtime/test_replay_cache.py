"""Eager layers replay their launches, and never stale ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8kit
from fp8kit.dispatch import backends as dispatch
from fp8kit.formats import ROW, TENSOR, GroupShape
from fp8kit.fused import operators as fused
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.quantizers import reference
from fp8kit.runtime.launch_recording import is_recording, record
from fp8kit.runtime.replay_cache import MOST_KEYS, Operator, ReplayCache
from frames import above_launches, launch_from
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install, launch, record_on_cpu

SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "FP8", "FP8_TENSOR")


@pytest.fixture
def cpu_backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


def dense(bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(160, 96, bias=bias, dtype=dtype)


def made(scheme: str = "FP8_DYNAMIC", linear: nn.Linear | None = None) -> fp8kit.Fp8Linear:
    linear = linear or dense()
    scale = torch.full((1, 1), 0.01, device=linear.weight.device) if scheme == "FP8" else None
    return fp8kit.Fp8Linear.from_linear(linear, scheme, scale).requires_grad_(False)


def operator(layer: fp8kit.Fp8Linear, x: Tensor) -> Tensor:
    """Compute by the registered operator, without replay."""
    weight = layer.quantized_weight()
    options = {"scheme": layer.scheme, "accum": layer.accum}
    return fp8kit.linear(x, weight, layer.bias, input_scale=layer.input_scale, **options)


def warmed(layer: fp8kit.Fp8Linear, x: Tensor, backends: CpuBackends) -> fp8kit.Fp8Linear:
    for _ in range(3):
        layer(x)
    backends.calls.clear()
    layer(x)
    assert backends.calls == [], "the layer is taped"
    return layer


def x_of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, 160, dtype=dtype)


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), ()], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_recorded_layer_computes_what_the_operator_computes(
    scheme: str, bias: bool, shape: tuple[int, ...], cpu_backends: CpuBackends
) -> None:
    layer = made(scheme, dense(bias))
    for turn in range(4):
        x = x_of(*shape)
        cpu_backends.calls.clear()
        y = layer(x)
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        assert_bits_equal(y, operator(layer, x))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_codes_with_gaps_between_rows_are_recorded(
    scheme: str, cpu_backends: CpuBackends, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = []

    def gaps(x: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
        m, k = x.shape
        return x.new_empty((m, k + 32), dtype=dtype).as_strided((m, k), (k + 32, 1))

    def noting(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        multiplied.append(operands.x.stride())
        return multiply(operands, problem)

    x, multiply = x_of(5), cpu_backends.run
    expected = operator(made(scheme, linear := dense()), x)
    monkeypatch.setattr("fp8kit.ops.bodies.empty_codes", gaps)
    cpu_backends.run = noting
    layer = warmed(made(scheme, linear), x, cpu_backends)
    assert multiplied == [(192, 1)] * 2
    assert_bits_equal(layer(x), expected)


def test_shapes_and_dtypes_have_recordings_of_their_own(cpu_backends: CpuBackends) -> None:
    layer = made()
    inputs = [x_of(3), x_of(4), x_of(3, dtype=torch.float32), x_of(1, 3)]
    for _ in range(3):
        for x in inputs:
            assert_bits_equal(layer(x), operator(layer, x))
    cpu_backends.calls.clear()
    for x in inputs:
        layer(x)
    assert cpu_backends.calls == []


def test_one_row_is_repeated_whatever_its_stride(cpu_backends: CpuBackends) -> None:
    layer = warmed(made(), x_of(1), cpu_backends)
    row = torch.randn(1, 320, dtype=torch.bfloat16)[:, :160]
    assert row.stride() == (320, 1)
    y = layer(row)
    assert cpu_backends.calls == []
    assert_bits_equal(y, operator(layer, row))


def test_what_was_found_takes_only_inputs_of_its_key(cpu_backends: CpuBackends) -> None:
    def double(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        launch(lambda x, y: y.copy_(2 * x), x, y)
        return y

    x, cache, doubled = torch.randn(4, 8), ReplayCache(), Operator(double, double)
    for _ in range(2):
        cache.run(doubled, (x,), (), ())
    found = cache.find(doubled, (x,), (), ())
    assert found is not None
    assert found.fits(torch.randn(4, 8))
    assert_bits_equal(found.recording(x)[0], 2 * x)
    for other in (torch.randn(3, 8), torch.randn(8, 4).t(), x.double(), x[:, :4]):
        assert not found.fits(other)
    assert not found.fits(torch.randn(33)[1:].view(4, 8))  # kernels need aligned addresses


def test_few_shapes_are_kept(cpu_backends: CpuBackends) -> None:
    layer = made()
    for m in range(1, 2 * MOST_KEYS):
        layer(x_of(m))
    assert 0 < len(layer.replays) <= MOST_KEYS


def test_threads_may_keep_calls_at_once(cpu_backends: CpuBackends) -> None:
    cache, interval, x = ReplayCache(), sys.getswitchinterval(), x_of(1)
    same = Operator(lambda x, *_: x, lambda x, *_: x)

    def keep(thread: int) -> None:
        for call in range(12000):
            cache.run(same, (x,), (), (thread, call))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(keep, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert len(cache) == MOST_KEYS


def test_new_times_are_heeded_at_once(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    dispatch.forget_tables()
    for made_in_full in (True, True, False):
        layer(x)
        assert cpu_backends.calls == (["quantize", "multiply"] if made_in_full else [])
        cpu_backends.calls.clear()


def test_a_reload_in_place_is_seen(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    layer.load_state_dict(dense().state_dict())
    assert_bits_equal(layer(x), operator(layer, x))
    layer.load_state_dict(made().state_dict())
    cpu_backends.calls.clear()
    for made_in_full in (True, True, False):  # waits for the new weight, is recorded, is replayed
        y = layer(x)
        assert cpu_backends.calls == (["quantize", "multiply"] if made_in_full else [])
        cpu_backends.calls.clear()
        assert_bits_equal(y, operator(layer, x))
        cpu_backends.calls.clear()


def test_a_weight_that_no_call_has_read_is_not_prefetched(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    twin = nn.Parameter(layer.codes.data, requires_grad=False)
    assert twin.data_ptr() == layer.codes.data_ptr()  # as the allocator may give it out again
    assert twin._version == layer.codes._version
    layer.weight = twin
    for made_in_full in (True, True, False):
        layer(x)
        assert cpu_backends.calls == (["quantize", "multiply"] if made_in_full else [])
        cpu_backends.calls.clear()


def replace_weight(layer: fp8kit.Fp8Linear) -> None:
    other = made()
    layer.weight, layer.weight_scale = other.weight, other.weight_scale


def swap_data(layer: fp8kit.Fp8Linear) -> None:
    other = made()
    layer.weight.data, layer.weight_scale.data = other.weight.data, other.weight_scale.data


def cast(layer: fp8kit.Fp8Linear) -> None:
    layer.half()
    layer.bfloat16()
    layer.float()


def drop_bias(layer: fp8kit.Fp8Linear) -> None:
    layer.bias = None


def bias_in_a_buffer(layer: fp8kit.Fp8Linear) -> None:
    bias = layer.bias.detach() + 1
    del layer.bias
    layer.register_buffer("bias", bias)


def fewer_outputs(layer: fp8kit.Fp8Linear) -> None:
    address = layer.weight.data_ptr()
    layer.weight.data = layer.weight.data[:64]
    layer.bias.data = layer.bias.data[:64]
    layer.weight_scale.data = layer.weight_scale.data[:64]
    assert layer.weight.data_ptr() == address


def fast(layer: fp8kit.Fp8Linear) -> None:
    layer.accum = "fast"


def strided_bias(layer: fp8kit.Fp8Linear) -> None:
    address = layer.bias.data_ptr()
    same = layer.bias.detach()[:1].expand(layer.out_features)
    layer.bias = nn.Parameter(same, requires_grad=False)
    assert layer.bias.data_ptr() == address


@pytest.mark.parametrize(
    "change",
    [
        replace_weight,
        swap_data,
        cast,
        drop_bias,
        bias_in_a_buffer,
        fewer_outputs,
        fast,
        strided_bias,
    ],
)
def test_a_change_of_the_layer_is_seen(
    change: Callable[[fp8kit.Fp8Linear], None], cpu_backends: CpuBackends
) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    change(layer)
    cpu_backends.calls.clear()
    layer(x)
    assert cpu_backends.calls == ["quantize", "multiply"]
    for _ in range(4):
        assert_bits_equal(layer(x), operator(layer, x))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias", "input_scale"])
def test_a_guard_holds_each_constant(name: str, cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made("FP8"), x, cpu_backends)
    held = layer._parameters[name].data
    other = held.view(torch.uint8).clone().view(held.dtype)  # equal, elsewhere
    layer._parameters[name].data = other
    for made_in_full in (True, True, False):
        assert_bits_equal(layer(x), operator(layer, x))
        expected = ["quantize", "multiply"] if made_in_full else []
        assert cpu_backends.calls[: len(expected)] == expected
        cpu_backends.calls.clear()


def test_a_bias_cast_at_its_address_is_another(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    address = layer.bias.data_ptr()
    layer.bias.data = layer.bias.data.view(torch.float16)
    assert layer.bias.data_ptr() == address
    layer(x)
    assert cpu_backends.calls == ["quantize", "multiply"]


def test_a_weight_written_in_place_is_read_anew(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    with torch.no_grad():
        layer.codes.zero_()
    y = layer(x)
    assert cpu_backends.calls == ["quantize", "multiply"], "nothing prefetches it"
    assert_bits_equal(y, layer.bias.expand(3, -1))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(TorchDispatchMode, "fp8kit.linear.default"), (TorchFunctionMode, "fp8kit.linear")],
)
def test_modes_see_the_operator(kind: type[Any], wanted: str, cpu_backends: CpuBackends) -> None:
    x, seen = x_of(3), []
    layer = warmed(made(), x, cpu_backends)

    class Mode(kind):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        __torch_function__ = __torch_dispatch__

    with Mode():
        layer(x)
    assert any(wanted in name for name in seen)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_traces_hold_the_operator(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert "fp8kit::linear" in str(traced.inlined_graph)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_derivatives_are_not_lost(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        layer(forward_ad.make_dual(x, x))
    assert cpu_backends.calls == []


class Marked(Tensor):
    """A subclass that sees every operation on it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_the_operator(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    Marked.seen.clear()
    layer(x.as_subclass(Marked))
    assert any("linear" in name for name in Marked.seen)
    layer._parameters["weight"] = layer.codes.detach().as_subclass(Marked)
    Marked.seen.clear()
    layer.compute(x)
    assert any("linear" in name for name in Marked.seen)


def test_gradients_flow(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    wanted = x.clone().requires_grad_()
    layer(wanted).sum().backward()
    assert wanted.grad is not None
    with torch.no_grad():
        assert not layer(wanted).requires_grad
    layer.bias.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.bias.grad is not None


def test_autocast_decides_the_dtype(cpu_backends: CpuBackends) -> None:
    x = x_of(3, dtype=torch.float32)
    layer = warmed(made(), x, cpu_backends)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.repeat(1, 2)[:, ::2],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x: torch.complex(x.float(), x.float()).conj().imag,
        lambda x: torch._neg_view(x),
    ],
    ids=["strided", "unaligned", "imaginary", "negative"],
)
def test_inputs_that_a_recording_cannot_take_run_in_full(
    other: Callable[[Tensor], Tensor], cpu_backends: CpuBackends
) -> None:
    x = other(x_of(3))
    layer = warmed(made(), x_of(3).to(x.dtype), cpu_backends)
    for _ in range(4):
        assert_bits_equal(layer(x), operator(layer, x))


def test_bad_input_is_refused_as_before(cpu_backends: CpuBackends) -> None:
    layer = warmed(made(), x_of(3), cpu_backends)
    with pytest.raises(ValueError, match="of the same K"):
        layer(torch.randn(3, 159))
    with pytest.raises(TypeError, match="bfloat16, float16 or float32"):
        layer(torch.ones(3, 160, dtype=torch.int64))
    for _ in range(3):
        assert layer(x_of(0)).shape == (0, 96)
    assert len(layer.replays) == 1


def test_layers_of_other_devices_keep_no_recordings() -> None:
    layer, x = made(), x_of(3)
    for _ in range(3):
        layer(x)
    assert not layer.replays


@pytest.mark.parametrize(
    "other",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda x: x.to("meta"),
        lambda x: torch.nested.nested_tensor([x, x]),
    ],
    ids=["coo", "csr", "elsewhere", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*nested tensors:UserWarning")
def test_inputs_without_an_address_are_not_replayed(
    other: Callable[[Tensor], Tensor], cpu_backends: CpuBackends
) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    with contextlib.suppress(Exception):  # refused, as by a layer that was never called
        layer(other(x))
    layer(x)
    with pytest.raises(Exception) as first:  # noqa: PT011
        made()(other(x))
    with pytest.raises(type(first.value)):
        layer(other(x))


def test_zeros_without_memory_are_zeros(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    zeros = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    assert_bits_equal(layer(zeros), operator(layer, torch.zeros_like(x)))
    assert cpu_backends.calls != []


def test_a_tensor_that_has_left_its_transform_is_taken(cpu_backends: CpuBackends) -> None:
    x, left = x_of(3), []
    layer = warmed(made(), x, cpu_backends)

    def loss(x: Tensor) -> Tensor:
        left.append(x)
        return x.float().sum()

    torch.func.grad(loss)(x)
    assert_bits_equal(layer(left[0]), operator(layer, x))


def test_a_bias_without_memory_is_added(cpu_backends: CpuBackends) -> None:
    w, bias = fp8kit.quantize(torch.randn(96, 160), role="weight"), torch._efficientzerotensor(96)
    for _ in range(4):
        x = x_of(3)
        assert_bits_equal(fp8kit.linear(x, w, bias), fp8kit.linear(x, w, torch.zeros(96)))


def test_optional_constants_are_told_apart(cpu_backends: CpuBackends) -> None:
    weight = torch.randn(96, 160)
    w, unused = (fp8kit.quantize(weight, TENSOR, role="weight") for _ in range(2))
    x, given = x_of(3), torch.full((1, 1), 0.05)
    for _ in range(3):
        fp8kit.linear(x, w, scheme="FP8", input_scale=given)
    bounded = {"scheme": fp8kit.Scheme("BOUNDED", TENSOR, TENSOR), "scale_ub": given}
    assert_bits_equal(fp8kit.linear(x, w, **bounded), fp8kit.linear(x, unused, **bounded))


@pytest.mark.parametrize("inference", [False, True])
def test_weights_of_inference_mode_are_recorded(inference: bool, cpu_backends: CpuBackends) -> None:
    with torch.inference_mode(inference):
        layer, x = made(), x_of(3)
    assert layer.weight.is_inference() == inference
    for _ in range(3):
        with torch.inference_mode():
            y = layer(x)
        assert_bits_equal(y, operator(layer, x))
    warmed(layer, x, cpu_backends)


def test_threads_share_a_layer(cpu_backends: CpuBackends) -> None:
    layer = warmed(made(), x_of(3), cpu_backends)
    inputs = [[x_of(3) for _ in range(10)] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda given: [layer(x) for x in given], inputs))
    assert cpu_backends.calls == []
    for given, ys in zip(inputs, results, strict=True):
        for x, y in zip(given, ys, strict=True):
            assert_bits_equal(y, operator(layer, x))


def test_hooks_run(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    layer.register_forward_hook(lambda *_: torch.zeros(1))
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 0,))
    assert torch.equal(layer(x), torch.zeros(1))


def test_copies_and_pickles_start_without_recordings(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    copies.append(torch.load(file, weights_only=False))
    for twin in copies:
        assert not twin.replays
        with torch.no_grad():
            twin.weight_scale.mul_(2)
        for _ in range(3):
            assert_bits_equal(twin(x), operator(twin, x))
    assert len(layer.replays) == 1


def test_compiled_layers_hold_the_operator(cpu_backends: CpuBackends) -> None:
    x = x_of(3)
    layer = warmed(made(), x, cpu_backends)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert_bits_equal(compiled(x), layer(x))
    compiled(x)
    layer(x_of(9))
    compiled(x)
    assert len(graphs) == 1
    assert "fp8kit" in graphs[0].code


@pytest.mark.filterwarnings("ignore:.*batching rule:UserWarning")
def test_vmap_sees_the_operator(cpu_backends: CpuBackends) -> None:
    x = x_of(2, 3)
    layer = warmed(made(), x[0], cpu_backends)
    assert_bits_equal(torch.vmap(layer)(x), torch.stack([operator(layer, part) for part in x]))


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(160, 128).bfloat16() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate_proj(x) - self.up_proj(x)


@torch.no_grad()  # their biases want gradients
def test_joined_siblings_are_replayed_too(cpu_backends: CpuBackends) -> None:
    model = nn.Sequential(Siblings())
    fp8kit.convert(model)
    first, second = model[0].gate_proj, model[0].up_proj
    for turn in range(4):
        x = x_of(3)
        cpu_backends.calls.clear()
        y = model(x)
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        assert_bits_equal(y, operator(first, x) - operator(second, x))


def test_a_failing_call_leaves_no_recording(cpu_backends: CpuBackends) -> None:
    x, layer = x_of(3), made()
    layer(x)

    def broken(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    whole, cpu_backends.run = cpu_backends.run, broken
    with pytest.raises(RuntimeError, match="out of memory"):
        layer(x)
    cpu_backends.run = whole
    assert not is_recording()
    for _ in range(3):
        assert_bits_equal(layer(x), operator(layer, x))


def test_real_backends_of_a_cpu_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    record_on_cpu(monkeypatch)
    x, layer = x_of(3), made()
    for _ in range(3):
        assert_bits_equal(layer(x), operator(layer, x))
    assert layer.replays.launches(x.shape) is None
    assert not layer.replays.has_recordings()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 16, 64, 200])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "FP8"])
def test_on_a_gpu_the_bits_stay_the_same(scheme: str, m: int) -> None:
    """Streams, graphs, reloads and other inputs are compared with the operator."""
    linear = nn.Linear(1024, 768, device="cuda", dtype=torch.bfloat16)
    layer = made(scheme, linear).to("cuda")
    inputs = [torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    for x in inputs:
        assert_bits_equal(layer(x), operator(layer, x))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [layer(x) for x in inputs * 50]
    results += [layer(x) for x in inputs * 50]
    torch.cuda.synchronize()
    for y, x in zip(results, inputs * 100, strict=True):
        assert_bits_equal(y, operator(layer, x))
    graph = torch.cuda.CUDAGraph()
    held = inputs[0].clone()
    with torch.cuda.graph(graph):
        y = layer(held)
    held.copy_(inputs[1])
    layer.load_state_dict(made(scheme, nn.Linear(1024, 768, dtype=torch.bfloat16)).state_dict())
    graph.replay()
    assert_bits_equal(y, operator(layer, inputs[1]))


@pytest.mark.gpu
def test_on_a_gpu_threads_and_streams_share_a_layer() -> None:
    layer = made("FP8_DYNAMIC", nn.Linear(1024, 768, device="cuda", dtype=torch.bfloat16))
    inputs = torch.randn(4, 100, 2, 1024, device="cuda", dtype=torch.bfloat16)
    wanted = [[operator(layer, x) for x in part] for part in inputs]
    for _ in range(3):
        layer(inputs[0, 0])
    torch.cuda.synchronize()

    def work(part: Tensor) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [layer(x) for x in part]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(4) as pool:
        for expected, results in zip(wanted, pool.map(work, inputs), strict=True):
            for one, y in zip(expected, results, strict=True):
                assert_bits_equal(y, one)


@pytest.mark.gpu
def test_on_hopper_a_decode_step_is_recorded() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the own kernels are Hopper's")
    layer = made("FP8_DYNAMIC", nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        layer(x)
    assert layer.replays.launches(x.shape) == 2
    assert layer.replays.has_recordings()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_function_of_a_weight_is_recorded(scheme: str, cpu_backends: CpuBackends) -> None:
    layer = made(scheme)
    weight, options = layer.quantized_weight(), {"scheme": scheme, "input_scale": layer.input_scale}
    for turn in range(4):
        x = x_of(3)
        cpu_backends.calls.clear()
        y = fp8kit.linear(x, weight, layer.bias, **options)
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        rows = fp8kit.linear(x[:2], weight, layer.bias, **options)  # another shape
        if scheme != "FP8_TENSOR":
            assert_bits_equal(rows, y[:2])


def test_a_product_of_codes_is_recorded(cpu_backends: CpuBackends) -> None:
    weight = made().quantized_weight()
    for turn in range(4):
        x_q = fp8kit.quantize(x_of(5))
        cpu_backends.calls.clear()
        y = fp8kit.scaled_mm(x_q, weight, out_dtype=torch.float32)
        assert cpu_backends.calls == ([] if turn > 1 else ["multiply"])
        exact = fp8kit.dequantize(x_q) @ fp8kit.dequantize(weight).t()
        torch.testing.assert_close(y, exact)
        other = fp8kit.scaled_mm(x_q, weight)  # neither another dtype nor another operator
        assert other.dtype == torch.bfloat16


@pytest.mark.parametrize("registered", [False, True])
def test_quantizers_are_recorded(registered: bool, cpu_backends: CpuBackends) -> None:
    dtype = torch.float8_e4m3fn
    for turn in range(4):
        x, bound, static = x_of(5), torch.tensor(0.5 + turn), torch.full((1, 1), 0.01 + turn)
        cpu_backends.calls.clear()
        if registered:
            codes, scale = torch.ops.fp8kit.quantize(x, [1, -1], dtype, 1e-12, bound, "exact")
            given = torch.ops.fp8kit.quantize_static(x, static, [-1, -1], dtype)
        else:
            q = fp8kit.quantize(x, scale_ub=bound)
            codes, scale = q.data, q.scale
            given = fp8kit.quantize(x, TENSOR, scale=static).data
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "quantize"])
        wanted, wanted_scale = reference.quantize(x, ROW, dtype, 1e-12, bound, "exact")
        assert_bits_equal(codes, wanted)
        assert_bits_equal(scale, wanted_scale)
        assert_bits_equal(given, reference.quantize_static(x, static, TENSOR, dtype))


@pytest.mark.parametrize("form", ["alone", "gated", "behind columns", "norm"])
def test_fused_producers_of_graphs_are_recorded(form: str, cpu_backends: CpuBackends) -> None:
    for turn in range(4):
        x, other, bound = x_of(3), x_of(3), torch.tensor(0.5 + turn)
        options = None, [1, -1], torch.float8_e4m3fn, 1e-12, bound, "exact"
        name, body, arguments = {
            "alone": ("activation", fused.activation, (x, None, "silu")),
            "gated": ("activation", fused.activation, (x, other, "silu")),
            "behind columns": (
                "concatenated_activation",
                fused.concatenated_activation,
                (other, x, None, "silu"),
            ),
            "norm": ("rms_norm", fused.rms_norm, (x, None, other[0], 1e-6, 0.0, "stepwise")),
        }[form]
        cpu_backends.calls.clear()
        found = getattr(torch.ops.fp8kit, f"{name}_quantize")(*arguments, *options)
        assert len(cpu_backends.calls) == (0 if turn > 1 else 1)
        for mine, wanted in zip(found, body(*arguments, *options), strict=True):
            assert_bits_equal(mine, wanted)


def test_compiled_code_repeats_recordings(cpu_backends: CpuBackends) -> None:
    layer = made()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for turn in range(4):
        x = x_of(3)
        cpu_backends.calls.clear()
        y = compiled(x)
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        assert_bits_equal(y, layer(x))
    layer.load_state_dict(made().state_dict())
    assert_bits_equal(compiled(x), layer(x))


def test_a_weight_changed_in_place_is_not_multiplied_as_it_was(cpu_backends: CpuBackends) -> None:
    weight, x = made().quantized_weight(), x_of(3)
    for _ in range(3):
        before = fp8kit.linear(x, weight)
    with torch.no_grad():
        weight.data.copy_(made().weight)
        weight.scale.mul_(2)
    after = fp8kit.linear(x, weight)
    assert not torch.equal(before, after)
    assert_bits_equal(
        after, fp8kit.linear(x, fp8kit.QTensor(weight.data.clone(), weight.scale, ROW))
    )


def transposed(weight: fp8kit.QTensor, bias: Tensor) -> Tensor:
    weight.data.data = weight.data.data.t()  # torch does not count this as a change
    return bias


def other_codes(weight: fp8kit.QTensor, bias: Tensor) -> Tensor:
    weight.data.data = weight.data.data.view(torch.float8_e5m2)
    return bias


def one_scale(weight: fp8kit.QTensor, bias: Tensor) -> Tensor:
    weight.scale.data = weight.scale.data[:1].expand(128, 1)
    return bias


def every_second(_: fp8kit.QTensor, bias: Tensor) -> Tensor:
    return bias.as_strided((128,), (2,))


@pytest.mark.parametrize("change", [transposed, other_codes, one_scale, every_second])
def test_what_lies_at_the_same_address_otherwise_is_not_taken_for_it(
    change: Callable[[fp8kit.QTensor, Tensor], Tensor], cpu_backends: CpuBackends
) -> None:
    weight = fp8kit.quantize(torch.randn(128, 128), ROW, role="weight")
    memory = torch.randn(256, dtype=torch.bfloat16)
    x, bias = torch.randn(3, 128, dtype=torch.bfloat16), memory[:128]
    for _ in range(3):
        before = fp8kit.linear(x, weight, bias)
    cpu_backends.calls.clear()
    addresses = weight.data.data_ptr(), weight.scale.data_ptr(), bias.data_ptr()
    bias = change(weight, bias)
    assert addresses == (weight.data.data_ptr(), weight.scale.data_ptr(), bias.data_ptr())
    after = fp8kit.linear(x, weight, bias)
    assert cpu_backends.calls == ["quantize", "multiply"]
    assert not torch.equal(before, after)
    copied = fp8kit.QTensor(weight.data.clone(), weight.scale.contiguous(), ROW)
    for _ in range(3):
        assert_bits_equal(fp8kit.linear(x, weight, bias), after)
    assert_bits_equal(fp8kit.linear(x, copied, bias.clone()), after)


def test_a_weight_with_recordings_can_be_swapped_copied_and_saved(
    cpu_backends: CpuBackends,
) -> None:
    layer, x = made(), x_of(3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(x)
    other = made()
    expected = other(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight_scale.mul_(2)
    assert_bits_equal(fp8kit.linear(x, twin.quantized_weight(), twin.bias), operator(twin, x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert_bits_equal(torch.load(file, weights_only=True)["weight"], layer.weight)
    torch.utils.swap_tensors(layer.codes, other.codes)
    torch.utils.swap_tensors(layer.weight_scale, other.weight_scale)
    torch.utils.swap_tensors(layer.bias, other.bias)
    for _ in range(3):
        assert_bits_equal(compiled(x), expected)


def test_a_recording_of_a_caller_does_not_meet_one_of_the_operator(
    cpu_backends: CpuBackends,
) -> None:
    weight, x = made().quantized_weight(), x_of(3)
    fp8kit.linear(x, weight)
    y, captured = record(
        lambda: fp8kit.linear(x, weight), (x,), (weight.data, weight.scale, None, None)
    )
    assert captured is None or torch.equal(captured(x)[0], y)


def test_a_bound_on_scales_is_guarded_by_its_address(cpu_backends: CpuBackends) -> None:
    weight, x = made().quantized_weight(), x_of(3)
    bounds = [torch.tensor(1.0), torch.tensor(2.0)]
    for _ in range(4):
        for bound in bounds:
            cpu_backends.calls.clear()
            fp8kit.linear(x, weight, scale_ub=bound)
            assert cpu_backends.calls == ["quantize", "multiply"]


def test_gradients_flow_through_a_recorded_operator(cpu_backends: CpuBackends) -> None:
    layer = made()
    weight, found = layer.quantized_weight(), []
    for _ in range(4):
        x = torch.ones(3, 160, dtype=torch.bfloat16, requires_grad=True)
        cpu_backends.calls.clear()
        fp8kit.linear(x, weight, layer.bias).sum().backward()
        found.append(x.grad)
    assert cpu_backends.calls == []
    assert all(torch.equal(grad, found[0]) for grad in found)
    assert found[0].any()


def test_recordings_go_with_their_weight(cpu_backends: CpuBackends) -> None:
    weight, x = made().quantized_weight(), x_of(3)
    for _ in range(3):
        cpu_backends.calls.clear()
        fp8kit.linear(x, weight)
    assert cpu_backends.calls == []
    owner = weakref.ref(weight.data)
    saved = io.BytesIO()
    torch.save(weight.data, saved)
    saved.seek(0)
    assert_bits_equal(torch.load(saved, weights_only=True), weight.data)
    del weight
    gc.collect()
    assert owner() is None, "a recording keeps no weight"


class Frames:
    """Collects the package's functions on the stack of a launch, the launch included."""

    def __init__(self) -> None:
        self.deepest: list[str] = []

    def __call__(self, *_: object) -> None:
        names, frame = [], sys._getframe(1)
        while frame is not None and frame.f_code is not fp8kit.Fp8Linear.forward.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        assert frame is not None, "launched by a layer"
        self.deepest = [*reversed(names)]


def test_few_frames_lie_between_a_layer_and_its_launch(cpu_backends: CpuBackends) -> None:
    """On a GPU ``run`` launches through ``_launch`` and ``Kernel.launch``, two more frames."""
    seen, real = Frames(), cpu_backends.run

    def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        seen()
        return real(operands, problem)

    layer, x = made(), x_of(3)
    cpu_backends.run = run
    layer(x)
    package = [name for name in seen.deepest if "<locals>" not in name]
    assert package == ["ReplayCache.run", "linear"]
    assert 1 + len(package) + 3 <= 6  # forward, these, and run, _launch, Kernel.launch

    def replaying(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        launch(seen)  # a kernel, which starts again with those of the product
        return real(operands, problem)

    cpu_backends.run = replaying
    warmed(layer, x, cpu_backends)
    for _ in range(2):
        layer(x)
    assert seen.deepest == ["ReplayCache.replay", "Recording.__call__", "CpuLaunch.start"]
    assert 1 + len(seen.deepest) <= 4  # forward, and these


@pytest.mark.gpu
def test_on_a_gpu_few_frames_lie_between_a_layer_and_its_launch() -> None:
    linear = nn.Linear(1024, 768, device="cuda", dtype=torch.bfloat16)
    layer = made("FP8_DYNAMIC", linear)
    x = torch.randn(16, 1024, device="cuda", dtype=torch.bfloat16)
    gemm = launch_from("matmul/hopper")

    def launches(frame: FrameType) -> bool:
        return frame.f_code.co_name == "start" or gemm(frame)

    for first in (True, False):
        layer = made("FP8_DYNAMIC", linear) if first else layer
        for _ in range(1 if first else 3):
            layer(x)
        twin = made("FP8_DYNAMIC", linear) if first else layer
        found = above_launches(lambda twin=twin: twin(x), launches)
        most = max(map(len, found))
        assert 2 <= most <= (6 if first else 4)


@torch.no_grad()
def test_inputs_that_an_operator_copies_are_read_anew(cpu_backends: CpuBackends) -> None:
    for _ in range(20):  # by chance the result lies where the copy was
        layer = made(linear=nn.Linear(128, 128, dtype=torch.bfloat16))
        for _ in range(4):
            x = torch.randn(128, 64, dtype=torch.bfloat16).t()
            with torch.autocast("cpu"):
                found = layer(x)
            assert_bits_equal(found, layer(x.contiguous()))


@torch.no_grad()
@pytest.mark.gpu
def test_inputs_that_an_operator_copies_are_read_anew_on_a_gpu() -> None:
    layer = made(linear=nn.Linear(128, 128, dtype=torch.bfloat16, device="cuda"))
    whole = torch.randn(6, 2, 65, 128, dtype=torch.bfloat16, device="cuda")
    for x in (*whole.mT.reshape(6, 2, 128, 65)[..., :64].mT, *whole[:, :, 1:]):
        with torch.autocast("cuda", torch.bfloat16):
            found = layer(x)
        assert_bits_equal(found, layer(x.contiguous()))


@torch.no_grad()
@pytest.mark.gpu
def test_on_a_gpu_a_graph_has_scratch_memory_of_its_own() -> None:
    layer = made(linear=nn.Linear(512, 256, dtype=torch.bfloat16, device="cuda"))
    x, stream = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = layer(x)
    layer.replays.clear()
    torch.cuda.synchronize()
    poison = [torch.full((1 << 17,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    x.neg_()
    graph.replay()
    assert_bits_equal(y, layer(x))
    assert all(bool((block == 255).all()) for block in poison)


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of the pool that Inductor begins
def test_on_a_gpu_inductor_captures_a_layer_that_is_called_several_times() -> None:
    layer = made(linear=nn.Linear(512, 512, dtype=torch.bfloat16, device="cuda"))

    def run(x: Tensor) -> Tensor:
        for _ in range(4):
            x = layer(x)
        return x

    compiled = torch.compile(run, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        assert_bits_equal(compiled(x), run(x))
