"""Joined layers, and GEMMs of codes from a fused producer, replay their launches too."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8kit
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops import operators
from fp8kit.ops.operators import RowCodes
from fp8kit.runtime.replay_cache import MOST_KEYS
from groups import Group, hand_over_codes
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install

SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK")


@pytest.fixture
def cpu_backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


def made(n: int, scheme: str = "FP8_DYNAMIC") -> fp8kit.Fp8Linear:
    linear = nn.Linear(256, n, dtype=torch.bfloat16)
    return fp8kit.Fp8Linear.from_linear(linear, scheme).requires_grad_(False)


def group(scheme: str = "FP8_DYNAMIC") -> SharedInput:
    return Group([made(n, scheme) for n in (128, 256, 128)])


def x_of(rows: int = 3, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 256, dtype=dtype)


def operator(layer: fp8kit.Fp8Linear, x: Tensor | RowCodes) -> Tensor:
    """Compute by the registered operator, without replay."""
    if isinstance(x, RowCodes):
        options = operators.options_of_codes(x, layer.options())
        return operators.codes_registered(*x.inputs, *layer.operands()[:3], *options)
    return operators.linear_registered(x, *layer.operands(), *layer.options())


def called(joined: SharedInput, x: Tensor) -> list[Tensor]:
    return [member(x) for member in joined.members]


def assert_recorded(joined: SharedInput, backends: CpuBackends) -> None:
    """Assert that calls are replayed from the third on, and that all equal the operators."""
    for turn in range(5):
        x = x_of()
        backends.calls.clear()
        results = called(joined, x)
        assert backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        for member, y in zip(joined.members, results, strict=True):
            assert_bits_equal(y, operator(member, x))


def warmed(joined: SharedInput, backends: CpuBackends) -> SharedInput:
    for _ in range(3):
        called(joined, x_of())
    backends.calls.clear()
    called(joined, x_of())
    assert backends.calls == [], "the group is taped"
    return joined


@pytest.mark.parametrize("unchanging", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_layers_are_recorded(
    scheme: str, unchanging: bool, cpu_backends: CpuBackends
) -> None:
    joined = group(scheme)
    joined.unchanging = unchanging
    assert_recorded(joined, cpu_backends)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_joined_products_of_codes_are_recorded(scheme: str, cpu_backends: CpuBackends) -> None:
    joined = group(scheme)
    for turn in range(5):
        x = x_of()
        stand_in = torch.zeros(()).expand(x.shape)
        cpu_backends.calls.clear()
        hand_over_codes(joined, stand_in, x)
        results = called(joined, stand_in)
        assert cpu_backends.calls == ([] if turn > 1 else ["quantize", "multiply"])
        for member, y in zip(joined.members, results, strict=True):
            assert_bits_equal(y, operator(member, x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_product_of_codes_by_one_layer_is_recorded(
    scheme: str, cpu_backends: CpuBackends
) -> None:
    layer = made(128, scheme)
    for turn in range(5):
        x = torch.randn(2, 3, 256, dtype=torch.bfloat16)
        codes = layer.quantize_input(x)
        cpu_backends.calls.clear()
        y = layer.multiply(codes)
        assert cpu_backends.calls == ([] if turn > 1 else ["multiply"])
        assert_bits_equal(y, operator(layer, x))


@pytest.mark.parametrize("made_inside", [False, True])
def test_groups_are_recorded_in_inference_mode(
    made_inside: bool, cpu_backends: CpuBackends
) -> None:
    with torch.inference_mode(made_inside):
        joined = group()
    with torch.inference_mode():
        assert_recorded(joined, cpu_backends)


def other_codes(layer: fp8kit.Fp8Linear) -> dict[str, RowCodes]:
    """Return codes of the same shape that a recording of ordinary codes would misread."""
    x = x_of()
    codes = layer.quantize_input(x)
    q = fp8kit.quantize(x, codes.group, dtype=torch.float8_e5m2, scale_layout="column")
    extent = codes.scale.stride(1) * codes.scale.shape[1]
    unaligned = torch.zeros(1 + extent)[1:].as_strided(codes.scale.shape, codes.scale.stride(), 1)
    unaligned.copy_(codes.scale)
    assert unaligned.data_ptr() % 16
    return {
        "result": dataclasses.replace(codes, dtype=torch.float32),
        "format": dataclasses.replace(codes, data=q.data, scale=q.scale),
        "row-major": dataclasses.replace(codes, scale=codes.scale.contiguous()),
        "unaligned": dataclasses.replace(codes, scale=unaligned),
    }


@pytest.mark.parametrize("kind", ["result", "format", "row-major", "unaligned"])
def test_a_recording_is_for_codes_of_one_kind(kind: str, cpu_backends: CpuBackends) -> None:
    layer = made(128, "FP8_BLOCK")
    for _ in range(3):
        layer.multiply(layer.quantize_input(x_of()))
    other = other_codes(layer)[kind]
    for turn in range(3):
        cpu_backends.calls.clear()
        y = layer.multiply(other)
        # a copy before the read is an operation of torch, so the call is not recorded
        repeated = turn > 1 and kind in ("result", "format")
        assert cpu_backends.calls == ([] if repeated else ["multiply"])
        assert_bits_equal(y, operator(layer, other))


@pytest.mark.parametrize("member", [0, 1, 2])
@pytest.mark.parametrize(
    "change", ["reload", "move", "parameter", "options", "bias", "gradient", "buffer"]
)
def test_a_change_of_any_member_is_seen(
    change: str, member: int, cpu_backends: CpuBackends
) -> None:
    joined = warmed(group(), cpu_backends)
    layer = joined.members[member]
    if change == "reload":
        layer.load_state_dict(made(layer.out_features).state_dict())
    elif change == "move":
        layer.weight_scale.data = layer.weight_scale.data * 2
    elif change == "parameter":
        other = made(layer.out_features)
        layer.weight, layer.weight_scale = other.weight, other.weight_scale
    elif change == "options":
        layer.accum = "fast"
    elif change == "bias":
        layer.bias = None
    elif change == "gradient":
        layer.bias.requires_grad_(True)
    else:
        bias = layer.bias.detach() + 1
        del layer.bias
        layer.register_buffer("bias", bias)
    cpu_backends.calls.clear()
    x = x_of()
    results = called(joined, x)
    assert cpu_backends.calls
    assert [y.requires_grad for y in results].count(True) == (change == "gradient")
    for each, y in zip(joined.members, results, strict=True):
        assert_bits_equal(y.detach(), operator(each, x).detach())


class View(nn.Module):
    """Returns another tensor at each call, at the same address."""

    def forward(self, held: Tensor) -> Tensor:
        return held.view_as(held)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_what_parametrizations_give_is_not_joined(name: str, cpu_backends: CpuBackends) -> None:
    joined = group()
    for member in joined.members:
        parametrize.register_parametrization(member, name, View(), unsafe=True)
    for _ in range(5):
        x = x_of()
        results = called(joined, x)
        # where a joined matrix that nothing holds would have been
        assert [torch.full((n, 256), 127, dtype=torch.uint8) for n in (128, 256, 512)]
        for member, y in zip(joined.members, results, strict=True):
            assert_bits_equal(y, operator(member, x))


def test_an_input_that_wants_gradients_is_not_recorded(cpu_backends: CpuBackends) -> None:
    joined = warmed(group(), cpu_backends)
    x = x_of().requires_grad_()
    sum(y.float().sum() for y in called(joined, x)).backward()
    assert x.grad is not None


def test_groups_keep_few_recordings(cpu_backends: CpuBackends) -> None:
    joined = group()
    for rows in range(1, 2 * MOST_KEYS):
        called(joined, x_of(rows))
    assert 0 < len(joined.replays) <= MOST_KEYS


@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.usefixtures("cpu_backends")
def test_codes_of_another_width_are_refused(rows: int) -> None:
    joined = group()

    def behind(x: Tensor) -> None:
        stand_in = torch.zeros(()).expand(x.shape)
        hand_over_codes(joined, stand_in, x)
        called(joined, stand_in)

    for _ in range(3):
        behind(x_of(rows))
    with pytest.raises(ValueError, match="of the same K"):
        behind(torch.randn(rows, 512, dtype=torch.bfloat16))


@pytest.mark.usefixtures("cpu_backends")
def test_bad_input_of_a_group_is_refused_as_of_a_layer() -> None:
    joined = group()
    for _ in range(4):
        called(joined, x_of())
        with pytest.raises(TypeError, match="bfloat16, float16 or float32"):
            joined.members[0](torch.ones(3, 256, dtype=torch.int64))
