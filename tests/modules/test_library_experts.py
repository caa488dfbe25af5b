"""FP8 forms of experts' classes keep gates, arguments and settings of the dense class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
import numerics
from fp8kit.modules.expert_stacks import quantize_stack
from interrupts import interrupted

E, H, N = 4, 128, 128


class Experts(nn.Module):
    """Gated experts with their own gate function."""

    def __init__(self, act_fn: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.limit = E, act_fn, 3.0
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * N, H) / H**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, N) / N**0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            gate, up = (x[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            up = up.clamp(-self.limit, self.limit)
            y = (self.act_fn(gate.clamp(max=self.limit)) * up) @ self.down_proj[expert].T
            total.index_add_(0, token, y * weights[token, slot, None])
        return total


class Unbounded(Experts):
    def __init__(self, act_fn: Any) -> None:
        super().__init__(act_fn)
        self.limit = 1e30


class Scaled(Unbounded):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, ids, weights) * scale


class Bounded(Experts):
    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        bound = self.limit
        return self.act_fn(gate.clamp(max=bound)) * up.clamp(-bound, bound)  # type: ignore


def converted(dense: nn.Module) -> Any:
    model = nn.ModuleDict({"experts": copy.deepcopy(dense)})
    assert [r.name for r in fp8kit.convert(model).stacks] == ["experts"]
    return model["experts"]


@pytest.fixture
def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, H), torch.rand(32, E).topk(2).indices, torch.rand(32, 2)


GATES = {
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
    "mish": nn.Mish(),
    "elu": nn.ELU(),
    "hardswish": nn.Hardswish(),
    "leaky": nn.LeakyReLU(0.01),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("kind", GATES)
def test_an_activation_that_is_not_listed_runs_between_two_products(
    kind: str, given: tuple[Tensor, ...]
) -> None:
    dense = Unbounded(GATES[kind])
    module = converted(dense)
    assert module.stacks.activation is None
    expected = dense(*given)
    assert 5e-3 < numerics.relative_error(module(*given), expected) < 0.1


def test_a_call_with_more_than_was_tried_is_refused(given: tuple[Tensor, ...]) -> None:
    fp8kit.register_experts(Scaled, lambda _: fp8kit.ExpertStacks())
    module = converted(Scaled(nn.SiLU()))
    x, ids, weights = given
    y = module(x, ids, weights)
    numerics.assert_bits_equal(module(x, weights=weights, ids=ids), y)
    for args, kwargs in (
        ((*given, 2.0), {}),
        (given, {"scale": 2.0}),
        ((x, ids), {"scale": 2.0}),
        ((x, ids), {"ids": ids}),
        ((x, ids), {}),
    ):
        with pytest.raises(TypeError, match=r"compute with x, ids, weights alone.*exclude="):
            module(*args, **kwargs)


def test_a_setting_that_is_no_longer_read_cannot_be_changed(given: tuple[Tensor, ...]) -> None:
    dense = Bounded(nn.SiLU())
    module = converted(dense)
    assert module.stacks.activation == fp8kit.moe.Activation("silu", limit=3.0)
    for name, value in (("limit", 1.0), ("act_fn", nn.GELU())):
        with pytest.raises(AttributeError, match=rf"{name} of FP8 Bounded was set.*before fp8kit"):
            setattr(module, name, value)
    module.limit, module.act_fn = module.limit, module.act_fn
    module.train().eval().num_experts = E  # what is not read
    twin = copy.deepcopy(module)
    with pytest.raises(AttributeError, match="limit of FP8 Bounded"):
        twin.limit = 1.0
    module.to_dense()
    module.limit = 1.0
    dense.limit = 1.0
    assert numerics.relative_error(module(*given), dense(*given)) < 0.1


def test_replicas_of_other_gpus_get_copies_of_all_that_is_held(given: tuple[Tensor, ...]) -> None:
    """``DataParallel`` makes replicas of children, too, and plain attributes of parameters."""
    module = converted(Bounded(nn.SiLU()))
    replica = module._replicate_for_data_parallel()
    replica.act_fn = module.act_fn._replicate_for_data_parallel()
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter.detach())
    numerics.assert_bits_equal(replica(*given), module(*given))


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_other_code_at_the_activation_runs(how: str, given: tuple[Tensor, ...]) -> None:
    dense = Bounded(nn.SiLU())
    module = converted(dense)
    for act in (dense.act_fn, module.act_fn):
        if how == "hook":
            act.register_forward_hook(lambda m, args, y: 2 * y)
        else:
            act.forward = torch.tanh
    assert 5e-3 < numerics.relative_error(module(*given), dense(*given)) < 0.1


def test_experts_that_an_earlier_version_pickled_load(given: tuple[Tensor, ...]) -> None:
    module = converted(Bounded(nn.SiLU()))
    text = pickle.dumps(module, 0)
    old = text.replace(b"fp8kit.modules.library_experts", b"fp8kit.modules.stacked_experts")
    assert old != text
    assert torch.equal(pickle.loads(old)(*given), module(*given))


@pytest.mark.parametrize("visit", [1, 2])
def test_an_interrupt_leaves_experts_dense(
    visit: int, given: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Before the second stack the first one is FP8, which the dense class cannot compute with."""
    dense = Unbounded(nn.SiLU())
    model = nn.ModuleDict({"experts": copy.deepcopy(dense)})
    assert interrupted(lambda: fp8kit.convert(model), quantize_stack, visit=visit)
    assert torch.equal(model["experts"](*given), dense(*given))
    assert len(fp8kit.convert(model).stacks) == 1


@pytest.mark.parametrize("visit", [1, 2])
def test_an_interrupt_leaves_experts_fp8(visit: int, given: tuple[Tensor, Tensor, Tensor]) -> None:
    module = converted(Unbounded(nn.SiLU()))
    y = module(*given)
    assert interrupted(module.to_dense, fp8kit.dequantize, visit=visit)
    assert torch.equal(module(*given), y)
    module.to_dense()
    assert type(module) is Unbounded
    assert 1e-3 < numerics.relative_error(module(*given), y) < 0.1
