"""The diffusion benchmark, on a small Flux transformer in every variant that a CPU can run."""

from __future__ import annotations

import pytest
import torch

from peers import DeclinedError
from processes import Case

pytest.importorskip("diffusers")

import diffusion
from diffusion import Setup

EAGER, COMPILED, LOOP = (Case(way, 1, 24) for way in ("eager", "compiled", "loop"))


def setup(variant: str) -> Setup:
    return Setup(variant, 1, 1, 24, 8, backend="eager", tiny=True)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fp8kit", "layerwise casting"])
def test_every_way_gives_the_numbers_of_bf16_but_for_fp8(variant: str) -> None:
    dense, fp8 = diffusion.build(setup("bf16")), diffusion.build(setup(variant))
    assert dense.about()["fp8_gb"] == 0
    assert fp8.about()["fp8_gb"] > 0
    for case in (EAGER, COMPILED, LOOP):
        exact, found = (torch.tensor(one.prepare(case).result) for one in (dense, fp8))
        assert 1e-3 < float((found - exact).norm() / exact.norm()) < 0.1, case
        assert 0 < fp8.measure(case) < 1e7


def test_a_peer_that_is_not_there_declines() -> None:
    with pytest.raises(DeclinedError, match="not asked for"):
        diffusion.build(setup("torchao"))
