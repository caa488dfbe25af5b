"""Decode the codes and use the machine's own dense matmul: the fast path of a CPU.

Where all scales factor out of the K sum (one per row or per tensor), the codes themselves are
multiplied, exactly representable in ``bfloat16``, and the scales are applied to the result, which
rounds once less than scaling the operands. Otherwise the scaled operands are rounded to the compute
dtype first. The compute dtype is ``bfloat16`` for ``bfloat16`` results, else ``float32``. A CPU
without ``bfloat16`` products, which needs up to five times as long to emulate them, computes in
``float32``, too, except for one row of codes: it takes only as long as reading the weight.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fp8kit.formats import ROW, TENSOR, GroupShape, fp8_format
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.quantizers import reference as quantizer

_FACTORS_OUT = (ROW, TENSOR)


def supports(problem: MatmulProblem) -> str | None:
    """Decline only what a library matmul cannot promise."""
    if problem.batch_invariant:
        return "a library matmul may change its K order with M"
    return None


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``; ``x_scale`` is ``None`` if ``x`` is not quantized."""
    x, x_scale, w, w_scale, bias = operands
    x_group, w_group = problem.x_group, problem.w_group
    out_dtype = problem.out_dtype
    codes_alone = x_group in _FACTORS_OUT and w_group in _FACTORS_OUT
    narrow = multiplies_bf16(x.device.type) or (x.shape[0] == 1 and codes_alone)
    compute = torch.bfloat16 if narrow and out_dtype == torch.bfloat16 else torch.float32
    scales = []
    if x_scale is None or x_group is None:
        left = x.to(compute)
    elif x_group in _FACTORS_OUT:
        left = decode(x, compute)
        scales.append(x_scale)
    else:
        left = scaled(x, x_scale, x_group, compute)
    if w_group in _FACTORS_OUT:
        right = decode(w, compute)
        scales.append(w_scale.t())
    else:
        right = scaled(w, w_scale, w_group, compute)
    y = left @ right.t()
    if scales:
        y = y * functools.reduce(torch.mul, scales)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert FP8 codes to ``dtype`` exactly, without scales.

    On a CPU a 256-entry table is two to three times faster than torch's own cast.
    """
    if codes.device.type != "cpu":
        return codes.to(dtype)
    index = codes.contiguous().view(torch.uint8).flatten().int()
    return _table(codes.dtype, dtype).index_select(0, index).view(codes.shape)


def scaled(codes: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    """Dequantize a matrix with scales along its rows, with the bits of the reference.

    On a CPU the codes are looked up, and scales are not expanded to the whole matrix.
    """
    if codes.device.type != "cpu" or codes.shape[0] % group.rows:
        return quantizer.dequantize(codes, scale, group, dtype)
    rows = quantizer.multipliers(scale, group).repeat_interleave(group.cols, -1)
    wide = decode(codes, torch.float32)
    wide.view(-1, group.rows, codes.shape[1]).mul_(rows[:, None, : codes.shape[1]])
    return wide.to(dtype)


@functools.cache
def multiplies_bf16(device_type: str) -> bool:
    """Return whether a device has ``bfloat16`` products of its own, not emulated ones."""
    if device_type != "cpu":
        return True
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _table(codes: torch.dtype, dtype: torch.dtype) -> Tensor:
    fp8_format(codes)  # an exported graph casts its codes as any parameter
    return torch.arange(256, dtype=torch.uint8).view(codes).to(dtype)


BACKEND = MatmulBackend(supports=supports, run=run)
