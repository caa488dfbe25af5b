"""Calls that compute a norm and quantize it for the layers behind it."""

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
    """What a norm computes; its roundings are defined in ``fused/reference.py``.

    ``kind`` is ``"rms_norm"`` or ``"layer_norm"``. ``weight_offset`` is added to the weight of an
    RMS norm. ``rounding`` is ``"stepwise"`` or ``"once"``.
    """

    kind: str
    eps: float
    weight_offset: float = 0.0
    rounding: str = "stepwise"

    def codes(self, inputs: tuple[Tensor, ...], norm: nn.Module, scheme: Scheme) -> CodesCall:
        """Return the call that norms ``x`` and quantizes it for layers of a scheme.

        ``inputs`` are ``x [..., K]``, then optionally: for an RMS norm a residual like ``x`` (their
        sum is normed, and is another result); for a layer norm scale and shift. ``norm`` holds the
        weight, and the bias of a layer norm. The call raises ``TypeError`` if ``x`` is not a float
        tensor, and ``ValueError`` if the other tensors do not fit it.
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
        """Return the RMS norm of ``x`` as a tensor, without quantizing it.

        ``x`` has the columns of the weight, and at most two strides between rows (``plain_norm``).
        """
        settings = (self.eps, self.weight_offset, self.rounding)
        weight = norm._parameters["weight"]
        return replays.call(operators.RMS_NORMED, (x,), (weight,), settings)

    def takes(self, x: Tensor, norm: nn.Module) -> bool:
        """Return whether the formula holds for the dtypes of input and weight."""
        weight = norm._parameters.get("weight")
        return self.kind == "layer_norm" or (weight is not None and x.dtype == weight.dtype)
