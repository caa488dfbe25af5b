"""DeepGEMM's 1x128 by 128x128 product on Hopper, where the package ``deep_gemm`` is installed.

https://github.com/deepseek-ai/DeepGEMM is looked for once, when a problem first needs it; if the
process has imported vLLM by then, the copy in vLLM's wheel also serves. Sums are promoted to fp32
every 128 of K, so they are precise. The reasons to decline follow from ``csrc/apis/gemm.hpp`` and
``csrc/utils/layout.hpp`` of its source; N and K are further kept to multiples of 64 and 128, the
shapes that its first releases took and that engines give it. A bias is added to the rounded result.

DeepGEMM compiles a kernel with nvcc at the first use of every N, K and tiling of M: call
``fp8kit.warmup`` with the row counts that matter. The shipped tables have no times for it, so it
runs only where ``fp8kit tune`` has measured it to be the fastest.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import BLOCK, GROUP128
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.tma_operands import aligned, by_column
from fp8kit.runtime.launch_recording import is_recording, record_launch

_NAMES = ("fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt")  # since 2.0, and before
_ABSENT = ("deep_gemm", "vllm.third_party", "vllm.third_party.deep_gemm")
_MULTIPLES = {"N": 64, "K": 128}


def supports(problem: MatmulProblem) -> str | None:
    """Return why DeepGEMM does not take a problem: what it lacks, or that it is not installed."""
    if (problem.x_group, problem.w_group) != (GROUP128, BLOCK):
        return f"has no {problem.x_group} by {problem.w_group} scales, only {GROUP128} by {BLOCK}"
    if problem.capability is not None and problem.capability[0] == 10:
        return "takes UE8M0 scales alone on sm100, and these may be any"
    if problem.capability is None or problem.capability[0] != 9:
        return "multiplies by such scales on sm90"
    if problem.x_dtype != torch.float8_e4m3fn or problem.w_dtype != torch.float8_e4m3fn:
        return "multiplies e4m3fn codes only"
    if problem.out_dtype != torch.bfloat16:
        return f"writes bfloat16 only, got {problem.out_dtype}"
    if problem.batch_invariant:
        return "chooses its tiles by M, and promises nothing about bits"
    for side, extent in (("N", problem.n), ("K", problem.k)):
        if extent % _MULTIPLES[side]:
            return f"needs {side} in multiples of {_MULTIPLES[side]}, got {extent}"
    return _product()[1]


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``, in 1x128 and 128x128 groups."""
    x, x_scale, w, w_scale, bias = operands
    product, missing = _product()
    assert product is not None, missing
    assert x_scale is not None
    if is_recording():
        record_launch(None)  # its launches cannot be repeated without the library
    y = torch.empty(x.shape[0], w.shape[0], dtype=problem.out_dtype, device=x.device)
    with current(x.device):
        # without gaps between rows, which not every release takes
        x, w = aligned(x.contiguous()), aligned(w.contiguous())
        product((x, by_column(x_scale)), (w, w_scale.contiguous()), y)
    return y if bias is None else y.add_(bias)


@functools.cache
def _product() -> tuple[Callable[..., None] | None, str | None]:
    """Return the function that multiplies, or the reason why there is none."""
    reasons = []
    for load in (_installed, _vendored) if "vllm" in sys.modules else (_installed,):
        try:
            module = load()
        except ModuleNotFoundError as error:
            if error.name in _ABSENT:
                continue
            reasons.append(_broken(error))
        except Exception as error:  # it asserts, and a loader of libraries may raise anything
            reasons.append(_broken(error))
        else:
            for name in _NAMES:
                if hasattr(module, name):
                    return getattr(module, name), None
            reasons.append(f"deep_gemm has neither {' nor '.join(_NAMES)}; use another release")
    return None, reasons[0] if reasons else "deep_gemm is not installed"


def _installed() -> Any:
    import deep_gemm

    return deep_gemm


def _vendored() -> Any:
    import vllm.third_party.deep_gemm as copy

    return copy


def _broken(error: Exception) -> str:
    return (
        f"deep_gemm does not import ({type(error).__name__}: {error}); it wants the torch it was"
        " built for, and a CUDA toolkit under CUDA_HOME"
    )


BACKEND = MatmulBackend(supports=supports, run=run)
