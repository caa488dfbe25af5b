"""``quantize``, ``dequantize``, ``scaled_mm`` and ``linear``: the checked entry points.

Each function validates its arguments once, flattens the input and calls the registered operator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8kit.errors import InvalidValue
from fp8kit.formats import (
    ROW,
    TENSOR,
    GroupShape,
    QTensor,
    Scheme,
    check_group,
    fp8_format,
    min_scale,
)
from fp8kit.ops import bodies, operators, scale_validation, validation
from fp8kit.runtime import settings
from fp8kit.runtime.replay_cache import call_on


def quantize(
    x: Tensor,
    group: GroupShape = ROW,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    scale_rounding: str | None = None,
    scale_layout: str = "row",
    role: str = "activation",
) -> QTensor:
    """Quantize a tensor to FP8 codes and scales.

    ``scale = max(amax / fp8_max, floor)`` and ``codes = cast(clamp(x / scale))``, with true
    division in fp32 and round to nearest even. A group that holds NaN or an infinity becomes
    NaN throughout, except that a given ``scale`` or ``scale_ub`` saturates infinities.

    Args:
        x: bf16, fp16 or fp32, 1-D or more, any strides, K last.
        group: elements per scale, e.g. ``fp8kit.ROW``.
        dtype: dtype of the codes.
        scale: static scales, positive, ``scale_shape(x.shape, group)``; computed from the data if
            omitted.
        scale_ub: fp32 scalar tensor, positive (checked on a CPU only), that bounds amax from above
            before the division.
        scale_rounding: ``"exact"`` or ``"up"`` (to a power of two, UE8M0); for MX ``"up"``
            (the default; never saturates) or ``"floor"`` (the rule of OCP MX v1.0). ``"ceil"``
            is another name of ``"up"``.
        scale_layout: ``"row"``, or ``"column"`` for groups along a row: the same scales with
            adjacent rows and columns a multiple of four apart, as block-scaled products load them.
        role: ``"activation"`` or ``"weight"``: which floor a per-row scale has.

    Returns:
        ``QTensor`` with codes of the shape of ``x``.

    Raises:
        TypeError: if ``x`` is not a float tensor, a dtype is not FP8, or ``group`` or a scale is of
            another type.
        ValueError: for a scale of the wrong shape or device, one that is not positive (checked on
            a CPU only), or contradictory options.

    Example:
        >>> q = fp8kit.quantize(torch.randn(4, 256), fp8kit.GROUP128)
        >>> q.scale.shape
        torch.Size([4, 2])
    """
    validation.check_float("x", x)
    check_group(group)
    fp8_format(dtype)
    if x.dim() == 0 or (group.rows > 1 and x.dim() < 2):
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)} for {group} groups.",
            "x needs a last dimension K, and two dimensions for groups of several rows.",
            "Add dimensions with reshape or unsqueeze.",
        )
    floor = min_scale(group, dtype, role)
    if scale is not None:
        scale_validation.check_static_options(scale_ub, scale_rounding, scale_layout)
        scale_validation.check_static_scale(scale, x, group)
        data = operators.QUANTIZE_STATIC(x, scale, (group.rows, group.cols), dtype)
        return QTensor(data, scale, group)
    rounding = validation.check_rounding(scale_rounding, group)
    scale_validation.check_scale_ub(scale_ub, x)
    validation.check_layout(scale_layout, group)
    options = (floor, scale_ub, rounding, scale_layout)
    data, found = operators.QUANTIZE(x, (group.rows, group.cols), dtype, *options)
    return QTensor(data, found, group)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiply codes by their scales in fp32 and round once.

    Args:
        q: codes and scales.
        dtype: dtype of the result: bf16, fp16 or fp32.

    Returns:
        A contiguous tensor of the shape of the codes.

    Raises:
        TypeError: if ``q`` is no ``QTensor``, or ``dtype`` is not one of the three.

    Example:
        >>> fp8kit.dequantize(fp8kit.quantize(torch.ones(2, 8)))[0, 0]
        tensor(1.)
    """
    validation.check_quantized("q", q)
    validation.check_out_dtype(dtype)
    return operators.DEQUANTIZE(q.data, q.scale, (q.group.rows, q.group.cols), dtype)


def scaled_mm(
    x_q: QTensor,
    w_q: QTensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    accum: str = settings.ACCUM,
    batch_invariant: bool = settings.BATCH_INVARIANT,
    backend: str | None = None,
) -> Tensor:
    """Multiply quantized activations by a quantized weight: ``x @ w.T + bias``.

    Args:
        x_q: activations ``[..., K]``.
        w_q: weight ``[N, K]``.
        bias: ``[N]``, bf16, fp16 or fp32.
        out_dtype: bf16, fp16 or fp32.
        accum: ``"precise"`` sums in fp32, or promotes sums to fp32 so often (every 128 of K) that
            data of one sign is biased by under 1e-3; ``"fast"`` permits Hopper's short accumulator.
        batch_invariant: the bits of a row depend neither on M nor on the other rows.
        backend: compute with this backend or fail; ``None`` takes the first that fits.

    Returns:
        ``[..., N]`` in ``out_dtype``.

    Raises:
        TypeError: if an operand is no ``QTensor``, or the bias or an option is of another type.
        ValueError: if K or the devices differ, or an option is unknown.
        UnsupportedError: if no backend computes it, with every backend's reason.

    Example:
        >>> x_q, w_q = fp8kit.quantize(x), fp8kit.quantize(w, role="weight")
        >>> y = fp8kit.scaled_mm(x_q, w_q)
    """
    validation.check_quantized("x_q", x_q)
    validation.check_quantized("w_q", w_q)
    x, w = x_q.data, w_q.data
    validation.check_operands(x, w, bias, accum)
    validation.check_run_options(batch_invariant, backend)
    validation.check_out_dtype(out_dtype)
    if x_q.group.rows > 1 and x.dim() > 2:
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)} in {x_q.group} groups.",
            "Groups of several rows belong to one matrix [M, K].",
            "Flatten x before it is quantized.",
        )
    rows, x_scale = math.prod(x.shape[:-1]), x_q.scale
    if x.dim() != 2 and x_q.group != TENSOR:
        x_scale = x_scale.reshape(rows, x_scale.shape[-1])
    groups = ((x_q.group.rows, x_q.group.cols), (w_q.group.rows, w_q.group.cols))
    y = call_on(
        w,
        operators.SCALED_MM,
        (x.reshape(rows, x.shape[-1]), x_scale),
        (w, w_q.scale, bias),
        (*groups, out_dtype, accum, batch_invariant, backend),
    )
    return bodies.reshaped(y, (*x.shape[:-1], w.shape[0]))


def linear(
    x: Tensor | QTensor,
    w_q: QTensor,
    bias: Tensor | None = None,
    *,
    scheme: Scheme | str | None = None,
    input_scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    accum: str = settings.ACCUM,
    batch_invariant: bool = settings.BATCH_INVARIANT,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Quantize ``x`` and multiply it by a quantized weight; differentiable in ``x`` and ``bias``.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides; or a ``QTensor``, which is multiplied as it
            is, without a gradient.
        w_q: weight ``[N, K]``.
        bias: ``[N]``, bf16, fp16 or fp32.
        scheme: how ``x`` is quantized; by default the standard partner of ``w_q.group``
            (row and tensor: per token, block: 1x128, MX: MX).
        input_scale: fp32 ``[1, 1]``, the static scale with which ``x`` is quantized per tensor;
            positive and finite, which is checked on a CPU only.
        scale_ub: fp32 scalar tensor that bounds each token's amax from above.
        accum: as in ``scaled_mm``.
        batch_invariant: as in ``scaled_mm``.
        out_dtype: bf16, fp16 or fp32; the fp32 sums are rounded to it once. By default the dtype of
            ``x`` (under autocast, autocast's), and bf16 for a ``QTensor``.

    Returns:
        ``[..., N]`` in ``out_dtype``.

    Raises:
        TypeError: if ``x`` is not a float tensor, a scale is no tensor, or ``out_dtype`` is another
            dtype.
        ValueError: if K, devices, scheme or scales do not fit.
        UnsupportedError: if no backend computes it, with every backend's reason.

    Example:
        >>> w_q = fp8kit.quantize(w, fp8kit.BLOCK, role="weight")
        >>> y = fp8kit.linear(x, w_q)
    """
    validation.check_quantized("w_q", w_q)
    if out_dtype is not None:
        validation.check_out_dtype(out_dtype)
    if isinstance(x, QTensor):
        validation.check_quantized_input(x, w_q, scheme, input_scale, scale_ub)
        return scaled_mm(
            x,
            w_q,
            bias,
            out_dtype=out_dtype or torch.bfloat16,
            accum=accum,
            batch_invariant=batch_invariant,
        )
    validation.check_float("x", x)
    validation.check_operands(x, w_q.data, bias, accum)
    validation.check_run_options(batch_invariant)
    if scheme is not None:
        validation.check_codes("w_q", w_q.data.dtype, Scheme.of(scheme))
    activation, rounding = validation.activation_format(w_q.group, scheme, input_scale)
    scale_validation.check_input_scale(input_scale, x.shape, x.device)
    scale_validation.check_scale_ub(scale_ub, x)
    if scale_ub is not None and (activation is None or input_scale is not None):
        raise InvalidValue(
            "Got scale_ub for activations that have no scale of their own.",
            "It bounds scales that are taken from the data.",
            "Leave scale_ub out, or use a dynamic scheme.",
        )
    x_group = None if activation is None else (activation.rows, activation.cols)
    return call_on(
        w_q.data,
        operators.LINEAR,
        (x,),
        (w_q.data, w_q.scale, bias, input_scale, scale_ub),
        (x_group, (w_q.group.rows, w_q.group.cols), rounding, accum, batch_invariant, out_dtype),
    )
