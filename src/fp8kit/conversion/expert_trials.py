"""Try modules of stacked experts on random numbers, and compare them with an ``ExpertStacks``.

A copy with small random stacks (the twin) runs the class's own code: on values beyond every limit
that it has, tokens for every expert and for only one, ids of no expert, both modes and 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import some_of
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.library_experts import argument_names, own_gate
from fp8kit.modules.trials import CopyError, contents, isolated_copy, row_factors, set_training
from fp8kit.moe.activation import KINDS, Activation

DOWN = "down_proj"
ELSE = "whose forward computes something else"
_HIDDEN, _INNER = 24, 20  # of the twin, which has all experts: one may differ from the others
_TOKENS, _MOST_EXPERTS = 24, 1024
_MANY_TOKENS = 384  # for small twins: a capacity per expert would show
# factors of the rows that are tried: beyond any clamp that a class may have
_MAGNITUDES = (1.0, 30.0, 1e3, 1e5)
_CLOSE = 1e-4  # relative to the largest result of a row; two formulas differ by far more


def layouts(module: nn.Module, up: str) -> Iterator[ExpertStacks]:
    """Yield the layouts that the stacks' shapes allow, with the gate's formula if it is known."""
    (e, a, b), (e_, c, d) = (module.get_parameter(n).shape for n in (up, DOWN))
    call = "sorted" if len(argument_names(type(module))) == 1 else "routed"
    told = getattr(module, "is_transposed", None)
    for transposed in (False, True):
        hidden, wide, inner = (a, b, c) if transposed else (b, a, d)
        fits = e == e_ and hidden == (d if transposed else c) and wide in (inner, 2 * inner)
        if fits and told in (None, transposed):
            yield ExpertStacks(up, DOWN, _formula(module, wide == 2 * inner), transposed, call)


def _formula(module: nn.Module, gated: bool) -> Activation | None:
    """Find the activation that computes what a module's gate does; ``None`` if none does."""
    gate = own_gate(_copied(module, module._parameters), gated)
    if gate is None:
        return None
    floats = {v for v in vars(module).values() if isinstance(v, float)}
    numbers = sorted(v for v in floats if 0 < v < math.inf)
    random = torch.Generator().manual_seed(0)
    z = torch.randn(_TOKENS, 2 * _INNER if gated else _INNER, generator=random)
    z *= row_factors(_MAGNITUDES, len(z), each=2)  # every other row is for limits
    z[::2] *= 2 * max([4.0, *numbers])  # beyond every limit
    try:
        expected = gate(z.clone())
    except Exception:  # a gate that cannot run like this is none of the candidates
        return None
    for candidate in _candidates(numbers, gated):
        if _close(expected, candidate(z)):
            return candidate
    return None


def _candidates(numbers: list[float], gated: bool) -> Iterator[Activation]:
    for limit in (None, *numbers):
        for kind in KINDS:
            yield Activation(kind, gated, limit=limit)
        for interleaved in (False, True) if gated else ():
            for alpha in (1.0, *numbers):
                for offset in (0.0, 1.0):
                    yield Activation("silu", True, interleaved, limit, alpha, offset)


def difference(
    module: nn.Module, stacks: ExpertStacks, told: bool = False, small: bool = True
) -> str | None:
    """Return how a module differs from an ``ExpertStacks``; ``None`` if it cannot be tried.

    Empty if they agree. The module is neither run nor changed. ``told`` if a user registered the
    ``ExpertStacks``: negative ids are then not tried. With ``small`` the twin has small matrices,
    else the module's own sizes. Raises ``CopyError`` if the module cannot be copied.
    """
    try:
        found = _difference_in(module, stacks, told, small, torch.float32)
    except CopyError:
        raise
    except Exception:  # the class may need state or sizes that the twin lacks
        return None
    if found != ELSE or stacks.activation is not None:
        return found
    try:  # a gate may magnify rounding errors of large numbers in fp32
        return _difference_in(module, stacks, told, small, torch.float64)
    except Exception:  # it does not run in fp64
        return found


def _difference_in(
    module: nn.Module, stacks: ExpertStacks, told: bool, small: bool, dtype: torch.dtype
) -> str:
    twin = _twin(module, stacks, small, dtype)
    experts, *sides = twin.get_parameter(stacks.up).shape
    random = torch.Generator().manual_seed(1)
    tokens = experts * math.ceil((_MANY_TOKENS if small else _TOKENS) / experts)
    x = torch.randn(tokens, sides[0 if stacks.transposed else 1], generator=random, dtype=dtype)
    x *= row_factors(_MAGNITUDES, tokens, each=2)
    usual = _usual_routes(tokens, experts, random)
    if stacks.call == "sorted":
        usual = torch.arange(experts).repeat_interleave(tokens // experts).unsqueeze(1)
    odd = small and stacks.call != "sorted"
    routes = {"": usual} | (_unusual_routes(usual, experts, told) if odd else {})
    set_training(twin, False)
    before = contents(twin)
    for what, ids in routes.items():
        weights = 3 * torch.rand(ids.shape, generator=random, dtype=dtype)
        weights = torch.ones_like(weights) if stacks.call == "sorted" else weights
        found = _computed(twin, stacks, x, ids, weights)
        given = (x,) if stacks.call == "sorted" else (x, ids, weights)
        try:
            differs = _run_differs(twin, given, found)
        except Exception:
            if not what:
                raise
            set_training(twin, False)  # it refuses ids that FP8 experts take: no contradiction
            continue
        if differs:
            return differs + what
        left = [n for n, v in contents(twin).items() if n not in before or before[n] != v]
        if left:
            return f"whose forward leaves behind what other code may read: {some_of(left)}"
    given = (x,) if stacks.call == "sorted" else (x, usual, x[:, : usual.shape[1]])
    narrow = [t.bfloat16() if t.is_floating_point() else t for t in given]
    try:
        gives = type(module).forward(_twin(module, stacks, small, torch.bfloat16), *narrow).dtype
    except Exception:  # it does not run in bf16, or not with these ids
        return ""
    return "" if gives == torch.bfloat16 else f"whose forward gives {gives} for bfloat16 tokens"


def _run_differs(twin: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> str:
    for training in (True, False):
        set_training(twin, training)
        passed = [t.clone() for t in given]
        if not _close(type(twin).forward(twin, *passed), found):
            return ELSE
        if not all(map(torch.equal, passed, given)):
            return "whose forward writes into its arguments"
    return ""


def _usual_routes(tokens: int, experts: int, random: torch.Generator) -> Tensor:
    """Draw two experts for each token, or the only one, so that every expert has tokens."""
    first = torch.randperm(tokens, generator=random) % experts
    away = torch.randint(1, max(2, experts), (tokens,), generator=random)
    return torch.stack([first, (first + away) % experts], 1)[:, :experts]


def _unusual_routes(ids: Tensor, experts: int, told: bool) -> dict[str, Tensor]:
    """Return unusual ids, by the end of a sentence about them; no negative ones if ``told``."""
    some = torch.arange(len(ids)).unsqueeze(1) % 3 == 0
    one, other = torch.full_like(ids[:, :1], experts // 2), ids[:, :1]
    other = other.where(other != one, 0)
    most, past = "where one expert has most tokens", f"for ids past {experts - 1}"
    found = {most: one, past: ids.masked_fill(some, experts)}
    if experts > 1:
        found[f"{most} of two"] = torch.cat([one, other], 1)
    if not told:  # registered classes may index their stacks, where -1 is the last expert
        found["for ids below zero"] = ids.masked_fill(some, -1)
    return {f" {what}": ids for what, ids in found.items()}


def _twin(module: nn.Module, stacks: ExpertStacks, small: bool, dtype: torch.dtype) -> nn.Module:
    """Copy a module with random stacks, small if ``small``, and set its sizes to match."""
    axes = (0, 2, 1) if stacks.transposed else (0, 1, 2)
    up, down = (tuple(module.get_parameter(n).shape[i] for i in axes) for n in stacks.names)
    e, h, i = down
    experts, inner, hidden = e, i, h
    if small:
        experts, inner = min(e, _MOST_EXPERTS), _INNER
        hidden = _HIDDEN if h not in (i, 2 * i) else _INNER * (h // i)
    sizes = {e: experts, 2 * i: 2 * inner, i: inner, h: hidden}
    random = torch.Generator().manual_seed(2)

    def drawn(shape: tuple[int, ...], spread: float) -> nn.Parameter:
        numbers = torch.randn(shape, generator=random, dtype=dtype)
        return nn.Parameter(spread * numbers, requires_grad=False)

    wide = up[1] // i * inner
    matrices = {stacks.up: (experts, wide, hidden), stacks.down: (experts, hidden, inner)}
    parameters: dict[str, nn.Parameter | None] = {}
    for name, shape in matrices.items():
        held = tuple(shape[axis] for axis in axes)
        parameters[name] = drawn(held, shape[2] ** -0.5)
        if module._parameters.get(f"{name}_bias") is not None:
            parameters[f"{name}_bias"] = drawn(shape[:2], 1.0)
    twin = _copied(module, parameters)
    twin.__dict__ |= {
        name: experts if "num" in name and value == e else sizes.get(value, value)
        for name, value in vars(module).items()
        if type(value) is int
    }
    return twin


def _copied(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> nn.Module:
    config = vars(module).get("config")
    memo = {} if config is None else {id(config): _Eager(config)}
    return isolated_copy(module, memo, _parameters=parameters)


class _Eager:
    """A config that makes a module of Transformers compute with its class's own code."""

    _experts_implementation = "eager"

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _computed(
    twin: nn.Module, stacks: ExpertStacks, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    held = twin._parameters
    up, down = (twin.get_parameter(n).detach() for n in stacks.names)
    if stacks.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    gate: Any = stacks.activation or own_gate(twin, up.shape[1] == 2 * down.shape[2])
    bias_up, bias_down = (held.get(f"{n}_bias") for n in stacks.names)
    total = torch.zeros_like(x)
    for expert in set(ids.flatten().tolist()) & set(range(len(up))):
        rows, slots = torch.where(ids == expert)
        h = x[rows] @ up[expert].T
        h = h if bias_up is None else h + bias_up[expert]
        y = gate(h) @ down[expert].T
        y = y if bias_down is None else y + bias_down[expert]
        total.index_add_(0, rows, y * weights[rows, slots, None])
    return total


def _close(expected: object, found: Tensor) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    largest = found.abs().amax(-1, keepdim=True)
    return bool(((expected - found).abs() <= _CLOSE * largest).all())
