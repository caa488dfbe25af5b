"""What fused norms and activations compute, as codes for the layers behind them.

Where nobody else would see it, an eager call repeats the launches of an earlier one, see ``eager``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor, nn

from fp8kit import eager, fused, fused_ops
from fp8kit.formats import GROUP128, ROW, GroupShape, QTensor, RowCodes, Scheme, min_scale
from fp8kit.quantizers.layout import product_layout
from fp8kit.validation import default_rounding

_FUSABLE = (ROW, GROUP128)


@dataclass(frozen=True, slots=True)
class NormFormula:
    """What a norm computes: see ``quantizers/fused_reference.py`` for the roundings.

    Args:
        kind: ``"rms_norm"`` or ``"layer_norm"``.
        eps: added to the mean square or the variance.
        weight_offset: added to the weight of an RMS norm.
        rounding: ``"stepwise"`` or ``"once"``.
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

    def codes(self, tapes: eager.Tapes, x: Tensor, norm: nn.Module, scheme: Scheme) -> RowCodes:
        """Give the norm of ``x`` as the layers of a scheme read it.

        Args:
            tapes: of the norm's module.
            x: ``[..., K]``.
            norm: holds the weight, and the bias of a layer norm.
            scheme: of the layers.
        """

        def make(*, directly: bool) -> tuple[Tensor, ...]:
            if directly:
                return rows_of(*self._directly(x, None, norm, scheme))
            q = self.quantize(x, norm, scheme)
            return rows_of(q.data, q.scale)

        constants = [norm._parameters.get(name) for name in ("weight", "bias")]
        data, scale = eager.make_codes(tapes, make, (x,), constants, (self, scheme))
        return _codes(data, scale, x, scheme)

    def add_codes(
        self, tapes: eager.Tapes, x: Tensor, residual: Tensor, norm: nn.Module, scheme: Scheme
    ) -> tuple[RowCodes, Tensor]:
        """Give the RMS norm of ``residual + x``, and that sum; arguments as in ``codes``."""
        weight = norm._parameters["weight"]

        def make(*, directly: bool) -> tuple[Tensor, ...]:
            if directly:
                data, scale, total = self._directly(x, residual, norm, scheme)
                return (*rows_of(data, scale), total)
            assert weight is not None
            offset, rounding, how = self.weight_offset, self.rounding, target(scheme)
            q, total = fused.add_rms_norm_quantize(
                x, residual, weight, self.eps, weight_offset=offset, rounding=rounding, **how
            )
            return (*rows_of(q.data, q.scale), total)

        inputs = (x, residual)
        data, scale, total = eager.make_codes(tapes, make, inputs, (weight,), (self, scheme))
        return _codes(data, scale, x, scheme), total

    def _directly(
        self, x: Tensor, residual: Tensor | None, norm: nn.Module, scheme: Scheme
    ) -> list[Tensor]:
        """Call the body of the operator, for arguments that an earlier call has checked."""
        weight, rest = norm._parameters.get("weight"), _arguments(scheme)
        if self.kind == "layer_norm":
            bias = norm._parameters.get("bias")
            return fused_ops.layer_norm(x, weight, bias, None, None, self.eps, "stepwise", *rest)
        assert weight is not None
        settings = (self.eps, self.weight_offset, self.rounding)
        return fused_ops.rms_norm(x, residual, weight, *settings, *rest)

    def takes(self, x: Tensor, norm: nn.Module) -> bool:
        """Say whether the dtypes of input and weight are those the formula holds for."""
        weight = norm._parameters.get("weight")
        return self.kind == "layer_norm" or (weight is not None and x.dtype == weight.dtype)


def activation_codes(
    tapes: eager.Tapes, kind: str, gate: Tensor, up: Tensor | None, scheme: Scheme
) -> RowCodes:
    """Give ``act(gate) * up``, or ``act(gate)``, as the layers of a scheme read it.

    Args:
        tapes: of the module that computes it.
        kind: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        gate: ``[..., K]``.
        up: like ``gate``, or ``None``.
        scheme: of the layers.
    """

    def make(*, directly: bool) -> tuple[Tensor, ...]:
        if directly:
            return rows_of(*fused_ops.activation(kind, gate, up, *_arguments(scheme)))
        q = _activated(kind, gate, up, scheme)
        return rows_of(q.data, q.scale)

    inputs = (gate,) if up is None else (gate, up)
    data, scale = eager.make_codes(tapes, make, inputs, (), (kind, scheme))
    return _codes(data, scale, gate, scheme)


def takes_codes(scheme: Scheme) -> bool:
    """Say whether layers of a scheme quantize per row or per 1x128 group, from the data."""
    return scheme.activation in _FUSABLE and not scheme.static


def target(scheme: Scheme) -> fused.QuantizeOptions:
    """Give the keywords of ``fp8kit.fused`` that quantize as the layers of a scheme do."""
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
    return _codes(*rows_of(q.data, q.scale), x, scheme)


def rows_of(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the leading dimensions of codes and scales into rows."""
    rows = math.prod(data.shape[:-1])
    return data.reshape(rows, data.shape[-1]), scale.reshape(rows, scale.shape[-1])


def _activated(kind: str, gate: Tensor, up: Tensor | None, scheme: Scheme) -> QTensor:
    if kind == "silu":
        return fused.silu_mul_quantize(gate, up, **target(scheme))
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    if up is None:
        return fused.gelu_quantize(gate, approximate, **target(scheme))
    return fused.gelu_mul_quantize(gate, up, approximate, **target(scheme))


def _codes(data: Tensor, scale: Tensor, x: Tensor, scheme: Scheme) -> RowCodes:
    return RowCodes(data, scale, _group(scheme), x.shape, x.dtype)


def _group(scheme: Scheme) -> GroupShape:
    assert scheme.activation is not None
    return scheme.activation


@functools.cache
def _arguments(scheme: Scheme) -> tuple[object, ...]:
    """Give the last seven arguments of an operator, which are those of ``target``."""
    group, dtype = _group(scheme), scheme.dtype
    floor, how = min_scale(group, dtype, "activation"), default_rounding(group, scheme.ue8m0)
    return None, [group.rows, group.cols], dtype, floor, None, how, product_layout(group)
