"""Weights fused from shards, and codes for MI300, under the names of vLLM.

Source: ``vllm/model_executor/layers/quantization/utils/w8a8_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.shapes import as_scale, check_scale
from fp8kit.errors import InvalidType, InvalidValue
from fp8kit.formats import TENSOR, QTensor
from fp8kit.modules.weight_parts import join_scales, recode, requantize


@names_wrong_argument
def convert_to_channelwise(weight_scale: Tensor, logical_widths: Sequence[int]) -> Tensor:
    """Repeat the scale of each shard of a fused weight for each of its channels.

    Args:
        weight_scale: one number per shard, in any shape and float dtype.
        logical_widths: rows of each shard.

    Returns:
        fp32 ``[sum(logical_widths), 1]``.

    Raises:
        ValueError: if there are not as many scales as widths, or one is not positive.

    Example:
        >>> fp8kit.compat.convert_to_channelwise(torch.tensor([0.5, 2.0]), [2, 1]).flatten()
        tensor([0.5000, 0.5000, 2.0000])
    """
    rows = sum(logical_widths)
    codes = torch.empty(rows, 1, dtype=torch.float8_e4m3fn, device=weight_scale.device)
    return join_scales(codes, as_scale(weight_scale, codes.device), list(logical_widths)).scale


@names_wrong_argument
def requantize_with_max_scale(
    weight: Tensor, weight_scale: Tensor, logical_widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Bring all shards of a fused weight to their largest scale.

    A weight whose last scale is still the sentinel ``finfo(float8_e4m3fn).min`` was fused before it
    was quantized, and stays as it is.

    Args:
        weight: FP8 ``[N, K]``; written in place, as in vLLM.
        weight_scale: one number per shard, in any shape and float dtype.
        logical_widths: rows of each shard.

    Returns:
        the largest scale, fp32 without a dimension, and ``weight``.

    Raises:
        ValueError: if scales or widths do not fit.

    Example:
        >>> scale, w = fp8kit.compat.requantize_with_max_scale(w, torch.tensor([0.5, 2.0]), [4, 2])
    """
    q = requantize(weight, as_scale(weight_scale, weight_scale.device), list(logical_widths))
    if q.data is not weight:
        weight.copy_(q.data)
    return q.scale.reshape(()), weight


@names_wrong_argument
def normalize_e4m3fn_to_e4m3fnuz(
    weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Read e4m3fn codes as e4m3fnuz: the same bytes, but 0x80 becomes 0, and twice the scales.

    Args:
        weight: e4m3fn, any shape; not changed.
        weight_scale: any shape.
        input_scale: any shape, or ``None``.

    Returns:
        e4m3fnuz codes, and the scales doubled.

    Raises:
        TypeError: if ``weight`` is not e4m3fn, or ``weight_scale`` no float tensor.

    Example:
        >>> codes, scale, _ = fp8kit.compat.normalize_e4m3fn_to_e4m3fnuz(w, torch.ones(1))
        >>> codes.dtype, scale
        (torch.float8_e4m3fnuz, tensor([2.]))
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise InvalidType(
            f"Got codes of {weight.dtype}.",
            "They must be float8_e4m3fn; they become float8_e4m3fnuz.",
            "Leave codes of e4m3fnuz as they are.",
        )
    check_scale(weight_scale)
    one = torch.ones(1, 1, device=weight.device)
    codes = recode(QTensor(weight.detach(), one, TENSOR), torch.float8_e4m3fnuz).data
    return codes, weight_scale * 2.0, None if input_scale is None else input_scale * 2.0


@names_wrong_argument
def per_tensor_dequantize(tensor: Tensor, inv_scale: float | Tensor) -> Tensor:
    """Decode codes with a scale.

    Args:
        tensor: FP8, any shape.
        inv_scale: the multiplier: a number, or a tensor that broadcasts.

    Returns:
        fp16, or what torch promotes fp16 and ``inv_scale`` to, as in vLLM.

    Example:
        >>> fp8kit.compat.per_tensor_dequantize(torch.ones(2).to(torch.float8_e4m3fn), 0.5)
        tensor([0.5000, 0.5000], dtype=torch.float16)
    """
    check_scale(inv_scale)
    return tensor.to(torch.float16) * inv_scale


@names_wrong_argument
def all_close_1d(x: Tensor) -> bool:
    """Return whether all elements of a vector are close to the first.

    Args:
        x: float ``[n]``.

    Raises:
        ValueError: if ``x`` is no vector.

    Example:
        >>> fp8kit.compat.all_close_1d(torch.tensor([1.0, 1.0]))
        True
    """
    if x.dim() != 1:
        raise InvalidValue(
            f"Got a tensor of shape {tuple(x.shape)}.",
            "Scales of shards are compared as one vector.",
            "Pass x.flatten().",
        )
    return torch.allclose(x, x[:1].expand_as(x)) if x.numel() else True
