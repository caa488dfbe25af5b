"""The self check finds kernels with wrong or missing results before they compute experts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import short_sums
from fp8kit.formats import SCHEMES, GroupShape, Scheme
from fp8kit.matmul import reference as matmul
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.moe import reference, self_check, triton
from fp8kit.moe.activation import Activation
from fp8kit.moe.loop import Products, looping
from fp8kit.moe.problem import ExpertsProblem, ExpertWeights, GroupedProblem

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

CPU = torch.device("cpu")
SWIGLU = Activation()
KINDS = ["FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY"]


def layer(name: str = "FP8_DYNAMIC", activation: Activation = SWIGLU) -> Any:
    scheme: Scheme = SCHEMES[name]
    groups = (scheme.activation, scheme.weight)
    kind = (torch.bfloat16, scheme.dtype, "up" if name == "MXFP8" else "exact")
    rest = (scheme.static, scheme.static, False, False, "cuda", (9, 0))
    problem = ExpertsProblem(4096, 128, 8, 2048, 768, activation, *groups, *kind, *rest)
    return self_check.trial_problem(problem)


def product(name: str = "FP8_DYNAMIC") -> Any:
    scheme: Scheme = SCHEMES[name]
    x_dtype = torch.bfloat16 if scheme.activation is None else scheme.dtype
    groups, place = (scheme.activation, scheme.weight), ("cuda", (9, 0))
    kind = (x_dtype, scheme.dtype, torch.bfloat16, False)
    return self_check.trial_problem(GroupedProblem(4096, 128, 2048, 768, *groups, *kind, *place))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_passes_for_every_scheme(kind: str) -> None:
    assert self_check.difference(layer(kind), reference.BACKEND.experts, CPU) is None
    assert self_check.difference(product(kind), reference.BACKEND.grouped, CPU) is None


ACTIVATIONS = [
    SWIGLU,
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2", gated=False),
    Activation("silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0),
]


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("kind", ["FP8", "FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK"])
def test_short_sums_of_a_tensor_core_pass(
    kind: str, activation: Activation, on_input: bool
) -> None:
    problem = dataclasses.replace(layer(kind, activation), router_weight_on_input=on_input)
    for tokens in (2, 33, 97):
        assert self_check.difference(problem, short_sums.EXPERTS.experts, CPU, tokens) is None


Spoil = Callable[[Any], Any]
GROUPS = ["FP8_BLOCK", "MXFP8"]  # kinds with scales along K
# wrong scales that a GEMM may get instead of the right ones, and the kinds that have them
OTHER_SCALES: dict[str, tuple[list[str], Spoil]] = {
    "of another token": (
        ["FP8_DYNAMIC", "FP8_TENSOR", *GROUPS],
        lambda o: o._replace(x_scale=o.x_scale.roll(1, 0)),
    ),
    "of another group": (GROUPS, lambda o: o._replace(x_scale=o.x_scale.roll(1, 1))),
    "of another channel": (
        ["FP8_DYNAMIC", "FP8_WEIGHT_ONLY", *GROUPS],
        lambda o: o._replace(w_scale=o.w_scale.roll(1, 0)),
    ),
    "of another block": (GROUPS, lambda o: o._replace(w_scale=o.w_scale.roll(1, 1))),
}
# and a layer, of any kind
OTHER_OPERANDS: dict[str, Spoil] = {
    "tokens": lambda o: o._replace(x=o.x.roll(1, 0)),
    "experts": lambda o: o._replace(ids=(o.ids + 1) % 4),
    "router weights": lambda o: o._replace(weights=o.weights.flip(1)),
    "scales of experts": lambda o: o._replace(w13=rolled(o.w13)),
    "scales of down projections": lambda o: o._replace(w2=rolled(o.w2)),
}


def rolled(w: ExpertWeights) -> ExpertWeights:
    return w._replace(scale=w.scale.roll(1, 0))


@pytest.mark.parametrize("product", [0, 1])
@pytest.mark.parametrize(
    ("scale", "kind"), [(name, kind) for name, (kinds, _) in OTHER_SCALES.items() for kind in kinds]
)
def test_another_scale_is_found(scale: str, kind: str, product: int) -> None:
    calls = itertools.count()  # both products of each expert

    def multiply(
        operands: MatmulOperands, groups: tuple[GroupShape | None, GroupShape], settings: Products
    ) -> torch.Tensor:
        if next(calls) % 2 == product:
            operands = OTHER_SCALES[scale][1](operands)
        numbers = (settings.out_dtype, operands.bias, "precise", settings.batch_invariant)
        problem = MatmulProblem.of(operands.x, operands.w, groups, *numbers)
        return matmul.run(operands, problem)

    wrong = looping(multiply)
    assert "differ" in str(self_check.difference(layer(kind), wrong.experts, CPU))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", OTHER_OPERANDS)
def test_other_operands_are_found(what: str, kind: str) -> None:
    def wrong(operands: Any, problem: Any) -> torch.Tensor:
        return reference.BACKEND.experts(OTHER_OPERANDS[what](operands), problem)

    assert "differ" in str(self_check.difference(layer(kind), wrong, CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_pass(kind: str) -> None:
    assert self_check.difference(layer(kind), triton.experts, CPU) is None


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


def test_nothing_is_tried_while_a_graph_is_captured(faked_cuda: Callable[..., None]) -> None:
    faked_cuda(is_current_stream_capturing=lambda: True)
    with pytest.raises(RuntimeError, match="Call the layer once before the capture"):
        self_check.failure(layer("FP8_BLOCK"), reference.BACKEND.experts)
