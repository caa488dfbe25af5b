"""Recognise modules of stacked experts by their Parameters and a run on random numbers.

A class does not declare the layout of its stacks or what its gate computes. Running its own
``forward`` on a small copy shows both: the FP8 form must agree with it, anything else stays dense.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.conversion.patterns import some_of
from fp8kit.errors import ConversionError, teach
from fp8kit.modules.expert_tensors import ExpertStacks, ExpertTensors
from fp8kit.moe.activation import KINDS, Activation

_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
_EXPERTS, _HIDDEN, _INNER = 3, 24, 20  # of the twin
_TOKENS, _TOP_K = 24, 2
_MANY_TOKENS = 384  # for small twins: an expert may take no more than so many
# of the rows that are tried: past any bound that a class may set
_MAGNITUDES = (1.0, 30.0, 1e3, 1e5)
_LARGEST_TWIN = 2**24  # numbers that are drawn for a class that runs in its own sizes alone
_CLOSE = 1e-4  # of the largest result; two formulas differ by far more
_REGISTERED: dict[type[nn.Module], Callable[[Any], ExpertStacks]] = {}

Gate = Callable[[Tensor], Tensor]


def register_experts(
    module_class: type[nn.Module], describe: Callable[[Any], ExpertStacks]
) -> None:
    """Let ``convert`` and ``load`` make FP8 experts of a class that they do not know by its form.

    The class is tried all the same: if its ``forward`` computes something else than what is
    described, it stays dense, and the report says so. If it cannot run on random numbers at all,
    it is believed, with a warning.

    Args:
        module_class: a class of your own that holds all experts of a layer in two Parameters.
        describe: gets a module of it, dense or on meta, and says how it holds its experts.

    Raises:
        TypeError: if the class is no class of modules, or ``describe`` no function.

    Example:
        >>> def describe(module):
        ...     return fp8kit.ExpertStacks("w13", "w2", fp8kit.moe.Activation("gelu"))
        >>> fp8kit.register_experts(MyExperts, describe)
        >>> fp8kit.convert(model)
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(
            teach(
                f"Got {module_class!r:.80} as a class of experts.",
                "It is a subclass of nn.Module.",
                "Pass the class, not a module of it.",
            )
        )
    if not callable(describe):
        raise TypeError(
            teach(
                f"Got describe of type {type(describe).__name__}.",
                "It is a function from a module to an fp8kit.ExpertStacks.",
                f"Pass lambda module: {describe!r:.80}.",
            )
        )
    _REGISTERED[module_class] = describe


def recognize(module: nn.Module) -> ExpertStacks | str | None:
    """Return how a module holds its experts, why that is not known, or ``None`` if it has none.

    Args:
        module: any; its Parameters may be on the meta device.
    """
    if isinstance(module, ExpertTensors):
        return module.stacks
    if isinstance(module, torch.jit.ScriptModule):
        return None
    with torch.device("cpu"), _single_precision():  # whatever a caller has made the defaults
        return _tried(module)


@contextmanager
def _single_precision() -> Iterator[None]:
    held = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(held)


def _tried(module: nn.Module) -> ExpertStacks | str | None:
    described = next((_REGISTERED[c] for c in type(module).__mro__ if c in _REGISTERED), None)
    if described is not None:
        stacks = _checked(described(module), module)
        return stacks if stacks is None or _believed(module, stacks) else _other(module)
    up = next((n for n in _UP if _is_stack(module, n)), None)
    if up is None or not _is_stack(module, _DOWN):
        return None
    known = {name + kind for name in (up, _DOWN) for kind in ("", "_bias")}
    if more := set(module._parameters) - known:
        return f"stacks of {type(module).__name__}, which has {', '.join(sorted(more))} as well"
    if any(True for _ in module.buffers()) or _with_weights(module):
        return f"stacks of {type(module).__name__}, which computes with more than its experts"
    for stacks in _layouts(module, up):
        if _agrees(module, stacks):
            return stacks
    return _other(module)


def _checked(stacks: object, module: nn.Module) -> ExpertStacks | None:
    """Refuse what does not describe a module."""
    if stacks is None or (
        isinstance(stacks, ExpertStacks) and all(_is_stack(module, n) for n in stacks.names)
    ):
        return stacks
    held = [n for n, p in module.named_parameters(recurse=False) if p.dim() == 3]
    raise ConversionError(
        teach(
            f"{type(module).__name__} was described to register_experts as {stacks!r:.200}.",
            f"An fp8kit.ExpertStacks names Parameters of three dimensions: {some_of(held)}.",
            "Correct what describe returns; None leaves a module as it is.",
        )
    )


def _believed(module: nn.Module, stacks: ExpertStacks) -> bool:
    """Try what was said of a module: on a small twin, and if that cannot run on one as large."""
    agrees = _agrees(module, stacks)
    if agrees is None and sum(p.numel() for p in module.parameters(False)) <= _LARGEST_TWIN:
        agrees = _agrees(module, stacks, small=False)
    if agrees is None:
        warnings.warn(
            teach(
                f"{type(module).__name__} could not be run on random numbers.",
                "What register_experts was told of it is believed.",
                "Compare a converted model with the dense one: fp8kit.evaluate.",
            ),
            stacklevel=2,
        )
    return agrees is not False


def names_to_match(names: Sequence[str], module: nn.Module, stacks: ExpertStacks) -> list[str]:
    """Name a module of experts as patterns may: by itself, its stacks, and its single experts.

    Checkpoints hold experts one by one, so that ``"*.experts.*"`` means them there.

    Args:
        names: every qualified name of the module.
        module: the module.
        stacks: how it holds its experts.
    """
    parts = ("gate_proj", "up_proj") if is_gated(module, stacks) else ("up_proj",)
    endings = [*stacks.names, *(f"0.{part}" for part in (*parts, "down_proj"))]
    return [*names, *(f"{name}.{ending}" for name in names for ending in endings)]


def is_gated(module: nn.Module, stacks: ExpertStacks) -> bool:
    """Return whether the first product of a module's experts has gates beside ups."""
    up, down = (module.get_parameter(name).shape for name in stacks.names)
    k = 1 if stacks.transposed and not isinstance(module, ExpertTensors) else 2
    return up[3 - k] == 2 * down[k]


def _other(module: nn.Module) -> str:
    return f"stacks of {type(module).__name__}, whose forward computes something else"


def _is_stack(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.dim() == 3


def _with_weights(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.children() if next(m.parameters(), None) is not None]


def _layouts(module: nn.Module, up: str) -> Iterator[ExpertStacks]:
    """List what the shapes of the stacks allow, with the gate's formula if it is known."""
    (e, a, b), (e_, c, d) = (module.get_parameter(n).shape for n in (up, _DOWN))
    call = "sorted" if len(_arguments(module)) == 1 else "routed"
    told = getattr(module, "is_transposed", None)
    for transposed in (False, True):
        hidden, wide, inner = (a, b, c) if transposed else (b, a, d)
        fits = e == e_ and hidden == (d if transposed else c) and wide in (inner, 2 * inner)
        if fits and told in (None, transposed):
            layout = ExpertStacks(up, _DOWN, None, transposed, call)
            gated = wide == 2 * inner
            yield replace(layout, activation=_formula(module, _gate(module, gated), gated))


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _gate(module: nn.Module, gated: bool) -> Gate | None:
    """Return what a module does between its products, as a function."""
    own, act = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if not gated or own is None:
        if not callable(act):
            return None
        return (lambda z: act(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]) if gated else act
    return own  # type: ignore[no-any-return]


def _formula(module: nn.Module, gate: Gate | None, gated: bool) -> Activation | None:
    """Find the activation that computes what a gate computes; ``None`` if none does."""
    if gate is None:
        return None
    numbers = sorted({v for v in vars(module).values() if _is_positive(v)})
    random = torch.Generator().manual_seed(0)
    z = torch.randn(_TOKENS, 2 * _INNER if gated else _INNER, generator=random)
    z *= _magnitudes(len(z))
    z[::2] *= 2 * max([4.0, *numbers])  # past every limit
    try:
        with torch.no_grad():
            expected = gate(z.clone())
    except Exception:  # whatever it wants, it is none of these
        return None
    for candidate in _candidates(numbers, gated):
        if _close(expected, candidate(z)):
            return candidate
    return None


def _is_positive(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _candidates(numbers: list[float], gated: bool) -> Iterator[Activation]:
    for limit in (None, *numbers):
        for kind in KINDS:
            yield Activation(kind, gated, limit=limit)
        for interleaved in (False, True) if gated else ():
            for alpha in (1.0, *numbers):
                for offset in (0.0, 1.0):
                    yield Activation("silu", True, interleaved, limit, alpha, offset)


def _agrees(module: nn.Module, stacks: ExpertStacks, small: bool = True) -> bool | None:
    """Try whether a module computes what its description says; ``None`` if it cannot be tried."""
    try:
        if _agrees_in(module, stacks, small, torch.float32):
            return True
    except Exception:  # whatever it does with what it does not know
        return None
    try:  # a gate may magnify roundings of large numbers
        return stacks.activation is None and _agrees_in(module, stacks, small, torch.float64)
    except Exception:  # it knows no such numbers
        return False


def _agrees_in(module: nn.Module, stacks: ExpertStacks, small: bool, dtype: torch.dtype) -> bool:
    twin = _twin(module, stacks, small, dtype)
    gate: Any = stacks.activation or _gate(twin, is_gated(module, stacks))
    random = torch.Generator().manual_seed(1)
    experts, *sides = twin.get_parameter(stacks.up).shape
    tokens = experts * math.ceil((_MANY_TOKENS if small else _TOKENS) / experts)
    x = torch.randn(tokens, sides[0 if stacks.transposed else 1], generator=random, dtype=dtype)
    x *= _magnitudes(tokens)
    ids = torch.rand(tokens, experts, generator=random).topk(min(_TOP_K, experts)).indices
    weights = 3 * torch.rand(ids.shape, generator=random, dtype=dtype)
    given: tuple[Tensor, ...] = (x, ids, weights)
    if stacks.call == "sorted":
        ids = torch.arange(experts).repeat_interleave(tokens // experts).unsqueeze(1)
        weights, given = torch.ones(tokens, 1, dtype=dtype), (x,)
    with torch.no_grad():
        found = _computed(twin, stacks, gate, x, ids, weights)
        for twin.training in (False, True):
            expected = type(module).forward(twin, *(t.clone() for t in given))
            if not _close(expected, found):
                return False
    return True


def _magnitudes(rows: int) -> Tensor:
    """Return a factor for each row, which changes every other row: limits are tried at others."""
    return torch.tensor(_MAGNITUDES)[torch.arange(rows) // 2 % len(_MAGNITUDES), None]


def _twin(module: nn.Module, stacks: ExpertStacks, small: bool, dtype: torch.dtype) -> nn.Module:
    """Copy a module with experts of random weights: few and small ones, and sizes to match."""
    axes = (0, 2, 1) if stacks.transposed else (0, 1, 2)
    up, down = (tuple(module.get_parameter(n).shape[i] for i in axes) for n in stacks.names)
    e, h, i = down
    experts, inner, hidden = e, i, h
    if small:
        experts, inner = _EXPERTS, _INNER
        hidden = _HIDDEN if h not in (i, 2 * i) else _INNER * (h // i)
    sizes = {e: experts, 2 * i: 2 * inner, i: inner, h: hidden}
    random = torch.Generator().manual_seed(2)

    def drawn(shape: tuple[int, ...], spread: float) -> nn.Parameter:
        numbers = torch.randn(shape, generator=random, dtype=dtype)
        return nn.Parameter(spread * numbers, requires_grad=False)

    twin = copy.copy(module)
    twin.__dict__ |= {
        name: experts if "num" in name and value == e else sizes.get(value, value)
        for name, value in vars(module).items()
        if type(value) is int
    }
    if "config" in vars(module):
        twin.__dict__["config"] = _Eager(module.config)
    wide = up[1] // i * inner
    matrices = {stacks.up: (experts, wide, hidden), stacks.down: (experts, hidden, inner)}
    twin._parameters = {}
    for name, shape in matrices.items():
        held = tuple(shape[axis] for axis in axes)
        twin._parameters[name] = drawn(held, shape[2] ** -0.5)
        if module._parameters.get(f"{name}_bias") is not None:
            twin._parameters[f"{name}_bias"] = drawn(shape[:2], 1.0)
    return twin


class _Eager:
    """The config of a module that computes with its class's own code."""

    _experts_implementation = "eager"

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _computed(
    twin: nn.Module, stacks: ExpertStacks, gate: Gate, x: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    held = twin._parameters
    up, down = (twin.get_parameter(n).detach() for n in stacks.names)
    if stacks.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    bias_up, bias_down = (held.get(f"{n}_bias") for n in stacks.names)
    total = torch.zeros_like(x)
    for slot, expert in itertools.product(range(ids.shape[1]), range(len(up))):
        rows = ids[:, slot] == expert
        h = x[rows] @ up[expert].T
        h = h if bias_up is None else h + bias_up[expert]
        y = gate(h) @ down[expert].T
        y = y if bias_down is None else y + bias_down[expert]
        total[rows] += y * weights[rows, slot, None]
    return total


def _close(expected: object, found: Tensor) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    largest = found.abs().amax(-1, keepdim=True)
    return bool(((expected - found).abs() <= _CLOSE * largest).all())
