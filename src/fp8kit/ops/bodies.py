"""The bodies of the operators: each chooses a backend and launches its kernels.

A body takes the arguments of its operator; groups are ``[rows, cols]``. The callers
(``functional``, ``Fp8Linear``) validate the arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8kit.dispatch.backends import decide, require
from fp8kit.formats import GroupShape, min_scale
from fp8kit.matmul.problem import (
    IN_GEMM_ROWS,
    MATMUL_BACKENDS,
    MatmulBackend,
    MatmulOperands,
    MatmulProblem,
)
from fp8kit.quantizers import reference
from fp8kit.quantizers.problem import QUANTIZER_BACKENDS, QuantizeProblem, QuantizerBackend
from fp8kit.quantizers.scale_layout import empty_codes, product_layout
from fp8kit.runtime.replay_cache import Replayed

Group = Sequence[int]  # rows and columns of a ``GroupShape``


@Replayed
def quantize(
    x: Tensor,
    group: Group,
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """Quantize with scales that are taken from the data; see ``functional.quantize``."""
    shape = GroupShape(*group)
    backend = _quantizer(x, shape, dtype)
    return backend.quantize(x, shape, dtype, min_scale, scale_ub, scale_rounding, scale_layout)


@Replayed
def quantize_static(x: Tensor, scale: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Quantize with given scales; see ``functional.quantize``."""
    shape = GroupShape(*group)
    backend = _quantizer(x, shape, dtype)
    return backend.quantize_static(x, scale, shape, dtype)


def dequantize(data: Tensor, scale: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """Multiply codes by their scales; see ``functional.dequantize``."""
    return reference.dequantize(data, scale, GroupShape(*group), dtype)


def scaled_mm(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_group: Group | None,
    w_group: Group,
    out_dtype: torch.dtype,
    accum: str,
    batch_invariant: bool,
    backend: str | None,
) -> Tensor:
    """Multiply codes ``x [M, K]`` by codes ``w [N, K]``; see ``functional.scaled_mm``."""
    groups = (None if x_group is None else GroupShape(*x_group), GroupShape(*w_group))
    problem = MatmulProblem.of(x, w, groups, out_dtype, bias, accum, batch_invariant)
    if not x.numel() or not w.numel():
        return _empty_product(x, w, bias, out_dtype)
    choice = decide(MATMUL_BACKENDS, problem, backend)
    matmul: MatmulBackend = choice.implementation
    return matmul.run(MatmulOperands(x, x_scale, w, w_scale, bias), choice.problem)


def multiply_codes(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_group: Group,
    w_group: Group,
    out_dtype: torch.dtype,
    accum: str,
    batch_invariant: bool,
    shape: Sequence[int],
    scaled_mm: Callable[..., Tensor] = scaled_mm,
) -> Tensor:
    """Multiply codes ``[M, K]`` of an input of ``shape [..., K]``; return ``[..., N]``.

    ``scaled_mm`` is the body above, or the registered operator.
    """
    options = (x_group, w_group, out_dtype, accum, batch_invariant, None)
    return reshaped(scaled_mm(x, x_scale, w, w_scale, bias, *options), (*shape[:-1], w.shape[0]))


def linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    x_group: Group | None,
    w_group: Group,
    scale_rounding: str,
    accum: str,
    batch_invariant: bool,
    out_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
    configuration: str | None = None,
) -> Tensor:
    """Quantize ``x [..., K]`` and multiply it by codes ``w [N, K]``; see ``functional.linear``.

    ``backend`` and ``configuration`` force a choice, or raise; measurements use them.
    """
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    shape, out_dtype = (*x.shape[:-1], w.shape[0]), out_dtype or x.dtype
    if not rows.numel() or not w.numel():
        return reshaped(_empty_product(rows, w, bias, out_dtype), shape)
    group = None if x_group is None else GroupShape(*x_group)
    options = (out_dtype, bias, accum, batch_invariant, None if group is None else w.dtype)
    problem = MatmulProblem.of(rows, w, (group, GroupShape(*w_group)), *options)
    if configuration is not None:
        problem = dataclasses.replace(problem, configuration=configuration)
    choice = decide(MATMUL_BACKENDS, problem, backend)
    matmul: MatmulBackend = choice.implementation
    problem, y = choice.problem, None
    dynamic = input_scale is None and scale_ub is None and scale_rounding == "exact"
    if dynamic and group is not None and rows.shape[0] <= IN_GEMM_ROWS and rows.is_cuda:
        values = MatmulOperands(rows, None, w, w_scale, bias)
        y = matmul.quantize_in_gemm(values, problem, min_scale(group, w.dtype, "activation"))
    if y is None:
        data, scale = quantize_input(rows, group, w.dtype, input_scale, scale_ub, scale_rounding)
        y = matmul.run(MatmulOperands(data, scale, w, w_scale, bias), problem)
    return reshaped(y, shape)


def quantize_input(
    rows: Tensor,
    group: GroupShape | None,
    dtype: torch.dtype,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    scale_rounding: str,
) -> tuple[Tensor, Tensor | None]:
    """Quantize the input of a linear layer as its scheme asks.

    ``rows`` are bf16, fp16 or fp32 ``[M, K]``; without a group they stay as they are. Scales are
    taken from the data unless one is given, and are in the layout that products load.
    """
    if group is None:
        return rows, None
    backend = _quantizer(rows, group, dtype)
    if input_scale is not None:
        return backend.quantize_static(rows, input_scale, group, dtype), input_scale
    how = (min_scale(group, dtype, "activation"), scale_ub, scale_rounding, product_layout(group))
    data, scale = backend.quantize(rows, group, dtype, *how, empty_codes(rows, group, dtype))
    return data, scale


def reshaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape a product that nobody else holds, so that callers may change it in place.

    Autograd refuses in-place changes of ordinary views that were made inside an operator.
    """
    return torch.ops.aten._unsafe_view.default(y, shape)


def _quantizer(x: Tensor, group: GroupShape, dtype: torch.dtype) -> QuantizerBackend:
    return require(QUANTIZER_BACKENDS, QuantizeProblem.of(x, group, dtype))


def _empty_product(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return the product when an operand is empty: zeros, or the bias in each row."""
    zeros = x.new_zeros(x.shape[0], w.shape[0], dtype=out_dtype)
    return zeros if bias is None else zeros + bias.to(out_dtype)
