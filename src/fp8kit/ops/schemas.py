"""The registered operators, which ``torch.compile`` and ``torch.export`` see.

Each has a schema, one implementation for every device, a fake, and an autograd rule. The choice
of a backend happens inside the implementation, so a graph never depends on M. The schemas below
name all arguments. Groups are passed as ``[rows, cols]``; the callers (``functional``) validate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.formats import GroupShape
from fp8kit.ops import bodies
from fp8kit.ops.registration import (
    refuse_backward,
    register,
    register_backward,
    replay_before_dispatch,
)
from fp8kit.quantizers.scale_layout import empty_scale
from fp8kit.runtime.joined_memory import as_one
from fp8kit.runtime.replay_cache import (
    Call,
    Operator,
    ReplayedOnWeight,
    cache_on,
    hashable,
    replay_on,
)
from fp8kit.runtime.weight_hazards import join

# below torch.library no compiler, autograd or mode is active, so both forms are the body
_SCALED_MM_BODY = Operator(bodies.scaled_mm, bodies.scaled_mm)
_LINEAR_BODY = Operator(bodies.linear, bodies.linear)
_JOINED_BODY = Operator(bodies.linear, bodies.linear)


def _quantize_fake(
    x: Tensor, group: Sequence[int], dtype: torch.dtype, *rest: Any
) -> tuple[Tensor, Tensor]:
    layout = rest[3] if len(rest) > 3 else "row"
    return x.new_empty(x.shape, dtype=dtype), empty_scale(x, GroupShape(*group), layout)


def _elementwise_fake(x: Tensor, scale: Tensor, group: Sequence[int], dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@ReplayedOnWeight
def _scaled_mm(x: Tensor, x_scale: Tensor | None, w: Tensor, *others: Any) -> Call:
    w_scale, bias, x_group, w_group, *rest = others
    inputs: tuple[Tensor, ...] = (x,)
    constants: tuple[Tensor | None, ...] = (w, w_scale, bias)
    if x_scale is None:
        constants = (None, *constants)
    else:
        inputs = (x, x_scale)
    options = (hashable(x_group), hashable(w_group), *rest)
    return w, _SCALED_MM_BODY, inputs, constants, options


def _scaled_mm_fake(x: Tensor, x_scale: Tensor | None, w: Tensor, *others: Any) -> Tensor:
    _w_scale, _bias, _x_group, _w_group, out_dtype, *_ = others
    return x.new_empty(x.shape[0], w.shape[0], dtype=out_dtype)


@ReplayedOnWeight
def _linear(x: Tensor, *others: Any) -> Call:
    constants, (x_group, w_group, *rest) = others[:5], others[5:]
    options = (hashable(x_group), hashable(w_group), *rest)
    return constants[0], _LINEAR_BODY, (x,), constants, options


def _linear_fake(x: Tensor, w: Tensor, *others: Any) -> Tensor:
    out_dtype = others[9] if len(others) > 9 else None  # torch omits default arguments
    return x.new_empty(*x.shape[:-1], w.shape[0], dtype=out_dtype or x.dtype)


def _joined_call(x: Tensor, *others: Any) -> Call:
    w, w_scale, bias, scale_ub, x_group, w_group, *rest = others
    held = (*w, *w_scale, *bias, scale_ub)
    return w[0], _JOINED_BODY, (x,), held, (tuple(x_group), tuple(w_group), *rest)


def _joined_linear(x: Tensor, *others: Any) -> Tensor:
    call = _joined_call(x, *others)
    y: Tensor | None = replay_on(*call)
    if y is not None:
        return y
    first, body, inputs, held, options = call
    w, w_scale, bias, scale_ub, *_ = others
    weight, scale, biases = as_one(w), as_one(w_scale), as_one(bias) if bias else None
    if weight is None or scale is None or (bias and biases is None):
        none: list[Tensor | None] = [None] * len(w)
        each = zip(w, w_scale, bias or none, strict=True)
        return torch.cat([_linear(x, *layer, None, scale_ub, *options) for layer in each], -1)
    constants = (join(weight, w), scale, biases, None, scale_ub)
    y = cache_on(first).run(body, inputs, constants, options, held)
    return y


def _joined_linear_fake(x: Tensor, w: list[Tensor], *others: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(t.shape[0] for t in w), dtype=others[-1] or x.dtype)


QUANTIZE = register(
    "quantize(Tensor x, int[2] group, ScalarType dtype, float min_scale, Tensor? scale_ub,"
    ' str scale_rounding, str scale_layout="row") -> (Tensor data, Tensor scale)',
    bodies.quantize,
    _quantize_fake,
)
QUANTIZE_STATIC = register(
    "quantize_static(Tensor x, Tensor scale, int[2] group, ScalarType dtype) -> Tensor",
    bodies.quantize_static,
    _elementwise_fake,
)
DEQUANTIZE = register(
    "dequantize(Tensor data, Tensor scale, int[2] group, ScalarType dtype) -> Tensor",
    bodies.dequantize,
    _elementwise_fake,
)
SCALED_MM = register(
    "scaled_mm(Tensor x, Tensor? x_scale, Tensor w, Tensor w_scale, Tensor? bias,"
    " int[2]? x_group, int[2] w_group, ScalarType out_dtype, str accum, bool batch_invariant,"
    " str? backend) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
)
LINEAR = register(
    "linear(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, Tensor? input_scale,"
    " Tensor? scale_ub, int[2]? x_group, int[2] w_group, str scale_rounding,"
    " str accum, bool batch_invariant, ScalarType? out_dtype=None) -> Tensor",
    _linear,
    _linear_fake,
)
JOINED_LINEAR = register(
    "joined_linear(Tensor x, Tensor[] w, Tensor[] w_scale, Tensor[] bias, Tensor? scale_ub,"
    " int[2] x_group, int[2] w_group, str scale_rounding, str accum, bool batch_invariant,"
    " ScalarType? out_dtype) -> Tensor",
    _joined_linear,
    _joined_linear_fake,
)


def save_for_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the tensors and dtypes that ``linear_backward`` needs."""
    x, w, w_scale, bias, _, _, _, w_group, *_ = inputs
    ctx.save_for_backward(w, w_scale)
    ctx.w_group, ctx.x_dtype = w_group, x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator ``linear``; raises for those of weight and scales."""
    if any(ctx.needs_input_grad[i] for i in (1, 2, 4, 5)):
        raise UnsupportedError(
            "A gradient for an FP8 weight or a scale was requested.",
            "FP8 layers are frozen; gradients flow to their input and their bias.",
            "Call requires_grad_(False) on both, or detach() them; train an adapter instead.",
        )
    w, w_scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        dense = torch.ops.fp8kit.dequantize(w, w_scale, ctx.w_group, grad.dtype)
        grad_x = (grad @ dense).to(ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        grad_bias = grad.sum_to_size(grad.shape[-1]).to(ctx.bias_dtype)
    return (grad_x, None, None, grad_bias, *[None] * 8)


register_backward(LINEAR, linear_backward, save_for_linear)
for _op in (QUANTIZE, QUANTIZE_STATIC, DEQUANTIZE, SCALED_MM, JOINED_LINEAR):
    refuse_backward(
        _op,
        "A gradient through quantize, dequantize or scaled_mm was requested.",
        "Only fp8kit.linear and Fp8Linear are differentiable, in their input and bias.",
        "Use one of them, or wrap the call in torch.no_grad().",
    )


for _op, _replay in (
    (QUANTIZE, bodies.quantize.replay),
    (QUANTIZE_STATIC, bodies.quantize_static.replay),
    (SCALED_MM, _scaled_mm.replay),
    (LINEAR, _linear.replay),
    (JOINED_LINEAR, ReplayedOnWeight(_joined_call).replay),
):
    replay_before_dispatch(_op, _replay)
