"""Norms and activations that write FP8, for layers whose input is quantized anyway.

Each function equals ``quantize`` of the unfused result, rounded to the dtype of its input, in one
pass over memory; ``fused/reference.py`` defines every rounding. Codes and scales have no
gradient.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from fp8kit.errors import check_choice
from fp8kit.formats import ROW, QTensor
from fp8kit.fused import operators
from fp8kit.fused.arguments import (
    QuantizeOptions,
    activation_arguments,
    layer_norm_arguments,
    rms_norm_arguments,
)
from fp8kit.ops.validation import check_float, check_operand, check_tensor


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
    return _qtensor(operators.RMS_NORM(*arguments), options)


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
    check_tensor("x", x)
    check_operand("residual", residual, tuple(x.shape), x, x.dtype)
    arguments = rms_norm_arguments(x, residual, weight, (eps, weight_offset, rounding), options)
    found = operators.RMS_NORM(*arguments)
    return _qtensor(found, options), found[-1]


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
        modulation: scale and shift, each ``[B, K]`` with any row stride, such as chunks of one
            projection; the dtype of ``x``, with ``"once"`` any of the three.
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
    return _qtensor(operators.LAYER_NORM(*arguments), options)


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


def _activation(kind: str, gate: Tensor, up: Tensor | None, options: QuantizeOptions) -> QTensor:
    arguments = activation_arguments(kind, gate, up, options)
    return _qtensor(operators.ACTIVATION(*arguments), options)


def _qtensor(found: list[Tensor], options: QuantizeOptions) -> QTensor:
    scale = options.get("scale")
    return QTensor(found[0], found[1] if scale is None else scale, options.get("group", ROW))


def _gelu(approximate: str) -> str:
    check_choice("approximate", approximate, ("none", "tanh"))
    return "gelu" if approximate == "none" else "gelu_tanh"
