"""What ``functional`` and the modules call once their arguments are known to fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8kit import ops, transforms
from fp8kit.errors import teach
from fp8kit.formats import GroupShape, RowCodes, min_scale
from fp8kit.quantizers import traced
from fp8kit.quantizers.layout import product_layout


def linear_unchecked(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    groups: tuple[GroupShape | None, GroupShape],
    options: tuple[str, str, bool],
) -> Tensor:
    """Quantize ``x`` and multiply it by a weight: one operator, or under a compiler its parts.

    Args:
        x: activations ``[..., K]``.
        w: codes ``[N, K]``.
        w_scale: scales of ``w``.
        bias: ``[N]`` or ``None``.
        input_scale: static per-tensor scale or ``None``.
        scale_ub: bound on amax or ``None``.
        groups: granularities of ``(x, w)``.
        options: ``(scale_rounding, accum, batch_invariant)``.

    Returns:
        ``[..., N]`` in the dtype of ``x``, or in autocast's where autocast is on.
    """
    _refuse_tangent(x)
    x = autocast(x)
    x_group, w_group = groups
    if x_group is not None and x.shape[-1] and not _wants_gradient(x, bias):
        static = input_scale is not None
        if traced.is_visible(x_group, w.dtype, static, x.device):
            codes = quantize_rows(x, x_group, w.dtype, options[0], input_scale, scale_ub)
            return multiply_rows(codes, (w, w_scale, w_group), bias, *options[1:])
    product = torch.ops.fp8kit.linear
    if not torch.compiler.is_compiling() and transforms.is_transformed():
        product = transforms.linear
    y: Tensor = product(
        x,
        w,
        w_scale,
        bias,
        input_scale,
        scale_ub,
        None if x_group is None else [x_group.rows, x_group.cols],
        [w_group.rows, w_group.cols],
        x.dtype,
        *options,
    )
    return y


def quantize_rows(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype,
    rounding: str,
    input_scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
) -> RowCodes:
    """Quantize activations ``[..., K]`` once, for ``multiply_rows``; arguments are known to fit.

    Args:
        x: bf16, fp16 or fp32.
        group: elements per scale.
        dtype: dtype of the codes.
        rounding: how scales are rounded.
        input_scale: static per-tensor scale or ``None``.
        scale_ub: bound on amax or ``None``.
    """
    _refuse_tangent(x)
    x = autocast(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    floor, shape = min_scale(group, dtype, "activation"), [group.rows, group.cols]
    visible = traced.is_visible(group, dtype, input_scale is not None, x.device)
    if input_scale is not None:
        scale = input_scale
        if visible:
            data = traced.quantize_static(rows, scale, dtype)
        else:
            data = torch.ops.fp8kit.quantize_static(rows, scale, shape, dtype)
    else:
        options = (floor, scale_ub, rounding, product_layout(group))
        if visible:
            data, scale = traced.quantize(rows, group, dtype, *options)
        else:
            data, scale = torch.ops.fp8kit.quantize(rows, shape, dtype, *options)
    return RowCodes(data, scale, group, x.shape, x.dtype)


def multiply_rows(
    codes: RowCodes,
    w_q: tuple[Tensor, Tensor, GroupShape],
    bias: Tensor | None,
    accum: str,
    batch_invariant: bool,
    directly: bool = False,
) -> Tensor:
    """Multiply ``quantize_rows``'s result by a weight; arguments are known to fit.

    Args:
        codes: the quantized input.
        w_q: codes ``[N, K]``, scales and granularity of the weight.
        bias: ``[N]`` or ``None``.
        accum: as in ``scaled_mm``.
        batch_invariant: as in ``scaled_mm``.
        directly: call the body of the operator, because nobody would see the operator.

    Returns:
        ``[..., N]`` in ``codes.dtype``.
    """
    weight, scale, group = w_q
    product = ops.scaled_mm if directly else torch.ops.fp8kit.scaled_mm
    y: Tensor = product(
        codes.data,
        codes.scale,
        weight,
        scale,
        bias,
        [codes.group.rows, codes.group.cols],
        [group.rows, group.cols],
        codes.dtype,
        accum,
        batch_invariant,
        None,
    )
    return ops.reshaped(y, (*codes.shape[:-1], weight.shape[0]))


def _wants_gradient(x: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad)
    )


def autocast(x: Tensor) -> Tensor:
    """Convert an input to the dtype of autocast, where autocast is on for its device."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    return x


def _refuse_tangent(x: Tensor) -> None:
    """Raise for forward-mode differentiation, in which torch takes such operators for constants."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            teach(
                "Got an input with a forward-mode tangent.",
                "FP8 products have a backward and no forward-mode derivative.",
                "Differentiate with backward() or torch.autograd.grad, or the dense model.",
            )
        )
