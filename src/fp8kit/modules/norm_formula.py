"""What fused norms and activations compute, as codes for the layers behind them.

An eager call repeats the launches of an earlier one, see ``replay_cache``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8kit import fused
from fp8kit.formats import GROUP128, ROW, GroupShape, QTensor, Scheme, min_scale
from fp8kit.fused import arguments, operators
from fp8kit.modules.linear import Fp8Linear
from fp8kit.ops.operators import CodesCall, RowCodes, options_of_codes, then_multiply
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

    def quantize(
        self,
        x: Tensor,
        norm: nn.Module,
        scheme: Scheme,
        modulation: tuple[Tensor, Tensor] | None = None,
    ) -> QTensor:
        """Quantize the norm of ``x`` as the layers of a scheme read it."""
        weight, how = norm._parameters.get("weight"), target(scheme)
        if self.kind == "layer_norm":
            bias = norm._parameters.get("bias")
            return fused.layer_norm_quantize(
                x, weight, bias, self.eps, modulation=modulation, **how
            )
        assert weight is not None
        offset, rounding = self.weight_offset, self.rounding
        return fused.rms_norm_quantize(
            x, weight, self.eps, weight_offset=offset, rounding=rounding, **how
        )

    def codes(self, inputs: tuple[Tensor, ...], norm: nn.Module, scheme: Scheme) -> CodesCall:
        """Return the call that norms ``x`` as the layers of a scheme read it.

        ``inputs`` are ``x [..., K]``, or for an RMS norm also a residual like it: then it norms
        their sum, which is another result. ``norm`` holds the weight, and the bias of a layer norm.
        The call raises ``TypeError`` if ``x`` is not a float tensor, and ``ValueError`` if the
        weight does not fit it.
        """
        weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
        x = inputs[0]
        if self.kind == "rms_norm":
            settings = (self.eps, self.weight_offset, self.rounding)
            constants = (weight,) if len(inputs) > 1 else (None, weight)  # no residual
            call = (operators.RMS_NORM_ROWS, inputs, constants, (*settings, *_target(scheme)))
            assert weight is not None
            return _codes(
                call,
                scheme,
                lambda: arguments.rms_norm_arguments(x, None, weight, settings, target(scheme)),
            )
        how = (self.eps, "stepwise")
        affine = (weight, bias, None, None)
        return _codes(
            (operators.LAYER_NORM_ROWS, inputs, affine, (*how, *_target(scheme))),
            scheme,
            lambda: arguments.layer_norm_arguments(x, weight, bias, None, how, target(scheme)),
        )

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
    return _codes(
        (operators.ACTIVATION_ROWS, inputs, constants, (kind, *_target(scheme))),
        scheme,
        lambda: arguments.activation_arguments(kind, gate, up, target(scheme)),
    )


def gated_codes(kind: str, call: CodesCall, gate: Fp8Linear, scheme: Scheme) -> CodesCall:
    """Return the call that activates what a joined gate and up projection make of another's codes.

    Other results are the other's. ``kind`` is as of ``activation_codes``; ``gate`` is the first of
    both layers, and ``scheme`` that of the layer which reads the codes.
    """
    product = options_of_codes(call, gate.options())
    return call._replace(
        operator=operators.then_activate(then_multiply(call.operator)),
        options=(call.options, product, (kind, *_target(scheme))),
        group=_group(scheme),
        shape=torch.Size((*call.shape[:-1], gate.out_features)),
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


def row_codes(q: QTensor, x: Tensor, scheme: Scheme) -> RowCodes:
    """View codes ``[..., K]`` that stand for a tensor like ``x`` as the rows that layers take."""
    return RowCodes(*operators.rows_of(q.data, q.scale), _group(scheme), x.shape, x.dtype)


def _codes(
    call: tuple[Operator, tuple[Tensor, ...], Operands, Options],
    scheme: Scheme,
    check: Callable[[], object],
) -> CodesCall:
    x = call[1][0]
    return CodesCall(*call, _group(scheme), x.shape, x.dtype, check)


def _group(scheme: Scheme) -> GroupShape:
    assert scheme.activation is not None
    return scheme.activation


@functools.cache
def _target(scheme: Scheme) -> Options:
    """Return the last seven arguments of an operator, which are those of ``target``."""
    group, dtype = _group(scheme), scheme.dtype
    floor, how = min_scale(group, dtype, "activation"), default_rounding(group, scheme.ue8m0)
    return None, (group.rows, group.cols), dtype, floor, None, how, product_layout(group)
