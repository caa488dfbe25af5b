"""Kernels that compute something else, or nothing, are found before they compute experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8kit.formats import SCHEMES, Scheme
from fp8kit.moe import reference, self_check, triton
from fp8kit.moe.activation import Activation
from fp8kit.moe.problem import ExpertsProblem, GroupedProblem

CPU = torch.device("cpu")
KINDS = ["FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY"]


def layer(name: str = "FP8_DYNAMIC") -> Any:
    scheme: Scheme = SCHEMES[name]
    groups = (scheme.activation, scheme.weight)
    kind = (torch.bfloat16, scheme.dtype, "up" if name == "MXFP8" else "exact")
    rest = (scheme.static, scheme.static, False, False, "cuda", (9, 0))
    problem = ExpertsProblem(4096, 128, 8, 2048, 768, Activation(), *groups, *kind, *rest)
    return self_check.small(problem)


def product(name: str = "FP8_DYNAMIC") -> Any:
    scheme: Scheme = SCHEMES[name]
    x_dtype = torch.bfloat16 if scheme.activation is None else scheme.dtype
    groups, place = (scheme.activation, scheme.weight), ("cuda", (9, 0))
    kind = (x_dtype, scheme.dtype, torch.bfloat16, False)
    return self_check.small(GroupedProblem(4096, 128, 2048, 768, *groups, *kind, *place))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_for_every_scheme(kind: str) -> None:
    assert self_check.difference(layer(kind), reference.BACKEND.experts, CPU) is None
    assert self_check.difference(product(kind), reference.BACKEND.grouped, CPU) is None


def test_the_kernels_pass() -> None:
    assert self_check.difference(layer(), triton.experts, CPU) is None


def test_a_wrong_or_failing_kernel_is_found() -> None:
    def scaled(operands: Any, problem: Any) -> torch.Tensor:
        y = reference.BACKEND.experts(operands, problem)
        y[3] *= 1.1  # one token
        return y

    def poisoned(operands: Any, problem: Any) -> torch.Tensor:
        return torch.full_like(reference.BACKEND.experts(operands, problem), torch.nan)

    def failing(operands: Any, problem: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory\nand more")

    assert "differ from the reference by 0.1" in str(self_check.difference(layer(), scaled, CPU))
    assert "differ" in str(self_check.difference(layer(), poisoned, CPU))
    said = self_check.difference(layer(), failing, CPU)
    assert said == "RuntimeError: out of resource: shared memory"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_pass_on_this_gpu(kind: str) -> None:
    cuda = torch.device("cuda")
    assert self_check.difference(layer(kind), triton.experts, cuda) is None
    assert self_check.difference(product(kind), triton.grouped, cuda) is None
