"""What ``torch.compile`` traces of an ``Fp8Linear``: few guards, shared codes for siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8kit.ops import operators, validation
from fp8kit.ops.operators import RowCodes

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

Function = TypeVar("Function", bound=Callable[..., Any])


class _Left(NamedTuple):
    """What the first of the siblings that are being traced has left for the others.

    Args:
        x: their input.
        kind: how it was quantized, or the options by which it was multiplied.
        codes: of the input, if each sibling multiplies them.
        operands: of the siblings whose results wait, if the first one computed all.
        results: theirs, in the same order.
        trace: in which they were computed; weights may change between one graph and the next.
    """

    x: Tensor
    kind: tuple[Any, ...]
    codes: RowCodes | None
    operands: tuple[tuple[Any, ...], ...] = ()
    results: tuple[Tensor, ...] = ()
    trace: str = ""


_left: _Left | None = None


def traced(layer: Fp8Linear, x: Tensor) -> Tensor:
    """Compute in a graph; siblings share codes, as Inductor merges no operators of others.

    Of few rows, the first sibling multiplies the weights of all as one matrix. What is read of a
    layer is a guard at every call, and what is found in two ways, such as the siblings of a group,
    is another and slower one. So a layer tells the next one through a global, which lives from the
    first sibling to the last within one trace. Changes of ``x`` go unseen.
    """
    global _left
    codes, _, bias, input_scale, bound = constants = layer.operands()
    group, _, rounding, accum, *_ = options = layer.options()
    validation.check_float("x", x)
    validation.check_operands(x, codes, bias, accum)
    if codes.dtype != torch.float8_e4m3fn:
        validation.check_codes("the weight of an Fp8Linear", codes.dtype, layer.scheme)
    if layer.place and group is not None and input_scale is None and is_compiled():
        grad = torch.is_grad_enabled()
        trained = grad and (x.requires_grad or (bias is not None and bias.requires_grad))
        bounded = None if bound is None else layer.scale_ub
        kind = (group, rounding, codes.dtype, codes.shape[1], bounded)
        if layer.place == "first":
            shares = x.shape[-1] > 0 and not trained
            _left = _of_all(layer, x, kind) if shares else None
        found = _left
        if layer.place == "last":
            _left = None
        if found is not None and found.x is x and not trained:
            if found.codes is not None and found.kind == kind:
                return layer.multiply(found.codes)
            if found.codes is None and found.kind == options and found.trace == _trace():
                for held, result in zip(found.operands, found.results, strict=True):
                    if all(a is b for a, b in zip(held, constants, strict=True)):
                        return result
    return operators.linear_registered(x, *constants, *options)


def _of_all(layer: Fp8Linear, x: Tensor, kind: tuple[Any, ...]) -> _Left:
    """Compute for all siblings what they have in common: everything, or codes of the input."""
    group: Any = layer.shared
    operands = group.joined_in_graph(x)
    if operands is None:
        return _Left(x, kind, layer.quantize_input(x))
    results = operators.joined_registered(x, operands, layer.options())
    return _Left(x, layer.options(), None, operands, results, _trace())


def constant_in_graphs(function: Function) -> Function:
    """Let a trace call a function and keep its result.

    As ``torch.compiler.assume_constant_result`` does, which imports the compiler: two seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def _trace() -> str:
    """Name the trace that is under way."""
    return str(torch._guards.CompileContext.current_compile_id())


def is_compiled() -> bool:
    """Return whether ``torch.compile`` is tracing, and not ``torch.export``."""
    # what is_exporting() returns; torch 2.11 folds that call to True in every trace
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_dynamo_compiling() and not exporting
