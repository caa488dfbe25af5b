"""Layers of experts replay their launches, and never stale ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.conversion.experts import recognize
from fp8kit.formats import BLOCK, QTensor
from fp8kit.modules.library_experts import convert_experts
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install, record_on_cpu

E, H, INNER, TOP_K = 4, 64, 128, 2


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    made = install(monkeypatch)
    record_on_cpu(monkeypatch)
    return made


def make(**options: Any) -> fp8kit.Fp8Experts:
    up, down = torch.randn(E, 2 * INNER, H) / 8, torch.randn(E, H, INNER) / 11
    return fp8kit.Fp8Experts.from_dense(up.bfloat16(), down.bfloat16(), **options)


def routed(m: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(m, H, dtype=torch.bfloat16)
    ids = torch.rand(m, E).argsort(1)[:, :TOP_K].contiguous()
    return x, ids, torch.rand(m, TOP_K)


def other_class() -> nn.Module:
    """Return FP8 experts in a class of Transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=INNER, num_experts=E, num_experts_per_tok=TOP_K
    )
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    dense = Qwen3MoeExperts(config)
    for weight in dense.parameters():
        nn.init.normal_(weight, std=0.1)
    stacks = recognize(dense)
    assert not isinstance(stacks, str)
    assert stacks is not None
    return convert_experts(dense, stacks, fp8kit.Scheme.of("FP8_DYNAMIC"))


def unrecorded(layer: nn.Module, *given: Any) -> Tensor:
    """Compute with a copy of the layer, whose codes have no recordings."""
    result: Tensor = copy.deepcopy(layer)(*given)
    return result


def recorded(layer: nn.Module, backends: CpuBackends, m: int = 3) -> None:
    for _ in range(3):
        layer(*routed(m))
    backends.calls.clear()


def assert_replayed(layer: nn.Module, backends: CpuBackends) -> None:
    recorded(layer, backends)
    given = routed()
    y = layer(*given)
    assert backends.calls == []
    assert_bits_equal(y, unrecorded(layer, *given))


def test_the_third_call_and_later_ones_launch_without_python(backends: CpuBackends) -> None:
    layer = make()
    backends.calls.clear()
    for _ in range(2):
        layer(*routed())
    assert backends.calls == ["experts"] * 2
    for _ in range(3):
        given = routed()
        expected = unrecorded(layer, *given)
        backends.calls.clear()
        assert_bits_equal(layer(*given), expected)
        assert backends.calls == []


def test_a_static_scale_and_biases_are_replayed_too(backends: CpuBackends) -> None:
    up, down = torch.randn(E, 2 * INNER, H) / 8, torch.randn(E, H, INNER) / 11
    layer = fp8kit.Fp8Experts.from_dense(
        up, down, "FP8",
        biases=(torch.randn(E, 2 * INNER), torch.randn(E, H)),
        input_scales=(torch.full((1, 1), 0.02), torch.full((1, 1), 0.03)),
    )  # fmt: skip
    assert_replayed(layer, backends)


def test_experts_in_the_class_of_another_library_are_replayed(backends: CpuBackends) -> None:
    layer = other_class()
    assert_replayed(layer, backends)


def test_weights_that_are_written_in_place_are_read_anew(backends: CpuBackends) -> None:
    layer, other = make(), make()
    recorded(layer, backends)
    layer.load_state_dict(other.state_dict())
    given = routed()
    assert_bits_equal(layer(*given), unrecorded(other, *given))
    assert backends.calls == ["experts"]  # of the other layer


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj", "down_proj_scale"])
def test_another_parameter_ends_a_recording(backends: CpuBackends, name: str) -> None:
    layer, other = make(), make()
    recorded(layer, backends)
    setattr(layer, name, getattr(other, name))
    given = routed()
    expected = unrecorded(layer, *given)
    backends.calls.clear()
    assert_bits_equal(layer(*given), expected)
    assert backends.calls == ["experts"]


def test_options_and_shapes_have_recordings_of_their_own(backends: CpuBackends) -> None:
    layer = make()
    recorded(layer, backends)
    layer.batch_invariant = True
    layer(*routed())
    layer(*routed(5))
    assert backends.calls == ["experts"] * 2
    given = routed()
    backends.calls.clear()
    ids = given[1].int()
    assert_bits_equal(layer(given[0], ids, given[2]), unrecorded(layer, given[0], ids, given[2]))
    assert backends.calls


def test_bad_arguments_are_refused_after_a_recording_as_before(backends: CpuBackends) -> None:
    layer = make()
    recorded(layer, backends)
    x, ids, weights = routed()
    with pytest.raises(ValueError, match="for 3 tokens"):
        layer(x, ids[:2], weights[:2])
    with pytest.raises(TypeError, match=r"ids of torch\.float32"):
        layer(x, weights, weights)
    with pytest.raises(TypeError, match=r"weights of torch\.int64"):
        layer(x, ids, ids)
    with pytest.raises(ValueError, match="Check the orientation"):
        layer(x[:, :32].contiguous(), ids, weights)
    assert backends.calls == []


def test_gradients_autocast_and_a_map_take_the_long_way(backends: CpuBackends) -> None:
    layer = make()
    recorded(layer, backends)
    x, ids, weights = routed()
    leaf = weights.clone().requires_grad_()
    layer(x, ids, leaf).float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0
    backends.calls.clear()
    with torch.autocast("cpu", torch.float16):
        assert layer(x, ids, weights).dtype == torch.float16
    layer.place(torch.tensor([3, 2, 1, 0]))
    for _ in range(4):
        backends.calls.clear()
        assert_bits_equal(layer(x, ids, weights), unrecorded(layer, x, ids, weights))
        assert backends.calls == ["experts"] * 2


def test_a_model_that_is_trained_whole_trains_through_its_experts() -> None:
    layer = other_class()
    layer.requires_grad_(True)
    x, ids, weights = routed()
    x.requires_grad_()
    layer(x, ids, weights).float().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_tensors_beside_codes_are_found_wherever_they_are() -> None:
    up, down = torch.randn(E, 2 * INNER, H) / 8, torch.randn(E, H, INNER) / 11
    biases = (torch.randn(E, 2 * INNER), torch.randn(E, H))
    layer, given = fp8kit.Fp8Experts.from_dense(up, down, biases=biases), routed()
    expected = layer(*given)
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        replica._parameters.pop(name, None)
        setattr(replica, name, parameter.detach())
    assert_bits_equal(replica(*given), expected)
    nn.utils.parametrize.register_parametrization(layer, "down_proj_bias", nn.Identity())
    assert_bits_equal(layer(*given), expected)


def test_what_is_not_as_it_was_recorded_is_refused(backends: CpuBackends) -> None:
    layer = make()
    recorded(layer, backends)
    x, ids, weights = routed()
    up, down = layer.operand("gate_up_proj"), layer.operand("down_proj")
    other = QTensor(down.data, torch.ones(E, 1, 1), BLOCK)
    with pytest.raises(ValueError, match="Both weights of a layer have one granularity"):
        fp8kit.moe.experts(x, up, other, ids, weights, scheme="FP8_DYNAMIC")
    bias = torch.randn(E, H)
    for _ in range(4):
        expected = fp8kit.moe.experts(x, up, down, ids, weights, bias2=-bias)
        fp8kit.moe.experts(x, up, down, ids, weights, bias2=bias)
    found = fp8kit.moe.experts(x, up, down, ids, weights, bias2=torch._neg_view(bias))
    assert_bits_equal(found, expected)
