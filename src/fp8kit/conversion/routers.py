"""Recognise routers by trials, and let them choose experts in one kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8kit.conversion.fusible_modules import may_own_forward
from fp8kit.modules.fused_router import BIAS, RouterFormula, RouterForward
from fp8kit.modules.own_forward import set_forward, settings
from fp8kit.modules.trials import isolated_copy, on_trial, set_training
from fp8kit.moe.top_k import SCORINGS, Formula, choose

_ROWS = 64  # enough that a router which chooses within groups of experts differs in some rows
_LEAST = -25.0  # the least mean logit: there a sum of sigmoids is far below one
# relative error of weights: a few roundings of a sum in another order; one rounding to 16 bits
_CLOSE = {torch.float32: 2**-20, torch.bfloat16: 2**-8}
_PRODUCTS = ((False, False), (True, False), (False, True))  # wide, widened


@dataclass(frozen=True, slots=True)
class _Trial:
    """A copy of a router with random weights, its random input, and its results."""

    twin: nn.Module
    x: Tensor
    given: tuple[Tensor, ...]
    logits: Tensor
    weights: Tensor
    ids: Tensor


def fuse_routers(block: nn.Module, name: str) -> list[str]:
    """Let the recognised routers of a block choose in one kernel, and return their names."""
    fused = []
    for child, router in block.named_children():
        formula = recognize_router(router) if may_own_forward(router) else None
        if formula is not None:
            set_forward(router, RouterForward(router, formula))
            fused.append(f"{name}.{child}" if name else child)
    return fused


def recognize_router(router: nn.Module) -> RouterFormula | None:
    """Find out what a router computes, by trying it on random numbers and weights.

    A formula must agree in fp32 in training and in bf16 in evaluation: with equal bits of the
    logits, the same experts, and weights equal up to rounding. The router must have only a
    weight, a bias and a correction bias, which may be on the meta device; it is not changed.
    """
    weight, top_k = router._parameters.get("weight"), vars(router).get("top_k")
    others = {*router._parameters, *router._buffers} - {"weight", "bias", BIAS}
    if weight is None or weight.dim() != 2 or router._modules or others or type(top_k) is not int:
        return None
    for given in (False, True):
        try:
            with on_trial():
                trials = [_try(router, weight, dtype, given) for dtype in _CLOSE]
                last = trials[-1]
                found = _run(last.twin, last.x.view(2, -1, last.x.shape[1]), *last.given)
                flattens = all(map(_equal, found, (last.logits, last.weights, last.ids)))
        except Exception:  # a module that cannot run like this is another router, or none
            continue
        formulas = _candidates(last, top_k, flattens)
        return next((f for f in formulas if all(_agrees(f, trial) for trial in trials)), None)
    return None


def _try(router: nn.Module, weight: Tensor, dtype: torch.dtype, given: bool) -> _Trial:
    experts, width = weight.shape
    random = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, width, generator=random)
    w = torch.randn(experts, width, generator=random) / width**0.5
    x[:, 0], w[:, 0] = torch.linspace(_LEAST, 10, _ROWS), 1.0
    vectors = {n: torch.randn(experts, generator=random).to(dtype) for n in ("bias", BIAS, "given")}
    numbers = {"weight": w.to(dtype), **vectors}
    parameters = {
        n: None if p is None else nn.Parameter(numbers[n], False)
        for n, p in router._parameters.items()
    }
    buffers = {n: None if b is None else numbers[n] for n, b in router._buffers.items()}
    twin = isolated_copy(router, _parameters=parameters, _buffers=buffers)
    set_training(twin, dtype == torch.float32)  # noise in training then shows
    more = (vectors["given"],) if given else ()
    return _Trial(twin, x.to(dtype), more, *_run(twin, x.to(dtype), *more))


def _run(twin: nn.Module, x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, ids = type(twin).forward(twin, x.clone(), *given)
    return logits, weights, ids


def _candidates(trial: _Trial, top_k: int, flattens: bool) -> Iterator[RouterFormula]:
    """Yield the formulas with the same logits; a factor is one or a scale that the router has."""
    own = settings(trial.twin).items()
    scales = {float(v) for n, v in own if "scal" in n and isinstance(v, (int, float))}
    correction = "given" if trial.given else "own" if hasattr(trial.twin, BIAS) else ""
    how = [*itertools.product(SCORINGS, (True, False), sorted({1.0, *scales}))]
    for wide, widened in _PRODUCTS:
        choices = (Formula(top_k, *one, trial.weights.dtype) for one in how)
        known = [RouterFormula(wide, widened, flattens, correction, one) for one in choices]
        if _equal(known[0].logits(trial.twin, trial.x), trial.logits):
            yield from known


def _agrees(formula: RouterFormula, trial: _Trial) -> bool:
    logits = formula.logits(trial.twin, trial.x)
    if not _equal(logits, trial.logits):
        return False
    bias = formula.bias(trial.twin, trial.given)
    ids, weights = choose(logits, bias, formula.options(trial.x))
    dtypes = (ids.dtype, weights.dtype) == (trial.ids.dtype, trial.weights.dtype)
    if not dtypes or ids.shape != trial.ids.shape or weights.shape != trial.weights.shape:
        return False
    order, expected_order = ids.argsort(1), trial.ids.argsort(1)  # any order of ids is right
    if trial.x.dtype != torch.float32:  # logits may tie, and either expert is right
        order, expected_order = weights.argsort(1), trial.weights.argsort(1)
    elif not _equal(ids.gather(1, order), trial.ids.gather(1, expected_order)):
        return False
    found, expected = weights.gather(1, order), trial.weights.gather(1, expected_order)
    return torch.allclose(found, expected, rtol=_CLOSE[weights.dtype], atol=0)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
