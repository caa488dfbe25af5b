"""Fake quantization of a linear layer in plain torch, which shares no code with the package.

A scale is the largest magnitude of its group divided by the largest code. A value is divided by the
scale, rounded to the nearest e4m3 and multiplied back. Both operands are then float64 values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0
# the least scale of an input per token, and of everything else, as in vLLM and FBGEMM
LEAST = 1e-10 / LARGEST
PER_TOKEN = 1 / (LARGEST * 512)


class Groups(NamedTuple):
    """The elements that share a scale, and the options of the scale.

    Args:
        extent: rows and columns that share a scale; ``None`` stands for all.
        floor: the least scale.
        power: whether scales are rounded up to a power of two.
        before: groups in which the matrix is rounded first.
    """

    extent: tuple[int | None, int | None]
    floor: float = LEAST
    power: bool = False
    before: Groups | None = None


class Scheme(NamedTuple):
    """Groups of both operands of a product."""

    weight: Groups
    inputs: Groups


_TOKEN = Groups((1, None), PER_TOKEN)
_MX = Groups((1, 32), 2.0**-127, power=True)
GROUPS = {
    "FP8_DYNAMIC": Scheme(Groups((1, None)), _TOKEN),
    "FP8_BLOCK": Scheme(Groups((128, 128)), Groups((1, 128))),
    "FP8_TENSOR": Scheme(Groups((None, None)), _TOKEN),
    "MXFP8": Scheme(_MX, _MX),
    # an MX weight that is rebased: its codes have moved to one power-of-two scale per row or block
    "MXFP8_ROW": Scheme(Groups((1, None), 2.0**-127, True, _MX), _TOKEN),
    "MXFP8_BLOCK": Scheme(Groups((128, 128), 2.0**-127, True, _MX), Groups((1, 128))),
    "MXFP8_EMULATED": Scheme(_MX, _MX),
}


def operands(x: Tensor, weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return ``[M, K]`` and ``[N, K]`` in float64 from ``x [..., K]`` and a dense ``weight``."""
    groups = GROUPS[scheme]
    return rounded(x.reshape(-1, x.shape[-1]), groups.inputs), rounded(weight, groups.weight)


def rounded(matrix: Tensor, groups: Groups) -> Tensor:
    """Return a matrix after quantization and dequantization, in float64."""
    if groups.before is not None:
        matrix = rounded(matrix, groups.before)
    m, n = matrix.shape
    rows, columns = groups.extent[0] or max(m, 1), groups.extent[1] or n
    padded = torch.zeros(-(-m // rows) * rows, -(-n // columns) * columns)
    padded[:m, :n] = matrix
    tiles = padded.view(-1, rows, padded.shape[1] // columns, columns)
    scale = tiles.abs().amax((1, 3), keepdim=True) / torch.tensor(LARGEST)
    scale = scale.clamp(min=groups.floor)
    if groups.power:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones(()), exponent - (mantissa == 0.5).int())
    codes = (tiles / scale).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).view(padded.shape)[:m, :n]
