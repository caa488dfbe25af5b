"""A model of the sums of Hopper's FP8 tensor core in plain torch, and experts computed with it.

The core aligns 32 products and the sum so far to the largest of them, and truncates each of them
and their sum after 13 bits of fraction. Kernels promote the sum every 128 products. The model
reproduced the differences from the reference that two layers of random experts had on an H200.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.formats import GroupShape
from fp8kit.matmul.problem import MatmulOperands
from fp8kit.moe.loop import Products, looping

FRACTION = 13
ALIGNED, PROMOTED = 32, 128


def short_sum(x: Tensor, w: Tensor) -> Tensor:
    """Multiply codes ``x [M, K]`` by codes ``w [N, K]`` with one accumulator, never promoted."""
    x, w = x.double(), w.double()
    total = x.new_zeros(x.shape[0], w.shape[0])
    for k in range(0, x.shape[1], ALIGNED):
        products = x[:, None, k : k + ALIGNED] * w[None, :, k : k + ALIGNED]
        largest = torch.maximum(products.abs().amax(2), total.abs())
        unit = _last_place(largest)
        total = (torch.trunc(products / unit[..., None]).sum(2) + torch.trunc(total / unit)) * unit
        unit = _last_place(total.abs())
        total = torch.trunc(total / unit) * unit
    return total


def multiply(
    operands: MatmulOperands, groups: tuple[GroupShape | None, GroupShape], settings: Products
) -> Tensor:
    """Multiply as a kernel on that core does; the signature is what ``looping`` expects."""
    assert groups[0] is not None
    x, w = operands.x, operands.w
    y = torch.zeros(x.shape[0], w.shape[0])
    for k in range(0, x.shape[1], PROMOTED):
        part = short_sum(x[:, k : k + PROMOTED].float(), w[:, k : k + PROMOTED].float()).float()
        part = part * _scales(operands.w_scale, groups[1], w.shape[0], k)
        y += part * _scales(operands.x_scale, groups[0], x.shape[0], k)[:, None]
    y = y if operands.bias is None else y + operands.bias.float()
    return y.to(settings.out_dtype)


def _last_place(largest: Tensor) -> Tensor:
    exponent = torch.frexp(largest)[1] - 1 - FRACTION
    return torch.ldexp(torch.ones_like(largest), exponent)


def _scales(scale: Tensor | None, group: GroupShape, rows: int, k: int) -> Tensor:
    """Return the scale of each row for the columns that start at ``k`` and share one scale."""
    assert scale is not None
    column = scale[:, 0 if group.cols == -1 else k // group.cols]
    return column.repeat_interleave(rows if group.rows == -1 else group.rows)[:rows]


EXPERTS = looping(multiply)
