"""What fused norms and activations compute, as codes for the layers behind them.

An eager call repeats the launches of an earlier one, see ``replay_cache``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.formats import GROUP128, ROW, GroupShape, Scheme, min_scale
from fp8kit.fused import arguments, operators
from fp8kit.ops.operators import CodesCall
from fp8kit.ops.validation import default_rounding
from fp8kit.quantizers.scale_layout import product_layout
from fp8kit.runtime.replay_cache import Operands, Operator, Options, ReplayCache

_FUSABLE = (ROW, GROUP128)


@dataclass(frozen=True, slots=True)
class NormFormula:
    """What a norm computes: see ``fused/reference.py`` for the roundings.

    ``kind`` is ``"rms_norm"``, to whose weight ``weight_offset`` is added, or ``"layer_norm"``, and
    ``rounding`` is ``"stepwise"`` or ``"once"``.
    """

    kind: str
    eps: float
    weight_offset: float = 0.0
    rounding: str = "stepwise"

    def codes(self, inputs: tuple[Tensor, ...], norm: nn.Module, scheme: Scheme) -> CodesCall:
        """Return the call that norms ``x`` as the layers of a scheme read it.

        ``inputs`` are ``x [..., K]``; for an RMS norm also a residual like it, if it norms their
        sum, which is another result; for a layer norm also scale and shift, if it is modulated.
        ``norm`` holds the weight, and the bias of a layer norm. The call raises ``TypeError`` if
        ``x`` is not a float tensor, and ``ValueError`` if the others do not fit it.
        """
        x, *others = inputs
        weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
        constants: Operands
        if self.kind == "rms_norm":
            assert weight is not None
            settings = (self.eps, self.weight_offset, self.rounding)
            operator, constants = operators.RMS_NORM_ROWS, (weight,) if others else (None, weight)
            check = functools.partial(arguments.rms_norm_arguments, x, None, weight, settings)
            return _codes(operator, inputs, constants, settings, scheme, check)
        how = (self.eps, "stepwise")
        operator, constants = operators.MODULATED_NORM_ROWS, (weight, bias)
        if not others:
            operator, constants = operators.LAYER_NORM_ROWS, (weight, bias, None, None)
        pair: Any = tuple(others) or None
        norm_check = functools.partial(arguments.layer_norm_arguments, x, weight, bias, pair, how)
        return _codes(operator, inputs, constants, how, scheme, norm_check)

    def normed(self, replays: ReplayCache, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the RMS norm of ``x`` itself.

        ``x`` has the columns of the weight, and rows that lie apart in two steps at most.
        """
        settings = (self.eps, self.weight_offset, self.rounding)
        weight = norm._parameters["weight"]
        y: Tensor = replays.call(operators.RMS_NORMED, (x,), (weight,), settings)
        return y

    def takes(self, x: Tensor, norm: nn.Module) -> bool:
        """Return whether the dtypes of input and weight are those the formula holds for."""
        weight = norm._parameters.get("weight")
        return self.kind == "layer_norm" or (weight is not None and x.dtype == weight.dtype)


def activation_codes(kind: str, gate: Tensor, up: Tensor | None, scheme: Scheme) -> CodesCall:
    """Return the call that computes ``act(gate) * up``, or ``act(gate)``, as layers read it.

    ``kind`` is ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; both tensors are ``[..., K]``. The call
    raises ``TypeError`` if one is not of a float dtype, and ``ValueError`` if their shapes differ.
    """
    inputs, constants = ((gate,), (None,)) if up is None else ((gate, up), ())
    check = functools.partial(arguments.activation_arguments, kind, gate, up)
    return _codes(operators.ACTIVATION_ROWS, inputs, constants, (kind,), scheme, check)


def concatenated_codes(kind: str, left: Tensor, gate: Tensor, scheme: Scheme) -> CodesCall:
    """Return the call that computes ``[left, act(gate)]`` as layers read it.

    Arguments as of ``activation_codes``; ``left [..., K1]`` has the rows and dtype of ``gate``.
    """
    check = functools.partial(arguments.activation_arguments, kind, gate, None)
    operator, inputs = operators.CONCATENATED_ACTIVATION_ROWS, (left, gate)
    shape = torch.Size((*gate.shape[:-1], left.shape[-1] + gate.shape[-1]))
    return _codes(operator, inputs, (), (kind,), scheme, check, shape)


def gated_codes(
    kind: str, call: CodesCall, width: int, options: Options, scheme: Scheme
) -> CodesCall:
    """Return the call that activates what a joined gate and up projection make of another's codes.

    Other results are the other's. ``kind`` is as of ``activation_codes``; ``options`` and ``width``
    are those of each projection, and ``scheme`` that of the layer which reads the codes.
    """
    operator, (own, product) = call.then_multiply(options)
    return call._replace(
        operator=operators.then_activate(operator),
        options=(own, product, (kind, *_target(scheme))),
        group=_group(scheme),
        shape=torch.Size((*call.shape[:-1], width)),
        dtype=product[2],
    )


def takes_codes(scheme: Scheme) -> bool:
    """Return whether layers of a scheme quantize per row or per 1x128 group, from the data."""
    return scheme.activation in _FUSABLE and not scheme.static


def target(scheme: Scheme) -> arguments.QuantizeOptions:
    """Return the keywords of ``fp8kit.fused`` that quantize as the layers of a scheme do."""
    group = _group(scheme)
    rounding = default_rounding(group, scheme.ue8m0)
    layout = product_layout(group)
    return {
        "group": group,
        "dtype": scheme.dtype,
        "scale_rounding": rounding,
        "scale_layout": layout,
    }


def _codes(
    operator: Operator,
    inputs: tuple[Tensor, ...],
    constants: Operands,
    settings: Options,
    scheme: Scheme,
    check: Callable[[arguments.QuantizeOptions], object],
    shape: torch.Size | None = None,
) -> CodesCall:
    """Describe a call whose arguments ``check`` raises for, given how it quantizes.

    ``shape`` is that of what is quantized, by default of the first input.
    """
    x, options = inputs[0], (*settings, *_target(scheme))
    kind = (_group(scheme), x.shape if shape is None else shape, x.dtype)
    fits = functools.partial(_check, check, scheme)
    return CodesCall(operator, inputs, constants, options, *kind, fits)


def _check(check: Callable[[arguments.QuantizeOptions], object], scheme: Scheme) -> None:
    check(target(scheme))


def _group(scheme: Scheme) -> GroupShape:
    assert scheme.activation is not None
    return scheme.activation


def _target(scheme: Scheme) -> Options:
    """Return the last seven arguments of an operator, which are those of ``target``."""
    # torch.compile warns of what a function keeps
    return (_new_target if torch.compiler.is_compiling() else _kept_target)(scheme)


def _new_target(scheme: Scheme) -> Options:
    group, dtype = _group(scheme), scheme.dtype
    floor, how = min_scale(group, dtype, "activation"), default_rounding(group, scheme.ue8m0)
    return None, (group.rows, group.cols), dtype, floor, None, how, product_layout(group)


_kept_target = functools.cache(_new_target)
