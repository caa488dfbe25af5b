"""Norms and activations that end in FP8, for layers whose input is quantized anyway.

Each function equals ``quantize`` of the unfused result, rounded to the dtype of its input, in one
pass over memory; ``quantizers/fused_reference.py`` defines every rounding. Codes and scales have no
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fp8kit import fused_ops
from fp8kit.errors import teach
from fp8kit.formats import ROW, TENSOR, GroupShape, QTensor, check_group, fp8_format, min_scale
from fp8kit.quantizers.fused_problem import ROUNDINGS
from fp8kit.validation import (
    check_float,
    check_layout,
    check_operand,
    check_options,
    check_rounding,
    check_scale_ub,
    check_static_scale,
)


class QuantizeOptions(TypedDict, total=False):
    """The keywords that say how a result is quantized, those of ``fp8kit.quantize``.

    ``group``: elements per scale, by default ``ROW``; one row at most, or ``TENSOR`` with a scale.
    ``dtype``: dtype of the codes, by default ``float8_e4m3fn``.
    ``scale``: static ``float32 [1, 1]``, only and always with ``TENSOR``.
    ``scale_ub``: ``float32`` scalar tensor that bounds amax from above before the division.
    ``scale_rounding``: ``"exact"`` or ``"up"``; for ``MX`` ``"floor"`` or ``"up"``.
    ``scale_layout``: ``"row"``, or ``"column"`` for groups along a row.
    """

    group: GroupShape
    dtype: torch.dtype
    scale: Tensor | None
    scale_ub: Tensor | None
    scale_rounding: str | None
    scale_layout: str


@dataclass(frozen=True, slots=True)
class _Options:
    group: GroupShape = ROW
    dtype: torch.dtype = torch.float8_e4m3fn
    scale: Tensor | None = None
    scale_ub: Tensor | None = None
    scale_rounding: str | None = None
    scale_layout: str = "row"

    def checked(self, x: Tensor) -> tuple[object, ...]:
        """Give the last seven arguments of an operator."""
        check_group(self.group)
        fp8_format(self.dtype)
        group, scale = self.group, self.scale
        if group.rows > 1 or (group == TENSOR) != (scale is not None):
            given = "a static scale" if scale is not None else "no static scale"
            raise ValueError(
                teach(
                    f"Got {group} groups and {given}.",
                    "Fused results are quantized within rows, or per tensor with a static scale.",
                    "Use fp8kit.ROW, GROUP128 or MX, or TENSOR with scale=.",
                )
            )
        if scale is not None:
            derived = self.scale_ub is not None or self.scale_rounding is not None
            if derived or self.scale_layout != "row":
                raise ValueError(
                    teach(
                        "Got a static scale with scale_ub, scale_rounding or scale_layout.",
                        "These shape scales that are taken from the data.",
                        "Leave them out, or leave out scale.",
                    )
                )
            check_static_scale(scale, x, group)
        check_scale_ub(self.scale_ub, x)
        rounding = check_rounding(self.scale_rounding, group)
        check_layout(self.scale_layout, group)
        floor = min_scale(group, self.dtype, "activation")
        rest = (floor, self.scale_ub, rounding, self.scale_layout)
        return scale, (group.rows, group.cols), self.dtype, *rest


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "stepwise",
    **options: Unpack[QuantizeOptions],
) -> QTensor:
    """Quantize the RMS norm of ``x``.

    Statistics are fp32. ``"stepwise"`` rounds the normed row to the dtype of ``x`` and multiplies
    it by the weight in that dtype (Llama, Qwen, Mistral); ``"once"`` stays in fp32 to the end, with
    ``weight_offset=1.0`` as in Gemma.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides.
        weight: ``[K]``, the dtype of ``x``; with ``"once"`` any of the three.
        eps: added to the mean square.
        weight_offset: added to the weight: 1 where checkpoints store ``w - 1``.
        rounding: ``"stepwise"`` or ``"once"``.
        **options: ``group``, ``dtype``, ``scale`` and others, see ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``x``.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> x, weight = torch.randn(4, 256), torch.ones(256)
        >>> rms_norm_quantize(x, weight, group=fp8kit.GROUP128).scale.shape
        torch.Size([4, 2])
    """
    arguments = rms_norm_arguments(x, None, weight, (eps, weight_offset, rounding), options)
    return _paired(fused_ops.RMS_NORM(*arguments), options)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    rounding: str = "stepwise",
    **options: Unpack[QuantizeOptions],
) -> tuple[QTensor, Tensor]:
    """Add ``x`` to the residual, round the sum, and quantize its RMS norm.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides.
        residual: shape and dtype of ``x``, any strides.
        weight: ``[K]``, the dtype of ``x``; with ``"once"`` any of the three.
        eps: added to the mean square.
        weight_offset: added to the weight.
        rounding: ``"stepwise"`` or ``"once"``, see ``rms_norm_quantize``.
        **options: as in ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``x``, and the new residual ``x + residual``, in the
        dtype of ``x``, contiguous.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> x, weight = torch.randn(4, 256), torch.ones(256)
        >>> q, residual = add_rms_norm_quantize(x, x, weight)
        >>> torch.equal(residual, x + x)
        True
    """
    check_operand("residual", residual, tuple(x.shape), x, x.dtype)
    arguments = rms_norm_arguments(x, residual, weight, (eps, weight_offset, rounding), options)
    found = fused_ops.RMS_NORM(*arguments)
    return _paired(found, options), found[-1]


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    modulation: tuple[Tensor, Tensor] | None = None,
    rounding: str = "stepwise",
    **options: Unpack[QuantizeOptions],
) -> QTensor:
    """Quantize the layer norm of ``x``, with an adaptive scale and shift if given.

    The norm itself is fp32 and rounded once. ``modulation`` makes it ``norm * (1 + scale) + shift``
    (DiT): ``"stepwise"`` rounds after each of these operations as eager torch does with 16-bit
    operands, ``"once"`` stays in fp32 to the end.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides; ``[B, ..., K]`` with a modulation.
        weight: ``[K]``, a float dtype, or ``None``.
        bias: ``[K]``, a float dtype, or ``None``.
        eps: added to the variance.
        modulation: scale and shift, each ``[B, K]`` in any row stride, so that chunks of one
            projection do; the dtype of ``x``, with ``"once"`` any of the three.
        rounding: ``"stepwise"`` or ``"once"``.
        **options: as in ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``x``.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> scale, shift = torch.randn(2, 512).chunk(2, dim=1)
        >>> layer_norm_quantize(torch.randn(2, 9, 256), modulation=(scale, shift)).scale.shape
        torch.Size([2, 9, 1])
    """
    arguments = layer_norm_arguments(x, weight, bias, modulation, (eps, rounding), options)
    return _paired(fused_ops.LAYER_NORM(*arguments), options)


def silu_mul_quantize(
    gate: Tensor, up: Tensor | None = None, **options: Unpack[QuantizeOptions]
) -> QTensor:
    """Quantize ``silu(gate) * up``, rounding after each of the two (Llama's MLP).

    Args:
        gate: bf16, fp16 or fp32 ``[..., K]``, any strides.
        up: shape and dtype of ``gate``, any strides: both may be halves of one ``[..., 2 K]``;
            ``None`` leaves the product out.
        **options: as in ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``gate``.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> gate, up = torch.randn(4, 512).chunk(2, dim=1)
        >>> silu_mul_quantize(gate, up).data.shape
        torch.Size([4, 256])
    """
    return _activation("silu", gate, up, options)


def gelu_quantize(
    x: Tensor, approximate: str = "none", **options: Unpack[QuantizeOptions]
) -> QTensor:
    """Quantize ``gelu(x)``.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides.
        approximate: ``"none"`` (erf) or ``"tanh"``, as in ``torch.nn.functional.gelu``.
        **options: as in ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``x``.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> gelu_quantize(torch.randn(4, 256), "tanh").data.dtype
        torch.float8_e4m3fn
    """
    return _activation(_gelu(approximate), x, None, options)


def gelu_mul_quantize(
    gate: Tensor, up: Tensor, approximate: str = "tanh", **options: Unpack[QuantizeOptions]
) -> QTensor:
    """Quantize ``gelu(gate) * up``, rounding after each of the two (Gemma's MLP).

    Args:
        gate: bf16, fp16 or fp32 ``[..., K]``, any strides.
        up: shape and dtype of ``gate``, any strides: both may be halves of one ``[..., 2 K]``.
        approximate: ``"tanh"`` or ``"none"`` (erf).
        **options: as in ``QuantizeOptions``.

    Returns:
        ``QTensor`` with codes of the shape of ``gate``.

    Raises:
        TypeError: if a tensor or dtype is of the wrong kind, or an option is unknown.
        ValueError: for shapes, devices or options that do not fit.

    Example:
        >>> gate, up = torch.randn(4, 512).chunk(2, dim=1)
        >>> gelu_mul_quantize(gate, up).data.shape
        torch.Size([4, 256])
    """
    check_float("up", up)
    return _activation(_gelu(approximate), gate, up, options)


def rms_norm_arguments(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    settings: tuple[float, float, str],
    options: QuantizeOptions,
) -> tuple[Any, ...]:
    """Check what ``rms_norm_quantize`` takes, and give the arguments of its operator.

    Args:
        x: ``[..., K]``.
        residual: checked already, or ``None``.
        weight: ``[K]``.
        settings: ``(eps, weight_offset, rounding)``.
        options: how the result is quantized.
    """
    target, rounding = _resolved("x", x, options), settings[2]
    _check_norm(rounding, *settings[:2])
    check_operand("weight", weight, (x.shape[-1],), x, x.dtype if rounding == "stepwise" else None)
    return (x, residual, weight, *settings, *target)


def layer_norm_arguments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, Tensor] | None,
    settings: tuple[float, str],
    options: QuantizeOptions,
) -> tuple[Any, ...]:
    """Check what ``layer_norm_quantize`` takes, and give the arguments of its operator.

    Args:
        x: ``[..., K]``.
        weight: ``[K]`` or ``None``.
        bias: ``[K]`` or ``None``.
        modulation: scale and shift, or ``None``.
        settings: ``(eps, rounding)``.
        options: how the result is quantized.
    """
    (eps, rounding), target = settings, _resolved("x", x, options)
    _check_norm(rounding, eps)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_operand(name, vector, (x.shape[-1],), x, None)
    if modulation is not None:
        _check_modulation(modulation, x, x.dtype if rounding == "stepwise" else None)
    return (x, weight, bias, *(modulation or (None, None)), *settings, *target)


def activation_arguments(
    kind: str, gate: Tensor, up: Tensor | None, options: QuantizeOptions
) -> tuple[Any, ...]:
    """Check what an activation takes, and give the arguments of its operator.

    Args:
        kind: one of ``fused_problem.ACTIVATIONS``.
        gate: ``[..., K]``.
        up: like ``gate``, or ``None``.
        options: how the result is quantized.
    """
    target = _resolved("x" if up is None else "gate", gate, options)
    if up is not None:
        check_operand("up", up, tuple(gate.shape), gate, gate.dtype)
    return (gate, up, kind, *target)


def _activation(kind: str, gate: Tensor, up: Tensor | None, options: QuantizeOptions) -> QTensor:
    arguments = activation_arguments(kind, gate, up, options)
    return _paired(fused_ops.ACTIVATION(*arguments), options)


def _paired(found: list[Tensor], options: QuantizeOptions) -> QTensor:
    scale = options.get("scale")
    return QTensor(found[0], found[1] if scale is None else scale, options.get("group", ROW))


def _resolved(name: str, x: Tensor, options: QuantizeOptions) -> tuple[object, ...]:
    check_float(name, x)
    if x.dim() == 0:
        raise ValueError(
            teach(
                f"Got {name} without dimensions.",
                "The last dimension is K.",
                f"Add one, e.g. {name}.reshape(1).",
            )
        )
    check_options(options, QuantizeOptions.__annotations__)
    return _Options(**options).checked(x)


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(
            teach(
                f"Got approximate={approximate!r}.",
                "GELU is 'none' (erf) or 'tanh'.",
                "Pass one of these words.",
            )
        )
    return "gelu" if approximate == "none" else "gelu_tanh"


def _check_norm(rounding: str, eps: float, weight_offset: float = 0.0) -> None:
    for name, value in (("eps", eps), ("weight_offset", weight_offset)):
        if not isinstance(value, (int, float)):
            raise TypeError(
                teach(
                    f"Got {name} of type {type(value).__name__}.",
                    "A norm adds numbers.",
                    "For torch's default eps, None, pass torch.finfo(torch.float32).eps.",
                )
            )
    if rounding not in ROUNDINGS:
        raise ValueError(
            teach(
                f"Got rounding={rounding!r}.",
                "Results are rounded 'stepwise' or 'once'.",
                "Pass the word that matches the layer that is replaced.",
            )
        )


def _check_modulation(pair: tuple[Tensor, Tensor], x: Tensor, dtype: torch.dtype | None) -> None:
    parts = pair if isinstance(pair, (tuple, list)) else ()
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or type(pair).__name__
        raise TypeError(
            teach(
                f"Got a modulation of {kinds}.",
                "A modulation is two tensors, scale and shift.",
                "Pass zeros for one that is missing.",
            )
        )
    if x.dim() < 2:
        raise ValueError(
            teach(
                f"Got x of shape {tuple(x.shape)} with a modulation.",
                "A modulation has one row per entry of the first dimension of x.",
                "Pass x of shape [B, ..., K].",
            )
        )
    for name, part in zip(("scale", "shift"), parts, strict=True):
        check_operand(f"{name} of the modulation", part, (x.shape[0], x.shape[-1]), x, dtype)
