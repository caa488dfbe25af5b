"""The registered operators of the experts, which ``torch.compile`` sees.

The callers (``functional``) validate the arguments. Gradients flow to the input and to the router's
weights, through the dequantized experts; codes, scales and biases are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.dispatch.backends import require
from fp8kit.dispatch.device import capability, current
from fp8kit.errors import UnsupportedError
from fp8kit.formats import GroupShape
from fp8kit.matmul.problem import m_bucket
from fp8kit.moe.activation import Activation
from fp8kit.moe.gradients import layer_backward
from fp8kit.moe.pairs import physical_ids
from fp8kit.moe.problem import (
    MOE_BACKENDS,
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedOperands,
    GroupedProblem,
    MoeBackend,
)
from fp8kit.ops.registration import (
    refuse_backward,
    register,
    register_backward,
    replay_before_dispatch,
)
from fp8kit.runtime.replay_cache import Call, Operator, ReplayedOnWeight, hashable

_TENSORS = 12  # first arguments of the operator; the others are its options
_X, _WEIGHTS = 0, 2  # which are differentiable


def experts(*arguments: Any) -> Tensor:
    """Compute a layer of experts; the body of ``fp8kit::experts``, with its arguments."""
    operands, problem, backend = described(arguments)
    if not operands.x.numel() or not operands.ids.numel():
        return torch.zeros_like(operands.x, memory_format=torch.contiguous_format)
    with current(operands.x.device):  # a self check tries kernels on the current device
        chosen: MoeBackend = require(MOE_BACKENDS, problem, backend)
    return chosen.experts(operands, problem)


# below torch.library no compiler, autograd or mode is active, so both forms are the body
_BODY = Operator(experts, experts)


@ReplayedOnWeight
def _experts(x: Tensor, ids: Tensor, weights: Tensor, *others: Any) -> Call:
    constants, options = others[: _TENSORS - 3], others[_TENSORS - 3 :]
    return others[0], _BODY, (x, ids, weights), constants, tuple(map(hashable, options))


def _experts_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def experts_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x`` and ``weights``; ``arguments`` are those of ``experts``."""
    operands, problem, _ = described(arguments)
    return layer_backward(grad, operands, problem)


def _experts_backward_fake(_: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    weights: Tensor = rest[1]
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def described(arguments: Sequence[Any]) -> tuple[ExpertOperands, ExpertsProblem, str | None]:
    """Return the operands, the problem and the wanted backend for an operator's arguments."""
    x, ids, weights, w13, scale13, bias13, in13, w2, scale2, bias2, in2, expert_map = arguments[
        :_TENSORS
    ]
    x_group, w_group, rounding, *words, on_input, invariant, backend = arguments[_TENSORS:]
    operands = ExpertOperands(
        x,
        ExpertWeights(w13, scale13, bias13, in13),
        ExpertWeights(w2, scale2, bias2, in2),
        ids if expert_map is None else physical_ids(ids, expert_map, w13.shape[0]),
        weights,
    )
    problem = ExpertsProblem(
        m_bucket(x.shape[0]), w13.shape[0], ids.shape[1], x.shape[1], w2.shape[2],
        Activation(*words), None if x_group is None else GroupShape(*x_group), GroupShape(*w_group),
        x.dtype, w13.dtype, rounding, in13 is not None, in2 is not None, on_input, invariant,
        x.device.type, capability(x.device),
    )  # fmt: skip
    return operands, problem, backend


def grouped_scaled_mm(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    x_group: Sequence[int] | None,
    w_group: Sequence[int],
    out_dtype: torch.dtype,
    batch_invariant: bool,
    backend: str | None,
) -> Tensor:
    """Multiply rows sorted by expert; the body of ``fp8kit::grouped_scaled_mm``."""
    groups = (None if x_group is None else GroupShape(*x_group), GroupShape(*w_group))
    problem = GroupedProblem.of(x, w, groups, out_dtype, batch_invariant)
    if not x.shape[0] or not w.shape[0] or not w.shape[1]:  # an empty sum along K is the bias
        return x.new_zeros(x.shape[0], w.shape[1], dtype=out_dtype)
    with current(x.device):
        chosen: MoeBackend = require(MOE_BACKENDS, problem, backend)
    weights = ExpertWeights(w, w_scale, bias, None)
    assert chosen.grouped is not None
    return chosen.grouped(GroupedOperands(x, x_scale, weights, offsets), problem)


def _grouped_scaled_mm_fake(
    x: Tensor, _x_scale: Tensor | None, w: Tensor, _w_scale: Tensor, *rest: Any
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=rest[4])


_LAYER = (
    "Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w13_scale, Tensor? bias13,"
    " Tensor? input_scale13, Tensor w2, Tensor w2_scale, Tensor? bias2, Tensor? input_scale2,"
    " Tensor? expert_map, int[2]? x_group, int[2] w_group, str scale_rounding, str kind,"
    " bool gated, bool interleaved, float? limit, float alpha, float up_offset,"
    " bool router_weight_on_input, bool batch_invariant, str? backend"
)
EXPERTS = register(f"experts({_LAYER}) -> Tensor", _experts, _experts_fake)
EXPERTS_BACKWARD = register(
    f"experts_backward(Tensor grad, {_LAYER}) -> (Tensor grad_x, Tensor grad_weights)",
    experts_backward,
    _experts_backward_fake,
)
GROUPED_SCALED_MM = register(
    "grouped_scaled_mm(Tensor x, Tensor? x_scale, Tensor w, Tensor w_scale, Tensor offsets,"
    " Tensor? bias, int[2]? x_group, int[2] w_group, ScalarType out_dtype, bool batch_invariant,"
    " str? backend) -> Tensor",
    grouped_scaled_mm,
    _grouped_scaled_mm_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    if any(needed[i] for i in range(_TENSORS) if i not in (_X, _WEIGHTS)):
        raise UnsupportedError(
            "A gradient for FP8 experts, their scales or biases was requested.",
            "Experts are frozen; gradients flow to their input and the router's weights.",
            "Call experts.requires_grad_(False), and train an adapter of other layers instead.",
        )
    tensors = ctx.saved_tensors
    grad_x, grad_weights = torch.ops.fp8kit.experts_backward(grad, *tensors, *ctx.options)
    found: list[Tensor | None] = [None] * len(needed)
    found[_X] = grad_x if needed[_X] else None
    found[_WEIGHTS] = grad_weights if needed[_WEIGHTS] else None
    return tuple(found)


register_backward(EXPERTS, _backward, _save)
replay_before_dispatch(EXPERTS, _experts.replay)
for _op in (EXPERTS_BACKWARD, GROUPED_SCALED_MM):
    refuse_backward(
        _op,
        "A gradient through grouped_scaled_mm, or a second one through experts, was requested.",
        "Only fp8kit.moe.experts and Fp8Experts are differentiable, once.",
        "Use one of them, or wrap the call in torch.no_grad().",
    )
LAYER = Operator(experts, torch.ops.fp8kit.experts)
