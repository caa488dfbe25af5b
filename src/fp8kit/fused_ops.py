"""The registered operators of the fused producers, beside those of ``ops``.

An operator returns the codes, then the scale unless that was given, then the new residual if one
was added: a list, because an operator must not return its own argument. The last seven arguments of
each schema are a ``Target``, in order; validation is the caller's (``fused``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.dispatch import require
from fp8kit.errors import teach
from fp8kit.formats import GroupShape
from fp8kit.ops import _outside_autocast
from fp8kit.quantizers.fused_problem import FUSED_BACKENDS, FusedProblem, Target
from fp8kit.quantizers.layout import empty_scale

_library: Any = torch.library.Library("fp8kit", "FRAGMENT")  # type: ignore[no-untyped-call]
_TARGET = (
    "Tensor? scale, int[2] group, ScalarType dtype, float min_scale, Tensor? scale_ub,"
    ' str scale_rounding, str scale_layout="row"'
)


def _register(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # any strides will do: otherwise Inductor computes an input once more for each of its readers
    _library.define(schema, tags=torch.Tag.flexible_layout)
    name = schema.partition("(")[0]
    _library.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8kit::{name}", fake, lib=_library)
    torch.library.register_autograd(f"fp8kit::{name}", _refuse_backward, lib=_library)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(name, _outside_autocast(name, device_type), key)


def _refuse_backward(ctx: Any, *grads: Any) -> None:  # noqa: ARG001
    raise RuntimeError(
        teach(
            "A gradient through a fused norm or activation was asked for.",
            "Its result is FP8 codes, which have none.",
            "Use the unfused norm or activation and fp8kit.linear, or wrap it in torch.no_grad().",
        )
    )


def _target(arguments: Sequence[Any]) -> Target:
    scale, group, *rest = arguments
    return Target(scale, GroupShape(*group), *rest)


def _outputs(data: Tensor, scale: Tensor, target: Target, *others: Tensor) -> list[Tensor]:
    return [data, *others] if target.scale is not None else [data, scale, *others]


def _fake_outputs(x: Tensor, target: Target, *others: Tensor) -> list[Tensor]:
    scale = empty_scale(x, target.group, target.scale_layout)
    return _outputs(x.new_empty(x.shape, dtype=target.dtype), scale, target, *others)


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
    target = _target(arguments)
    run = require(FUSED_BACKENDS, FusedProblem.of("rms_norm", x, target)).rms_norm
    data, scale, total = run(x, residual, weight, eps, weight_offset, rounding, target)
    return _outputs(data, scale, target, *([] if total is None else [total.contiguous()]))


def _rms_norm_fake(x: Tensor, residual: Tensor | None, *arguments: Any) -> list[Tensor]:
    total = [] if residual is None else [x.new_empty(x.shape)]
    return _fake_outputs(x, _target(arguments[4:]), *total)


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
    target = _target(arguments)
    modulation = None if gain is None or shift is None else (gain, shift)
    run = require(FUSED_BACKENDS, FusedProblem.of("layer_norm", x, target)).layer_norm
    data, scale = run(x, weight, bias, modulation, eps, rounding, target)
    return _outputs(data, scale, target)


def _layer_norm_fake(x: Tensor, *arguments: Any) -> list[Tensor]:
    return _fake_outputs(x, _target(arguments[6:]))


def activation(kind: str, gate: Tensor, up: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Activate and quantize; the body of ``activation_quantize``, with its arguments."""
    target = _target(arguments)
    run = require(FUSED_BACKENDS, FusedProblem.of(kind, gate, target)).activation
    data, scale = run(kind, gate, up, target)
    return _outputs(data, scale, target)


def _activation_fake(kind: str, gate: Tensor, *arguments: Any) -> list[Tensor]:  # noqa: ARG001
    return _fake_outputs(gate, _target(arguments[1:]))


_register(
    "rms_norm_quantize(Tensor x, Tensor? residual, Tensor weight, float eps, float weight_offset,"
    f" str rounding, {_TARGET}) -> Tensor[]",
    rms_norm,
    _rms_norm_fake,
)
_register(
    "layer_norm_quantize(Tensor x, Tensor? weight, Tensor? bias, Tensor? gain, Tensor? shift,"
    f" float eps, str rounding, {_TARGET}) -> Tensor[]",
    layer_norm,
    _layer_norm_fake,
)
_register(
    f"activation_quantize(str kind, Tensor gate, Tensor? up, {_TARGET}) -> Tensor[]",
    activation,
    _activation_fake,
)
