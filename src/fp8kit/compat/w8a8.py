"""The quantizer and the scaled products of vLLM, with its shapes and argument names.

Sources: ``vllm/_custom_ops.py`` and ``vllm/model_executor/layers/quantization/utils/w8a8_utils.py``
of vLLM 0.7 to 0.12. ``fp8kit.scaled_mm`` chooses the kernel, whatever the function's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit import formats as fp8_formats
from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.blocks import block_product
from fp8kit.compat.capabilities import supports
from fp8kit.compat.shapes import (
    as_number,
    as_scale,
    as_vector,
    check_view,
    stored,
    with_scale,
    written,
)
from fp8kit.errors import InvalidValue
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR
from fp8kit.ops import validation

_DEVICE_IDENTITY: list[Tensor] = []


class GroupShape(NamedTuple):
    """Elements per scale as vLLM writes them: ``-1`` is the whole extent.

    Args:
        row: rows per scale.
        col: columns per scale.

    Example:
        >>> GroupShape.PER_TOKEN
        GroupShape(row=1, col=-1)
    """

    row: int
    col: int

    def is_per_tensor(self) -> bool:
        """Return whether there is one scale."""
        return self == (-1, -1)

    def is_per_token(self) -> bool:
        """Return whether each row has a scale."""
        return self == (1, -1)

    def is_per_channel(self) -> bool:
        """Return whether each column has a scale."""
        return self == (-1, 1)

    def is_per_group(self) -> bool:
        """Return whether a row has a scale for each group of its columns."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)  # type: ignore[attr-defined]
GroupShape.PER_TOKEN = GroupShape(1, -1)  # type: ignore[attr-defined]
GroupShape.PER_CHANNEL = GroupShape(-1, 1)  # type: ignore[attr-defined]


@names_wrong_argument
def scaled_fp8_quant(
    input: Tensor,
    scale: Tensor | float | None = None,
    num_token_padding: int | None = None,
    scale_ub: Tensor | float | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Tensor | None = None,
    group_shape: Sequence[int] | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to FP8 codes and a scale.

    Args:
        input: bf16, fp16 or fp32 ``[M, K]``, any strides.
        scale: one number in any shape, or one for each group, for static quantization; without it,
            the scale is dynamic.
        num_token_padding: the codes have at least this many rows; those beyond M are zero.
        scale_ub: bounds amax from above; ignored with ``scale``, as in vLLM.
        use_per_token_if_dynamic: one scale per row instead of one for the tensor.
        output: FP8 of the result's shape, into which the codes are written.
        group_shape: elements per static scale, ``(rows, columns)`` with -1 for the whole extent;
            needed if ``scale`` is a vector, or if groups do not divide the input evenly.
        output_dtype: of the codes, by default e4m3fn.

    Returns:
        codes ``[max(M, num_token_padding), K]`` and the scale: the one given, or fp32 ``(1,)`` for
        the tensor, or ``(rows of the codes, 1)``, which is 1 for rows beyond M.

    Raises:
        TypeError: if ``input`` is no float tensor.
        ValueError: if ``input`` is no matrix, the static scale has another number of elements or no
            ``group_shape`` that it needs, or ``output`` another shape or dtype than the codes.

    Example:
        >>> codes, scale = fp8kit.compat.scaled_fp8_quant(torch.randn(4, 64))
        >>> scale.shape
        torch.Size([1])
    """
    validation.check_tensor("input", input)
    if input.dim() != 2:
        raise InvalidValue(
            f"Got an input of shape {tuple(input.shape)}.",
            "It must be a matrix [M, K]: padding adds rows to it.",
            "Pass input.reshape(-1, input.shape[-1]), or use fp8kit.quantize.",
        )
    dtype = output_dtype or torch.float8_e4m3fn
    if scale is not None:
        used = as_scale(scale, input.device)
        given = scale.to(input.device) if isinstance(scale, Tensor) else used
        codes = _static(input, used, group_shape, dtype)
    else:
        bound = None if scale_ub is None else as_number(scale_ub, input.device)
        group = ROW if use_per_token_if_dynamic else TENSOR
        found = functional.quantize(input, group, dtype=dtype, scale_ub=bound)
        codes = found.data
        given = found.scale if use_per_token_if_dynamic else found.scale.reshape(1)
    missing = max(num_token_padding or 0, input.shape[0]) - input.shape[0]
    if missing:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, missing))
        codes = codes.view(dtype)
        if given.shape == (input.shape[0], 1) and scale is None and use_per_token_if_dynamic:
            given = torch.nn.functional.pad(given, (0, 0, 0, missing), value=1.0)
    return written(codes, output), given


def _static(
    x: Tensor, scale: Tensor, group_shape: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Return codes of a matrix with given scales."""
    if group_shape is None and scale.dim() == 2 and scale.numel() > 1:
        extents = list(zip(x.shape, scale.shape, strict=True))
        if any(extent % parts for extent, parts in extents):
            raise InvalidValue(
                f"Got a scale of shape {tuple(scale.shape)} for an input {tuple(x.shape)}.",
                "Without group_shape, groups divide rows and columns evenly.",
                "Pass group_shape=, such as (1, 128), where the last group is shorter.",
            )
        group_shape = [max(extent // parts, 1) for extent, parts in extents]
    rows, cols = (-1, -1) if group_shape is None else group_shape
    if rows == cols == -1:
        return functional.quantize(x, TENSOR, dtype=dtype, scale=as_number(scale, x.device)).data
    group = fp8_formats.GroupShape(max(x.shape[0], 1) if rows == -1 else rows, cols)
    wanted = fp8_formats.scale_shape(x.shape, group)
    if scale.numel() != math.prod(wanted):
        raise InvalidValue(
            f"Got a scale of shape {tuple(scale.shape)}.",
            f"x {tuple(x.shape)} in groups {tuple(group_shape or ())} has {wanted} scales.",
            "Pass one number for each group.",
        )
    if group == MX:
        # the core has E8M0 bytes as scales of 32 columns: for floats, each group becomes a row
        padded = torch.nn.functional.pad(x, (0, wanted[1] * cols - x.shape[1]))
        parts = _static(padded.reshape(-1, cols), scale.reshape(-1, 1), (1, -1), dtype)
        return parts.view(padded.shape)[:, : x.shape[1]].contiguous()
    return functional.quantize(x, group, dtype=dtype, scale=scale.reshape(wanted)).data


@names_wrong_argument
def cutlass_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply codes: ``scale_a * scale_b * (a @ b) + bias``.

    Args:
        a: FP8 ``[M, K]``.
        b: FP8 ``[K, N]``, as a rule the view ``weight.t()``.
        scale_a: one number or one per row of ``a``, in any shape and float dtype; or one per 1x128,
            ``[M, ceil(K / 128)]``.
        scale_b: one number or one per column of ``b``, likewise; or one per 128x128,
            ``[ceil(K / 128), ceil(N / 128)]``.
        out_dtype: bf16, fp16 or fp32.
        bias: ``[N]``, bf16, fp16 or fp32.

    Returns:
        ``[M, N]``.

    Raises:
        TypeError: if ``a`` or ``b`` is not FP8, or ``out_dtype`` is another dtype.
        ValueError: if shapes, devices or scales do not fit.
        UnsupportedError: if no backend computes it.

    Example:
        >>> y = fp8kit.compat.cutlass_scaled_mm(a, w.t(), one, one, torch.bfloat16)
    """
    check_view(b, a.shape[-1])
    weight = stored(b)
    bias = as_vector(bias, weight.shape[0])
    scale_a, scale_b = as_scale(scale_a, a.device), as_scale(scale_b, b.device)
    if _by_blocks(a, b, scale_a, scale_b):
        blocks = (weight, stored(scale_b))
        return block_product((a, scale_a), blocks, (BLOCK.rows, BLOCK.cols), out_dtype, bias)
    x_q, w_q = with_scale(a, scale_a), with_scale(weight, scale_b)
    return functional.scaled_mm(x_q, w_q, bias, out_dtype=out_dtype)


def _by_blocks(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    if scale_a.numel() in (1, a.shape[0]) and scale_b.numel() in (1, b.shape[1]):
        return False
    wanted = fp8_formats.scale_shape(a.shape, GROUP128), fp8_formats.scale_shape(b.shape, BLOCK)
    return (tuple(scale_a.shape), tuple(scale_b.shape)) == wanted


@names_wrong_argument
def cutlass_w8a8_scaled_mm(
    *,
    qinput: Tensor,
    weight: Tensor,
    out_dtype: torch.dtype,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    output_shape: Sequence[int],
    **kwargs: Any,
) -> Tensor:
    """Multiply codes with any of the four pairings of scales.

    Args:
        qinput: FP8 ``[M, K]``; rows beyond those of ``input_2d`` are padding, also of ``scale_a``.
        weight: FP8 ``[K, N]``, the view of what is stored.
        out_dtype: of the result.
        scale_a: of ``qinput``, per tensor or per token.
        scale_b: of ``weight``, per tensor or per channel.
        bias: ``[N]`` or ``None``.
        output_shape: of the result; its elements are those of ``[M, N]``.
        kwargs: ``input_2d``, the input before it was quantized; others are ignored, as in vLLM.

    Returns:
        a tensor of ``output_shape``.

    Raises:
        TypeError, ValueError, UnsupportedError: as ``cutlass_scaled_mm`` raises them.

    Example:
        >>> call = fp8kit.compat.dispatch_w8a8_scaled_mm(True, True, True)
        >>> y = call(qinput=a, weight=w.t(), out_dtype=torch.bfloat16, scale_a=one, scale_b=one,
        ...          bias=None, output_shape=[4, 8])
    """
    given = kwargs.get("input_2d")
    rows = qinput.shape[0] if given is None else given.shape[0]
    if scale_a.numel() == qinput.shape[0] > 1:
        scale_a = scale_a.reshape(-1)[:rows]
    y = cutlass_scaled_mm(qinput[:rows], weight, scale_a, scale_b, out_dtype, bias)
    return y.view(*output_shape)


def _product(name: str, pairing: str) -> Callable[..., Tensor]:
    """Return ``cutlass_w8a8_scaled_mm`` under another name of vLLM, there for one pairing."""

    def multiply(*, output_shape: Sequence[int], **operands: Any) -> Tensor:
        return cutlass_w8a8_scaled_mm(output_shape=output_shape, **operands)

    multiply.__name__ = multiply.__qualname__ = name
    multiply.__doc__ = f"Multiply as ``cutlass_w8a8_scaled_mm``, with its arguments: {pairing}."
    return multiply


rocm_per_tensor_w8a8_scaled_mm = _product("rocm_per_tensor_w8a8_scaled_mm", "one scale each")
torch_per_tensor_w8a8_scaled_mm = _product("torch_per_tensor_w8a8_scaled_mm", "one scale each")
torch_per_token_w8a8_scaled_mm = _product("torch_per_token_w8a8_scaled_mm", "per token and channel")
torch_channelwise_w8a8_scaled_mm = _product("torch_channelwise_w8a8_scaled_mm", "any pairing")
flashinfer_w8a8_scaled_mm = _product("flashinfer_w8a8_scaled_mm", "one scale each")


def dispatch_w8a8_scaled_mm(
    preferred_backend: str | bool | None = None,
    per_tensor_weights: bool = True,
    per_tensor_activations: bool = True,
    *,
    cutlass_fp8_supported: bool | None = None,
) -> Callable[..., Tensor]:
    """Return the product that goes with a pairing of scales.

    All of them take the keywords of ``cutlass_w8a8_scaled_mm``, and scales of any pairing.

    Args:
        preferred_backend: ``"cutlass"``, ``"flashinfer"``, ``"rocm"`` or ``"torch"``, or, as in
            vLLM before 0.11, whether CUTLASS runs.
        per_tensor_weights: the weight has one scale.
        per_tensor_activations: the input has one scale.
        cutlass_fp8_supported: the first argument under its older name.

    Raises:
        ValueError: for an unknown backend.

    Example:
        >>> fp8kit.compat.dispatch_w8a8_scaled_mm("torch", False, True).__name__
        'torch_channelwise_w8a8_scaled_mm'
    """
    given = preferred_backend if cutlass_fp8_supported is None else cutlass_fp8_supported
    if given is True or given == "cutlass":
        return cutlass_w8a8_scaled_mm
    if given not in (None, False, "torch", "flashinfer", "rocm"):
        raise InvalidValue(
            f"Got preferred_backend={given!r}.",
            "It must be 'cutlass', 'flashinfer', 'rocm' or 'torch'.",
            "Pass one of these words; which kernel runs, fp8kit.explain(layer) says.",
        )
    rocm = given == "rocm" or (not given and torch.version.hip is not None)
    if per_tensor_weights and per_tensor_activations:
        if given == "flashinfer":
            return flashinfer_w8a8_scaled_mm
        return rocm_per_tensor_w8a8_scaled_mm if rocm else torch_per_tensor_w8a8_scaled_mm
    if given == "flashinfer":
        return cutlass_w8a8_scaled_mm
    if not (per_tensor_weights or per_tensor_activations) and supports("torch_rowwise"):
        return torch_per_token_w8a8_scaled_mm
    return torch_channelwise_w8a8_scaled_mm


def maybe_create_device_identity() -> None:
    """Make ``TORCH_DEVICE_IDENTITY``, fp32 ``[1]`` of one, on the CPU; ported code may read it."""
    if not _DEVICE_IDENTITY:
        _DEVICE_IDENTITY.append(torch.ones(1, dtype=torch.float32))


def device_identity() -> Tensor | None:
    """Return ``TORCH_DEVICE_IDENTITY``: ``None`` until ``maybe_create_device_identity``."""
    return _DEVICE_IDENTITY[0] if _DEVICE_IDENTITY else None
