"""Check the kernels of experts once on each GPU before they compute there.

The kernels also compile for GPUs that nobody has tested. Their result for a few rows is compared
with the reference; kernels that fail, or give a wrong result, decline with that reason.

FP8 tensor cores keep about 14 bits of a sum. With random numbers the first GEMM is then off by
about 2^-12, and one code in a hundred of the intermediate moves to its neighbour. If that is one of
a token's largest, the token is off by some per cent although nothing is wrong. So the numbers here
are chosen so that 14 bits hold the sums of the first GEMM, and no code moves.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.errors import teach
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
from fp8kit.runtime import compile_ahead

_TOKENS, _EXPERTS, _TOP_K, _SIZE = 33, 4, 2, 256
# rounding a pair's row, the result and the reference's to 16 bits gives 2^-9 each, short sums of
# the second product 2^-10, together less than 2^-7; another scale or expert, a tenth and more
_LIMIT = 0.02
_STATIC = 2**-6  # scale of inputs around one
_MOST = 7  # of integers: the largest codes are powers of two times 7, so scales are powers of two
# parts of an input and of a weight, as rows and columns, that a scale may belong to
_INPUT_PARTS = ((1, _SIZE), (1, 128), (1, 32))
_WEIGHT_PARTS = ((2 * _SIZE, _SIZE), (1, _SIZE), (128, 128), (1, 32))

Problem = ExpertsProblem | GroupedProblem
Operands = ExpertOperands | GroupedOperands
_found: dict[tuple[int, Problem, Callable[..., Tensor], int], str | None] = {}


def failure(problem: Problem, run: Callable[..., Tensor], tokens: int = _TOKENS) -> str | None:
    """Return why kernels must not compute a problem on the current GPU, tried once for its kind.

    ``None`` if they agree with the reference. ``tokens`` is the number of tokens to try, as kernels
    may depend on it. Raises ``RuntimeError`` if a graph is being captured and the kind was never
    tried: nothing can be compared then, and a choice without a trial would hold for good.
    """
    tried = (torch.cuda.current_device(), trial_problem(problem), run, tokens)
    if tried not in _found:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                teach(
                    "A layer of experts, or a few tokens of it, is called for the first time while "
                    "a graph is captured.",
                    "Its kernels are compiled, and tried on a few rows, before they are captured.",
                    "Call the layer once before the capture, or fp8kit.warmup(model).",
                )
            )
        with compile_ahead.launching():
            _found[tried] = _failure_on(*tried)
    return _found[tried]


def _failure_on(
    device: int, problem: Problem, run: Callable[..., Tensor], tokens: int
) -> str | None:
    found = difference(problem, run, torch.device("cuda", device), tokens)
    if found:
        warnings.warn(
            f"fp8kit's kernels of experts are not used on {torch.cuda.get_device_name(device)}: "
            f"{found}. Experts run slowly there; please report it with the output of fp8kit env.",
            stacklevel=2,
        )
    return found


def trial_problem(problem: Problem) -> Problem:
    """Return the small problem that is tried for all problems of the same kind."""
    m = m_bucket(_TOKENS)
    if isinstance(problem, GroupedProblem):
        return dataclasses.replace(problem, m=m, experts=_EXPERTS, n=_SIZE, k=_SIZE)
    fewer = dataclasses.replace(problem, m=m, experts=_EXPERTS, top_k=_TOP_K)
    return dataclasses.replace(fewer, hidden=_SIZE, intermediate=_SIZE)


@torch.no_grad()
def difference(
    problem: Problem, run: Callable[..., Tensor], device: torch.device, tokens: int = _TOKENS
) -> str | None:
    """Compare kernels with the reference on numbers whose sums are exact.

    ``problem`` is a result of ``trial_problem``. Returns what is wrong, or ``None``.
    """
    operands = _operands(problem, torch.Generator("cpu").manual_seed(0), device, tokens)
    define = reference.BACKEND
    compute = define.grouped if isinstance(problem, GroupedProblem) else define.experts
    assert compute is not None
    expected = compute(operands, problem).double()  # type: ignore[arg-type]
    try:
        found = run(operands, problem).double()
    except Exception as error:  # whether from a compiler, a driver or a kernel
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    wrong = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
    return None if wrong < _LIMIT else f"they differ from the reference by {wrong:.3g}"


def _operands(
    problem: Problem, generator: torch.Generator, device: torch.device, tokens: int
) -> Operands:
    def weights(rows: int, columns: int, static: bool) -> ExpertWeights:
        shape = (_EXPERTS, rows, columns)
        dense = _numbers(shape, _WEIGHT_PARTS, generator).to(device) * _SIZE**-0.5
        stack = [
            functional.quantize(w, problem.w_group, dtype=problem.w_dtype, role="weight")
            for w in dense
        ]
        data, scale = (torch.stack([getattr(q, part) for q in stack]) for part in ("data", "scale"))
        given = torch.full((1, 1), _STATIC, device=device) if static else None
        return ExpertWeights(data, scale, None, given)

    x = _numbers((tokens, _SIZE), _INPUT_PARTS, generator).to(device)
    if isinstance(problem, GroupedProblem):
        offsets = torch.tensor([0, 5, 5, 20, tokens], device=device)
        w = weights(problem.n, problem.k, False)
        if problem.x_group is None:
            return GroupedOperands(x.to(problem.x_dtype), None, w, offsets)
        scale = torch.full((1, 1), _STATIC, device=device) if problem.x_group == TENSOR else None
        q = functional.quantize(x, problem.x_group, dtype=problem.x_dtype, scale=scale)
        return GroupedOperands(q.data, q.scale, w, offsets)
    rows = (2 if problem.activation.gated else 1) * problem.intermediate
    ids = torch.stack(
        [torch.randperm(_EXPERTS, generator=generator)[:_TOP_K] for _ in range(tokens)]
    )
    return ExpertOperands(
        x.to(problem.x_dtype),
        weights(rows, problem.hidden, problem.static_input),
        weights(problem.hidden, problem.intermediate, problem.static_intermediate),
        ids.to(device),
        _halvings((tokens, _TOP_K), generator).to(device),
    )


def _numbers(
    shape: tuple[int, ...], parts: tuple[tuple[int, int], ...], generator: torch.Generator
) -> Tensor:
    """Draw numbers around one such that a sum of 256 products needs less than 14 bits.

    They are halves of integers up to ``_MOST``. For each size in ``parts``, a random half of the
    parts is halved, so that scales differ. The products of a sum are multiples of the least one, up
    to 49 * 2^4 times; 256 with random signs usually add up to 2^11 times, almost never to 2^14.
    """
    found = torch.randint(-_MOST, _MOST + 1, shape, generator=generator) / 2
    rows, columns = shape[-2:]
    for high, wide in parts:
        factors = _halvings((*shape[:-2], -(-rows // high), -(-columns // wide)), generator)
        factors = factors.repeat_interleave(high, -2).repeat_interleave(wide, -1)
        found *= factors[..., :rows, :columns]
    return found


def _halvings(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 0.5 ** torch.randint(0, 2, shape, generator=generator)
