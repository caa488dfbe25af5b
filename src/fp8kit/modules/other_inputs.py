"""Inputs of an ``Fp8Linear`` other than plain tensors: codes, deferred, jagged, ``fx`` proxies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Proxy
from torch.nested._internal.nested_tensor import NestedTensor

from fp8kit.errors import InvalidValue
from fp8kit.formats import QTensor
from fp8kit.modules.deferred import Deferred, multiplied
from fp8kit.ops import validation
from fp8kit.ops.operators import RowCodes

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

OTHERS = (Proxy, QTensor, NestedTensor, Deferred)


def of_others(layer: Fp8Linear, x: Any) -> Any:
    """Apply a layer to an input that is no plain tensor; for a proxy, add one ``fx`` call node."""
    if isinstance(x, QTensor):
        return layer.multiply(row_codes(layer, x))
    if isinstance(x, Deferred):
        return multiplied(layer, x)
    if isinstance(x, Proxy):
        tracer: Any = x.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(layer), (x,), {})
    rows = layer.forward(x.values())
    return torch.nested.nested_tensor_from_jagged(rows, x.offsets(), x.lengths())


def row_codes(layer: Fp8Linear, x: QTensor) -> RowCodes:
    """Return an already quantized input as ``Fp8Linear.multiply`` takes it.

    Raises ``ValueError`` if granularity, codes, K or device are not those of the layer.
    """
    scheme = layer.scheme
    if x.group != scheme.activation:
        wanted, remedy = "16-bit activations", "."
        if scheme.activation is not None:
            wanted = f"{scheme.activation}-scaled activations"
            remedy = f", which the layer quantizes, or quantize it per {scheme.activation}."
        raise InvalidValue(
            f"Got an input with {x.group} scales for a layer of scheme {scheme}.",
            f"It multiplies {wanted}.",
            f"Pass the tensor itself{remedy}",
        )
    validation.check_codes("an input", x.data.dtype, scheme)
    validation.check_operands(x.data, layer.codes, layer.bias, layer.accum)
    rows = math.prod(x.shape[:-1])
    data, scale = x.data.reshape(rows, x.shape[-1]), x.scale
    if not scheme.static and x.data.dim() != 2:
        scale = scale.reshape(rows, scale.shape[-1])
    return RowCodes(data, scale, x.group, x.shape, layer.compute_dtype)
