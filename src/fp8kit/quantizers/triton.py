"""The quantizer in Triton, for NVIDIA GPUs with FP8 (sm89 and later); bit-equal to ``reference``.

This module chooses a kernel and allocates; the kernels are in ``triton_rows``, ``triton_groups``
and ``triton_tensor``. Shapes and strides are free: leading dimensions are folded into rows without
a copy wherever the strides allow it. The number of rows is never compiled in, while K is: it is a
constant of a model's layers, and lets the compiler drop masks and resolve loops.
"""

import functools
import math

import torch
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import FLOATS, MX, TENSOR, GroupShape, fp8_format
from fp8kit.quantizers import hopper_rows, reference
from fp8kit.quantizers.problem import QuantizeProblem, QuantizerBackend
from fp8kit.quantizers.scale_layout import empty_scale
from fp8kit.quantizers.triton_encode import ScaleRule, division_of, missing_gpu
from fp8kit.quantizers.triton_groups import group_tile, quantize_blocks, quantize_groups
from fp8kit.quantizers.triton_rows import quantize_rows, row_tile
from fp8kit.quantizers.triton_tensor import quantize_tensor, tensor_tile

E4M3_MAX = fp8_format(torch.float8_e4m3fn).max
_MAX_BLOCK = 32768  # elements per group that one program holds in registers


def supports(problem: QuantizeProblem) -> str | None:
    """Return the reason why the kernels do not cover a problem, ``None`` if they do."""
    if problem.in_dtype not in FLOATS:
        return f"{problem.in_dtype} input; the kernels read bfloat16, float16 and float32"
    return missing_gpu(problem.capability, (8, 9)) or _group_reason(problem.group)


def _group_reason(group: GroupShape) -> str | None:
    rows, cols = group.rows, group.cols
    if group == TENSOR or (rows == 1 and cols == -1):
        return None
    if cols == -1:
        return f"{group} groups: several whole rows per scale"
    if rows & (rows - 1) or cols & (cols - 1):
        return f"{group} groups: not powers of two"
    if rows * cols > _MAX_BLOCK:
        return f"{group} groups: more than {_MAX_BLOCK} elements"
    return None


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

    ``x`` is bf16, fp16 or fp32, of any shape and strides. Codes are written to ``data [M, K]``, if
    it is given; its rows may have gaps if a group is within one row. The padding of column-major
    scales is not initialised.
    """
    if x.numel() == 0:
        options = (group, dtype, min_scale, scale_ub, scale_rounding, scale_layout, data)
        return reference.quantize(x, *options)
    scale = empty_scale(x, group, scale_layout)
    data = torch.empty(x.shape, dtype=dtype, device=x.device) if data is None else data
    assert data.is_contiguous() or (group.rows == 1 and data.dim() == 2)
    division = division_of(group, min_scale, scale_ub, scale_rounding)
    rule = ScaleRule(min_scale, False, division, fp8_format(dtype).max)
    _launch(x, scale, scale_ub, data, group, rule)
    return data, scale


def quantize_static(x: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    """Quantize with given scales: ``cast(clamp(x / scale))``, NaN as one canonical code."""
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        division = "mx floor" if group == MX else "ieee"
        rule = ScaleRule(0.0, True, division, fp8_format(dtype).max)
        _launch(x, scale, None, data, group, rule)
    return data


def _launch(
    x: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    data: Tensor,
    group: GroupShape,
    rule: ScaleRule,
) -> None:
    raw = data.view(torch.uint8)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    codes, count = raw.reshape(m, k), _processors(x.device)
    with current(x.device):
        if group == TENSOR:
            cut = tensor_tile(x.numel(), x.element_size(), count)
            quantize_tensor(x.reshape(m, k), scale, scale_ub, raw, rule, cut)
        elif group.rows > 1:
            stack = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
            scales = scale.reshape(stack.shape[0], *scale.shape[-2:])
            quantize_blocks(stack, scales, scale_ub, raw, group.rows, group.cols, rule)
        elif group.cols == -1:
            rows, exact = x.reshape(m, k), rule.division == "corrected"
            scales = scale.reshape(m)
            if exact and rule.fp8_max == E4M3_MAX and hopper_rows.takes(rows, count):
                hopper_rows.quantize_rows(rows, scales, codes, rule.min_scale, count)
                return
            tile = row_tile(m, k, x.element_size(), count)
            tile = tile._replace(held=0) if rule.static else tile
            quantize_rows(rows, scales, scale_ub, codes, rule, tile)
        else:
            scales = scale.reshape(1, -1) if m == 1 else scale.flatten(0, -2)
            part = group_tile(m, k, group.cols, x.element_size(), scales.stride(0) == 1, count)
            quantize_groups(x.reshape(m, k), scales, scale_ub, codes, group.cols, rule, part)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the interpreter runs the tiles of the GPU that the choices were made for
    return torch.cuda.get_device_properties(device).multi_processor_count


BACKEND = QuantizerBackend(supports=supports, quantize=quantize, quantize_static=quantize_static)
