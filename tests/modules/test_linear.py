from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.errors import UnsupportedError
from fp8kit.formats import SCHEMES, TENSOR, Scheme
from fp8kit.modules.entries import quantize_weight
from fp8kit.modules.linear import Fp8Linear
from numerics import (
    assert_bits_equal,
    assert_matmul,
    assert_same_tensors,
    assert_scheme_error,
    relative_error,
)

N, K = 96, 200
DYNAMIC = [name for name, scheme in SCHEMES.items() if not scheme.static]


def dense(bias: bool = True, dtype: torch.dtype = torch.float32, n: int = N) -> nn.Linear:
    return nn.Linear(K, n, bias=bias, dtype=dtype)


def layer_of(
    scheme: str = "FP8_DYNAMIC", device: torch.device | str = "cpu", **options: Any
) -> Fp8Linear:
    scale = torch.full((1, 1), 0.01, device=device) if SCHEMES[scheme].static else None
    return Fp8Linear.from_linear(dense(**options).to(device), scheme, scale)


def assert_same_layer(a: Fp8Linear, b: Fp8Linear, same_device: bool = True) -> None:
    """Check that two layers hold the same bits and compute the same bits."""
    assert a.scheme == b.scheme
    for name in ("weight", "weight_scale", "input_scale", "bias"):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None)
        if left is not None:
            assert isinstance(right, nn.Parameter)
            assert_bits_equal(left.detach().cpu(), right.detach().cpu())
    if same_device:
        x = torch.randn(3, K, device=a.weight.device)
        assert_bits_equal(a(x).detach(), b(x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_is_quantized_linear(scheme: str, dtype: torch.dtype, device: torch.device) -> None:
    layer = layer_of(scheme, device, dtype=dtype)
    x = torch.randn(2, 5, K, device=device, dtype=dtype)
    y = layer(x)
    assert y.shape == (2, 5, N)
    assert y.dtype == dtype
    seen = x.flatten(0, 1).float()
    if layer.scheme.activation is not None:
        seen = fp8kit.dequantize(
            fp8kit.quantize(seen, layer.scheme.activation, scale=layer.input_scale)
        )
    w = fp8kit.dequantize(layer.quantized_weight())
    backend = fp8kit.explain(layer, m=10).to_dict()[0]["backend"]
    assert_matmul(y.flatten(0, 1).detach(), seen, w, layer.bias, str(backend))


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_layer_is_as_wrong_as_fp8(scheme: str, device: torch.device) -> None:
    linear = nn.Linear(1024, 256, bias=False).to(device)
    nn.init.normal_(linear.weight)
    x = torch.randn(64, 1024, device=device)
    y = Fp8Linear.from_linear(linear, scheme)(x)
    assert_scheme_error(y, linear(x).detach(), scheme)


def test_from_linear_shares_the_bias_and_leaves_the_layer_alone() -> None:
    linear = dense()
    before = linear.weight.detach().clone()
    layer = Fp8Linear.from_linear(linear)
    assert layer.bias is linear.bias
    assert_bits_equal(linear.weight.detach(), before)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (K, N)


def test_state_dict_is_the_checkpoint() -> None:
    state = layer_of("FP8").state_dict()
    kinds = {name: (t.dtype, tuple(t.shape)) for name, t in state.items()}
    assert kinds == {
        "weight": (torch.float8_e4m3fn, (N, K)),
        "weight_scale": (torch.float32, (1, 1)),
        "input_scale": (torch.float32, (1, 1)),
        "bias": (torch.float32, (N,)),
    }
    assert not layer_of().weight.requires_grad


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_copies_keep_every_bit(how: str, scheme: str) -> None:
    layer = layer_of(scheme)
    if how == "save":
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        copiers: dict[str, Callable[[Any], Any]] = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        }
        twin = copiers[how](layer)
    assert_same_layer(layer, twin)
    shared = twin.weight.data_ptr() == layer.weight.data_ptr()
    assert shared == (how == "copy")


def test_a_shallow_copy_holds_the_same_parameters() -> None:
    layer = layer_of()
    twin = copy.copy(layer)
    assert [*map(id, twin.parameters())] == [*map(id, layer.parameters())]
    layer.to("meta")
    assert all(p.is_meta for p in twin.parameters())
    twin.accum = "fast"
    assert layer.accum == "precise"


def test_compiled_code_deep_copies() -> None:
    layer = layer_of()
    copied = torch.compile(lambda x: (x + 1, copy.deepcopy(layer)), backend="eager")
    assert_same_layer(layer, copied(torch.ones(1))[1])


def test_deepcopy_of_other_codes() -> None:
    scheme = Scheme("E5M2", fp8kit.ROW, fp8kit.ROW, dtype=torch.float8_e5m2)
    layer = Fp8Linear.from_linear(dense(), scheme)
    assert layer.weight.dtype == torch.float8_e5m2
    assert_same_layer(layer, copy.deepcopy(layer))


CASTS: list[tuple[str, Callable[[nn.Module], nn.Module], torch.dtype]] = [
    ("half", lambda m: m.half(), torch.float16),
    ("bfloat16", lambda m: m.bfloat16(), torch.bfloat16),
    ("float", lambda m: m.bfloat16().float(), torch.float32),
    ("double", lambda m: m.double(), torch.float64),
    ("to", lambda m: m.to(torch.bfloat16), torch.bfloat16),
    ("to-both", lambda m: m.to("cpu", torch.float16), torch.float16),
    ("type", lambda m: m.type(torch.bfloat16), torch.bfloat16),
    ("to-other", lambda m: m.to(torch.empty(0, dtype=torch.float16)), torch.float16),
]


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize(("cast", "dtype"), [pytest.param(c, d, id=i) for i, c, d in CASTS])
def test_casts_change_the_bias_and_never_the_codes(
    cast: Callable[[nn.Module], nn.Module], dtype: torch.dtype, scheme: str
) -> None:
    layer = layer_of(scheme)
    kept = {n: p.detach().clone() for n, p in layer.named_parameters() if n != "bias"}
    cast(nn.Sequential(layer))
    for name, value in kept.items():
        assert_bits_equal(getattr(layer, name).detach(), value)
    assert layer.bias.dtype == layer.compute_dtype == dtype
    if dtype == torch.float64:
        with pytest.raises(TypeError, match=r"Got x of dtype torch\.float64"):
            layer(torch.randn(2, K, dtype=dtype))
        layer.float()
        dtype = torch.float32
    assert layer(torch.randn(2, K, dtype=dtype)).dtype == dtype


def test_a_scale_that_was_cast_past_the_layer_is_told() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(128, 256))
    for p in layer.parameters():  # as DeepSpeed's bf16 does
        if p.dtype == torch.float32:
            p.data = p.data.bfloat16()
    with pytest.raises(UnsupportedError, match=r"scales of an FP8 layer to torch.bfloat16, past"):
        layer.to("cpu")


def test_casts_keep_parameter_objects() -> None:
    layer = layer_of()
    before = [id(p) for p in layer.parameters()]
    layer.bfloat16()
    assert [id(p) for p in layer.parameters()] == before


@pytest.mark.parametrize("scheme", SCHEMES)
def test_move_to_device_and_back(scheme: str, device: torch.device) -> None:
    layer = layer_of(scheme)
    moved = copy.deepcopy(layer).to(device)
    assert {p.device.type for p in moved.parameters()} == {device.type}
    assert moved(torch.randn(2, K, device=device)).device.type == device.type
    assert_same_layer(layer, moved.cpu())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_to_meta_and_to_empty(scheme: str) -> None:
    layer = layer_of(scheme)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    twin = copy.deepcopy(layer).to("meta")
    assert all(p.is_meta for p in twin.parameters())
    kinds = [(p.dtype, p.shape) for p in layer.parameters()]
    twin.to_empty(device="cpu")
    assert [(p.dtype, p.shape) for p in twin.parameters()] == kinds
    assert twin.compute_dtype == torch.float32
    twin.load_state_dict(state)
    assert_same_layer(layer, twin)


def test_share_memory() -> None:
    layer = layer_of()
    twin = copy.deepcopy(layer).share_memory()
    assert all(p.is_shared() for p in twin.parameters())
    assert_same_layer(layer, twin)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_state_dict_round_trip(start: str, assign: bool, scheme: str) -> None:
    if start == "meta" and not assign:
        pytest.skip("torch copies nothing into meta without assign=True")
    layer = layer_of(scheme)
    fresh = Fp8Linear(K, N, scheme=scheme, device=start)
    fresh.load_state_dict(layer.state_dict(), assign=assign)
    assert_same_layer(layer, fresh)
    assert (fresh.weight.data_ptr() == layer.weight.data_ptr()) == assign


@pytest.mark.parametrize("start", ["cpu", "meta"])
@pytest.mark.parametrize("scheme", DYNAMIC)
def test_dense_weights_are_quantized_on_assignment(scheme: str, start: str) -> None:
    linear = dense(dtype=torch.bfloat16)
    fresh = Fp8Linear(K, N, scheme=scheme, device=start, dtype=torch.bfloat16)
    fresh.load_state_dict(linear.state_dict(), assign=True)
    assert_same_layer(Fp8Linear.from_linear(linear, scheme), fresh)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_reload_in_place_keeps_every_pointer(kind: str, scheme: str, device: torch.device) -> None:
    layer, other = layer_of(scheme, device), dense().bfloat16().to(device)
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    new = Fp8Linear.from_linear(other, scheme, layer.input_scale)
    layer.load_state_dict(other.state_dict() if kind == "dense" else new.state_dict())
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == pointers
    x = torch.randn(3, K, device=device)
    assert_bits_equal(layer.weight.detach(), new.weight.detach())
    assert_bits_equal(layer.weight_scale.detach(), new.weight_scale.detach())
    assert relative_error(layer(x).detach(), new.float()(x).detach()) < 1e-6


def test_reload_of_a_model_reports_a_layer_without_scale() -> None:
    model = nn.Sequential(layer_of())
    state = model.state_dict()
    before = model[0].weight.detach().clone()
    del state["0.weight_scale"]
    with pytest.raises(RuntimeError, match=r"has no 0\.weight_scale"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"has no 0\.weight_scale"):
        model.load_state_dict(state, strict=False)
    assert_bits_equal(model[0].weight.detach(), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_that_were_computed_with_are_refused_under_the_own_scale(scheme: str) -> None:
    """LoRA networks merge so: a sum in fp32, cast back to the dtype that the weight had."""
    model = nn.Sequential(layer_of(scheme))
    state = model.state_dict()
    before = state["0.weight"].clone()
    state["0.weight"] = (before.float() * 1.5).to(before.dtype)
    with pytest.raises(RuntimeError, match=r"not what .* Add to layer\.to_linear.*fp8kit\.load\("):
        model.load_state_dict(state)
    assert_bits_equal(model[0].weight.detach(), before)
    model.load_state_dict({**state, "0.weight": before})


@pytest.mark.parametrize("shape", [(N,), (1, N), (N, 2), (1, 1), ()], ids=str)
def test_a_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer = layer_of()
    state = {**layer.state_dict(), "weight_scale": torch.ones(shape)}
    with pytest.raises(RuntimeError, match=rf"Codes of shape \({N}, {K}\) in row groups need"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("shape", [(N,), (1, N), (1, 1), ()], ids=str)
@pytest.mark.parametrize("called", [0, 2])
def test_a_scale_of_another_shape_that_is_set_is_refused(
    shape: tuple[int, ...], called: int
) -> None:
    layer = layer_of()
    for _ in range(called):
        layer(torch.ones(2, K))
    layer.weight_scale = nn.Parameter(torch.ones(shape), requires_grad=False)
    with pytest.raises(ValueError, match=rf"Codes of shape \({N}, {K}\) in row groups need"):
        layer(torch.ones(2, K))


def test_a_scheme_in_the_place_of_the_bias_is_refused() -> None:
    with pytest.raises(TypeError, match=r"bias='FP8_BLOCK'.*scheme='FP8_BLOCK'"):
        Fp8Linear(K, N, "FP8_BLOCK")  # type: ignore[arg-type]


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer_of().load_state_dict(dense(n=N + 1).state_dict())


@pytest.mark.parametrize("scheme", ["FP8_TENSOR", "FP8", "MXFP8_ROW"])
@pytest.mark.parametrize("odd", ["weight", "input_scale", "weight_exponents"])
def test_codes_that_do_not_fit_leave_the_layer_as_it_was(scheme: str, odd: str) -> None:
    scale = torch.full((1, 1), 0.01) if scheme == "FP8" else None
    layer, other = (Fp8Linear.from_linear(dense(), scheme, scale) for _ in range(2))
    if odd not in layer.state_dict():
        pytest.skip("the scheme has no such tensor")
    layer.keep(torch.zeros(N, K))
    before, state = copy.deepcopy(layer), other.state_dict()
    state[odd] = torch.cat([state[odd].view(torch.uint8)] * 2).view(state[odd].dtype)
    if odd == "weight" and scheme == "MXFP8_ROW":
        for name in ("weight_scale", "weight_exponents"):
            state[name] = torch.cat([state[name]] * 2)
    with pytest.raises(RuntimeError, match=f"size mismatch for {odd}"):
        layer.load_state_dict(state)
    assert layer.original_weight is not None
    assert_same_layer(layer, before)


def test_missing_and_unexpected_keys_are_reported() -> None:
    layer = layer_of()
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({**layer.state_dict(), "input_scale": torch.ones(1, 1)})


def test_a_static_layer_keeps_its_calibration_when_dense_weights_arrive() -> None:
    layer = layer_of("FP8")
    layer.load_state_dict(dense().state_dict())
    assert layer.input_scale is not None
    assert layer.input_scale.item() == pytest.approx(0.01)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_to_linear_gives_the_dequantized_weight(scheme: str, device: torch.device) -> None:
    layer = layer_of(scheme, device)
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert_bits_equal(back.weight.detach(), fp8kit.dequantize(layer.quantized_weight()))
    assert_bits_equal(back.bias.detach(), layer.bias.detach())
    assert back.bias.data_ptr() != layer.bias.data_ptr()
    assert layer.to_linear(torch.bfloat16).weight.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="Got 0 as the dtype of the result"):
        layer.to_linear(0)  # type: ignore[arg-type]


def test_to_linear_gives_the_kept_weight() -> None:
    linear = dense(bias=False)
    layer = Fp8Linear.from_linear(linear)
    layer.original_weight = linear.weight.detach().clone()
    assert_bits_equal(layer.to_linear().weight.detach(), linear.weight.detach())
    assert layer.to_linear().bias is None
    other = dense(bias=False)
    layer.load_state_dict(other.state_dict())
    assert_bits_equal(layer.to_linear().weight.detach(), other.weight.detach())


def test_a_kept_weight_does_not_outlive_its_codes() -> None:
    layer, other = layer_of(), layer_of()
    layer.original_weight = torch.zeros(N, K)
    layer.load_state_dict(other.state_dict())
    assert_bits_equal(layer.to_linear().weight.detach(), other.to_linear().weight.detach())


def test_quantize_weight_rounds_scales_as_the_scheme_says() -> None:
    w = torch.randn(N, K)
    q = quantize_weight(w, Scheme("U", fp8kit.BLOCK, fp8kit.GROUP128, ue8m0=True))
    assert (torch.frexp(q.scale)[0] == 0.5).all()
    assert not (torch.frexp(quantize_weight(w, SCHEMES["FP8_BLOCK"]).scale)[0] == 0.5).all()


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_input_gradient_of_the_layer(scheme: str, device: torch.device) -> None:
    layer = layer_of(scheme, device)
    x = torch.randn(4, K, device=device, requires_grad=True)
    grad = torch.randn(4, N, device=device)
    layer(x).backward(grad)
    assert x.grad is not None
    assert_bits_equal(x.grad, grad @ fp8kit.dequantize(layer.quantized_weight()))
    assert layer.bias.grad is not None
    assert layer.weight.grad is None


@pytest.mark.parametrize("shapes", [((2, K), (3, K)), ((1, 4, K), (5, 4, K))])
def test_jagged_inputs(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    layer = layer_of(device=device)
    parts = [torch.randn(shape, device=device) for shape in shapes]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = layer(x)
    assert [len(part) for part in y.unbind()] == [len(part) for part in parts]
    assert_bits_equal(y.values().detach(), layer(torch.cat(parts)).detach())
    back = fp8kit.Fp8Linear.from_linear(nn.Linear(N, K, device=device))
    (x + back(y)).values().sum().backward()  # both have the same rows
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_is_not_jagged_is_computed_part_by_part() -> None:
    layer = layer_of()
    x = torch.nested.nested_tensor([torch.randn(2, K), torch.randn(3, K)])
    with pytest.raises(TypeError, match=r"Pass each tensor of x.unbind\(\); Fp8Linear"):
        layer(x)
    jagged = torch.nested.as_nested_tensor(x.unbind(), layout=torch.jagged)
    for part, y in zip(x.unbind(), layer(jagged).unbind(), strict=True):
        torch.testing.assert_close(layer(part), y)


def test_repr_names_the_scheme() -> None:
    text = repr(layer_of("FP8_BLOCK"))
    assert "in_features=200, out_features=96, bias=True, scheme=FP8_BLOCK" in text
    assert "compute_dtype=torch.float32" in text
    assert "accum" not in text
    assert "batch_invariant" not in text


def test_repr_names_how_a_layer_runs() -> None:
    layer = layer_of()
    layer.accum, layer.batch_invariant = "fast", True
    assert repr(layer).endswith(", accum=fast, batch_invariant=True)")
    assert repr(copy.deepcopy(layer)) == repr(layer)


def test_a_new_layer_is_uninitialized_and_stays_so() -> None:
    layer = Fp8Linear(K, N, scheme="FP8_BLOCK")
    layer.reset_parameters()
    assert layer.codes.float().isnan().all()
    assert layer.weight_scale.isnan().all()


def test_a_layer_is_not_initialized_again() -> None:
    layer = layer_of()
    twin = copy.deepcopy(layer)
    with pytest.raises(UnsupportedError, match=r"__init__ .* again on Fp8Linear.*from_linear"):
        layer.__init__(K, N)  # type: ignore[misc]
    assert_same_layer(layer, twin)


def test_empty_inputs(device: torch.device) -> None:
    layer = layer_of(device=device)
    assert layer(torch.empty(0, K, device=device)).shape == (0, N)
    assert layer(torch.empty(2, 0, K, device=device)).shape == (2, 0, N)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_invariant_layer(scheme: str, device: torch.device) -> None:
    layer = layer_of(scheme, device)
    layer.batch_invariant = True
    x = torch.randn(40, K, device=device)
    whole = layer(x).detach()
    assert_bits_equal(layer(x[7:8]).detach(), whole[7:8])
    assert_bits_equal(layer(x[7:30]).detach(), whole[7:30])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_dict_survives_torch_save(scheme: str) -> None:
    layer, file = layer_of(scheme), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = Fp8Linear(K, N, scheme=scheme)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_layer(layer, fresh)


def captured(layer: Fp8Linear, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Warm up on a side stream, as CUDA graphs require, then capture one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(2):
            layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    return graph, y


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 255])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_graph_replay_equals_eager(scheme: str, m: int) -> None:
    scale = torch.full((1, 1), 0.01, device="cuda") if SCHEMES[scheme].static else None
    layer = Fp8Linear.from_linear(
        nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16), scheme, scale
    )
    x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    graph, y = captured(layer, x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        with torch.no_grad():
            assert_bits_equal(y, layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "fp8"])
def test_cuda_graph_sees_reloaded_weights(kind: str) -> None:
    layer = Fp8Linear.from_linear(nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(16, 512, device="cuda", dtype=torch.bfloat16)
    graph, y = captured(layer, x)
    graph.replay()
    before = y.clone()
    other = nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
    new = Fp8Linear.from_linear(other)
    layer.load_state_dict(other.state_dict() if kind == "dense" else new.state_dict())
    graph.replay()
    assert_bits_equal(y, new(x).detach())
    assert not torch.equal(y, before)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices() -> None:
    layer = layer_of().to("cuda:0")
    twin = copy.deepcopy(layer).to("cuda:1")
    assert {p.device.index for p in twin.parameters()} == {1}
    x = torch.randn(4, K)
    assert_bits_equal(layer(x.to("cuda:0")).detach().cpu(), twin(x.to("cuda:1")).detach().cpu())
    with pytest.raises(ValueError, match="A matmul runs on one device"):
        twin(x.to("cuda:0"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("m", [1, 16, 300])
def test_repeated_calls_of_layers_on_two_devices(m: int, scheme: str) -> None:
    """Recordings are replayed on the device of their layer, whichever device is current."""
    pairs = []
    for index in (0, 1):
        dense = nn.Linear(4096, 1024, False, device=f"cuda:{index}", dtype=torch.bfloat16)
        layer = Fp8Linear.from_linear(dense, scheme).requires_grad_(False)
        x = torch.randn(m, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
        pairs.append((layer, x, layer(x)))
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for layer, x, expected in pairs * 3:
                assert_bits_equal(layer(x), expected)
    for layer, x, _ in pairs:
        assert layer.replays.launches(x.shape)


def test_a_layer_with_a_scale_per_tensor_has_a_matrix_scale() -> None:
    layer = layer_of("FP8_TENSOR")
    assert layer.weight_scale.shape == (1, 1)
    assert layer.quantized_weight().group == TENSOR


def test_a_failed_move_leaves_the_layer_whole() -> None:
    layer = layer_of("FP8")
    twin = copy.deepcopy(layer)

    def fail(_: Tensor) -> Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        layer._apply(fail)
    assert_same_layer(layer, twin)


def test_forward_takes_the_keyword_of_nn_linear() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 32))
    x = torch.randn(2, 64)
    assert_bits_equal(layer(input=x), layer(x))


def test_deepcopy_keeps_layers_with_one_parameter_tied() -> None:
    first = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 32))
    second = fp8kit.Fp8Linear.from_quantized(first.quantized_weight(), dtype=torch.float32)
    second.weight, second.weight_scale = first.weight, first.weight_scale
    a, b = copy.deepcopy(nn.ModuleList([first, second]))
    assert a.weight is b.weight
    assert a.weight is not first.weight


def test_a_scale_without_its_weight_is_refused() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 32))
    with pytest.raises(RuntimeError, match="weight_scale comes without"):
        layer.load_state_dict({"weight_scale": torch.ones(32, 1)}, strict=False)


@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("value", [None, 1.5, [1.0], "of somebody"])
def test_what_is_no_tensor_in_a_state_dict_is_refused(name: str, value: object) -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=f"{name}|Got a scale"):
        layer.load_state_dict({**layer.state_dict(), name: value})
    assert_same_tensors(layer.state_dict(), before)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("wanted", ["no gradient", "gradient of the input"])
def test_a_result_may_be_changed_in_place(wanted: str, scheme: str, device: torch.device) -> None:
    layer = layer_of(scheme, device).requires_grad_(False)
    x = torch.randn(3, K, device=device, requires_grad=wanted != "no gradient")
    adapter = torch.randn(3, N, device=device, requires_grad=True)
    y = layer(x)
    expected = y.detach() + adapter.detach()
    y += adapter
    assert_bits_equal(y.detach(), expected)
    y.relu_().sum().backward()
    assert adapter.grad is not None
    assert (x.grad is not None) == x.requires_grad


def test_a_result_made_without_gradients_may_be_changed_with_one(device: torch.device) -> None:
    layer = layer_of(device=device)
    with torch.no_grad():
        y = layer(torch.randn(2, 3, K, device=device))
    y += torch.ones(N, device=device, requires_grad=True)
    assert y.requires_grad


def test_a_kept_weight_that_is_reloaded_has_no_history() -> None:
    layer = layer_of()
    layer.original_weight = torch.zeros(N, K)
    source = dense()
    layer.load_state_dict(dict(source.named_parameters()))
    assert not layer.original_weight.requires_grad
    assert_bits_equal(copy.deepcopy(layer).to_linear().weight.detach(), source.weight.detach())


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Got x of type list\..*Pass a torch.Tensor"):
        layer_of()([1.0] * K)


def test_a_dense_layer_has_a_weight_of_its_own() -> None:
    layer = layer_of()
    layer.original_weight = torch.zeros(N, K)
    nn.init.ones_(layer.to_linear().weight)
    assert not layer.original_weight.any()


def test_options_follow_their_attributes() -> None:
    layer = Fp8Linear(32, 16)
    assert layer.options()[-3:] == ("precise", False, None)
    layer.accum = "fast"
    layer.batch_invariant = True
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert each.options()[-3:-1] == ("fast", True)
        each.accum = "precise"
        assert each.options()[-3:-1] == ("precise", True)
        each.accum = "fast"


def test_inputs_and_weights_of_other_kinds_are_named() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    x = torch.randn(4, 64)
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo.*Pass x.to_dense"):
        layer(x.to_sparse())
    nothing: Any = None
    with pytest.raises(TypeError, match=r"Got weight of type NoneType.*role=.weight"):
        fp8kit.Fp8Linear.from_quantized(nothing)


class Offloading(nn.Module):
    """Moves a layer to the device of its input, as models do that keep experts on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expert.to(x.device)(x)
        return y


def test_compiled_code_may_move_a_layer() -> None:
    model, x = Offloading().eval(), torch.randn(3, 128)
    fp8kit.convert(model, exclude=[])
    expected = model(x)
    whole = torch.__version__ >= (2, 12)  # torch 2.11 moves no layer in a full graph, dense or not
    compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
    assert_bits_equal(compiled(x).detach(), expected.detach())
    assert_bits_equal(model(x).detach(), expected.detach())
