"""Layers that must stay dense because of the code around them."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fp8kit
from fp8kit.conversion.eligibility import Eligibility
from fp8kit.integrations.quantizer_of_layers import restore_dense
from numerics import assert_bits_equal, relative_error

IDS = torch.arange(32).view(2, 16)
WO = "encoder.block.0.layer.1.DenseReluDense.wo"
DTYPE = "asks for the dtype of its weight"
READS = "reads its weight instead of calling it"


def t5(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 1, "num_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=256, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}EncoderModel")(config).bfloat16().eval()


def hidden(model: Any) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(IDS).last_hidden_state
    return y


def reasons(report: fp8kit.Report) -> dict[str, str]:
    return {r.name: r.reason for r in report.skipped}


def test_weights_of_another_kind_of_tensor_are_named() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    for layer in model[:2]:
        held = layer.weight.detach()
        layer.weight = nn.Parameter(TwoTensor(held, held))  # neither has an address of its own
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["2"]
    assert reasons(report) == dict.fromkeys("01", "its weight is a TwoTensor of torch")


class Scaled(nn.TransformerEncoderLayer):
    """Has its own ``forward``, without the fast path of its parent."""

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        src = src + 0.5 * self._sa_block(self.norm1(src), None, None)
        return src + self._ff_block(self.norm2(src))


class Doubled(nn.TransformerEncoderLayer):
    """Calls the ``forward`` of its parent."""

    @torch.no_grad()
    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(2 * src)


def test_the_fast_path_of_an_encoder_layer_counts_only_where_it_may_run() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(kind(128, 2, 256, batch_first=True) for kind in (Scaled, Doubled)).eval()
    x = torch.randn(2, 3, 128)
    with torch.no_grad():
        before = [layer(x) for layer in model]
        report = fp8kit.convert(model)
        after = [layer(x) for layer in model]
    assert [r.name for r in report.converted] == ["0.linear1", "0.linear2"]
    assert "fast path" in reasons(report)["1.linear1"]
    assert 1e-3 < relative_error(after[0], before[0]) < 0.05
    assert_bits_equal(after[1], before[1])


@pytest.mark.parametrize("kind", ["T5", "UMT5", "MT5", "LongT5"])
def test_models_that_cast_to_the_dtype_of_a_weight_still_run(kind: str) -> None:
    model = t5(kind)
    dense = hidden(model)
    report = fp8kit.convert(model)
    assert list(reasons(report)) == [WO]
    assert len(report.converted) >= 5
    assert 1e-3 < relative_error(hidden(model), dense) < 0.1


def test_what_a_model_keeps_in_float32_is_skipped_by_name() -> None:
    report = fp8kit.plan(t5("UMT5")).report
    assert reasons(report) == {WO: "the model keeps it in float32"}
    inside = fp8kit.plan(nn.ModuleDict({"text": t5("UMT5")})).report
    assert reasons(inside) == {f"text.{WO}": "the model keeps it in float32"}


def test_a_part_of_such_a_model_is_known_by_its_code() -> None:
    block = t5("UMT5").encoder.block[0]
    x = torch.randn(2, 16, 128).bfloat16()
    report = fp8kit.convert(block)
    assert reasons(report) == {
        "layer.1.DenseReluDense.wo": f"UMT5DenseGatedActDense.forward {DTYPE}"
    }
    with torch.no_grad():
        assert block.layer[1](x).isfinite().all()


def test_planning_loading_and_streaming_agree(tmp_path: Path) -> None:
    model = t5("LongT5")
    model.save_pretrained(tmp_path / "dense")
    loaded = fp8kit.load(tmp_path / "dense", scheme="FP8_DYNAMIC")
    fp8kit.quantize_checkpoint(tmp_path / "dense", tmp_path / "fp8", "FP8_DYNAMIC")
    streamed = fp8kit.load(tmp_path / "fp8")
    fp8kit.convert(model)
    for other in (loaded, streamed):
        assert type(other.get_submodule(WO)) is nn.Linear
        torch.testing.assert_close(hidden(other), hidden(model), rtol=0, atol=0)


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(128, 128)
        self.out = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x.to(self.out.weight.dtype))
        return y + x @ self.fc.weight.to(x.dtype).T


class Harmless(Casting):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.fc.weight.shape[0]
        y: Tensor = self.out(self.fc(x.to(self.fc.weight.device)))
        return y * rows


def test_code_of_ones_own_is_read_too() -> None:
    assert Eligibility(Casting()).of(["fc"]) == f"Casting.forward {READS}"
    assert Eligibility(nn.Sequential(Casting())).of(["0.out"]) == f"Casting.forward {DTYPE}"
    model, x = Casting(), torch.randn(3, 128)
    expected = model(x)
    with pytest.warns(UserWarning, match="No layer becomes FP8: Casting.forward "):
        fp8kit.convert(model)
    assert torch.equal(model(x), expected)


def test_other_uses_of_a_weight_are_no_obstacle() -> None:
    obstacles = Eligibility(Harmless())
    assert [obstacles.of([name]) for name in ("fc", "out")] == ["", ""]


def test_strict_names_them() -> None:
    with pytest.raises(fp8kit.ConversionError, match=rf"out: Casting\.forward {DTYPE}"):
        fp8kit.plan(Casting(), strict=True)


@dataclass
class Step:
    layer: nn.Module
    scale: float = 1.0


def cyclic(layer: nn.Module) -> list[Any]:
    held: list[Any] = [layer]
    held.append(held)
    return held


@dataclass(slots=True, weakref_slot=True)
class Slotted:
    layer: nn.Module


class PrivateSlot:
    __slots__ = ("__held",)

    def __init__(self, held: object) -> None:
        self.__held = held


class OneSlot:
    __slots__ = "held"

    def __init__(self, held: object) -> None:
        self.held = held


class Gone:
    """What a foreign object that is not ready does when it is looked at."""

    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def enclosed(layer: nn.Module) -> Any:
    class Calls:
        __slots__ = ()

        def __call__(self, x: Tensor) -> Any:
            return layer(x)

    return Calls()


REGISTRY: dict[str, nn.Module] = {}
# by container: how it holds a layer, and how code reads the layer from it
HOLDERS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "list": (cyclic, lambda held: held[0]),
    "dict": (lambda m: {"a": {"b": {"c": {"d": [m]}}}}, lambda held: held["a"]["b"]["c"]["d"][0]),
    "set": (lambda m: {m}, lambda held: next(iter(held))),
    "deque": (lambda m: deque([m]), lambda held: held[0]),
    "partial": (lambda m: functools.partial(m.__call__), lambda held: held),
    "function": (lambda m: lambda x: m(x), lambda held: held),
    "function of a class": (enclosed, lambda held: held),
    "object": (Step, lambda held: held.layer),
    "slots": (Slotted, lambda held: held.layer),
    "weak reference": (weakref.ref, lambda held: held()),
    "weak proxy": (weakref.proxy, lambda held: held),
    "registry": (lambda m: REGISTRY.update(layer=m), lambda held: REGISTRY["layer"]),
}


class Listing(nn.Module):
    """Calls a layer by a plain list or the like, as MaskFormer does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hold, self.reach = HOLDERS[kind]
        self.proj, self.other = nn.Linear(128, 128), nn.Linear(128, 128)
        self.steps = hold(self.proj)

    def forward(self, x: Tensor) -> Any:
        return self.other(self.reach(self.steps)(x))


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_else_holds_a_layer_runs_it_in_fp8(kind: str, tmp_path: Path) -> None:
    model, x = Listing(kind), torch.randn(3, 128)
    held, expected = model.proj, model(x)
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["proj", "other"]
    assert isinstance(held, fp8kit.Fp8Linear)  # a variable of the caller's too
    assert held is model.proj
    y = model(x)
    assert 0.01 < relative_error(y, expected) < 0.1
    assert torch.equal(y, model.other(model.proj(x)))
    fp8kit.save(model, tmp_path / "fp8")
    fresh = Listing(kind)
    fp8kit.load(tmp_path / "fp8", fresh)
    assert torch.equal(fresh(x), y)
    restore_dense(fresh)
    assert type(fresh.proj) is nn.Linear
    assert torch.equal(fresh(x), fresh.other(fresh.proj(x)))


def test_the_hooks_of_a_layer_stay_and_can_be_removed() -> None:
    model, seen = Listing("list"), list[Any]()
    handle = model.proj.register_forward_hook(lambda *args: seen.append(args))
    fp8kit.convert(model)
    model(torch.randn(3, 128))
    handle.remove()
    model(torch.randn(3, 128))
    assert [type(args[0]) for args in seen] == [fp8kit.Fp8Linear]


HELD_PARTS: dict[str, Callable[[nn.Module], Any]] = {
    "attribute": lambda layer: layer.forward,
    "partial": lambda layer: functools.partial(torch.relu, layer.forward),
    "argument by name": lambda layer: functools.partial(torch.relu, layer=layer.forward),
    "object": lambda layer: Step(layer.forward),  # type: ignore[arg-type]
    "function": lambda layer: (lambda f: lambda x: f(x))(layer.forward),
    "weak proxy": lambda layer: [weakref.proxy(layer).forward],
    "method of a partial": lambda layer: types.MethodType(functools.partial(torch.relu), layer),
    "weight": lambda layer: {"weights": [layer.weight]},
    "weight in objects": lambda layer: Step([Step([Step(layer.weight)])]),  # type: ignore[arg-type]
    "weight in slots": lambda layer: [Slotted(layer.weight)],  # type: ignore[arg-type]
    "weight in a private slot": lambda layer: PrivateSlot(layer.weight),
    "weight in one slot": lambda layer: OneSlot(layer.weight),
    "weight in items": lambda layer: dict(enumerate([0, 1, layer.weight])).items(),
    "view of the weight": lambda layer: layer.weight.t(),
    "part of the weight": lambda layer: [layer.weight.detach()[:64]],
    "end of the weight": lambda layer: [layer.weight.detach()[64:]],
    "columns of the weight": lambda layer: layer.weight.data[:, 1:],
}


@pytest.mark.parametrize("kind", HELD_PARTS)
def test_a_layer_of_which_a_part_is_held_stays_dense(kind: str) -> None:
    model = Listing("list")
    part = next((word for word in ("weight", "method") if word in kind), "forward")
    model.steps = HELD_PARTS[kind](model.proj)
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["other"]
    reasons = {r.name: r.reason for r in report.skipped}
    assert reasons["proj"].startswith(f"Listing holds its {part} in steps, which stays dense")


def test_how_a_layer_is_printed_is_no_part_of_it() -> None:
    """torchao changes how a layer is printed, to show the form of its weight."""
    model = Listing("list")
    describe = types.MethodType(functools.partial(lambda text, layer: text, "int8"), model.proj)
    model.proj.extra_repr = describe  # type: ignore[method-assign]
    assert len(fp8kit.convert(model).converted) == 2
    assert "scheme=FP8_DYNAMIC" in str(model.proj)


@pytest.mark.parametrize("proxy", [False, True])
def test_objects_that_raise_when_looked_at_may_be_held(proxy: bool) -> None:
    model, part = Listing("list"), nn.ReLU()
    held = weakref.proxy(part) if proxy else Gone()
    model.steps = [{"a": [held]}, model.proj.weight]
    del part
    assert [r.name for r in fp8kit.convert(model).converted] == ["other"]


def test_a_tensor_without_a_shape_may_be_held() -> None:
    model = Listing("list")
    model.steps = [nn.parameter.UninitializedBuffer()]
    assert len(fp8kit.convert(model).converted) == 2


def test_a_tensor_that_lies_behind_a_weight_may_be_held() -> None:
    model, flat = Listing("list"), torch.randn(128 * 128 + 8)
    model.proj.weight.data = flat[: 128 * 128].view(128, 128)
    model.steps = [flat[-8:]]
    assert len(fp8kit.convert(model).converted) == 2


class Mirrored(nn.Module):
    """Multiplies by a weight in its layer, and again outside the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(128, 128)
        self.register_buffer("mirror", self.proj.weight.detach().t(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) @ self.get_buffer("mirror")


def test_a_layer_whose_weight_a_buffer_shows_is_loaded_dense(tmp_path: Path) -> None:
    model, x = Mirrored(), torch.randn(3, 128)
    layers = nn.ModuleDict({"proj": copy.deepcopy(model.proj)})
    fp8kit.convert(layers)
    fp8kit.save(layers, tmp_path / "fp8")
    with pytest.warns(UserWarning, match="proj: Mirrored holds its weight in _buffers"):
        fp8kit.load(tmp_path / "fp8", model)
    weight = layers.get_submodule("proj").to_linear().weight
    assert_bits_equal(model.proj.weight, weight)
    assert torch.equal(model(x), model.proj(x) @ weight.t())
    assert not fp8kit.plan(model).report.converted


def test_a_method_that_is_held_out_of_sight_raises() -> None:
    model = Listing("list")
    forward = model.proj.forward
    fp8kit.convert(model)
    with pytest.raises(fp8kit.UnsupportedError, match="to the weight of proj"):
        forward(torch.randn(3, 128))


class Slots(nn.Linear):
    __slots__ = ("more",)


def test_a_class_with_slots_stays_dense() -> None:
    """Python cannot change the class of an instance with slots."""
    model = nn.Sequential(Slots(128, 128), nn.Linear(128, 128))
    report = fp8kit.convert(model, include=["0", "1"])
    assert [r.name for r in report.converted] == ["1"]
    assert "Slots is a subclass of nn.Linear with __slots__" in str(report)


def test_a_compiled_layer_stays_dense() -> None:
    model = Listing("list")
    model.proj = torch.compile(model.proj, backend="eager")  # type: ignore[assignment]
    x = torch.randn(2, 128)
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["other"]
    assert torch.equal(model.proj(x), model.get_submodule("proj._orig_mod")(x))
