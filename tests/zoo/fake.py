"""Fake quantization of a linear layer in plain torch, which shares no code with the package.

A scale is the largest magnitude of its group over the largest code; a value is divided by it,
rounded to the nearest e4m3 and multiplied back. Both operands are then numbers of float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0
# the least scale, as vLLM and FBGEMM have it: of an input per token, and of everything else
LEAST = 1e-10 / LARGEST
PER_TOKEN = 1 / (LARGEST * 512)


class Groups(NamedTuple):
    """Which elements share a scale, and what is special about it.

    Args:
        extent: rows and columns that share one; ``None`` stands for all.
        floor: the least scale.
        power: scales are rounded up to a power of two.
        before: the matrix is rounded in these groups first.
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
    # an MX weight whose codes have moved under the scale of a row or block, a power of two
    "MXFP8_ROW": Scheme(Groups((1, None), 2.0**-127, True, _MX), _TOKEN),
    "MXFP8_BLOCK": Scheme(Groups((128, 128), 2.0**-127, True, _MX), Groups((1, 128))),
    "MXFP8_EMULATED": Scheme(_MX, _MX),
}


def operands(x: Tensor, weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return ``[M, K]`` and ``[N, K]`` in float64 from ``x [..., K]`` and a dense ``weight``."""
    groups = GROUPS[scheme]
    return rounded(x.reshape(-1, x.shape[-1]), groups.inputs), rounded(weight, groups.weight)


def rounded(matrix: Tensor, groups: Groups) -> Tensor:
    """Give the values that the codes of a matrix stand for, in float64."""
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
