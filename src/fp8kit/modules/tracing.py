"""What ``torch.compile`` traces of an ``Fp8Linear``: few guards, shared codes for siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kit.ops import operators, validation
from fp8kit.ops.operators import RowCodes

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

# of the siblings that are being traced: their input, how it was quantized, and to what
_pending: tuple[Tensor, tuple[Any, ...], RowCodes] | None = None


def traced(layer: Fp8Linear, x: Tensor) -> Tensor:
    """Compute in a graph; siblings share codes, as Inductor merges no operators of others.

    Whatever is read of a layer is a guard at every call, and what is found in two ways, such as the
    siblings of a group, is another and slower one. So a layer tells the next one through a global,
    which lives from the first sibling to the last within one trace. Changes of ``x`` go unseen.
    """
    global _pending
    codes, _, bias, input_scale, bound = constants = layer.operands()
    group, _, rounding, accum, *_ = options = layer.options()
    validation.check_float("x", x)
    validation.check_operands(x, codes, bias, accum)
    if codes.dtype != torch.float8_e4m3fn:
        validation.check_codes("the weight of an Fp8Linear", codes.dtype, layer.scheme)
    if layer.place and group is not None and input_scale is None and _is_compiled():
        grad = torch.is_grad_enabled()
        trained = grad and (x.requires_grad or (bias is not None and bias.requires_grad))
        bounded = None if bound is None else layer.scale_ub
        kind = (group, rounding, codes.dtype, codes.shape[1], bounded)
        if layer.place == "first":
            shares = x.shape[-1] > 0 and not trained
            _pending = (x, kind, layer.quantize_input(x)) if shares else None
        found = _pending
        if layer.place == "last":
            _pending = None
        if found is not None and found[0] is x and found[1] == kind and not trained:
            return layer.multiply(found[2])
    return operators.linear_registered(x, *constants, *options)


def _is_compiled() -> bool:
    """Return whether ``torch.compile`` is tracing, and not ``torch.export``."""
    # what is_exporting() returns; torch 2.11 folds that call to True in every trace
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_dynamo_compiling() and not exporting
