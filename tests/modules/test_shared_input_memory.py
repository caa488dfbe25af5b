"""Joined siblings lie in one allocation, but no library takes them for tied weights."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8kit
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared_input import SharedInput
from numerics import assert_bits_equal
from recorded_calls import install

NAMES = ("weight", "weight_scale", "bias")


def siblings(device: torch.device | str = "cpu", scheme: str = "FP8_DYNAMIC") -> nn.ModuleList:
    dense = [nn.Linear(256, n, device=device, dtype=torch.bfloat16) for n in (256, 128, 384)]
    layers = [Fp8Linear.from_linear(layer, scheme).requires_grad_(False) for layer in dense]
    SharedInput(layers, unchanging=True)
    return nn.ModuleList(layers)


def called(model: nn.ModuleList, x: Tensor | None = None) -> list[Tensor]:
    weight = model[0].weight
    if x is None:
        x = torch.ones(3, 256, dtype=torch.bfloat16, device=weight.device)
    return [layer(x) for layer in model]


def alone(model: nn.ModuleList, x: Tensor) -> list[Tensor]:
    return [layer.compute(x) for layer in model]


def are_joined(model: nn.ModuleList, name: str = "weight") -> bool:
    parts = [getattr(layer, name) for layer in model]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    return ends[:-1] == [part.data_ptr() for part in parts[1:]]


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_each_member_has_a_storage_of_its_own(scheme: str, device: torch.device) -> None:
    model = siblings(device, scheme)
    called(model)
    for name in NAMES:
        assert are_joined(model, name)
        parts = [getattr(layer, name) for layer in model]
        storages = [part.untyped_storage() for part in parts]
        assert len({storage.data_ptr() for storage in storages}) == len(parts)
        for part, storage in zip(parts, storages, strict=True):
            assert (part.storage_offset(), storage.nbytes()) == (0, part.nbytes)
            assert not part._is_view()


def saved(thing: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def test_what_is_saved_does_not_change(device: torch.device) -> None:
    model = siblings(device)
    ways: tuple[Callable[[nn.Module], object], ...] = (
        lambda m: m,
        lambda m: m[1],
        lambda m: m[1].state_dict(),
        lambda m: m[2].weight.detach(),
    )
    before = [saved(way(model)) for way in ways]
    called(model)
    assert are_joined(model)
    assert [saved(way(model)) for way in ways] == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_memory(
    copied: Callable[[nn.ModuleList], nn.ModuleList], device: torch.device
) -> None:
    model = siblings(device)
    called(model)
    twin = copied(model)
    held, owned = ({p.data_ptr() for p in m.parameters()} for m in (model, twin))
    assert not held & owned
    with torch.no_grad():
        twin[1].weight.copy_(torch.zeros_like(twin[1].weight))
    x = torch.randn(3, 256, dtype=torch.bfloat16, device=device)
    for layers in (model, twin):
        for y, expected in zip(called(layers, x), alone(layers, x), strict=True):
            assert_bits_equal(y, expected)


def moved_in_place(model: nn.ModuleList) -> None:
    model[1].weight.data = model[1].weight.data.clone()


def swapped(model: nn.ModuleList) -> None:
    other = nn.Parameter(model[1].weight.data.clone(), requires_grad=False)
    torch.utils.swap_tensors(model[1]._parameters["weight"], other)


def loaded_in_place(model: nn.ModuleList) -> None:
    model.load_state_dict(siblings(model[0].weight.device).state_dict())


def assigned(model: nn.ModuleList) -> None:
    model.load_state_dict(siblings(model[0].weight.device).state_dict(), assign=True)


def there_and_back(model: nn.ModuleList) -> None:
    device = model[0].weight.device
    model.to(torch.device("meta"))
    model.to_empty(device=device)
    loaded_in_place(model)


CHANGES = (moved_in_place, swapped, loaded_in_place, assigned, there_and_back)


@pytest.mark.parametrize("change", CHANGES)
def test_members_that_change_are_joined_as_they_are_then(
    change: Callable[[nn.ModuleList], None], device: torch.device
) -> None:
    model = siblings(device)
    called(model)
    change(model)
    x = torch.randn(3, 256, dtype=torch.bfloat16, device=device)
    expected = alone(model, x)
    for _ in range(3):
        for y, wanted in zip(called(model, x), expected, strict=True):
            assert_bits_equal(y, wanted)
    assert are_joined(model)


def test_members_that_lie_behind_one_another_already_stay_there() -> None:
    model = siblings()
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    expected = alone(model, x)
    whole = torch.cat([layer.weight.view(torch.uint8) for layer in model])
    for layer, part in zip(model, whole.split([256, 128, 384]), strict=True):
        layer.weight.data = part.view(layer.weight.dtype)
    for y, before in zip(called(model, x), expected, strict=True):
        assert_bits_equal(y, before)
    assert model[0].weight.data_ptr() == whole.data_ptr()


def test_shared_memory_stays_where_it_is() -> None:
    model = siblings().share_memory()
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    for y, expected in zip(called(model, x), alone(model, x), strict=True):
        assert_bits_equal(y, expected)
    assert all(p.is_shared() for p in model.parameters())
    joined = siblings()
    called(joined)
    joined.share_memory()
    assert all(p.is_shared() for p in joined.parameters())
    for y, expected in zip(called(joined, x), alone(joined, x), strict=True):
        assert_bits_equal(y, expected)


def test_the_group_keeps_no_memory_of_members_that_left() -> None:
    model = siblings()
    called(model)
    homes = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    assert not any(home.expired() for home in homes)
    model.to("meta")
    assert all(home.expired() for home in homes)


@pytest.mark.gpu
def test_joining_takes_no_memory() -> None:
    other, model = siblings("cuda"), siblings("cuda")
    for _ in range(4):
        called(other)  # what replays share is there now
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        called(model)
    held = sum(p.nbytes for p in model.parameters())
    assert torch.cuda.memory_allocated() - before < held / 2
    model.to("cpu")
    assert torch.cuda.memory_allocated() < before - held / 2


@pytest.mark.gpu
def test_what_is_saved_does_not_change_by_captures() -> None:
    model = siblings("cuda")
    x = torch.randn(3, 256, dtype=torch.bfloat16, device="cuda")
    before = saved(model.state_dict())
    for _ in range(3):
        called(model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = called(model, x)
    assert saved(model.state_dict()) == before
    x.copy_(torch.randn_like(x))
    graph.replay()
    for y, expected in zip(captured, alone(model, x), strict=True):
        assert_bits_equal(y, expected)
    model.cpu()
    model.cuda()
    assert saved(model.state_dict()) == before
    assert fp8kit.explain(model[0])


def test_a_product_that_fails_leaves_nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, model, failing = install(monkeypatch), siblings(), [True]
    own = backends.run

    def run(*given: Any) -> Tensor:
        if failing:
            raise torch.OutOfMemoryError
        return own(*given)

    backends.run = run  # type: ignore[method-assign]
    x = torch.ones(600, 256, dtype=torch.bfloat16)
    kept = weakref.ref(x)
    with pytest.raises(torch.OutOfMemoryError):
        model[0](x)
    del x
    gc.collect()
    assert kept() is None
    failing.clear()
    again = torch.ones(600, 256, dtype=torch.bfloat16)
    for y, expected in zip(called(model, again), alone(model, again), strict=True):
        assert_bits_equal(y, expected)
