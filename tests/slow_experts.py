"""The yardstick for a layer of experts: float64 between the roundings to FP8.

``slow_experts`` loops over pairs (a token and one of its experts), ``slow_by_expert`` over experts,
which is quick enough for large layers on a GPU. ``assert_experts`` compares a result with either.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fp8kit
from fp8kit.formats import GROUP128, MX, TENSOR, GroupShape, QTensor
from fp8kit.moe import Activation
from numerics import MATMUL_FACTOR

_SWIGLU = Activation()


class Layer(NamedTuple):
    """A layer of experts: its dense weights, the same weights quantized, and its options."""

    gate_up: Tensor
    down: Tensor
    w13: QTensor
    w2: QTensor
    x_group: GroupShape | None
    activation: Activation
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    input_scale: Tensor | None = None
    on_input: bool = False
    rounding: str | None = None


class Yardstick(NamedTuple):
    """A result in float64, and per token the two numbers that bound its error.

    ``flips``: the error of codes that flip to a neighbour. ``spread``: the sum of the norms of the
    rows that are added up, to which roundings are relative.
    """

    y: Tensor
    flips: Tensor
    spread: Tensor


def random_layer(
    groups: tuple[GroupShape | None, GroupShape],
    activation: Activation = _SWIGLU,
    sizes: tuple[int, int, int] = (4, 160, 200),
    biases: bool = False,
) -> Layer:
    """Draw experts of ``sizes`` E, H, I; ``groups`` are those of the input and of the weights."""
    count, hidden, inner = sizes
    gate_up = torch.randn(count, activation.columns(inner), hidden) / math.sqrt(hidden)
    down = torch.randn(count, hidden, inner) / math.sqrt(inner)
    return Layer(
        gate_up, down, stack(gate_up, groups[1]), stack(down, groups[1]), groups[0], activation,
        torch.randn(gate_up.shape[:2]) if biases else None,
        torch.randn(down.shape[:2]) if biases else None,
    )  # fmt: skip


def stack(weights: Tensor, group: GroupShape) -> QTensor:
    """Quantize a stack ``[E, N, K]``, each matrix by itself."""
    parts = [fp8kit.quantize(w, group, role="weight") for w in weights]
    data = torch.stack([p.data.view(torch.uint8) for p in parts]).view(parts[0].data.dtype)
    return QTensor(data, torch.stack([p.scale for p in parts]), group)


def slow_experts(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Yardstick:
    """Compute a layer pair by pair, rounding to FP8 where the layer does."""
    m, hidden = x.shape
    y, flips, spread = torch.zeros(m, hidden).double(), torch.zeros(m).double(), torch.zeros(m)
    w13, w2 = (fp8kit.dequantize(w).double() for w in (layer.w13, layer.w2))
    for token in range(m):
        for place in range(ids.shape[1]):
            expert, weight = int(ids[token, place]), weights[token, place]
            if not 0 <= expert < w13.shape[0]:
                continue
            given = x[token] * weight.to(x.dtype) if layer.on_input else x[token]
            p = w13[expert] @ _rounded(given[None], layer.x_group, layer, x.dtype)[0]
            p = p if layer.bias13 is None else p + layer.bias13[expert]
            h = _intermediate(layer, p[None], x.dtype)[0]
            q = w2[expert] @ h
            q = q if layer.bias2 is None else q + layer.bias2[expert]
            factor = 1.0 if layer.on_input else float(weight)
            y[token] += factor * q
            # an error of about 2^-23 flips one code in a thousand rows, to a neighbour 2^-3 away
            flips[token] += abs(factor) / 8 * (h.abs() * w2[expert].norm(dim=0)).max()
            spread[token] += abs(factor) * float(q.norm())
    return Yardstick(y, flips, spread.double())


def slow_by_expert(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Yardstick:
    """Compute the same as ``slow_experts``, all pairs of an expert at once, on x's device."""
    y = torch.zeros_like(x, dtype=torch.float64)
    flips, spread = y.new_zeros(x.shape[0]), y.new_zeros(x.shape[0])
    for expert in ids.unique().tolist():
        if not 0 <= expert < layer.w13.shape[0]:
            continue
        token, place = (ids == expert).nonzero(as_tuple=True)
        weight = weights[token, place, None]
        given = x[token] * weight.to(x.dtype) if layer.on_input else x[token]
        w13, w2 = (
            fp8kit.dequantize(QTensor(w.data[expert], w.scale[expert], w.group)).double()
            for w in (layer.w13, layer.w2)
        )
        p = _rounded(given, layer.x_group, layer, x.dtype) @ w13.t()
        p = p if layer.bias13 is None else p + layer.bias13[expert]
        h = _intermediate(layer, p, x.dtype)
        q = h @ w2.t()
        q = q if layer.bias2 is None else q + layer.bias2[expert]
        factor = torch.ones_like(weight) if layer.on_input else weight
        y.index_add_(0, token, factor * q)
        size = factor[:, 0].abs().double()
        flips.index_add_(0, token, size / 8 * (h.abs() * w2.norm(dim=0)).amax(1))
        spread.index_add_(0, token, size * q.norm(dim=1))
    return Yardstick(y, flips, spread)


def dense_experts(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the layer from its dense weights, differentiably and without rounding to FP8."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for place in range(ids.shape[1]):
            expert = int(ids[token, place])
            if 0 <= expert < layer.gate_up.shape[0]:
                weight = weights[token, place]
                p = layer.gate_up[expert] @ (x[token] * weight if layer.on_input else x[token])
                p = p if layer.bias13 is None else p + layer.bias13[expert]
                q = layer.down[expert] @ layer.activation(p)
                q = q if layer.bias2 is None else q + layer.bias2[expert]
                total = total + (q if layer.on_input else weight * q)
        rows.append(total)
    return torch.stack(rows)


def dequantized(layer: Layer) -> Layer:
    """Return the layer with its dequantized codes as its dense weights."""
    return layer._replace(gate_up=fp8kit.dequantize(layer.w13), down=fp8kit.dequantize(layer.w2))


def operator_arguments(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
    """Return the arguments of ``fp8kit::experts``."""
    pair = [None if g is None else (g.rows, g.cols) for g in (layer.x_group, layer.w13.group)]
    rounding = layer.rounding or ("floor" if layer.x_group == MX else "exact")
    return (
        x, ids, weights, layer.w13.data, layer.w13.scale, layer.bias13, layer.input_scale,
        layer.w2.data, layer.w2.scale, layer.bias2, layer.input_scale, None, *pair, rounding,
        *layer.activation.words(), layer.on_input, False, None,
    )  # fmt: skip


def on_device(layer: Layer, device: str) -> Layer:
    """Move a layer."""
    return Layer(*(x.to(device) if isinstance(x, Tensor | QTensor) else x for x in layer))


def assert_experts(y: Tensor, slow: Yardstick, terms: int, short_sums: float = 0.0) -> None:
    """Check every token of a layer against the slow result.

    Permitted are flipped codes; two roundings to the dtype of the result, of each pair's row and of
    the sum, each by half an epsilon of what is added up; the errors of ``float32`` sums of
    ``terms`` products, which add in quadrature; and ``short_sums``, the relative error of a tensor
    core's short accumulator.
    """
    unit = torch.finfo(torch.float32).eps / 2 * math.sqrt(terms)
    bound = slow.flips + slow.spread * (
        torch.finfo(y.dtype).eps + MATMUL_FACTOR * unit + short_sums
    )
    # a router weight of 1e-7 makes results that float16 rounds to its smallest subnormal
    smallest = torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps
    bound = bound + smallest / 2 * math.sqrt(y.shape[1])
    error = (y.double() - slow.y).norm(dim=1)
    wrong = (~(error <= bound)).nonzero().flatten().tolist()
    assert not wrong, f"tokens {wrong}: {error[wrong]} over {bound[wrong]}"


def _intermediate(layer: Layer, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows that the second GEMM reads, for rows ``p`` that the first one wrote."""
    group = None if layer.x_group is None else GROUP128
    group = TENSOR if layer.input_scale is not None else group
    return _rounded(layer.activation(p).float(), group, layer, dtype)


def _rounded(x: Tensor, group: GroupShape | None, layer: Layer, dtype: torch.dtype) -> Tensor:
    if group is None:
        return x.to(dtype).double()
    how = {"scale": layer.input_scale, "scale_rounding": layer.rounding}
    return fp8kit.dequantize(fp8kit.quantize(x, group, **how)).double()
