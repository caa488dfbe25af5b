"""Quantize and dequantize in plain torch, on any device: the specification of every backend.

    amax  = max |x| over the group, bounded from above by scale_ub
    scale = max(amax / fp8_max, min_scale), rounded as asked; NaN if amax is not finite
    codes = cast(clamp(x / scale, -fp8_max, fp8_max)), round to nearest even

All arithmetic is IEEE ``float32`` with true division, so a kernel that divides agrees bit for bit.
NaN and infinities (unless a static scale or ``scale_ub`` saturates them) make their group NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.formats import MX, TENSOR, Fp8Format, GroupShape, fp8_format, scale_shape
from fp8kit.quantizers.problem import QuantizerBackend
from fp8kit.quantizers.scale_layout import laid_out

_MANTISSA_MASK = 0x7FFFFF
_EXPONENT_MASK = 0x7F800000
_E8M0_NAN = 255


def quantize(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
    data: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize with scales taken from the data; see ``functional.quantize`` for the arguments.

    Codes are written to ``data``, if it is given.
    """
    fmt = fp8_format(dtype)
    amax = _group_amax(x.float(), group)
    scale = scales(amax, group, fmt, min_scale, scale_ub, scale_rounding)
    codes = quantize_static(x, scale, group, dtype)
    return codes if data is None else data.copy_(codes), laid_out(scale, scale_layout)


def scales(
    amax: Tensor,
    group: GroupShape,
    fmt: Fp8Format,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
) -> Tensor:
    """Return the scales of groups with these ``float32`` maxima; arguments as in ``quantize``."""
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub)
    if group == MX:
        return _mx_exponents(amax, fmt, scale_rounding)
    return _float_scales(amax, fmt, min_scale, scale_rounding)


def quantize_static(x: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    """Quantize with given scales: ``cast(clamp(x / scale))``, NaN as one canonical code."""
    fmt = fp8_format(dtype)
    ratio = x.float() / expand_scale(scale, tuple(x.shape), group)
    codes = ratio.clamp(-fmt.max, fmt.max).to(dtype).contiguous()
    return codes.view(torch.uint8).masked_fill_(ratio.isnan(), fmt.nan_code).view(dtype)


def dequantize(data: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    """Multiply codes by their scales in ``float32`` and round once to ``dtype``."""
    value = data.float() * expand_scale(scale, tuple(data.shape), group)
    return value.to(dtype).contiguous()


def expand_scale(scale: Tensor, shape: tuple[int, ...], group: GroupShape) -> Tensor:
    """Return ``float32`` scales that broadcast against a tensor of ``shape``.

    ``scale`` is ``float32`` or E8M0 bytes, of shape ``scale_shape(shape, group)``, or per tensor of
    ``stack_scale_shape``. The result is broadcastable along whole rows, else expanded to ``shape``.
    """
    scale = multipliers(scale, group)
    if group == TENSOR:
        stacked = scale.dim() == len(shape) > 2  # one for each matrix
        return scale if stacked else scale.reshape([1] * max(len(shape), 1))
    if group.rows > 1:
        scale = scale.repeat_interleave(group.rows, -2)[..., : shape[-2], :]
    if group.cols != -1:
        scale = scale.repeat_interleave(group.cols, -1)[..., : shape[-1]]
    return scale


def multipliers(scale: Tensor, group: GroupShape) -> Tensor:
    """Return scales as ``float32`` numbers of the same shape; only MX scales need a conversion."""
    if group != MX:
        return scale
    # 2^(byte - 127) built from bits: torch has no arithmetic on E8M0, and byte 0 is subnormal
    bits = scale.int() << 23
    value = torch.where(scale == 0, 0x400000, bits).view(torch.float32)
    return torch.where(scale == _E8M0_NAN, torch.nan, value)


def _group_amax(x: Tensor, group: GroupShape) -> Tensor:
    shape = scale_shape(x.shape, group)
    if x.numel() == 0:
        return x.new_zeros(shape)
    if group == TENSOR:
        return x.abs().amax().reshape(1, 1)
    if group.cols == -1 and group.rows == 1:
        return x.abs().amax(-1, keepdim=True)
    cols = group.cols if group.cols != -1 else x.shape[-1]
    right = -x.shape[-1] % cols
    below = -x.shape[-2] % group.rows if group.rows > 1 else 0
    padded = F.pad(x, (0, right, 0, below) if below else (0, right)).abs()
    if group.rows == 1:
        return padded.reshape(*shape, cols).amax(-1)
    return padded.reshape(*shape[:-1], group.rows, shape[-1], cols).amax((-3, -1))


def _float_scales(amax: Tensor, fmt: Fp8Format, floor: float, rounding: str) -> Tensor:
    scale = _divided(amax, fmt.max).clamp(min=floor)
    if rounding == "up":
        bits = scale.view(torch.int32)
        scale = ((bits + _MANTISSA_MASK) & _EXPONENT_MASK).view(torch.float32)
    return torch.where(amax.isfinite(), scale, torch.nan)


def _mx_exponents(amax: Tensor, fmt: Fp8Format, rounding: str) -> Tensor:
    if rounding == "floor":
        # the biased exponent field is floor(log2(amax)) + 127; subnormal amax clamps to 0 anyway
        exponent = ((amax.view(torch.int32) >> 23) - fmt.max_exponent).clamp(min=0)
    else:
        ratio = _divided(amax, fmt.max)
        ceil = (ratio.view(torch.int32) + _MANTISSA_MASK) >> 23
        exponent = torch.where(ratio <= 2.0**-127, 0, ceil)
    return torch.where(amax.isfinite(), exponent, _E8M0_NAN).to(torch.uint8)


def _divided(amax: Tensor, divisor: float) -> Tensor:
    # a Python number would become a multiplication by its rounded reciprocal on CUDA
    return amax / torch.full_like(amax, divisor)


BACKEND = QuantizerBackend(quantize=quantize, quantize_static=quantize_static)
