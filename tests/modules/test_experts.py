"""``Fp8Experts``: making, moving, copying, sharing, placing and counting."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import backend_tables
import fp8kit
from fp8kit import moe
from fp8kit.errors import UnsupportedError
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR
from frames import above_launches, launch_from
from numerics import assert_bits_equal, assert_same_tensors
from recorded_calls import record_on_cpu
from slow_experts import Layer, assert_experts, random_layer, slow_experts

OSS = moe.Activation("silu", interleaved=True, limit=1.0, alpha=1.702, up_offset=1.0)
SCHEMES = {
    "FP8_DYNAMIC": (ROW, ROW),
    "FP8_TENSOR": (ROW, TENSOR),
    "FP8_BLOCK": (GROUP128, BLOCK),
    "MXFP8": (MX, MX),
    "FP8": (TENSOR, TENSOR),
    "FP8_WEIGHT_ONLY": (None, ROW),
}


def make(
    scheme: str = "FP8_BLOCK", activation: moe.Activation | None = None, **options: Any
) -> tuple[Layer, fp8kit.Fp8Experts]:
    dense = random_layer(SCHEMES[scheme], activation or moe.Activation(), (5, 64, 136))
    if scheme == "FP8":
        scale = torch.full((1, 1), 0.02)
        dense, options = dense._replace(input_scale=scale), {"input_scales": (scale, scale)}
    layer = fp8kit.Fp8Experts.from_dense(
        dense.gate_up, dense.down, scheme, activation=dense.activation, **options
    )
    return dense, layer


def routed(tokens: int = 6, top_k: int = 2, ids: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, 64)
    return x, *moe.route(torch.randn(tokens, ids), top_k)


def test_experts_are_not_initialized_again() -> None:
    _, layer = make()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(UnsupportedError, match=r"__init__ was called again on Fp8Experts"):
        layer.__init__(5, 64, 136)  # type: ignore[misc]
    assert_same_tensors(layer.state_dict(), before)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dense_experts_are_quantized_one_by_one(scheme: str) -> None:
    dense, layer = make(scheme)
    assert_bits_equal(layer.gate_up_proj.detach(), dense.w13.data)
    assert_bits_equal(layer.down_proj_scale.detach(), dense.w2.scale)
    x, ids, weights = routed()
    x = x.bfloat16()
    assert_experts(layer(x, ids, weights), slow_experts(dense, x, ids, weights), 200)


def test_other_layouts_of_dense_experts_give_the_same_layer() -> None:
    biases = (torch.randn(5, 272), torch.randn(5, 64))
    dense, layer = make(activation=OSS, biases=biases)
    turned = fp8kit.Fp8Experts.from_dense(
        dense.gate_up.transpose(1, 2), iter(dense.down.transpose(1, 2)), "FP8_BLOCK",
        activation=OSS, biases=biases, transposed=True,
    )  # fmt: skip
    state = layer.state_dict()
    assert sorted(state) == [
        "down_proj", "down_proj_bias", "down_proj_scale",
        "gate_up_proj", "gate_up_proj_bias", "gate_up_proj_scale",
    ]  # fmt: skip
    assert_same_tensors(turned, state)
    assert not any(p.requires_grad for p in layer.parameters())


def test_without_a_gate_the_first_weight_is_called_up_proj() -> None:
    _, layer = make("FP8_DYNAMIC", moe.Activation("relu2", gated=False))
    assert layer.up_proj.shape == (5, 136, 64)
    x, ids, weights = routed()
    assert layer(x, ids, weights).shape == x.shape


def test_leading_dimensions_and_logits() -> None:
    _, layer = make()
    x, logits = torch.randn(2, 3, 64), torch.randn(2, 3, 5)
    with pytest.raises(ValueError, match="without a routing"):
        layer(x, logits=logits)
    layer.routing = functools.partial(moe.route, top_k=2)
    ids, weights = moe.route(logits.flatten(0, 1), 2)
    expected = layer(x, ids.view(2, 3, 2), weights.view(2, 3, 2))
    assert_bits_equal(layer(x, logits=logits), expected)
    with pytest.raises(TypeError, match="tensors of ids and weights, or logits"):
        layer(x)
    x, alone = torch.randn(1, 6, 64), [t.view(6, 1, -1) for t in (ids, weights)]
    assert_bits_equal(layer(x, *alone), layer(x, ids, weights))  # a 1 does not change the order


@pytest.mark.parametrize("also", [{"top_k_index": 0}, {"top_k_weights": 1}])
@pytest.mark.parametrize("how", ["forward", "apart"])
def test_logits_beside_ids_or_weights_are_refused(how: str, also: dict[str, int]) -> None:
    """One of them would be ignored."""
    _, layer = make()
    layer.routing, layer.shared = functools.partial(moe.route, top_k=2), 1
    x, *routes = routed()
    given = {name: routes[place] for name, place in also.items()}
    with pytest.raises(ValueError, match="Got logits beside ids or weights"):
        getattr(layer, how)(x, logits=torch.randn(6, 5), **given)


def test_what_a_routing_returns_is_checked() -> None:
    _, layer = make()
    layer.routing = lambda logits: logits  # type: ignore[assignment,return-value]
    with pytest.raises(TypeError, match=r"layer\.routing returned"):
        layer(torch.randn(6, 64), logits=torch.randn(6, 5))
    with pytest.raises(TypeError, match="Got logits of type list"):
        layer(torch.randn(6, 64), logits=[[0.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 1.5, [1.0]])
@pytest.mark.parametrize("name", ["gate_up_proj", "gate_up_proj_scale"])
def test_what_is_no_tensor_in_a_state_dict_is_refused(name: str, value: object) -> None:
    _, layer = make()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=name):
        layer.load_state_dict({**layer.state_dict(), name: value})
    assert_same_tensors(layer.state_dict(), before)


@pytest.mark.parametrize("scheme", ["FP8", "MXFP8"])
def test_casts_and_copies_keep_codes_and_scales(scheme: str) -> None:
    _, layer = make(scheme)
    layer.routing = functools.partial(moe.route, top_k=2)
    x, ids, weights = routed()
    expected = layer(x, ids, weights)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).half(),
        copy.deepcopy(layer).to(torch.bfloat16),
    ):
        assert_bits_equal(twin(x, ids, weights), expected)
        assert twin.down_proj.data_ptr() != layer.down_proj.data_ptr()
    assert copy.deepcopy(layer).half().compute_dtype == torch.float16
    empty = fp8kit.Fp8Experts(5, 64, 136, scheme=scheme, device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert_bits_equal(empty(x, ids, weights), expected)


def test_biases_follow_casts() -> None:
    _, layer = make(biases=(torch.randn(5, 272), torch.randn(5, 64)))
    layer.half()
    assert layer.gate_up_proj_bias.dtype == torch.float16
    assert layer.gate_up_proj.dtype == torch.float8_e4m3fn


def test_one_product_may_have_no_bias() -> None:
    x, ids, weights = routed()
    up = torch.randn(5, 272)
    dense, layer = make(biases=(up, None))
    stacks = (dense.gate_up, dense.down, "FP8_BLOCK")
    zeros = fp8kit.Fp8Experts.from_dense(*stacks, biases=(up, torch.zeros(5, 64)))
    assert layer.down_proj_bias is None
    assert_bits_equal(layer(x, ids, weights), zeros(x, ids, weights))
    with pytest.raises(TypeError, match="They must be two tensors, one for each product"):
        make(biases=(up, [0.0] * 64))


def test_shared_experts_are_taken_by_every_token() -> None:
    _, layer = make()
    x, ids, weights = routed(ids=3)
    two = torch.tensor([3, 4]).expand(6, 2)
    expected = layer(x, torch.cat([ids, two], 1), torch.cat([weights, torch.ones(6, 2)], 1))
    layer.shared = 2
    assert_bits_equal(layer(x, ids, weights), expected)
    gates = torch.rand(6, 2)
    by_gate = layer(x, ids, weights, shared_weights=gates)
    routed_part, shared_part = layer.apart(x, ids, weights, shared_weights=gates)
    torch.testing.assert_close(routed_part + shared_part, by_gate)
    other = torch.randn(6, 64)
    _, of_other = layer.apart(x, ids, weights, shared_input=other)
    assert_bits_equal(layer(x, ids, weights, shared_input=other), routed_part + of_other)
    layer.shared = 0
    with pytest.raises(ValueError, match=r"layer\.shared=0"):
        layer.apart(x, ids, weights)


def test_experts_are_rearranged_and_replicated_in_place() -> None:
    _, layer = make()
    layer.batch_invariant = True  # replicas share the tokens of an expert among them
    x, ids, weights = routed()
    expected = layer(x, ids, weights)
    layer.place(torch.tensor([4, 3, 0, 0, 1, 2, 0]))
    assert layer.num_experts == 7
    assert layer.num_ids == 5
    assert_bits_equal(layer(x, ids, weights), expected)
    held = {name: t.data_ptr() for name, t in layer.state_dict().items()}
    layer.place(torch.tensor([0, 1, 2, 3, 4, 4, 4]))
    assert {name: t.data_ptr() for name, t in layer.state_dict().items()} == held
    assert_bits_equal(layer(x, ids, weights), expected)
    layer.place(torch.tensor([1, 2]))  # the others live elsewhere
    ids = ids.clamp(1, 2)
    assert layer(x, ids, weights).abs().sum() > 0
    assert layer(x, torch.zeros_like(ids), weights).abs().sum() == 0
    with pytest.raises(ValueError, match=r"with ids \[0\] that are not held"):
        layer.place(torch.tensor([0, 1]))


@pytest.mark.parametrize("odd", [torch.tensor(1.0), torch.empty(0), torch.empty(6, 0)])
@pytest.mark.parametrize("place", range(3))
def test_tensors_without_rows_are_refused(place: int, odd: Tensor) -> None:
    given = list(routed())
    given[place] = odd
    with pytest.raises(ValueError, match=r"Got .* of shape .* a row for each token.*unsqueeze"):
        make()[1](*given)


@pytest.mark.parametrize("odd", ["gate_up_proj", "down_proj", "down_proj_scale"])
def test_stacks_that_do_not_fit_leave_the_layer_as_it_was(odd: str) -> None:
    (_, layer), (_, other) = make("FP8_TENSOR"), make("FP8_TENSOR")
    before = copy.deepcopy(layer.state_dict())
    state = other.state_dict()
    state[odd] = state[odd][:, :32] if state[odd].shape[1] > 1 else state[odd][:2]
    with pytest.raises(RuntimeError, match=f"size mismatch for {odd}"):
        layer.load_state_dict(state)
    assert_same_tensors(layer, before)


@pytest.mark.parametrize("strict", [True, False])
def test_weights_in_the_order_of_ids_do_not_load_into_rearranged_rows(strict: bool) -> None:
    dense, layer = make()
    x, ids, weights = routed()
    expected, state = layer(x, ids, weights), copy.deepcopy(layer.state_dict())
    layer.place(torch.tensor([4, 3, 2, 1, 0]))
    placed = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=r"rearranged by place\(\).*layer\.place\(torch\.arange"):
        layer.load_state_dict(state, strict=strict)
    model = torch.nn.ModuleDict({"moe": layer})
    arriving = {"moe.gate_up_proj": dense.gate_up, "moe.down_proj": dense.down}
    with pytest.raises(fp8kit.CheckpointError, match=r"experts of moe were rearranged"):
        fp8kit.load_weights(model, arriving)
    layer.load_state_dict(placed)  # a rearranged layer is saved in its new order
    assert_bits_equal(layer(x, ids, weights), expected)
    layer.place(torch.arange(5))
    layer.load_state_dict(state)
    fp8kit.load_weights(model, arriving)
    assert_bits_equal(layer(x, ids, weights), expected)
    fresh = make()[1]
    fresh.load_state_dict(placed, strict=strict)
    assert_bits_equal(fresh(x, ids, weights), expected)


def test_tokens_are_counted_when_asked() -> None:
    _, layer = make()
    x, ids, weights = routed()
    layer(x, ids, weights)
    assert layer.tokens is None
    layer.count_tokens()
    layer(x, ids, weights)
    layer(x, ids, weights)
    assert layer.tokens is not None
    assert torch.equal(layer.tokens, 2 * moe.tokens_per_expert(ids, 5))
    assert "tokens" not in layer.state_dict()
    layer.count_tokens(False)
    assert layer.tokens is None


def test_gradients_flow_to_the_input_and_the_router() -> None:
    _, layer = make()
    x, logits = torch.randn(6, 64, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    layer(x, *moe.route(logits, 2)).square().sum().backward()
    for tensor in (x, logits):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0
    layer.down_proj_scale.requires_grad_()
    with pytest.raises(RuntimeError, match=r"Experts are frozen.*requires_grad_\(False\)"):
        layer(x, *moe.route(logits, 2)).sum().backward()


def test_compiled_and_exported_modules_compute_the_same() -> None:
    _, layer = make()
    layer.routing, layer.shared = functools.partial(moe.route, top_k=2), 1
    x, logits = torch.randn(6, 64), torch.randn(6, 4)
    expected = layer(x, logits=logits)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_bits_equal(compiled(x, logits=logits), expected)
    program = torch.export.export(layer, (x,), {"logits": logits})
    assert_bits_equal(program.module()(x, logits=logits), expected)


def test_what_does_not_fit_is_refused() -> None:
    dense, _ = make()
    with pytest.raises(ValueError, match="got no input_scale"):
        fp8kit.Fp8Experts.from_dense(dense.gate_up, dense.down, "FP8")
    with pytest.raises(ValueError, match="at least one"):
        fp8kit.Fp8Experts.from_dense([], [])
    with pytest.raises(ValueError, match="weight in 128x128 groups for scheme FP8_DYNAMIC"):
        fp8kit.Fp8Experts.from_quantized(dense.w13, dense.w2, "FP8_DYNAMIC")
    with pytest.raises(ValueError, match=r"needs gate_up_proj \(5, 272, 64\)"):
        fp8kit.Fp8Experts.from_quantized(dense.w2, dense.w2, "FP8_BLOCK")
    with pytest.raises(TypeError, match=r"Got a Linear.*layer\.weight"):
        fp8kit.Fp8Experts.from_dense([torch.nn.Linear(64, 272)], dense.down)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"Got QTensor.* as dense experts.*layer\.weight"):
        fp8kit.Fp8Experts.from_dense(dense.w13, dense.w2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"activation='gelu'.*Activation\('silu'\)"):
        fp8kit.Fp8Experts.from_quantized(dense.w13, dense.w2, activation="gelu")  # type: ignore
    for name in ("biases", "input_scales"):
        with pytest.raises(TypeError, match=f"Got {name}=.* one for each product"):
            fp8kit.Fp8Experts.from_dense(dense.gate_up, dense.down, **{name: torch.ones(1, 1)})
    with pytest.raises(TypeError, match="Got transposed='no'"):
        fp8kit.Fp8Experts.from_dense(dense.gate_up, dense.down, transposed="no")  # type: ignore
    layer = make()[1]
    with pytest.raises(TypeError, match="Got on='no'"):
        layer.count_tokens("no")  # type: ignore[arg-type]
    x, ids, weights = routed()
    with pytest.raises(TypeError, match="Got hidden_states of type list"):
        layer(x.tolist(), ids, weights)
    with pytest.raises(TypeError, match="Got ids of type list and weights of type Tensor"):
        layer(x, ids.tolist(), weights)
    wide, turned = x[:6].view(2, 3, -1), [t[:6].view(3, 2, -1) for t in (ids, weights)]
    with pytest.raises(ValueError, match=r"Got tokens \(2, 3, 64\), and ids, .* \(3, 2, 2\)"):
        layer(wide, *turned)
    layer.shared = 1
    with pytest.raises(TypeError, match="Got shared_input of type list"):
        layer(x, ids, weights, shared_input=x.tolist())
    layer.shared = 0
    for placement in (torch.ones(2), torch.tensor(3)):
        with pytest.raises(TypeError, match=r"placement of torch.* It must be a vector of ids"):
            layer.place(placement)
    layer.shared = 9
    with pytest.raises(ValueError, match=r"layer\.shared=9. The last layer\.shared of 5 experts"):
        layer(torch.randn(2, 64), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    with pytest.raises(ValueError, match="Stack them"):
        fp8kit.Fp8Experts.from_quantized(dense.w13, fp8kit.quantize(dense.down[0], BLOCK))
    with pytest.raises(fp8kit.UnsupportedError, match="TorchScript"):
        torch.jit.script(make()[1])


MOST_FRAMES = 6  # from forward to a launch, both of them counted


def launches_of(layer: fp8kit.Fp8Experts, x: Tensor, most: int) -> list[list[str]]:
    """Return the package's functions above each launch of the GEMMs and the kernels around them."""
    routes = moe.route(torch.randn(x.shape[0], 5, device=x.device), 2)
    layer(*(torch.cat([t, t]) for t in (x, *routes)))  # a second call of one size is recorded
    return above_launches(lambda: layer(x, *routes), launch_from("moe"), most)


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_few_frames_lie_between_experts_and_their_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("fp8kit.moe.triton")
    if not triton.INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    backend_tables.install(monkeypatch, moe={"triton_experts": triton.BACKEND})
    record_on_cpu(monkeypatch)  # as on a GPU, nothing lies between the layer and the body
    _, layer = make("FP8_WEIGHT_ONLY")
    (first,) = launches_of(layer, torch.randn(1, 64, dtype=torch.bfloat16), 1)
    body = ["Fp8Experts.forward", "experts", "ReplayCache.run", "experts", "experts"]
    assert first == [*body, "launch"]
    assert len(first) <= MOST_FRAMES


@pytest.mark.gpu
def test_on_a_gpu_few_frames_lie_between_experts_and_their_products() -> None:
    _, layer = make("FP8_DYNAMIC")
    x = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    found = launches_of(layer.cuda(), x, 2)  # what comes behind the products is not bounded
    assert len(found) == 2
    assert max(map(len, found)) <= MOST_FRAMES
