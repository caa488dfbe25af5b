"""The layer of experts as a loop over the experts in use, around any dense GEMM."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.errors import InvalidValue
from fp8kit.formats import TENSOR, GroupShape
from fp8kit.matmul.problem import MatmulOperands
from fp8kit.moe.pairs import combine, sorted_pairs
from fp8kit.moe.problem import (
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedOperands,
    GroupedProblem,
    MoeBackend,
)
from fp8kit.ops import bodies


class Products(NamedTuple):
    """The settings of a dense product, besides its operands."""

    out_dtype: torch.dtype
    batch_invariant: bool


Multiply = Callable[[MatmulOperands, tuple[GroupShape | None, GroupShape], Products], Tensor]


class Input(NamedTuple):
    """The input of the first product.

    ``data`` holds codes, or the unquantized input, with a row per token or per pair. ``fan`` pairs
    read the same row.
    """

    data: Tensor
    scale: Tensor | None
    fan: int


def quantized_input(operands: ExpertOperands, problem: ExpertsProblem) -> Input:
    """Quantize each token once, or each pair if the router's weight is applied to the input."""
    x, weights, fan = operands.x, operands.weights, problem.top_k
    if problem.router_weight_on_input:
        x = (x.unsqueeze(1) * weights.unsqueeze(2).to(x.dtype)).flatten(0, 1)
        fan = 1
    settings = (problem.w_dtype, operands.w13.input_scale, None, problem.scale_rounding)
    return Input(*bodies.quantize_input(x, problem.x_group, *settings), fan)


def quantized_intermediate(
    h: Tensor, problem: ExpertsProblem, input_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Quantize the input of the second product, fp32 ``[S, I]``, by a given scale or by its own."""
    group = problem.intermediate_group
    if group is None:
        return h.to(problem.x_dtype), None
    settings = (problem.w_dtype, input_scale, None, problem.scale_rounding)
    return bodies.quantize_input(h, group, *settings)


def looping(multiply: Multiply, **answers: Any) -> MoeBackend:
    """Return a backend that loops with a dense product; ``answers`` are fields of ``Backend``."""
    experts, grouped = (functools.partial(each, multiply=multiply) for each in (layer, product))
    return MoeBackend(experts=experts, grouped=grouped, **answers)


def layer(operands: ExpertOperands, problem: ExpertsProblem, multiply: Multiply) -> Tensor:
    """Compute ``[M, H]`` expert by expert."""
    operands = operands.placed(problem.experts)
    pairs = sorted_pairs(operands.ids, problem.experts)
    source = quantized_input(operands, problem)
    settings = Products(torch.float32, problem.batch_invariant)
    first, second = (
        (problem.x_group, problem.w_group),
        (problem.intermediate_group, problem.w_group),
    )
    rows = operands.x.new_zeros(operands.ids.numel(), problem.hidden, dtype=torch.float32)
    for expert, start, stop in used(pairs.offsets):
        chosen = pairs.order[start:stop]
        x, scale = _rows(source.data, source.scale, problem.x_group, chosen // source.fan)
        p = multiply(_operands(x, scale, operands.w13, expert), first, settings)
        h = quantized_intermediate(problem.activation(p), problem, operands.w2.input_scale)
        rows[chosen] = multiply(_operands(*h, operands.w2, expert), second, settings)
    weights = None if problem.router_weight_on_input else operands.weights
    return combine(rows, operands.ids, weights, problem.x_dtype)


def product(operands: GroupedOperands, problem: GroupedProblem, multiply: Multiply) -> Tensor:
    """Compute ``[S, N]`` expert by expert."""
    x, settings = operands.x, Products(problem.out_dtype, problem.batch_invariant)
    y = x.new_zeros(x.shape[0], problem.n, dtype=problem.out_dtype)
    _check_edges(operands.offsets, x.shape[0])
    for expert, start, stop in used(operands.offsets):
        chosen = torch.arange(start, stop, device=x.device)
        rows = _rows(x, operands.x_scale, problem.x_group, chosen)
        inputs = _operands(*rows, operands.w, expert)
        y[start:stop] = multiply(inputs, (problem.x_group, problem.w_group), settings)
    return y


def _check_edges(offsets: Tensor, rows: int) -> None:
    edges = [0, *offsets.tolist(), rows]
    if edges != sorted(edges):
        raise InvalidValue(
            f"Got offsets {edges[1:-1]} for {rows} rows.",
            f"They do not fall, and lie between 0 and {rows}.",
            "Sort the rows by expert, and put a zero before the cumulated counts.",
        )


def used(offsets: Tensor) -> list[tuple[int, int, int]]:
    """Return each expert that has rows, its first row and that behind its last; the host waits."""
    edges = offsets.tolist()
    spans = itertools.pairwise(edges)
    return [(e, start, stop) for e, (start, stop) in enumerate(spans) if start < stop]


def _rows(
    x: Tensor, scale: Tensor | None, group: GroupShape | None, chosen: Tensor
) -> tuple[Tensor, Tensor | None]:
    if group is None:
        return x[chosen], None
    codes = x.view(torch.uint8)[chosen].view(x.dtype)
    return codes, scale if scale is None or group == TENSOR else scale[chosen]


def _operands(x: Tensor, scale: Tensor | None, w: ExpertWeights, expert: int) -> MatmulOperands:
    bias = None if w.bias is None else w.bias[expert]
    return MatmulOperands(x, scale, w.data[expert], w.scale[expert], bias)
