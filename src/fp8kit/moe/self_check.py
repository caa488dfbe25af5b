"""Kernels are tried once on each GPU before they may compute experts there.

They are compiled for GPUs on which nobody has run them. A few rows are compared with the reference;
kernels that fail, or compute something else, decline with that reason.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.formats import TENSOR
from fp8kit.matmul.problem import m_bucket
from fp8kit.moe import reference
from fp8kit.moe.problem import (
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedOperands,
    GroupedProblem,
)

_TOKENS, _EXPERTS, _TOP_K, _SIZE = 33, 4, 2, 256
_LIMIT = 0.02  # rounding gives 2^-7 at most; a scale or an expert that is another, a tenth and more
_STATIC = 2**-6  # scale of inputs around one

Problem = ExpertsProblem | GroupedProblem
Operands = ExpertOperands | GroupedOperands


def failure(problem: Problem, run: Callable[..., Tensor]) -> str | None:
    """Return why kernels must not compute a problem on the current GPU, tried once for its kind.

    Args:
        problem: on a CUDA device.
        run: the kernels: takes operands and problem.

    Returns:
        ``None`` if they compute what the reference computes, or nothing can be tried during the
        capture of a graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return None
    return _failure_on(torch.cuda.current_device(), small(problem), run)


@functools.cache
def _failure_on(device: int, problem: Problem, run: Callable[..., Tensor]) -> str | None:
    found = difference(problem, run, torch.device("cuda", device))
    if found:
        warnings.warn(
            f"fp8kit's kernels of experts are not used on {torch.cuda.get_device_name(device)}: "
            f"{found}. Experts run slowly there; please report it with the output of fp8kit env.",
            stacklevel=2,
        )
    return found


def small(problem: Problem) -> Problem:
    """Return the problem of the same kind that is tried."""
    m = m_bucket(_TOKENS)
    if isinstance(problem, GroupedProblem):
        return dataclasses.replace(problem, m=m, experts=_EXPERTS, n=_SIZE, k=_SIZE)
    fewer = dataclasses.replace(problem, m=m, experts=_EXPERTS, top_k=_TOP_K)
    return dataclasses.replace(fewer, hidden=_SIZE, intermediate=_SIZE)


@torch.no_grad()
def difference(problem: Problem, run: Callable[..., Tensor], device: torch.device) -> str | None:
    """Compare kernels with the reference on random numbers.

    Args:
        problem: as ``small`` gives it.
        run: the kernels.
        device: where to compare.

    Returns:
        What is wrong, or ``None``.
    """
    operands = _operands(problem, torch.Generator("cpu").manual_seed(0), device)
    define = reference.BACKEND
    compute: Callable[..., Tensor] = define.experts
    if isinstance(problem, GroupedProblem):
        compute = define.grouped
    expected = compute(operands, problem).double()
    try:
        found = run(operands, problem).double()
    except Exception as error:  # of a compiler, a driver, a kernel: all make it unfit
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    wrong = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    return None if wrong < _LIMIT else f"they differ from the reference by {wrong:.3g}"


def _operands(problem: Problem, generator: torch.Generator, device: torch.device) -> Operands:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    def weights(rows: int, columns: int, static: bool) -> ExpertWeights:
        dense = normal(_EXPERTS, rows, columns) * columns**-0.5
        stack = [
            functional.quantize(w, problem.w_group, dtype=problem.w_dtype, role="weight")
            for w in dense
        ]
        data, scale = (torch.stack([getattr(q, part) for q in stack]) for part in ("data", "scale"))
        given = torch.full((1, 1), _STATIC, device=device) if static else None
        return ExpertWeights(data, scale, None, given)

    x = normal(_TOKENS, _SIZE)
    if isinstance(problem, GroupedProblem):
        offsets = torch.tensor([0, 5, 5, 20, _TOKENS], device=device)
        w = weights(problem.n, problem.k, False)
        if problem.x_group is None:
            return GroupedOperands(x.to(problem.x_dtype), None, w, offsets)
        scale = torch.full((1, 1), _STATIC, device=device) if problem.x_group == TENSOR else None
        q = functional.quantize(x, problem.x_group, dtype=problem.x_dtype, scale=scale)
        return GroupedOperands(q.data, q.scale, w, offsets)
    rows = (2 if problem.activation.gated else 1) * problem.intermediate
    ids = torch.stack(
        [torch.randperm(_EXPERTS, generator=generator)[:_TOP_K] for _ in range(_TOKENS)]
    )
    return ExpertOperands(
        x.to(problem.x_dtype),
        weights(rows, problem.hidden, problem.static_input),
        weights(problem.hidden, problem.intermediate, problem.static_intermediate),
        ids.to(device),
        torch.rand(_TOKENS, _TOP_K, generator=generator).to(device),
    )
