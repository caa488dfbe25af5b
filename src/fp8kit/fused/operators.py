"""The registered operators of the fused norms and activations, beside those of ``ops``.

An operator returns a list: the codes, the scale unless it was given (an operator must not return
its own argument), and the new residual if one was added. The last seven arguments of each schema
are a ``CodesFormat``, in order; the callers (``fused.functional``) validate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.dispatch.backends import require
from fp8kit.formats import GroupShape
from fp8kit.fused import reference
from fp8kit.fused.problem import FUSED_BACKENDS, CodesFormat, FusedBackend, FusedProblem
from fp8kit.ops.registration import refuse_backward, register, replay_before_dispatch
from fp8kit.quantizers.scale_layout import empty_scale
from fp8kit.runtime.replay_cache import Operator, Replayed

_CODES_FORMAT = (
    "Tensor? scale, int[2] group, ScalarType dtype, float min_scale, Tensor? scale_ub,"
    ' str scale_rounding, str scale_layout="row"'
)


def _codes_format(arguments: Sequence[Any]) -> CodesFormat:
    scale, group, *rest = arguments
    return CodesFormat(scale, GroupShape(*group), *rest)


def _outputs(data: Tensor, scale: Tensor, how: CodesFormat, *others: Tensor) -> list[Tensor]:
    return [data, *others] if how.scale is not None else [data, scale, *others]


def _fake_outputs(x: Tensor, how: CodesFormat, *others: Tensor) -> list[Tensor]:
    scale = empty_scale(x, how.group, how.scale_layout)
    return _outputs(x.new_empty(x.shape, dtype=how.dtype), scale, how, *others)


def _backend(problem: FusedProblem) -> FusedBackend:
    return require(FUSED_BACKENDS, problem)


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    rounding: str,
    *arguments: Any,
) -> list[Tensor]:
    """Norm and quantize; the body of ``rms_norm_quantize``, with its arguments."""
    how = _codes_format(arguments)
    backend = _backend(FusedProblem.of("rms_norm", x, how))
    data, scale, total = backend.rms_norm(x, residual, weight, eps, weight_offset, rounding, how)
    return _outputs(data, scale, how, *([] if total is None else [total.contiguous()]))


def _rms_norm_fake(x: Tensor, residual: Tensor | None, *arguments: Any) -> list[Tensor]:
    total = [] if residual is None else [x.new_empty(x.shape)]
    return _fake_outputs(x, _codes_format(arguments[4:]), *total)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    eps: float,
    rounding: str,
    *arguments: Any,
) -> list[Tensor]:
    """Norm and quantize; the body of ``layer_norm_quantize``, with its arguments."""
    how = _codes_format(arguments)
    modulation = None if gain is None or shift is None else (gain, shift)
    backend = _backend(FusedProblem.of("layer_norm", x, how))
    data, scale = backend.layer_norm(x, weight, bias, modulation, eps, rounding, how)
    return _outputs(data, scale, how)


def _layer_norm_fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    return _fake_outputs(x, _codes_format(arguments[6:]))


def activation(gate: Tensor, up: Tensor | None, kind: str, *arguments: Any) -> list[Tensor]:
    """Activate and quantize; the body of ``activation_quantize``, with its arguments."""
    how = _codes_format(arguments)
    backend = _backend(FusedProblem.of(kind, gate, how))
    data, scale = backend.activation(kind, gate, up, how)
    return _outputs(data, scale, how)


def _activation_fake(gate: Tensor, *arguments: Any) -> list[Tensor]:
    return _fake_outputs(gate, _codes_format(arguments[2:]))


def concatenated_activation(
    left: Tensor, gate: Tensor, up: Tensor | None, kind: str, *arguments: Any
) -> list[Tensor]:
    """Quantize ``left`` and activations; the body of ``concatenated_activation_quantize``."""
    how, k = _codes_format(arguments), left.shape[-1] + gate.shape[-1]
    backend = _backend(dataclasses.replace(FusedProblem.of(kind, gate, how), k=k))
    data, scale = backend.activation(kind, gate, up, how, left)
    return _outputs(data, scale, how)


def _concatenated_activation_fake(left: Tensor, gate: Tensor, *arguments: Any) -> list[Tensor]:
    whole = gate.new_empty((*gate.shape[:-1], left.shape[-1] + gate.shape[-1]))
    return _fake_outputs(whole, _codes_format(arguments[2:]))


for _schema, _impl, _fake in (
    (
        "rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps,"
        f" float weight_offset, str rounding, {_CODES_FORMAT}) -> Tensor[]",
        rms_norm,
        _rms_norm_fake,
    ),
    (
        "layer_norm_quantize(Tensor x, Tensor? weight, Tensor? bias, Tensor? gain, Tensor? shift,"
        f" float eps, str rounding, {_CODES_FORMAT}) -> Tensor[]",
        layer_norm,
        _layer_norm_fake,
    ),
    (
        f"activation_quantize(Tensor gate, Tensor? up, str kind, {_CODES_FORMAT}) -> Tensor[]",
        activation,
        _activation_fake,
    ),
    (
        "concatenated_activation_quantize(Tensor left, Tensor gate, Tensor? up, str kind,"
        f" {_CODES_FORMAT}) -> Tensor[]",
        concatenated_activation,
        _concatenated_activation_fake,
    ),
):
    _body = Replayed(_impl)
    _name = register(_schema, _body, _fake)
    refuse_backward(
        _name,
        "A gradient through a fused norm or activation was requested.",
        "Its result is FP8 codes, which have none.",
        "Use the unfused norm or activation and fp8kit.linear, or wrap it in torch.no_grad().",
    )
    replay_before_dispatch(_name, _body.replay)


def rms_normed(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, rounding: str
) -> Tensor:
    """Compute an RMS norm that is not quantized, in one launch where a kernel supports it."""
    backend = _backend(FusedProblem.plain("rms_norm", x))
    return backend.rms_normed(x, weight, eps, weight_offset, rounding)


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys, in one launch where a kernel supports it."""
    backend = _backend(FusedProblem.plain("rotary", query))
    return backend.rotated(query, key, cos, sin)


RMS_NORM = Operator(rms_norm, torch.ops.fp8kit.rms_norm_quantize)
LAYER_NORM = Operator(layer_norm, torch.ops.fp8kit.layer_norm_quantize)
ACTIVATION = Operator(activation, torch.ops.fp8kit.activation_quantize)
CONCATENATED_ACTIVATION = Operator(
    concatenated_activation, torch.ops.fp8kit.concatenated_activation_quantize
)
# their registered forms consist of torch's operators, so they have gradients
RMS_NORMED = Operator(rms_normed, reference.rms_normed)
ROTATED = Operator(rotated, reference.rotated)


def _in_rows(operator: Operator) -> Operator:
    """Wrap an operator with dynamic scales so that it returns codes and scales as matrices."""

    def folded(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> list[Tensor]:
            data, scale, *others = compute(*arguments)
            rows = math.prod(data.shape[:-1])
            return [*(part.reshape(rows, part.shape[-1]) for part in (data, scale)), *others]

        return call

    return Operator(folded(operator.body), folded(operator.registered))


def _modulated(operator: Operator) -> Operator:
    """Wrap a layer norm so that its modulation, an input that varies, comes right after ``x``."""

    def ordered(norm: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, gain: Tensor, shift: Tensor, *arguments: Any) -> Any:
            weight, bias, *settings = arguments
            return norm(x, weight, bias, gain, shift, *settings)

        return call

    return Operator(ordered(operator.body), ordered(operator.registered))


RMS_NORM_ROWS, LAYER_NORM_ROWS, ACTIVATION_ROWS = map(_in_rows, (RMS_NORM, LAYER_NORM, ACTIVATION))
MODULATED_NORM_ROWS = _modulated(LAYER_NORM_ROWS)
CONCATENATED_ACTIVATION_ROWS = _in_rows(CONCATENATED_ACTIVATION)


@functools.cache
def then_activate(product: Operator) -> Operator:
    """Return an operator that activates the result of a product and quantizes it in rows.

    The first result of ``product`` has the columns of the gate, then those of ``up``. Arguments are
    those of ``product``, then the options of ``ACTIVATION_ROWS``. The operator returns codes,
    scale, and the other results of ``product``.
    """

    def chained(multiply: Callable[..., Any], activate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> list[Tensor]:
            *given, options = arguments
            y, *others = multiply(*given)
            gate, up = y.chunk(2, -1)
            return [*activate(gate, up, *options), *others]

        return call

    body = chained(product.body, ACTIVATION_ROWS.body)
    return Operator(body, chained(product.registered, ACTIVATION_ROWS.registered))
