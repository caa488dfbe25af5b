"""The registered operators: all that ``torch.compile`` and ``torch.export`` see of the package.

Each has a schema, one implementation for every device, a fake, and an autograd rule. The choice
of a backend happens inside the implementation, so a graph never depends on M. Groups travel as
``[rows, cols]``; validation is the caller's (``functional``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit import eager
from fp8kit.dispatch import decide, require
from fp8kit.errors import teach
from fp8kit.formats import GroupShape, RowCodes, min_scale
from fp8kit.matmul.problem import BACKENDS as MATMUL_BACKENDS
from fp8kit.matmul.problem import IN_GEMM_ROWS, MatmulProblem
from fp8kit.quantizers.layout import empty_codes, empty_scale, product_layout
from fp8kit.quantizers.problem import BACKENDS as QUANTIZER_BACKENDS
from fp8kit.quantizers.problem import DequantizeProblem, QuantizeProblem

_library: Any = torch.library.Library("fp8kit", "DEF")  # type: ignore[no-untyped-call]


def _register(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> str:
    # any strides will do: otherwise Inductor computes an input once more for each of its readers
    _library.define(schema, tags=torch.Tag.flexible_layout)
    name = schema.partition("(")[0]
    _library.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8kit::{name}", fake, lib=_library)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(name, _outside_autocast(name, device_type), key)
    return f"fp8kit::{name}"


def _outside_autocast(name: str, device_type: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        # autocast would run the implementation's fp32 matmuls in 16 bit, where bare codes overflow
        with torch.autocast(device_type, enabled=False):
            return getattr(torch.ops.fp8kit, name)(*args)

    return kernel


def _quantize(
    x: Tensor,
    group: Sequence[int],
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    shape = GroupShape(*group)
    backend = require(QUANTIZER_BACKENDS, QuantizeProblem.of(x, shape, dtype))
    options = (min_scale, scale_ub, scale_rounding, scale_layout)
    data, scale = backend.quantize(x, shape, dtype, *options)
    return data, scale


def _quantize_fake(
    x: Tensor,
    group: Sequence[int],
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), empty_scale(x, GroupShape(*group), scale_layout)


def _quantize_static(x: Tensor, scale: Tensor, group: Sequence[int], dtype: torch.dtype) -> Tensor:
    shape = GroupShape(*group)
    backend = require(QUANTIZER_BACKENDS, QuantizeProblem.of(x, shape, dtype))
    data: Tensor = backend.quantize_static(x, scale, shape, dtype)
    return data


def _quantize_static_fake(
    x: Tensor, scale: Tensor, group: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _dequantize(data: Tensor, scale: Tensor, group: Sequence[int], dtype: torch.dtype) -> Tensor:
    shape = GroupShape(*group)
    problem = DequantizeProblem(shape, data.dtype, dtype, data.device.type)
    backend = require(QUANTIZER_BACKENDS, problem)
    value: Tensor = backend.dequantize(data, scale, shape, dtype)
    return value


def _dequantize_fake(
    data: Tensor, scale: Tensor, group: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return data.new_empty(data.shape, dtype=dtype)


def multiply(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    problem: MatmulProblem,
    backend: str | None = None,
) -> Tensor:
    """Multiply by the backend that the problem chooses, or by a named one; the operators' body.

    Args:
        x: codes ``[M, K]``, or bf16, fp16 or fp32 for a weight-only product.
        x_scale: scales of ``x``.
        w: codes ``[N, K]``.
        w_scale: scales of ``w``.
        bias: ``[N]`` or ``None``.
        problem: describes the product.
        backend: compute with this backend or raise.

    Raises:
        UnsupportedError: if no backend, or not the named one, computes it.
    """
    if x.shape[0] == 0 or w.shape[0] == 0:
        return x.new_empty(x.shape[0], w.shape[0], dtype=problem.out_dtype)
    if x.shape[1] == 0:
        zeros = x.new_zeros(x.shape[0], w.shape[0], dtype=problem.out_dtype)
        return zeros if bias is None else zeros + bias.to(problem.out_dtype)
    choice = decide(MATMUL_BACKENDS, problem, backend)
    assert choice.module is not None
    groups = (problem.x_group, problem.w_group)
    y: Tensor = choice.module.run(x, x_scale, w, w_scale, bias, groups, choice.problem)
    return y


def scaled_mm(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_group: Sequence[int] | None,
    w_group: Sequence[int],
    out_dtype: torch.dtype,
    accum: str,
    batch_invariant: bool,
    backend: str | None,
) -> Tensor:
    """Multiply codes; the body of the operator ``scaled_mm``, with its arguments."""
    groups = (None if x_group is None else GroupShape(*x_group), GroupShape(*w_group))
    problem = MatmulProblem.of(x, w, groups, out_dtype, bias, accum, batch_invariant)
    return multiply(x, x_scale, w, w_scale, bias, problem, backend)


def _scaled_mm(*arguments: Any) -> Tensor:
    x, x_scale, w, w_scale, bias, x_group, w_group, out_dtype = arguments[:8]
    given = x
    if x_group is not None:
        given = RowCodes(x, x_scale, GroupShape(*x_group), x.shape, out_dtype)
    options = ("scaled_mm", GroupShape(*w_group), *arguments[7:])
    body = functools.partial(scaled_mm, *arguments)
    return eager.run_body(body, given, (w, w_scale, bias, None), options)


def _scaled_mm_fake(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    x_group: Sequence[int] | None,
    w_group: Sequence[int],
    out_dtype: torch.dtype,
    accum: str,
    batch_invariant: bool,
    backend: str | None,
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0], dtype=out_dtype)


def quantize_rows(
    rows: Tensor,
    group: GroupShape | None,
    dtype: torch.dtype,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    scale_rounding: str,
) -> tuple[Tensor, Tensor | None]:
    """Quantize what a linear layer gets, as its scheme wants it; the operators' body.

    Args:
        rows: bf16, fp16 or fp32 ``[M, K]``.
        group: elements per scale; ``None`` leaves the rows as they are.
        dtype: dtype of the codes.
        input_scale: static scale, or ``None`` to take scales from the data.
        scale_ub: bound on amax or ``None``.
        scale_rounding: how scales are rounded.

    Returns:
        What is multiplied, and its scales, laid out as products load them.
    """
    if group is None:
        return rows, None
    backend = require(QUANTIZER_BACKENDS, QuantizeProblem.of(rows, group, dtype))
    if input_scale is not None:
        return backend.quantize_static(rows, input_scale, group, dtype), input_scale
    how = (min_scale(group, dtype, "activation"), scale_ub, scale_rounding, product_layout(group))
    data, scale = backend.quantize(rows, group, dtype, *how, empty_codes(rows, group, dtype))
    return data, scale


def multiply_values(
    rows: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    problem: MatmulProblem,
    backend: str | None = None,
) -> Tensor | None:
    """Quantize and multiply in one kernel, if the backend of the product has one that fits.

    Args:
        rows: bf16, fp16 or fp32 ``[M, K]``, to be quantized from their own maxima, exactly.
        w: codes ``[N, K]``.
        w_scale: scales of ``w``.
        bias: ``[N]`` or ``None``.
        problem: describes the product; ``x_dtype`` is that of the codes.
        backend: ask this backend.

    Returns:
        The bits of ``quantize_rows`` and ``multiply``; ``None`` where it takes two kernels.
    """
    if problem.x_group is None or not 0 < rows.shape[0] <= IN_GEMM_ROWS or not rows.is_cuda:
        return None
    if not w.shape[0] or not w.shape[1]:
        return None
    in_one = getattr(decide(MATMUL_BACKENDS, problem, backend).module, "quantize_in_gemm", None)
    if in_one is None:
        return None
    floor = min_scale(problem.x_group, w.dtype, "activation")
    groups = (problem.x_group, problem.w_group)
    y: Tensor | None = in_one(rows, w, w_scale, bias, groups, problem, floor)
    return y


def linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    x_group: GroupShape | None,
    w_group: GroupShape,
    out_dtype: torch.dtype,
    scale_rounding: str,
    accum: str,
    batch_invariant: bool,
) -> Tensor:
    """Quantize and multiply; the body of the operator ``linear``, with its arguments."""
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.new_empty(x.shape[:-1].numel(), 0)
    options = (out_dtype, bias, accum, batch_invariant, None if x_group is None else w.dtype)
    problem = MatmulProblem.of(rows, w, (x_group, w_group), *options)
    dynamic = input_scale is None and scale_ub is None and scale_rounding == "exact"
    y = multiply_values(rows, w, w_scale, bias, problem) if dynamic else None
    if y is None:
        data, x_scale = quantize_rows(rows, x_group, w.dtype, input_scale, scale_ub, scale_rounding)
        y = multiply(data, x_scale, w, w_scale, bias, problem)
    return reshaped(y, (*x.shape[:-1], w.shape[0]))


def reshaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Give a product that nobody else holds another shape, and let callers change it in place.

    Autograd refuses in-place changes of views made where it does not look, as in an operator.

    Args:
        y: ``[M, N]``.
        shape: ``[..., N]``, with as many elements.
    """
    z: Tensor = torch.ops.aten._unsafe_view.default(y, shape)
    return z


def _linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    x_group: Sequence[int] | None,
    w_group: Sequence[int],
    out_dtype: torch.dtype,
    scale_rounding: str,
    accum: str,
    batch_invariant: bool,
) -> Tensor:
    x_shape = None if x_group is None else GroupShape(*x_group)
    options = (x_shape, GroupShape(*w_group), out_dtype, scale_rounding, accum, batch_invariant)
    body = functools.partial(linear, x, w, w_scale, bias, input_scale, scale_ub, *options)
    if scale_ub is not None:  # not among what a tape checks
        return body()
    return eager.run_body(body, x, (w, w_scale, bias, input_scale), ("linear", *options))


def _linear_fake(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
    x_group: Sequence[int] | None,
    w_group: Sequence[int],
    out_dtype: torch.dtype,
    scale_rounding: str,
    accum: str,
    batch_invariant: bool,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0], dtype=out_dtype)


QUANTIZE = _register(
    "quantize(Tensor x, int[2] group, ScalarType dtype, float min_scale, Tensor? scale_ub,"
    ' str scale_rounding, str scale_layout="row") -> (Tensor data, Tensor scale)',
    _quantize,
    _quantize_fake,
)
QUANTIZE_STATIC = _register(
    "quantize_static(Tensor x, Tensor scale, int[2] group, ScalarType dtype) -> Tensor",
    _quantize_static,
    _quantize_static_fake,
)
DEQUANTIZE = _register(
    "dequantize(Tensor data, Tensor scale, int[2] group, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
SCALED_MM = _register(
    "scaled_mm(Tensor x, Tensor? x_scale, Tensor w, Tensor w_scale, Tensor? bias,"
    " int[2]? x_group, int[2] w_group, ScalarType out_dtype, str accum, bool batch_invariant,"
    " str? backend) -> Tensor",
    _scaled_mm,
    _scaled_mm_fake,
)
LINEAR = _register(
    "linear(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, Tensor? input_scale,"
    " Tensor? scale_ub, int[2]? x_group, int[2] w_group, ScalarType out_dtype,"
    " str scale_rounding, str accum, bool batch_invariant) -> Tensor",
    _linear,
    _linear_fake,
)


def linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what ``linear_backward`` needs."""
    x, w, w_scale, bias = inputs[:4]
    ctx.save_for_backward(w, w_scale)
    ctx.w_group, ctx.x_dtype = inputs[7], x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Give the gradients of the operator ``linear``; raises for those of weight and scales."""
    if any(ctx.needs_input_grad[i] for i in (1, 2, 4, 5)):
        raise RuntimeError(
            teach(
                "A gradient to an FP8 weight or to a scale was asked for.",
                "FP8 layers are frozen; gradients flow to their input and their bias.",
                "Detach them (quantize weight.detach()), and train an adapter instead.",
            )
        )
    w, w_scale = ctx.saved_tensors
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        dense = torch.ops.fp8kit.dequantize(w, w_scale, ctx.w_group, grad.dtype)
        grad_x = (grad @ dense).to(ctx.x_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
        grad_bias = grad.sum_to_size(grad.shape[-1]).to(ctx.bias_dtype)
    return (grad_x, None, None, grad_bias, *[None] * 8)


def _refuse_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        teach(
            "A gradient through quantize, dequantize or scaled_mm was asked for.",
            "Only fp8kit.linear and Fp8Linear are differentiable, in their input and bias.",
            "Use one of them, or wrap the call in torch.no_grad().",
        )
    )


torch.library.register_autograd(LINEAR, linear_backward, setup_context=linear_setup, lib=_library)
for _op in (QUANTIZE, QUANTIZE_STATIC, DEQUANTIZE, SCALED_MM):
    torch.library.register_autograd(_op, _refuse_backward, lib=_library)
