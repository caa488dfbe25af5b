"""Joined weights are prefetched like others, except after one of their parts has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.modules import shared_input
from fp8kit.modules.shared_input import SharedInput
from fp8kit.runtime.weight_hazards import safe_to_prefetch
from groups import Group, hand_over_codes
from numerics import assert_bits_equal

launches = pytest.importorskip("launches", reason="cuda-bindings is not installed")


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return launches.fake_layers(monkeypatch)


def siblings(scheme: str = "FP8_DYNAMIC", bias: bool = True) -> list[fp8kit.Fp8Linear]:
    return [
        fp8kit.Fp8Linear.from_linear(nn.Linear(256, n, bias, dtype=torch.bfloat16), scheme)
        for n in (256, 128, 384)
    ]


def group(scheme: str = "FP8_DYNAMIC") -> SharedInput:
    layers = siblings(scheme)
    for layer in layers:
        layer.requires_grad_(False)  # as conversion leaves them
    return Group(layers)


def step(joined: SharedInput, early: list[bool], rows: int = 4) -> list[bool]:
    """Call every member with one new input, and return which launches prefetched the weight."""
    early.clear()
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    for member in joined.members:
        member(x)
    return list(early)


def step_with_codes(joined: SharedInput, early: list[bool], rows: int = 4) -> list[bool]:
    """Call every member with a fused norm's codes; return which launches prefetched the weight."""
    early.clear()
    stand_in = torch.zeros((), dtype=torch.bfloat16).expand(rows, 256)
    hand_over_codes(joined, stand_in, torch.randn(rows, 256, dtype=torch.bfloat16))
    for member in joined.members:
        member(stand_in)
    return list(early)


STEPS = pytest.mark.parametrize("step", [step, step_with_codes])
Step = Callable[[SharedInput, list[bool]], list[bool]]


@STEPS
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_joined_weights_are_read_early_from_the_second_call_on(
    scheme: str, step: Step, early: list[bool]
) -> None:
    joined = group(scheme)
    assert [step(joined, early) for _ in range(4)] == [[False], [True], [True], [True]]


def test_what_one_path_has_waited_for_the_other_reads_early(early: list[bool]) -> None:
    joined = group()
    assert step(joined, early) == [False]
    assert step_with_codes(joined, early) == [True]
    assert step(joined, early, 600) == [True, True, True]  # many rows: each its own product
    apart = group()
    assert step(apart, early, 600) == [False, False, False]
    assert step(apart, early, 600) == [True, True, True]


def copied(layer: fp8kit.Fp8Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.zeros_like(layer.weight))


def reloaded(layer: fp8kit.Fp8Linear) -> None:
    linear = nn.Linear(256, layer.out_features, dtype=torch.bfloat16)
    layer.load_state_dict(linear.state_dict())


def written_in_inference_mode(layer: fp8kit.Fp8Linear) -> None:
    with torch.inference_mode():
        layer.weight.copy_(torch.zeros_like(layer.weight))


def written_by_a_foreign_kernel(layer: fp8kit.Fp8Linear) -> None:
    layer.weight.data.view(torch.uint8).zero_()
    torch.autograd.graph.increment_version(layer.weight)


def another_parameter(layer: fp8kit.Fp8Linear) -> None:
    address = layer.weight.data_ptr()
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    assert layer.weight.data_ptr() == address  # as the allocator may give it out again


def another_storage(layer: fp8kit.Fp8Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


CHANGES = (
    copied, reloaded, written_in_inference_mode, written_by_a_foreign_kernel, another_parameter,
    another_storage,
)  # fmt: skip


@STEPS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_change_of_any_member_is_waited_for(
    member: int, change: Callable[[fp8kit.Fp8Linear], None], step: Step, early: list[bool]
) -> None:
    joined = group()
    step(joined, early)
    assert step(joined, early) == [True]
    change(joined.members[member])
    assert [step(joined, early) for _ in range(3)] == [[False], [True], [True]]


def test_the_members_have_counters_of_their_own(early: list[bool]) -> None:
    joined = group()
    step(joined, early)
    first, second, _ = (m.weight for m in joined.members)
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    before = first._version
    copied(joined.members[1])
    assert first._version == before


def test_a_weight_that_is_joined_again_at_its_old_place_is_waited_for(
    early: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = group()
    step(joined, early)
    assert step(joined, early) == [True]
    weights = [m.weight for m in joined.members]
    addresses, versions = [w.data_ptr() for w in weights], [w._version for w in weights]
    home = joined._joined("weight").view(torch.uint8)
    joined.members[1].weight.data = joined.members[1].weight.data.clone()  # away, as a move would
    concatenate = torch.cat

    def in_the_old_place(parts: list[Tensor]) -> Tensor:
        whole = concatenate(parts)
        if whole.shape == home.shape:
            home.data.copy_(whole)
        return home if whole.shape == home.shape else whole

    monkeypatch.setattr(shared_input.torch, "cat", in_the_old_place)
    assert step(joined, early) == [False]
    assert addresses == [w.data_ptr() for w in weights]
    assert versions == [w._version for w in weights]
    assert step(joined, early) == [True]


def test_a_product_that_fails_has_not_waited(
    early: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = group()

    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA: no kernel image")

    with monkeypatch.context() as patch:
        launches.fake_layers(patch, broken)
        with pytest.raises(RuntimeError, match="no kernel image"):
            step(joined, early)
    assert not any(safe_to_prefetch(m.weight) for m in joined.members)
    assert step(joined, early) == [False]


def test_uncounted_weights_are_never_read_early(early: list[bool]) -> None:
    with torch.inference_mode():
        joined = group()
    assert [step(joined, early) for _ in range(3)] == [[False]] * 3
    assert all(m.weight.is_inference() for m in joined.members)


def test_counted_and_uncounted_weights_are_not_joined(early: list[bool]) -> None:
    with torch.inference_mode():
        joined = group()
    second = joined.members[1]
    second.weight = nn.Parameter(second.weight.clone(), requires_grad=False)
    for _ in range(2):
        early_now = step(joined, early)
        assert len(early_now) == 3
    assert early_now == [False, True, False]


def test_weights_that_are_joined_in_inference_mode_stay_counted(early: list[bool]) -> None:
    joined = group()
    with torch.inference_mode():
        assert [step(joined, early) for _ in range(3)] == [[False], [True], [True]]
    assert not any(m.weight.is_inference() for m in joined.members)
    copied(joined.members[2])
    with torch.inference_mode():
        assert [step(joined, early) for _ in range(2)] == [[False], [True]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_wait_for_their_own_weights(
    copied: Callable[[nn.Module], nn.Module], early: list[bool]
) -> None:
    joined = group()
    step(joined, early)
    copies: Any = copied(nn.ModuleList(joined.members))
    twin = copies[0].shared
    assert [step(twin, early) for _ in range(2)] == [[False], [True]]
    assert step(joined, early) == [True]


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)


def wide_group(scheme: str = "FP8_DYNAMIC") -> SharedInput:
    dense = [
        nn.Linear(4096, n, False, device="cuda", dtype=torch.bfloat16) for n in (4096, 1024, 1024)
    ]
    layers = [fp8kit.Fp8Linear.from_linear(linear, scheme) for linear in dense]
    return Group(layers)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("offered", [False, True])
def test_a_sibling_written_just_before_is_seen(offered: bool) -> None:
    joined, x = wide_group(), torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    stand_in = torch.zeros((), device="cuda", dtype=torch.bfloat16).expand(x.shape)
    versions = [[m.weight.detach().view(torch.uint8).clone() for m in joined.members]]
    versions.append([codes.flip(0) for codes in versions[0]])

    def results() -> list[Tensor]:
        if offered:
            hand_over_codes(joined, stand_in, x)
        return [member(stand_in if offered else x) for member in joined.members]

    def write(member: int, version: int) -> None:
        codes = joined.members[member].weight.detach().view(torch.uint8)
        torch.bitwise_xor(versions[version][member], zero, out=codes)  # a kernel, and counted

    zero = torch.zeros((), dtype=torch.uint8, device="cuda")
    expected = []
    for version in range(2):
        for member in range(3):
            write(member, version)
        torch.cuda.synchronize()
        expected.append([y.clone() for y in results()])
    torch.cuda.synchronize()
    now = [1, 1, 1]
    for i in range(1000):
        member = i % 3
        now[member] ^= 1
        write(member, now[member])
        for _ in range(3):
            for each, (y, version) in enumerate(zip(results(), now, strict=True)):
                assert_bits_equal(y, expected[version][each])


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_on_hopper_joined_products_are_early_and_recorded(scheme: str) -> None:
    joined, x = wide_group(scheme), torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    stand_in = torch.zeros((), device="cuda", dtype=torch.bfloat16).expand(x.shape)
    for _ in range(3):
        y = [member(x) for member in joined.members]
        hand_over_codes(joined, stand_in, x)
        for member, own in zip(joined.members, y, strict=True):
            assert_bits_equal(member(stand_in), own)
    assert all(safe_to_prefetch(m.weight) for m in joined.members)
    assert joined.replays.launches(x.shape) == 2
    assert len(joined.replays) == 2
