"""Layers that something else holds: whole, or in parts that would stay dense."""

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

import fp8kit
from fp8kit.integrations.quantizer_of_layers import restore_dense
from numerics import assert_bits_equal, relative_error


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


def test_a_compiled_layer_asks_to_be_compiled_later() -> None:
    model = Listing("list")
    model.proj.compile(backend="eager")
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["other"]
    reasons = {r.name: r.reason for r in report.skipped}
    assert reasons["proj"].endswith("convert the model before its layers are compiled")


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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("forward", "its forward was replaced on the instance"),
        ("scheme", "it has scheme of its own, and an FP8 layer too"),
    ],
)
def test_what_was_set_on_a_layer_is_not_lost_when_it_is_loaded(
    name: str, reason: str, tmp_path: Path
) -> None:
    layers = nn.ModuleDict({"fc": nn.Linear(128, 128)})
    fp8kit.convert(layers)
    fp8kit.save(layers, tmp_path / "fp8")
    model, x = nn.ModuleDict({"fc": nn.Linear(128, 128)}), torch.randn(3, 128)
    plain = model["fc"].forward
    held = lambda x: 2 * plain(x)  # noqa: E731
    setattr(model["fc"], name, held)
    with pytest.warns(UserWarning, match=f"fc: {reason}"):
        fp8kit.load(tmp_path / "fp8", model)
    assert vars(model["fc"])[name] is held
    assert torch.equal(held(x), 2 * layers["fc"].to_linear()(x))


def test_a_layer_that_was_compiled_alone_becomes_fp8_when_it_is_loaded(tmp_path: Path) -> None:
    layers = nn.ModuleDict({"fc": nn.Linear(128, 128)})
    fp8kit.convert(layers)
    fp8kit.save(layers, tmp_path / "fp8")
    model, x = nn.ModuleDict({"fc": nn.Linear(128, 128)}), torch.randn(3, 128)
    model["fc"].compile()
    fp8kit.load(tmp_path / "fp8", model)
    assert isinstance(model["fc"], fp8kit.Fp8Linear)
    assert torch.equal(model["fc"](x), layers["fc"](x))


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


class Attending(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.fc = attention, nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.attention(x, x, x)[0])


def test_what_attention_of_torch_multiplies_itself_is_loaded_dense(tmp_path: Path) -> None:
    attention = nn.Module()  # as a checkpoint has it that was quantized by names
    attention.out_proj = nn.Linear(128, 128)
    layers = Attending(attention)
    assert len(fp8kit.convert(layers).converted) == 2
    fp8kit.save(layers, tmp_path / "fp8")
    model = Attending(nn.MultiheadAttention(128, 2, batch_first=True))
    with pytest.warns(UserWarning, match=r"attention.out_proj: nn.MultiheadAttention multiplies"):
        fp8kit.load(tmp_path / "fp8", model, missing=["attention"])
    assert type(model.fc) is fp8kit.Fp8Linear
    weight = attention.out_proj.to_linear().weight
    assert_bits_equal(model.get_submodule("attention.out_proj").weight, weight)
    assert model(torch.randn(2, 3, 128)).isfinite().all()


def test_a_method_that_is_held_out_of_sight_raises() -> None:
    model = Listing("list")
    forward = model.proj.forward
    fp8kit.convert(model)
    with pytest.raises(fp8kit.UnsupportedError, match="to the weight of proj"):
        forward(torch.randn(3, 128))


def test_a_compiled_layer_stays_dense() -> None:
    model = Listing("list")
    model.proj = torch.compile(model.proj, backend="eager")  # type: ignore[assignment]
    x = torch.randn(2, 128)
    report = fp8kit.convert(model)
    assert [r.name for r in report.converted] == ["other"]
    assert torch.equal(model.proj(x), model.get_submodule("proj._orig_mod")(x))
