"""Quantization in plain torch, for graphs whose compiler fuses it with what comes before it.

An operator is opaque to ``torch.compile``; these few tensor operations are not, so Inductor writes
codes from the kernel that computes the norm or activation. The bits are those of ``reference`` for
the same input, although a GPU compiler divides approximately: quotients are taken in fp64 and
rounded once. With 24-bit operands a quotient is at least 2^-49 away, relatively, from the middle of
two fp32 numbers, and a product with the fp64 reciprocal is within 2^-52 of it, so that both round
alike. What Inductor fuses it does not round in between: its input may be more exact than eager's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit import settings
from fp8kit.formats import TENSOR, GroupShape, scale_dtype

# the first compute capability whose conversion to FP8 Triton has
_CONVERTING = (8, 9)
_MANTISSA_MASK = 0x7FFFFF
_EXPONENT_MASK = 0x7F800000


def is_compiled() -> bool:
    """Say whether ``torch.compile`` is tracing; ``torch.export`` wants operators instead."""
    # what is_exporting() returns; torch 2.11 folds that call to True in every trace
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_dynamo_compiling() and not exporting


def is_visible(group: GroupShape, dtype: torch.dtype, static: bool, device: torch.device) -> bool:
    """Say whether the graph that is being traced shall show how its inputs are quantized.

    It does under ``torch.compile``, for fp32 scales of one row or a static one, on a CPU or a GPU
    that converts to FP8. ``FP8KIT_COMPILED_QUANTIZER=opaque`` and ``torch.export`` keep operators.

    Args:
        group: elements per scale.
        dtype: dtype of the codes.
        static: the scale is given.
        device: where the input is.
    """
    if not is_compiled() or settings.COMPILED_QUANTIZER != "visible":
        return False
    plain = group == TENSOR if static else group.rows == 1
    if not plain or scale_dtype(group) != torch.float32 or dtype == torch.float8_e4m3fnuz:
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type == "cpu"
    gpu = torch.cuda.get_device_properties(device)  # Dynamo folds it, unlike the capability
    return (gpu.major, gpu.minor) >= _CONVERTING


def quantize(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """Quantize rows or groups within rows, with fp32 scales taken from the data.

    Args:
        x: bf16, fp16 or fp32 ``[M, K]`` with ``K > 0``; ``M`` may be symbolic.
        group: one row per group.
        dtype: dtype of the codes.
        min_scale: floor of the scales.
        scale_ub: fp32 scalar bound of amax, or ``None``.
        scale_rounding: ``"exact"`` or ``"up"``.
        scale_layout: ``"row"``, or ``"column"``: columns are ``M`` apart, because padding would be
            another kernel; where ``M`` is no multiple of four the product pads.

    Returns:
        Codes ``[M, K]`` and scales ``scale_shape(x.shape, group)``.
    """
    largest, k = _largest(dtype), x.shape[-1]
    cols = k if group.cols == -1 else group.cols
    wide = x.float()
    if k % cols:
        wide = F.pad(wide, (0, -k % cols))
    wide = wide.unflatten(-1, (-1, cols))
    amax = wide.abs().amax(-1)
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub)
    scale = (amax.double() / largest).float().clamp(min=min_scale)
    if scale_rounding == "up":
        bits = scale.view(torch.int32)
        scale = ((bits + _MANTISSA_MASK) & _EXPONENT_MASK).view(torch.float32)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    ratio = _divided(wide, scale.unsqueeze(-1)).flatten(-2)
    scale = scale.t().contiguous().t() if scale_layout == "column" else scale
    return _cast(ratio[..., :k] if k % cols else ratio, dtype), scale


def quantize_static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize with one given scale.

    Args:
        x: bf16, fp16 or fp32, any shape.
        scale: fp32 ``[1, 1]``.
        dtype: dtype of the codes.

    Returns:
        Codes of the shape of ``x``.
    """
    return _cast(_divided(x.float(), scale.reshape(())), dtype)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    return (x.double() * scale.double().reciprocal()).float()


def _cast(ratio: Tensor, dtype: torch.dtype) -> Tensor:
    largest = _largest(dtype)
    # one NaN for all: the sign of NaN differs between devices, and would become a bit of the code
    return torch.where(ratio.isnan(), torch.nan, ratio.clamp(-largest, largest)).to(dtype)


def _largest(dtype: torch.dtype) -> float:
    # an attribute of a dataclass would be traced as a variable, and handed to every kernel
    return torch.finfo(dtype).max
