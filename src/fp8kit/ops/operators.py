"""Each operator in two forms: its body, and the registered form that compilers and autograd see.

Arguments are inputs, then constants, then options, in the order of the schemas. The callers have
validated them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8kit.errors import teach
from fp8kit.formats import GroupShape, min_scale
from fp8kit.ops import bodies, schemas, transforms  # noqa: F401  (schemas registers)
from fp8kit.quantizers.scale_layout import product_layout
from fp8kit.runtime.replay_cache import Operands, Operator, Options, ReplayCache


def linear_registered(x: Tensor, *others: Any) -> Tensor:
    """Quantize ``x`` and multiply it by a weight, as one registered operator.

    The arguments are those of ``bodies.linear`` up to ``out_dtype``, all of them. If that is
    ``None``, the result has the dtype of ``x``, or of autocast where that is on.
    """
    _refuse_tangent(x)
    x = autocast(x)
    product: Any = torch.ops.fp8kit.linear
    if transforms.needs_function():
        product = transforms.linear
    return product(x, *others)


def joined_registered(
    x: Tensor, operands: Sequence[tuple[Any, ...]], options: Options
) -> tuple[Tensor, ...]:
    """Multiply ``x`` by the weights of several layers at once, as one registered operator.

    ``x`` is ``[..., K]``. The operands of each layer, and the options, which are the same for all,
    are as in ``linear_registered``. Returns each layer's columns of one result.
    """
    x = autocast(x)
    weights, scales, biases, _, bounds = map(list, zip(*operands, strict=True))
    biases = [b for b in biases if b is not None]
    y = torch.ops.fp8kit.joined_linear(x, weights, scales, biases, bounds[0], *options)
    return y.split([w.shape[0] for w in weights], -1)


QUANTIZE = Operator(bodies.quantize, torch.ops.fp8kit.quantize)
QUANTIZE_STATIC = Operator(bodies.quantize_static, torch.ops.fp8kit.quantize_static)
DEQUANTIZE = Operator(bodies.dequantize, torch.ops.fp8kit.dequantize)
SCALED_MM = Operator(bodies.scaled_mm, torch.ops.fp8kit.scaled_mm)
LINEAR = Operator(bodies.linear, linear_registered)
codes_registered = functools.partial(bodies.multiply_codes, scaled_mm=torch.ops.fp8kit.scaled_mm)
CODES = Operator(bodies.multiply_codes, codes_registered)


@dataclass(frozen=True, slots=True)
class RowCodes:
    """An input quantized for several products.

    ``data`` are codes ``[M, K]``; the scale has the layout that products load. ``shape [..., K]``
    and ``dtype`` are those of the input (or autocast's dtype), which results take over.
    """

    data: Tensor
    scale: Tensor
    group: GroupShape
    shape: torch.Size
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The inputs of ``CODES``."""
        return self.data, self.scale


class CodesCall(NamedTuple):
    """A call that quantizes a result that it computes: that of a norm or an activation.

    ``operator`` returns codes and scales in rows, then other results; ``inputs``, ``constants`` and
    ``options`` are its arguments, and ``check`` raises if they are invalid. The other fields are
    those of ``RowCodes``.
    """

    operator: Operator
    inputs: tuple[Tensor, ...]
    constants: Operands
    options: Options
    group: GroupShape
    shape: torch.Size
    dtype: torch.dtype
    check: Callable[[], object]

    def run(self, replays: ReplayCache) -> tuple[RowCodes, list[Tensor]]:
        """Return the codes and the operator's other results."""
        call = (self.operator, self.inputs, self.constants, self.options)
        data, scale, *others = replays.call(*call, self.check)
        return RowCodes(data, scale, self.group, self.shape, self.dtype), others

    def traced(self) -> RowCodes:
        """Return the codes in a graph that is being traced."""
        self.check()
        data, scale, *_ = self.operator.registered(*self.inputs, *self.constants, *self.options)
        return RowCodes(data, scale, self.group, self.shape, self.dtype)

    def then_multiply(self, options: Options) -> tuple[Operator, Options]:
        """Return the operator and options of this call followed by the product of its codes.

        The operator's constants are those of this call, then weight, scale and bias of a layer;
        ``options`` are those of ``LINEAR`` for the layer.
        """
        return then_multiply(self.operator), (self.options, options_of_codes(self, options))


@functools.cache
def then_multiply(producer: Operator) -> Operator:
    """Return an operator that multiplies the codes of a producer, so that one recording has both.

    A producer quantizes a norm or an activation. The arguments are the producer's tensors, then
    weight, scale and bias, then the options of both; the product comes before other results.
    """

    def chained(produce: Callable[..., Any], multiply: Callable[..., Tensor]) -> Callable[..., Any]:
        def call(*arguments: Any) -> list[Tensor]:
            *tensors, w, w_scale, bias, options, product_options = arguments
            data, scale, *others = produce(*tensors, *options)
            return [multiply(data, scale, w, w_scale, bias, *product_options), *others]

        return call

    body = chained(producer.body, bodies.multiply_codes)
    return Operator(body, chained(producer.registered, codes_registered))


def options_of_codes(codes: RowCodes | CodesCall, options: Options) -> Options:
    """Return the options of ``CODES``; ``options`` are those of ``LINEAR`` for a layer."""
    _, w_group, _, accum, batch_invariant, out_dtype = options
    group = (codes.group.rows, codes.group.cols)
    return group, w_group, out_dtype or codes.dtype, accum, batch_invariant, codes.shape


def quantize_rows(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype,
    rounding: str,
    scale_ub: Tensor | None,
) -> RowCodes:
    """Quantize activations ``[..., K]`` once, for several products.

    ``x`` is bf16, fp16 or fp32; scales are taken from the data.
    """
    _refuse_tangent(x)
    x = autocast(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    shape, layout = (group.rows, group.cols), product_layout(group)
    options = (min_scale(group, dtype, "activation"), scale_ub, rounding, layout)
    data, scale = QUANTIZE(rows, shape, dtype, *options)
    return RowCodes(data, scale, group, x.shape, x.dtype)


def autocast(x: Tensor) -> Tensor:
    """Convert an input to the dtype of autocast, where autocast is on for its device."""
    device_type = x.device.type
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        x = x.to(torch.get_autocast_dtype(device_type))
    return x


def _refuse_tangent(x: Tensor) -> None:
    """Raise for forward-mode differentiation, where torch would take the operator for constant."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotImplementedError(
            teach(
                "Got an input with a forward-mode tangent.",
                "FP8 products have a backward and no forward-mode derivative.",
                "Differentiate with backward() or torch.autograd.grad, or the dense model.",
            )
        )
