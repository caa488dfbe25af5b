"""Experts on a CPU: one dense GEMM after the other, for the experts in use.

Weights are decoded one expert at a time, and only where an expert has tokens.
"""

from __future__ import annotations

from torch import Tensor

from fp8kit.formats import GroupShape
from fp8kit.matmul.problem import MatmulOperands
from fp8kit.moe.loop import Products, looping
from fp8kit.moe.problem import ExpertsProblem, GroupedProblem
from fp8kit.ops import bodies


def supports(problem: ExpertsProblem | GroupedProblem) -> str | None:
    """Decline where reading the counts on the host would wait for a device."""
    return None if problem.device_type == "cpu" else "reads the tokens' counts on the host"


def _multiply(
    operands: MatmulOperands, groups: tuple[GroupShape | None, GroupShape], settings: Products
) -> Tensor:
    x_group = None if groups[0] is None else (groups[0].rows, groups[0].cols)
    how = (settings.out_dtype, "precise", settings.batch_invariant, None)
    return bodies.scaled_mm(*operands, x_group, (groups[1].rows, groups[1].cols), *how)


BACKEND = looping(_multiply, supports=supports)
