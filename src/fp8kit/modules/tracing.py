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
    """What the first sibling left in this trace for the other siblings.

    Args:
        x: the siblings' input.
        kind: how ``x`` was quantized, or the options by which it was multiplied.
        codes: of ``x``, if each sibling multiplies them itself.
        operands: of each sibling, if the first one computed all results.
        results: of the siblings, in the same order.
        trace: the trace that computed the results; weights may change before the next graph.
    """

    x: Tensor
    kind: tuple[Any, ...]
    codes: RowCodes | None
    operands: tuple[tuple[Any, ...], ...] = ()
    results: tuple[Tensor, ...] = ()
    trace: str = ""


_left: _Left | None = None


def traced(layer: Fp8Linear, x: Tensor) -> Tensor:
    """Compute in a graph; siblings share codes, because Inductor does not merge custom operators.

    With few rows the first sibling multiplies the weights of all as one matrix. Every attribute
    that is read of a layer costs a guard at each call; objects reachable in two ways, such as the
    siblings of a group, cost a slower one. So layers pass results on through a global, which is set
    from the first sibling to the last of one trace. Changes of ``x`` in between go unnoticed.
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
    """Compute what siblings share: all their results with few rows, else codes of the input."""
    group: Any = layer.shared
    operands = group.joined_in_graph(x)
    if operands is None:
        return _Left(x, kind, layer.quantize_input(x))
    results = operators.joined_registered(x, operands, layer.options())
    return _Left(x, layer.options(), None, operands, results, _trace())


def constant_in_graphs(function: Function) -> Function:
    """Make a trace call a function and treat its result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler: two seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def _trace() -> str:
    """Return the id of the running trace."""
    return str(torch._guards.CompileContext.current_compile_id())


def is_compiled() -> bool:
    """Return whether ``torch.compile`` is tracing, and not ``torch.export``."""
    # the flag behind is_exporting(): torch 2.11 folds that call to True in every trace
    exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    return torch.compiler.is_dynamo_compiling() and not exporting
