"""Fake quantization of a linear layer in plain torch, which shares no code with the package.

A scale is the largest magnitude of its group over the largest code; a value is divided by it,
rounded to the nearest e4m3 and multiplied back. Both operands are then numbers of float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
# rows and columns that share one scale: of the weight, of the input; None stands for all
GROUPS: dict[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = {
    "FP8_DYNAMIC": ((1, None), (1, None)),
    "FP8_BLOCK": ((128, 128), (1, 128)),
    "FP8_TENSOR": ((None, None), (1, None)),
}
# the least scale, as vLLM and FBGEMM have it: of an input per token, and of everything else
LEAST = 1e-10 / LARGEST
FLOOR = {"FP8_DYNAMIC": 1 / (LARGEST * 512), "FP8_TENSOR": 1 / (LARGEST * 512), "FP8_BLOCK": LEAST}


def operands(x: Tensor, weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return ``[M, K]`` and ``[N, K]`` in float64 from ``x [..., K]`` and a dense ``weight``."""
    of_weight, of_input = GROUPS[scheme]
    rows = x.reshape(-1, x.shape[-1])
    return rounded(rows, *of_input, FLOOR[scheme]), rounded(weight, *of_weight)


def rounded(matrix: Tensor, rows: int | None, columns: int | None, floor: float = LEAST) -> Tensor:
    """Give the values that the codes of a matrix stand for, in float64."""
    m, n = matrix.shape
    rows, columns = rows or max(m, 1), columns or n
    padded = torch.zeros(-(-m // rows) * rows, -(-n // columns) * columns)
    padded[:m, :n] = matrix
    tiles = padded.view(-1, rows, padded.shape[1] // columns, columns)
    scale = tiles.abs().amax((1, 3), keepdim=True) / torch.tensor(LARGEST)
    scale = scale.clamp(min=floor)
    codes = (tiles / scale).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).view(padded.shape)[:m, :n]
