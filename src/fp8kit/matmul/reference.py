"""The definition: the ``float32`` product of the dequantized operands, bias added, rounded once.

With ``batch_invariant`` the rows are multiplied in contiguous tiles of a fixed height, the last one
padded: the library underneath always sees one shape, so a row's bits do not depend on other rows.
K is padded, too: where it is odd and N small, MKL sums the rows of a tile in different orders.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.quantizers import reference as quantizer

_INVARIANT_ROWS = _INVARIANT_K = 16


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``; ``x_scale`` is ``None`` if ``x`` is not quantized."""
    x, x_scale, w, w_scale, bias = operands
    x_group, w_group = problem.x_group, problem.w_group
    if x_scale is None or x_group is None:
        left = x.float()
    else:
        left = quantizer.dequantize(x, x_scale, x_group, torch.float32)
    right = quantizer.dequantize(w, w_scale, w_group, torch.float32)
    if problem.batch_invariant:
        rows, k = left.shape
        more = -k % _INVARIANT_K
        right = F.pad(right, (0, more)).contiguous().t()
        padded = F.pad(left, (0, more, 0, -rows % _INVARIANT_ROWS)).contiguous()
        tiles = torch.split(padded, _INVARIANT_ROWS)
        y = torch.cat([tile @ right for tile in tiles])[:rows]
    else:
        y = left @ right.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(problem.out_dtype)


BACKEND = MatmulBackend(run=run)
