"""The layer of experts in plain torch, on any device: the specification of every other backend.

    x'   x, or rn(x * weight) for each pair where the router's weight is applied to the input
    p    quantize(x') @ w13[e].T + bias13[e]           fp32
    h    quantize(activation(p))                       fp32 to codes, 1x128 or by the given scale
    q    h @ w2[e].T + bias2[e]                        fp32
    y    rn(sum over the token's pairs, in order, of weight * q)

``rn`` rounds to the dtype of ``x``. Between the first product and the codes of ``h``, and between
the second product and ``y``, all values are ``float32``. Where a layer does not quantize its
input, ``h`` is rounded to the dtype of ``x`` instead. Pairs without an expert add nothing.
"""

from __future__ import annotations

from torch import Tensor

from fp8kit.formats import GroupShape
from fp8kit.matmul import reference as matmul
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.moe.loop import Products, looping


def _multiply(
    operands: MatmulOperands, groups: tuple[GroupShape | None, GroupShape], settings: Products
) -> Tensor:
    numbers = (settings.out_dtype, operands.bias, "precise", settings.batch_invariant)
    problem = MatmulProblem.of(operands.x, operands.w, groups, *numbers)
    return matmul.run(operands, problem)


BACKEND = looping(_multiply)
