"""Check the arguments of the fused norms and activations, and order them for their operators."""

from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue, check_choice
from fp8kit.formats import ROW, TENSOR, GroupShape, check_group, fp8_format, min_scale
from fp8kit.fused.problem import ROUNDINGS
from fp8kit.ops import scale_validation, validation


class QuantizeOptions(TypedDict, total=False):
    """The keywords that say how a result is quantized, as in ``fp8kit.quantize``.

    ``group``: elements per scale, by default ``ROW``; within one row, or ``TENSOR`` with ``scale``.
    ``dtype``: dtype of the codes, by default ``float8_e4m3fn``.
    ``scale``: static ``float32 [1, 1]``, only and always with ``TENSOR``.
    ``scale_ub``: ``float32`` scalar tensor that bounds amax from above before the division.
    ``scale_rounding``: ``"exact"`` or ``"up"``, also named ``"ceil"``; for ``MX`` ``"floor"`` or
    ``"up"``.
    ``scale_layout``: ``"row"``, or ``"column"`` for groups along a row.
    """

    group: GroupShape
    dtype: torch.dtype
    scale: Tensor | None
    scale_ub: Tensor | None
    scale_rounding: str | None
    scale_layout: str


def rms_norm_arguments(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    settings: tuple[float, float, str],
    options: QuantizeOptions,
) -> tuple[Any, ...]:
    """Check the arguments of ``rms_norm_quantize``, and return those of its operator.

    ``x`` is ``[..., K]``, the caller has checked the residual, and ``settings`` are
    ``(eps, weight_offset, rounding)``.
    """
    how, rounding = _resolved("x", x, options), settings[2]
    _check_norm(rounding, *settings[:2])
    validation.check_operand(
        "weight", weight, (x.shape[-1],), x, x.dtype if rounding == "stepwise" else None
    )
    return (x, residual, weight, *settings, *how)


def layer_norm_arguments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, Tensor] | None,
    settings: tuple[float, str],
    options: QuantizeOptions,
) -> tuple[Any, ...]:
    """Check the arguments of ``layer_norm_quantize``, and return those of its operator.

    ``x`` is ``[..., K]``, ``modulation`` is (scale, shift), ``settings`` are ``(eps, rounding)``.
    """
    (eps, rounding), how = settings, _resolved("x", x, options)
    _check_norm(rounding, eps)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            validation.check_operand(name, vector, (x.shape[-1],), x, None)
    if modulation is not None:
        _check_modulation(modulation, x, x.dtype if rounding == "stepwise" else None)
    return (x, weight, bias, *(modulation or (None, None)), *settings, *how)


def activation_arguments(
    kind: str, gate: Tensor, up: Tensor | None, options: QuantizeOptions
) -> tuple[Any, ...]:
    """Check the arguments of an activation, and return those of its operator."""
    how = _resolved("x" if up is None else "gate", gate, options)
    if up is not None:
        validation.check_operand("up", up, tuple(gate.shape), gate, gate.dtype)
    return (gate, up, kind, *how)


def _resolved(name: str, x: Tensor, options: QuantizeOptions) -> tuple[object, ...]:
    validation.check_float(name, x)
    if x.dim() == 0:
        raise InvalidValue(
            f"Got {name} without dimensions.",
            "The last dimension is K.",
            f"Add one, e.g. {name}.reshape(1).",
        )
    validation.check_options(options, QuantizeOptions.__annotations__)
    return _checked(x, **options)


def _checked(
    x: Tensor,
    group: GroupShape = ROW,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    scale_rounding: str | None = None,
    scale_layout: str = "row",
) -> tuple[object, ...]:
    """Return the last seven arguments of an operator."""
    check_group(group)
    fp8_format(dtype)
    if group.rows > 1 or (group == TENSOR) != (scale is not None):
        given = "a static scale" if scale is not None else "no static scale"
        raise InvalidValue(
            f"Got {group} groups and {given}.",
            "Fused results are quantized within rows, or per tensor with a static scale.",
            "Use fp8kit.ROW, GROUP128 or MX, or TENSOR with scale=.",
        )
    if scale is not None:
        scale_validation.check_static_options(scale_ub, scale_rounding, scale_layout)
        scale_validation.check_static_scale(scale, x, group)
    scale_validation.check_scale_ub(scale_ub, x)
    rounding = validation.check_rounding(scale_rounding, group)
    validation.check_layout(scale_layout, group)
    floor = min_scale(group, dtype, "activation")
    return scale, (group.rows, group.cols), dtype, floor, scale_ub, rounding, scale_layout


def _check_norm(rounding: str, eps: float, weight_offset: float = 0.0) -> None:
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise InvalidType(
                f"Got {name} of type {type(value).__name__}.",
                "A norm adds numbers.",
                "For torch's default eps, None, pass torch.finfo(torch.float32).eps.",
            )
    if not (0 <= eps < math.inf and abs(weight_offset) < math.inf):
        raise InvalidValue(
            f"Got eps={eps} and weight_offset={weight_offset}.",
            "They are finite, and eps is not negative.",
            "Pass the numbers of the layer that is replaced.",
        )
    remedy = "Pass the word that matches the layer that is replaced."
    check_choice("rounding", rounding, ROUNDINGS, remedy)


def _check_modulation(pair: tuple[Tensor, Tensor], x: Tensor, dtype: torch.dtype | None) -> None:
    parts = pair if isinstance(pair, (tuple, list)) else ()
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or type(pair).__name__
        raise InvalidType(
            f"Got a modulation of {kinds}.",
            "A modulation is two tensors, scale and shift.",
            "Pass zeros for one that is missing.",
        )
    if x.dim() < 2:
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)} with a modulation.",
            "A modulation has one row per entry of the first dimension of x.",
            "Pass x of shape [B, ..., K].",
        )
    for name, part in zip(("scale", "shift"), parts, strict=True):
        validation.check_operand(
            f"{name} of the modulation", part, (x.shape[0], x.shape[-1]), x, dtype
        )
