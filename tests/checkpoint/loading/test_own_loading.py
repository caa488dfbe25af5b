"""Loading code of a model's own is tried, and refused where it changes values."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.loading.own_loading import refuse_own_loading
from fp8kit.errors import CheckpointError
from numerics import assert_bits_equal, assert_same_tensors

State = dict[str, Tensor]


class Scaled(nn.Module):
    """Two layers, one of which is scaled; ``halves`` does not arrive, but follows ``scale``."""

    halves: Tensor

    def __init__(self, size: int = 128, device: str = "cpu") -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(size, size, device=device) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("version", torch.tensor([3]))
        self.register_buffer("halves", self.scale.detach() / 2, persistent=False)
        self.loads: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale + self.b(x)


class Doubled(Scaled):
    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}scale"] = state[f"{prefix}scale"] * 2
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


class ByHand(Scaled):
    factor = 1

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.scale.copy_(state[f"{prefix}scale"] * self.factor)


class DoubledByHand(ByHand):
    factor = 2


class Derived(Scaled):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)  # type: ignore[no-untyped-call]
        self.halves = self.scale.detach() / 2


class Kept(Scaled):
    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}scale"] = self.scale.detach()
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


class Renamed(Scaled):
    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        if f"{prefix}gain" in state:
            state[f"{prefix}scale"] = state.pop(f"{prefix}gain")
        super()._load_from_state_dict(state, prefix, *rest)  # type: ignore[no-untyped-call]


def hooked(hook: Callable[..., None], size: int = 128, device: str = "cpu") -> Scaled:
    model = Scaled(size, device)
    model.register_load_state_dict_pre_hook(hook)
    return model


def transposed(_: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    state[f"{prefix}a.weight"] = state[f"{prefix}a.weight"].t()


def in_place(_: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    state[f"{prefix}a.weight"].mul_(2)


def exchanged(_: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    a, b = f"{prefix}a.weight", f"{prefix}b.weight"
    state[a], state[b] = state[b], state[a]


def converted(kind: Callable[[Tensor], Tensor], _: nn.Module, state: State, *rest: Any) -> None:
    state |= {name: kind(tensor) for name, tensor in state.items()}


def of_old_versions(module: Scaled, state: State, prefix: str, *rest: Any) -> None:
    if state[f"{prefix}version"].item() < 3 or f"{prefix}c.weight" in state:
        transposed(module, state, prefix)


def reinterpreted(_: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    state[f"{prefix}a.weight"] = state[f"{prefix}a.weight"].view(torch.int32)


def flattened(_: nn.Module, state: State, *rest: Any) -> None:
    state |= {name: tensor.view(-1).view(tensor.shape) for name, tensor in state.items()}


def after(hook: Callable[[Scaled], None]) -> Scaled:
    model = Scaled()
    model.register_load_state_dict_post_hook(lambda module, _: hook(module))
    return model


def scale_a(model: Scaled) -> None:
    model.a.weight.data.mul_(2)


def derive(model: Scaled) -> None:
    model.halves.copy_(model.scale / 2)


def restore(model: Scaled) -> None:
    model.halves = torch.full((128,), 0.5)


def times(factor: int, _: nn.Module, state: State, prefix: str, *rest: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"] * factor


def at_layer() -> Scaled:
    model = Scaled()
    model.a.register_load_state_dict_pre_hook(functools.partial(times, 2))
    return model


CHANGING: dict[str, tuple[Callable[[], Scaled], str]] = {
    "transposed": (lambda: hooked(transposed), "the hook transposed of the model (Scaled)"),
    "in place": (lambda: hooked(in_place), "the hook in_place of the model (Scaled)"),
    "exchanged": (lambda: hooked(exchanged), "changes a.weight, b.weight"),
    "of a layer": (at_layer, "of a (Linear), which changes a.weight"),
    "large": (lambda: hooked(transposed, 4096, "meta"), "changes a.weight"),
    "large, in place": (lambda: hooked(in_place, 4096, "meta"), "changes a.weight"),
    "override": (Doubled, "_load_from_state_dict of the model (Doubled), which changes scale"),
    "by hand": (DoubledByHand, "changes scale"),
    "derived": (Derived, "changes halves"),
    "its own": (Kept, "changes scale"),
    "reinterpreted": (lambda: hooked(reinterpreted), "changes a.weight"),
    "after": (lambda: after(scale_a), "<lambda> of the model (Scaled), which changes a.weight"),
    "derived after": (lambda: after(derive), "changes halves"),
}
HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "copies": lambda: hooked(functools.partial(converted, Tensor.clone)),
    "casts": lambda: hooked(functools.partial(converted, Tensor.bfloat16)),
    "of old versions": lambda: hooked(of_old_versions),
    "by hand": ByHand,
    "renamed": Renamed,
    "views": lambda: hooked(flattened),
    "the same again": lambda: after(restore),
}


def tensors_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    held: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tensor, tensor.detach().clone()) for name, tensor in held.items()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[Tensor, Tensor]]) -> None:
    now = tensors_of(model)
    assert now.keys() == before.keys()
    for name, (tensor, values) in before.items():
        assert now[name][0] is tensor
        assert tensor.is_meta or torch.equal(tensor, values)


@pytest.mark.parametrize("case", CHANGING)
def test_code_that_changes_values_is_refused(case: str) -> None:
    make, match = CHANGING[case]
    model = make()
    before, state = tensors_of(model), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=re.escape(match)):
        refuse_own_loading(model)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", HARMLESS)
def test_code_that_changes_no_values_passes(case: str) -> None:
    model = HARMLESS[case]()
    before = tensors_of(model)
    refuse_own_loading(model)
    assert_untouched(model, before)


@pytest.mark.parametrize("fill", ["load", "load_weights"])
@pytest.mark.parametrize("make", [lambda: hooked(transposed), Doubled])
def test_no_way_to_fill_a_model_skips_its_code(
    fill: str, make: Callable[[], Scaled], tmp_path: Path
) -> None:
    dense = Scaled()
    save_file(dense.state_dict(), tmp_path / "model.safetensors")
    model, right = make(), make()
    before = tensors_of(model)
    ways = {
        "load": lambda: fp8kit.load(tmp_path, model, scheme="FP8_DYNAMIC"),
        "load_weights": lambda: fp8kit.load_weights(model, dense.state_dict(), scheme="FP8_TENSOR"),
    }
    with pytest.raises(CheckpointError, match=r"which changes .*Use model\.load_state_dict"):
        ways[fill]()
    assert_untouched(model, before)
    # what the error recommends: two ways with one result
    right.load_state_dict(dense.state_dict())
    fp8kit.convert(right)
    fp8kit.convert(model)
    model.load_state_dict(dense.state_dict())
    assert_same_tensors(model, right)
    x = torch.randn(3, 128)
    assert_bits_equal(model(x), right(x))


def test_code_that_renames_loads_new_names(tmp_path: Path) -> None:
    dense, model = Renamed(), Renamed()
    save_file(dense.state_dict(), tmp_path / "model.safetensors")
    fp8kit.load(tmp_path, model, scheme="FP8_DYNAMIC")
    fp8kit.convert(dense)
    assert_same_tensors(model, dense)


def test_code_that_raises_is_told(tmp_path: Path) -> None:
    def old(_: nn.Module, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}scale"] = state.pop(f"{prefix}gain")

    model = hooked(old)
    save_file(Scaled().state_dict(), tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"does not run the hook .*old of the model.*'gain'"):
        fp8kit.load(tmp_path, model, scheme="FP8_DYNAMIC")


def test_a_trial_leaves_no_mark() -> None:
    model = Scaled()

    def count(module: Scaled, *_: Any) -> None:
        module.loads.append("before")
        module.last = "before"  # type: ignore[assignment]
        module.a.register_buffer("extra", torch.ones(1), persistent=False)

    model.register_load_state_dict_pre_hook(count)
    refuse_own_loading(model)
    assert model.loads == []
    assert not hasattr(model, "last")
    assert not hasattr(model.a, "extra")
    model.load_state_dict(Scaled().state_dict())
    assert model.loads == ["before"]


def test_code_in_a_model_with_fp8_layers_is_tried() -> None:
    model = hooked(functools.partial(converted, Tensor.clone))
    model.a.register_load_state_dict_pre_hook(lambda *_: None)
    fp8kit.convert(model)
    x = torch.randn(3, 128)
    before, held = model(x), tensors_of(model)
    refuse_own_loading(model)
    assert_untouched(model, held)
    assert_bits_equal(model(x), before)
    model.a.register_load_state_dict_pre_hook(functools.partial(times, 2))
    with pytest.raises(CheckpointError, match=r"of a \(Fp8Linear\), which changes a\.weight"):
        refuse_own_loading(model)


def test_code_of_torch_is_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    parts = [
        nn.BatchNorm1d(8),
        nn.SyncBatchNorm(8),
        nn.InstanceNorm1d(8, affine=True),
        nn.MultiheadAttention(8, 2),
        old,
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.utils.spectral_norm(nn.Linear(8, 8)),
        torch.ao.quantization.MinMaxObserver(),
        torch.ao.quantization.FakeQuantize(),
    ]
    model = nn.ModuleList(parts)
    held = tensors_of(model)
    refuse_own_loading(model)
    assert_untouched(model, held)


def test_a_dict_of_a_library_gets_its_tensors_back() -> None:
    class Watched(dict[str, Any]):
        """Stands for the class of a library that watches Parameters."""

    model = hooked(functools.partial(converted, Tensor.clone))
    model.a._parameters = Watched(model.a._parameters)
    held = tensors_of(model)
    refuse_own_loading(model)
    assert_untouched(model, held)
