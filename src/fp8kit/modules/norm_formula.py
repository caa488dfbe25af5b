"""What norms compute, as codes for the layers behind them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8kit.formats import Scheme
from fp8kit.fused import arguments, operators
from fp8kit.modules.codes_calls import codes_call
from fp8kit.ops.operators import CodesCall
from fp8kit.runtime.replay_cache import Operands, ReplayCache


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
            return codes_call(operator, inputs, constants, settings, scheme, check)
        how = (self.eps, "stepwise")
        operator, constants = operators.MODULATED_NORM_ROWS, (weight, bias)
        if not others:
            operator, constants = operators.LAYER_NORM_ROWS, (weight, bias, None, None)
        pair: Any = tuple(others) or None
        norm_check = functools.partial(arguments.layer_norm_arguments, x, weight, bias, pair, how)
        return codes_call(operator, inputs, constants, how, scheme, norm_check)

    def normed(self, replays: ReplayCache, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the RMS norm of ``x`` itself.

        ``x`` has the columns of the weight, and rows that lie apart in two steps at most.
        """
        settings = (self.eps, self.weight_offset, self.rounding)
        weight = norm._parameters["weight"]
        return replays.call(operators.RMS_NORMED, (x,), (weight,), settings)

    def takes(self, x: Tensor, norm: nn.Module) -> bool:
        """Return whether the dtypes of input and weight are those the formula holds for."""
        weight = norm._parameters.get("weight")
        return self.kind == "layer_norm" or (weight is not None and x.dtype == weight.dtype)
