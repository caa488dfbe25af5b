"""Fused norms and activations in Triton, for NVIDIA GPUs with FP8 (sm89 and later).

Given the result before it is quantized, codes and scales equal ``reference`` bit for bit. That
result can differ in the last place of its dtype: see ``triton_norms`` and ``triton_activations``.
"""

import math

import torch
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import ROW, TENSOR, GroupShape
from fp8kit.fused import reference
from fp8kit.fused.problem import ACTIVATIONS, CodesFormat, FusedBackend, FusedProblem
from fp8kit.fused.triton_activations import MOST_TILES as MOST_ACTIVATION_TILES
from fp8kit.fused.triton_activations import quantize_activation
from fp8kit.fused.triton_norms import MOST_TILES as MOST_NORM_TILES
from fp8kit.fused.triton_norms import NormOperands, NormSettings, quantize_norm
from fp8kit.fused.triton_output import TILE_BYTES, Output
from fp8kit.fused.triton_plain_norm import norm_rows
from fp8kit.fused.triton_rotary import rotate
from fp8kit.quantizers.triton_encode import missing_gpu

_LARGEST_GROUP = 256


def supports(problem: FusedProblem) -> str | None:
    """Return the reason why the kernels do not cover a problem, ``None`` if they do."""
    if problem.in_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{problem.in_dtype} input; the kernels read bfloat16, float16 and float32"
    least = (8, 0) if problem.group is None else (8, 9)  # bf16 arithmetic, or FP8 conversion
    if missing := missing_gpu(problem.capability, least):
        return missing
    size, norm = problem.k * problem.in_dtype.itemsize, problem.producer not in ACTIVATIONS
    most = TILE_BYTES * (MOST_NORM_TILES if norm else MOST_ACTIVATION_TILES)
    if (norm or problem.group == ROW) and size > most:
        return f"K = {problem.k}: a row of {size} bytes, registers hold {most}"
    return None if problem.group is None else _group_reason(problem.group, problem.static)


def _group_reason(group: GroupShape, static: bool) -> str | None:
    if group == TENSOR:
        return None if static else "a dynamic scale per tensor needs all rows before the first code"
    if static or group.rows != 1:
        return f"{'static ' if static else ''}{group} groups: not within one row, from its data"
    if group.cols != -1 and (group.cols & (group.cols - 1) or group.cols > _LARGEST_GROUP):
        return f"{group} groups: not a power of two up to {_LARGEST_GROUP}"
    return None


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    rounding: str,
    how: CodesFormat,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize the RMS norm of ``x`` or ``x + residual``; arguments as in ``reference``."""
    if x.numel() == 0:
        return reference.rms_norm(x, residual, weight, eps, weight_offset, rounding, how)
    output = Output.of(x, how)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    others = None if residual is None else _rows(residual)
    operands = NormOperands(others, total, weight.contiguous())
    settings = NormSettings(False, rounding == "stepwise", eps, weight_offset)
    with current(x.device):
        quantize_norm(_rows(x), operands, settings, output)
    return output.data, output.scale, total


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, Tensor] | None,
    eps: float,
    rounding: str,
    how: CodesFormat,
) -> tuple[Tensor, Tensor]:
    """Quantize the layer norm of ``x``; arguments as in ``reference``."""
    if x.numel() == 0:
        return reference.layer_norm(x, weight, bias, modulation, eps, rounding, how)
    output = Output.of(x, how)
    operands = NormOperands(
        weight=None if weight is None else weight.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        modulation=None if modulation is None else (_rows(modulation[0]), _rows(modulation[1])),
    )
    with current(x.device):
        settings = NormSettings(True, rounding == "stepwise", eps)
        quantize_norm(_rows(x), operands, settings, output)
    return output.data, output.scale


def activation(
    kind: str, gate: Tensor, up: Tensor | None, how: CodesFormat, left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize ``act(gate) * up`` or ``act(gate)``; arguments as in ``reference``."""
    if gate.numel() == 0:
        return reference.activation(kind, gate, up, how, left)
    k = gate.shape[-1] + (0 if left is None else left.shape[-1])
    output = Output.of(gate[..., :1].expand(*gate.shape[:-1], k), how)
    up, left = (None if x is None else _rows(x) for x in (up, left))
    with current(gate.device):
        quantize_activation(kind, _rows(gate), up, left, output)
    return output.data, output.scale


def rms_normed(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, rounding: str
) -> Tensor:
    """Return the RMS norm of ``x``; arguments as in ``reference``."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    rows = y.shape[-2] if y.dim() > 1 else 1
    given, found = (t.reshape(-1, rows, t.shape[-1]) for t in (x, y))
    given = given if given.stride(2) == 1 else given.contiguous()
    with current(x.device):
        norm_rows(given, weight.contiguous(), found, eps, weight_offset, rounding == "stepwise")
    return y


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys; arguments as in ``reference``."""
    with current(query.device):
        return rotate(query, key, cos, sin)


def _rows(x: Tensor) -> Tensor:
    """Fold leading dimensions into rows; copy only where strides demand it."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


BACKEND = FusedBackend(
    supports=supports,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    activation=activation,
    rms_normed=rms_normed,
    rotated=rotated,
)
