"""Weights that arrive tensor by tensor: in any order, in parts, repeatedly."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backend_tables
import fp8kit
from fp8kit import compat, load_weights
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.modules.linear import Fp8Linear
from fp8kit.quantizers import reference
from fp8kit.quantizers.scale_layout import swizzle_scales
from numerics import assert_bits_equal, assert_same_tensors

Q, KV, K, FF, EXPERTS = 256, 128, 192, 320, 3
SOURCES = {
    "attn.q_proj": (Q, K),
    "attn.k_proj": (KV, K),
    "attn.v_proj": (KV, K),
    "attn.o_proj": (K, Q),
    "mlp.gate_proj": (FF, K),
    "mlp.up_proj": (FF, K),
    "mlp.down_proj": (K, FF),
}


class Stack(nn.Module):
    """Experts as two stacks, as in Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * FF, K))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, K, FF))


def block(joined: bool, bias: bool = True) -> nn.Module:
    model = nn.Module()
    model.attn, model.mlp, model.moe = nn.Module(), nn.Module(), nn.Module()
    if joined:
        model.attn.qkv_proj = nn.Linear(K, Q + 2 * KV, bias)
        model.mlp.gate_up_proj = nn.Linear(K, 2 * FF, bias)
    for name, (n, k) in SOURCES.items():
        if not joined or name in ("attn.o_proj", "mlp.down_proj"):
            model.set_submodule(name, nn.Linear(k, n, bias))
    model.norm = nn.LayerNorm(K)
    model.moe.experts = Stack()
    return model.bfloat16().eval()


def on_meta(joined: bool) -> nn.Module:
    with torch.device("meta"):
        return block(joined)


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    found = {f"{name}.weight": draw(*shape) for name, shape in SOURCES.items()}
    found |= {f"{name}.bias": draw(shape[0]) for name, shape in SOURCES.items()}
    for i, (part, shape) in itertools.product(
        range(EXPERTS), (("gate_proj", (FF, K)), ("up_proj", (FF, K)), ("down_proj", (K, FF)))
    ):
        found[f"moe.experts.{i}.{part}.weight"] = draw(*shape)
    return found | {"norm.weight": draw(K), "norm.bias": draw(K)}


def joined_weights(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the joined model holds them."""
    names = {"attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}
    found = {k: v for k, v in parts.items() if k.split(".")[1] in ("o_proj", "down_proj")}
    found |= {k: v for k, v in parts.items() if k.startswith("norm")}
    for target, letters in names.items():
        holder = target.split(".")[0]
        for kind in ("weight", "bias"):
            found[f"{target}.{kind}"] = torch.cat(
                [parts[f"{holder}.{letter}_proj.{kind}"] for letter in letters]
            )
    return found


def stacks(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    def one(i: int, kind: str) -> Tensor:
        return parts[f"moe.experts.{i}.{kind}_proj.weight"]

    gate_up = [torch.cat([one(i, "gate"), one(i, "up")]) for i in range(EXPERTS)]
    down = [one(i, "down") for i in range(EXPERTS)]
    prefix = "moe.experts."
    return {
        f"{prefix}gate_up_proj": torch.stack(gate_up),
        f"{prefix}down_proj": torch.stack(down),
    }


def expected(parts: dict[str, Tensor], joined: bool, scheme: str) -> dict[str, Tensor]:
    """Return the expected model: the dense model of whole tensors, converted."""
    model = block(joined)
    state = joined_weights(parts) if joined else {k: v for k, v in parts.items() if "moe" not in k}
    model.load_state_dict(state | stacks(parts))
    fp8kit.convert(model, scheme)
    return model.state_dict()


def assert_state(model: nn.Module, wanted: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_bits_equal(found[name], tensor)


def shuffled(tensors: dict[str, Tensor], seed: int) -> list[tuple[str, Tensor]]:
    items = list(tensors.items())
    random.Random(seed).shuffle(items)
    return items


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize("joined", [False, True])
def test_any_order_into_a_model_on_meta(scheme: str, joined: bool) -> None:
    parts = weights()
    wanted = expected(parts, joined, scheme)
    for seed in range(3):
        model = on_meta(joined)
        assert load_weights(model, shuffled(parts, seed), scheme=scheme) == wanted.keys()
        assert_state(model, wanted)


def test_a_state_dict_is_taken_as_its_pairs() -> None:
    dense = block(joined=False)
    ours, theirs = block(joined=False), block(joined=False)
    fp8kit.convert(ours)
    fp8kit.convert(theirs)
    state = dense.state_dict()
    assert load_weights(ours, state) == load_weights(theirs, state.items())
    assert_same_tensors(ours, theirs)


@pytest.mark.parametrize("joined", [False, True])
def test_reload_keeps_every_address(joined: bool) -> None:
    model = on_meta(joined)
    load_weights(model, weights().items(), scheme="FP8_DYNAMIC")
    model.attn.o_proj(torch.ones(1, Q, dtype=torch.bfloat16))
    places = {n: t.data_ptr() for n, t in model.state_dict().items()}
    for seed in range(1, 4):
        load_weights(model, shuffled(weights(seed), seed))
        assert {n: t.data_ptr() for n, t in model.state_dict().items()} == places
        assert_state(model, expected(weights(seed), joined, "FP8_DYNAMIC"))


def test_reload_of_siblings_that_were_joined_for_speed() -> None:
    model = block(False)
    model.load_state_dict({k: v for k, v in weights().items() if "moe" not in k}, strict=False)
    fp8kit.convert(model)
    x = torch.randn(2, K, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [layer(x) for layer in (model.attn.q_proj, model.attn.k_proj, model.attn.v_proj)]

    run()  # the first call moves the three weights into one storage
    place = model.attn.k_proj.weight.data_ptr()
    load_weights(model, shuffled(weights(7), 7))
    assert model.attn.k_proj.weight.data_ptr() == place
    again = on_meta(False)
    load_weights(again, weights(7).items(), scheme="FP8_DYNAMIC")
    with torch.no_grad():
        fresh = [layer(x) for layer in (again.attn.q_proj, again.attn.k_proj, again.attn.v_proj)]
    for ours, theirs in zip(run(), fresh, strict=True):
        assert_bits_equal(ours, theirs)


def test_codes_load_as_they_are_whatever_comes_first() -> None:
    source = on_meta(False)
    load_weights(source, weights().items(), scheme="FP8_DYNAMIC")
    state = source.state_dict()
    for seed in range(3):
        model = on_meta(False)
        load_weights(model, shuffled(state, seed), scheme="FP8_DYNAMIC")
        assert_state(model, state)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8"])
def test_scales_have_the_names_of_any_dialect(scheme: str, joined: bool) -> None:
    source = on_meta(joined)
    load_weights(source, weights().items(), scheme=scheme)
    state = source.state_dict()
    model = on_meta(joined)
    load_weights(model, weights(1).items(), scheme=scheme)
    others = {re.sub("_scale$", "_scale_inv", name): tensor for name, tensor in state.items()}
    load_weights(model, shuffled(others, 1))
    assert_state(model, state)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale", "scale_input", "qscale_act"])
def test_input_scales_have_the_names_of_any_dialect(name: str) -> None:
    model = nn.Sequential(nn.Linear(256, 64)).bfloat16()
    fp8kit.convert(model, "FP8", calibrate=lambda m: m(torch.ones(2, 256).bfloat16()))
    state = {n: t.clone() for n, t in model.state_dict().items()} | {"0.input_scale": torch.ones(1)}
    load_weights(model, {n.replace("input_scale", name): t for n, t in state.items()})
    assert model[0].input_scale.item() == 1


def test_a_kept_weight_of_another_dtype_leaves_the_loaded_codes() -> None:
    """Codes of the bf16 copy are others than those of the fp32 weight that was loaded."""
    model = nn.Sequential(nn.Linear(256, 256)).bfloat16()
    fp8kit.convert(model, weight_storage="keep")
    weight = torch.randn(256, 256)
    load_weights(model, {"0.weight": weight, "0.bias": torch.zeros(256)})
    q = fp8kit.quantize(weight, role="weight")
    model(torch.randn(2, 256))
    assert_bits_equal(model[0].quantized_weight().data, q.data)
    assert_bits_equal(model[0].original_weight, weight.bfloat16())


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "MXFP8"])
def test_codes_of_siblings_join(scheme: str) -> None:
    source = on_meta(False)
    load_weights(source, weights().items(), scheme=scheme)
    state = source.state_dict()
    model = on_meta(True)
    load_weights(model, shuffled(state, 1), scheme=scheme)
    for target, letters in (("attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        holder = target.split(".")[0]
        for kind in ("weight", "weight_scale", "bias"):
            parts = [state[f"{holder}.{letter}_proj.{kind}"] for letter in letters]
            assert_bits_equal(model.state_dict()[f"{target}_proj.{kind}"], torch.cat(parts))


@pytest.mark.parametrize("order", [*itertools.permutations("qkv")])
def test_keys_and_values_of_different_rows(order: tuple[str, ...]) -> None:
    rows = {"q": 256, "k": 64, "v": 128}
    parts = {name: torch.randn(n, K) for name, n in rows.items()}
    parts |= {f"{name}.bias": torch.randn(n) for name, n in rows.items()}

    def one_buffer() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(256 * K)
        for name in order:
            for key, kind in ((name, "weight"), (f"{name}.bias", "bias")):
                held = buffer[: parts[key].numel()].view_as(parts[key])
                yield f"attn.{name}_proj.{kind}", held.copy_(parts[key])

    whole = {kind: torch.cat([parts[name + kind] for name in rows]) for kind in ("", ".bias")}
    for scheme in (None, "FP8_DYNAMIC"):
        model = nn.Module()
        model.attn = nn.Module()
        model.attn.qkv_proj = nn.Linear(K, sum(rows.values()))
        load_weights(model, one_buffer(), scheme=scheme)
        assert_bits_equal(model.attn.qkv_proj.bias, whole[".bias"])
        if scheme is None:
            assert_bits_equal(model.attn.qkv_proj.weight, whole[""])
        else:
            q = fp8kit.quantize(whole[""], fp8kit.ROW, role="weight")
            assert_bits_equal(model.attn.qkv_proj.weight, q.data)


def test_parts_with_more_rows_than_their_layer() -> None:
    tensors = weights() | {"attn.k_proj.bias": torch.zeros(Q), "attn.v_proj.bias": torch.zeros(Q)}
    for seed in range(4):
        with pytest.raises(CheckpointError, match=r"The model needs \[512\]"):
            load_weights(on_meta(True), shuffled(tensors, seed), scheme="FP8_DYNAMIC")


def test_a_joined_checkpoint_into_separate_layers() -> None:
    whole = joined_weights(weights()) | stacks(weights())
    model = on_meta(False)
    load_weights(model, shuffled(whole, 3), scheme="FP8_DYNAMIC")
    assert_state(model, expected(weights(), False, "FP8_DYNAMIC"))
    joined = on_meta(True)
    load_weights(joined, whole.items(), scheme="FP8_DYNAMIC")
    again = on_meta(False)
    codes = joined.state_dict()
    load_weights(again, shuffled(codes, 4), scheme="FP8_DYNAMIC")
    assert_state(again, model.state_dict())
    for tensor in again.state_dict().values():  # a view would keep the whole other tensor alive
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shared", [True, False], ids=["module", "tensor"])
def test_what_the_model_ties_must_not_differ(shared: bool, device: str) -> None:
    def model() -> nn.Module:
        with torch.device(device):
            found = nn.Sequential(*(nn.Linear(256, 256, False) for _ in range(3)))
        if shared:
            found[2] = found[0]
        found[2].weight = found[0].weight
        return found

    one, other = torch.randn(256, 256), torch.randn(256, 256)
    one[:, 0], other[:, 0] = 9, 9  # and so scales are the same
    one[0, 1] = -0.0
    tensors = {"0.weight": one, "1.weight": one, "2.weight": one.clone()}
    tied, scheme = model(), "FP8_DYNAMIC" if shared else None
    load_weights(tied, tensors, scheme=scheme)
    assert isinstance(tied[0], Fp8Linear) == shared
    assert tied[0]._parameters["weight"] is tied[2]._parameters["weight"]
    with pytest.raises(CheckpointError, match=r"0\.weight and 2\.weight differ, and the"):
        load_weights(model(), tensors | {"2.weight": other}, scheme=scheme)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_that_a_tensor_cannot_hold(device: str) -> None:
    def model(dtype: torch.dtype) -> nn.Module:
        found = nn.Module()
        found.register_buffer("steps", torch.zeros(2, dtype=dtype))
        return found.to(device)

    counted = model(torch.int64)
    load_weights(counted, {"steps": torch.tensor([1.0, 2.0])})
    assert counted.steps.tolist() == [1, 2]
    for dtype, value in ((torch.int64, 1.5), (torch.int64, float("nan")), (torch.float32, 1j)):
        with pytest.raises(CheckpointError, match=f"steps has numbers of .* that {dtype} cannot"):
            load_weights(model(dtype), {"steps": torch.tensor([1.0, value])})


def test_numbers_beyond_fp16() -> None:
    fits, beyond = torch.full((K,), -65504.0), torch.full((K,), 1e5, dtype=torch.bfloat16)
    fits[0] = float("inf")  # it was there before
    model = nn.RMSNorm(K, dtype=torch.float16)
    load_weights(model, {"weight": fits})
    assert model.weight.tolist() == fits.tolist()
    with pytest.raises(CheckpointError, match=f"weight has {K} of {K} numbers beyond 65504"):
        load_weights(model, {"weight": beyond})


def test_numbers_are_not_cast_to_codes_of_other_modules() -> None:
    model = nn.Sequential(compat.FP8Linear.from_linear(nn.Linear(K, K)), nn.Module())
    model[0].materialize_fp8_weight("cpu")
    method, scale = compat.Fp8PerBlockOnlineLinearMethod(), "weight_scale_inv"
    method.create_weights(model[1], K, [K])
    model[1].weight.weight_loader(model[1].weight, torch.randn(K, K))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert {"0.weight_scale", f"1.{scale}"} < before.keys()
    for name in ("0.weight", "1.weight"):
        with pytest.raises(
            CheckpointError, match=f"{name} has numbers of torch.float32, and .* codes"
        ):
            load_weights(model, {name: torch.randn(K, K)})
    assert_same_tensors(model.state_dict(), before)
    stored = nn.Module()  # FP8 without a scale is a way to store numbers
    stored.register_buffer("weight", torch.zeros(K, dtype=torch.float8_e4m3fn))
    load_weights(stored, {"weight": torch.full((K,), 0.5)})
    assert torch.equal(stored.weight.float(), torch.full((K,), 0.5))


@pytest.mark.parametrize("name", ["attn.o_proj.weight", "norm.weight"])
def test_what_has_no_values_or_no_codes(name: str) -> None:
    model = on_meta(False)
    load_weights(model, weights(), scheme="FP8_DYNAMIC")
    with pytest.raises(CheckpointError, match=f"{name} is on the meta device"):
        load_weights(model, {name: weights()[name].to("meta")})
    if name == "attn.o_proj.weight":
        for dtype in (torch.float64, torch.uint8):
            with pytest.raises(TypeError, match=f"{name} is {dtype}. FP8 is made from bf16"):
                load_weights(model, {name: weights()[name].to(dtype)})


def test_weights_may_arrive_over_several_partial_calls() -> None:
    model, items = on_meta(True), shuffled(weights(), 5)
    first = load_weights(model, items[:9], scheme="FP8_DYNAMIC", partial=True)
    assert "attn.qkv_proj.weight" not in first
    load_weights(model, items[9:20], partial=True)
    every = load_weights(model, items[20:])
    assert first < every == model.state_dict().keys()
    assert_state(model, expected(weights(), True, "FP8_DYNAMIC"))


def test_memory_of_the_caller_may_be_used_again() -> None:
    def through_one_buffer() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(2**20, dtype=torch.bfloat16)
        for name, tensor in shuffled(weights(), 6):
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)
            buffer.fill_(torch.nan)

    for joined in (False, True):
        model = on_meta(joined)
        load_weights(model, through_one_buffer(), scheme="FP8_DYNAMIC")
        assert_state(model, expected(weights(), joined, "FP8_DYNAMIC"))


@pytest.mark.parametrize("joined", [False, True])
def test_parameters_of_a_trainer(joined: bool) -> None:
    """A trainer's parameters need gradients, are fp32, and may have any strides."""
    parts = {n: nn.Parameter(t.float().t().contiguous().t()) for n, t in weights().items()}
    assert not parts["attn.q_proj.weight"].is_contiguous()
    model = on_meta(joined)
    load_weights(model, shuffled(parts, 8), scheme="FP8_DYNAMIC")
    for _ in range(2):
        assert_state(model, expected(weights(), joined, "FP8_DYNAMIC"))
        for tensor in model.state_dict(keep_vars=True).values():
            assert tensor.grad_fn is None
            assert tensor.is_contiguous()
        load_weights(model, shuffled(parts, 9))


def test_each_weight_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def counting(x: Tensor, *others: Any) -> Any:
        seen.append(x.shape)
        return reference.BACKEND.quantize(x, *others)

    counted = dataclasses.replace(reference.BACKEND, quantize=counting)
    backend_tables.install(monkeypatch, quantizers={"reference": counted})
    model = on_meta(True)
    load_weights(model, shuffled(weights(), 2), scheme="FP8_DYNAMIC")
    assert len(seen) == sum(isinstance(m, Fp8Linear) for m in model.modules()) == 4
    codes = model.state_dict()
    load_weights(model, codes.items())
    assert len(seen) == 4


def test_a_dropped_model_takes_its_unfinished_load_along() -> None:
    model = on_meta(True)
    load_weights(model, shuffled(weights(), 2)[:5], scheme="FP8_DYNAMIC", partial=True)
    gone = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert gone() is None


def test_a_model_that_was_loaded_is_freed_at_once() -> None:
    model = on_meta(True)
    load_weights(model, shuffled(weights(), 2), scheme="FP8_DYNAMIC")
    gone = [weakref.ref(p) for p in model.parameters()]
    gc.disable()
    del model
    gc.enable()
    assert [ref() for ref in gone] == [None] * len(gone)


def refused(message: str, model: nn.Module, items: Any, **options: Any) -> None:
    with pytest.raises((CheckpointError, ConversionError), match=message):
        load_weights(model, items, **options)


def without(*names: str, **changes: Tensor) -> dict[str, Tensor]:
    kept = {k: v for k, v in weights().items() if k not in names}
    return kept | {k.replace("__", "."): v for k, v in changes.items()}


def test_a_missing_part_is_named() -> None:
    fp8 = {"scheme": "FP8_DYNAMIC"}
    message = r"1 weights are not whole:\n  attn.qkv_proj.weight waits for attn.k_proj\n"
    refused(message, on_meta(True), without("attn.k_proj.weight").items(), **fp8)
    message = r"moe.experts.gate_up_proj waits for moe.experts.2.up_proj\n"
    refused(message, on_meta(True), without("moe.experts.2.up_proj.weight").items(), **fp8)
    message = r"attn.o_proj.weight, attn.o_proj.weight_scale did not arrive and have no values"
    refused(message, on_meta(True), without("attn.o_proj.weight").items(), **fp8)


def test_a_missing_scale_is_named() -> None:
    model = block(False)
    fp8kit.convert(model)
    name = "attn.o_proj.weight"
    state = model.state_dict()
    refused(rf"{name} waits for {name}_scale", model, [(name, state[name])])
    refused(rf"{name}_scale waits for {name}\n", model, [(f"{name}_scale", state[f"{name}_scale"])])


def test_a_tensor_arrives_once_a_load() -> None:
    name, tensor = "norm.bias", torch.zeros(K)
    model = block(True)
    refused("norm.bias arrived twice", model, [(name, tensor), (name, tensor)])
    load_weights(model, [(name, tensor)], partial=True)
    refused("norm.bias arrived twice", model, [(name, tensor)])
    load_weights(model, [(name, tensor)])
    load_weights(model, [(name, tensor)])


def test_a_weight_has_one_scale_by_whatever_names() -> None:
    q = fp8kit.quantize(torch.randn(128, 256), fp8kit.BLOCK, role="weight")
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    fp8kit.convert(model, "FP8_BLOCK", exclude=[])
    names = {"0.weight_scale": q.scale, "0.weight_scale_inv": q.scale * 2}
    for order in (list(names), list(names)[::-1]):
        scales = [(n, names[n]) for n in order]
        refused(f"{order[1]} arrived twice", model, scales)
        refused(f"{order[1]} arrived twice", model, [scales[0], ("0.weight", q.data), scales[1]])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("attn.o_proj.weight", (K, Q + 1), r"attn.o_proj.weight has shape \[192, 257\].*needs"),
        ("attn.o_proj.bias", (1,), r"attn.o_proj.bias has shape \[1\]"),
        ("attn.q_proj.weight", (Q + 1, K), r"q_proj, attn.k_proj, attn.v_proj has shape \[513\]"),
        ("attn.q_proj.weight", (Q, K + 1), r"attn.q_proj has shape \[256, 193\]"),
        ("attn.q_proj.weight", (Q * 9, K), r"attn.q_proj has shape \[2304, 192\]"),
        ("moe.experts.1.up_proj.weight", (FF, FF), r"moe.experts.1.up_proj has shape \[320, 320\]"),
    ],
)
def test_wrong_shapes_are_named(name: str, shape: tuple[int, ...], message: str) -> None:
    tensors = weights() | {name: torch.zeros(shape, dtype=torch.bfloat16)}
    refused(message, on_meta(True), tensors.items(), scheme="FP8_DYNAMIC")


def test_nan_is_named() -> None:
    bad = weights()["attn.k_proj.weight"].clone()
    bad[3, 4] = torch.nan
    for scheme in ("FP8_DYNAMIC", "MXFP8"):
        tensors = without(attn__k_proj__weight=bad).items()
        refused(r"attn.qkv_proj.weight holds NaN", on_meta(True), tensors, scheme=scheme)


def test_scales_come_in_the_order_of_their_codes() -> None:
    """Engines transpose and tile them: as many numbers, of other codes."""
    q = fp8kit.quantize(torch.randn(256, 512), fp8kit.BLOCK, role="weight")
    model = nn.Sequential(nn.Linear(512, 256, bias=False))
    fp8kit.convert(model, "FP8_BLOCK", exclude=[])
    for shape in ((2, 4), (2, 1, 4, 1), (1, 2, 4)):
        load_weights(model, {"0.weight": q.data, "0.weight_scale": q.scale.reshape(shape)})
        assert_bits_equal(model[0].quantized_weight().scale, q.scale)
    for scale in (q.scale.T.contiguous(), q.scale.flatten()):
        refused("Got a scale of shape", model, {"0.weight": q.data, "0.weight_scale": scale})
    fp8kit.convert(model := nn.Sequential(nn.Linear(512, 256)), "MXFP8", exclude=[])
    q = fp8kit.quantize(torch.randn(256, 512), fp8kit.MX, role="weight")
    tiles = swizzle_scales(q.scale).flatten()
    refused("Got a scale of shape", model, {"0.weight": q.data, "0.weight_scale": tiles})


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_are_checked(bad: float) -> None:
    model = block(False)
    fp8kit.convert(model)
    state = dict(model.state_dict())
    scale = state["attn.o_proj.weight_scale"].clone()
    scale[5] = bad
    items = [("attn.o_proj.weight", state["attn.o_proj.weight"])]
    refused(r"attn.o_proj.weight_scale holds", model, [*items, ("attn.o_proj.weight_scale", scale)])
    short = ("attn.o_proj.weight_scale", torch.ones(3))
    refused(r"attn.o_proj.weight_scale: Got a scale of shape \(3,\)", model, [*items, short])


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_input_scales_are_checked(bad: float) -> None:
    layer = Fp8Linear(128, 64, scheme="FP8")
    q, one = fp8kit.quantize(torch.randn(64, 128), fp8kit.TENSOR, role="weight"), torch.ones(1, 1)
    layer.load_state_dict(
        {"weight": q.data, "weight_scale": q.scale, "input_scale": one, "bias": torch.ones(64)}
    )
    model = nn.ModuleDict({"proj": layer})
    state = model.state_dict() | {"proj.input_scale": torch.full((1, 1), bad)}
    refused(r"proj.input_scale holds NaN, infinite, zero or negative", model, state)
    assert torch.equal(layer.get_parameter("input_scale"), one)


def test_codes_need_an_fp8_layer() -> None:
    q = fp8kit.quantize(weights()["attn.o_proj.weight"], role="weight")
    items = [("attn.o_proj.weight", q.data), ("attn.o_proj.weight_scale", q.scale)]
    refused(r"o_proj.weight is torch.float8_e4m3fn, and its layer is in high", block(False), items)
    model = block(False)
    fp8kit.convert(model, "FP8_BLOCK")
    refused(r"o_proj.weight_scale: Got a scale of shape \(192, 1\)", model, items)
    items[0] = "attn.o_proj.weight", q.data.view(torch.float8_e5m2)
    said = r"is torch.float8_e5m2, and its layer is FP8_BLOCK\..*of torch.float8_e4m3fn\..*recode"
    refused(said, model, items)


def test_a_dense_weight_has_no_scale() -> None:
    model = block(False)
    fp8kit.convert(model)
    dense = weights()["attn.o_proj.weight"]
    items = [("attn.o_proj.weight_scale", torch.ones(K, 1)), ("attn.o_proj.weight", dense)]
    refused(r"o_proj.weight is torch.bfloat16 and comes with weight_scale", model, items)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_state_dict_that_was_cast_is_refused_by_its_cause(backwards: bool) -> None:
    model = nn.Sequential(fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64)))
    items = [(name, tensor.half()) for name, tensor in model.state_dict().items()]
    message = r"0.weight is torch.float16 and comes with weight_scale.* before the cast"
    refused(message, model, items[::-1] if backwards else items)


@pytest.mark.parametrize("backwards", [False, True])
def test_an_input_scale_beside_a_dense_weight_is_not_dropped(backwards: bool) -> None:
    fixed = torch.ones(1, 1)
    model = nn.Sequential(fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64), "FP8", fixed))
    items = [("0.weight", torch.randn(64, 64)), ("0.input_scale", 2 * fixed)]
    refused("comes with input_scale", model, items[::-1] if backwards else items)


def test_siblings_are_of_one_kind() -> None:
    q = fp8kit.quantize(weights()["attn.q_proj.weight"], role="weight")
    tensors = without(attn__q_proj__weight=q.data, attn__q_proj__weight_scale=q.scale).items()
    message = r"Of attn.q_proj, attn.k_proj, attn.v_proj, some are FP8 and some are not"
    refused(message, on_meta(True), tensors, scheme="FP8_DYNAMIC")


def test_blocks_are_not_cut() -> None:
    source = on_meta(False)
    load_weights(source, weights().items(), scheme="FP8_BLOCK")
    state = {k: v for k, v in source.state_dict().items() if k.startswith("mlp.")}
    model = block(True)
    fp8kit.convert(model, "FP8_BLOCK")
    refused("mlp.gate_up_proj is cut at row 320, inside a 128x128 block", model, state.items())


def test_transposed_stacks_are_refused() -> None:
    model = block(True)
    model.moe.experts.is_transposed = True
    items = [("moe.experts.0.up_proj.weight", weights()["moe.experts.0.up_proj.weight"])]
    refused(r"stacks its experts as \[E, K, N\]", model, items)


def test_unknown_names() -> None:
    model = block(False)
    with pytest.warns(UserWarning, match="tensors that the model does not use: extra.weight"):
        load_weights(model, [("extra.weight", torch.ones(2))])
    refused(
        "extra.weight is not in the model", model, [("extra.weight", torch.ones(2))], strict=True
    )


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("dir", "weights of type str.*fp8kit.load"),
        (5, "weights of type int.*pairs of names"),
        ({"0.weight": 1.0}, r"Got \('0.weight', 1.0\) among"),
        ([torch.ones(2)], "among the weights.*a pair of a name"),
    ],
)
def test_what_is_no_weights_is_refused(weights: Any, said: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    with pytest.raises(TypeError, match=said):
        fp8kit.load_weights(model, weights)
    with pytest.raises(TypeError, match="Got a dict as the model"):
        fp8kit.load_weights({}, model)  # type: ignore[arg-type]


def test_a_model_without_tensors_uses_none() -> None:
    with pytest.warns(UserWarning, match="tensors that the model does not use: 0.weight"):
        assert load_weights(nn.Module(), {"0.weight": torch.ones(2)}) == set()


def test_patterns_need_a_scheme() -> None:
    with pytest.raises(ValueError, match="include or exclude without a scheme"):
        load_weights(block(False), [], exclude=["o_proj"])


def test_static_schemes_need_calibration() -> None:
    refused(r"calibration, which needs the loaded model", on_meta(False), [], scheme="FP8")


def test_quantized_tensors_of_other_libraries_are_refused_by_name() -> None:
    """Their dtype is that of the numbers that they stand for."""
    ao = pytest.importorskip("torchao.quantization")
    weight = ao.Float8Tensor.from_hp(torch.randn(128, 128).bfloat16(), granularity=ao.PerRow())
    said = r"0\.weight is a Float8Tensor of torchao.*Pass its \.dequantize\(\)"
    model = nn.Sequential(nn.Linear(128, 128, bias=False).bfloat16())
    with pytest.raises(TypeError, match=said):
        load_weights(model, {"0.weight": weight})
    fp8kit.convert(model, exclude=[])
    before = model[0].codes.clone()
    with pytest.raises(TypeError, match=said):
        load_weights(model, {"0.weight": weight})
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict({"0.weight": weight}, assign=assign)
    assert_bits_equal(model[0].codes, before)
    load_weights(model, {"0.weight": weight.dequantize()})
