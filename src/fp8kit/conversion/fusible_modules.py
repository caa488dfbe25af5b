"""Recognise norms, activations and feed-forwards that can write FP8; make their fused forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8kit.fused import reference
from fp8kit.modules.activation_formula import activation_kind
from fp8kit.modules.consumers import Consumers
from fp8kit.modules.decoder_layer import RandomChild
from fp8kit.modules.diffusers_producers import (
    FusedAdaptiveNorm,
    FusedFeedForward,
    Modulation,
    first_kind,
)
from fp8kit.modules.fused_producers import (
    FusedActivation,
    FusedGatedMlp,
    FusedNorm,
    Producer,
)
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.plain_norm import NormForward
from fp8kit.modules.rotary import RotaryForward, calls_rotary
from fp8kit.modules.trials import isolated_copy, on_trial, set_training

EPSILONS = ("variance_epsilon", "eps", "epsilon")
_RMS_FORMULAS = ((0.0, "stepwise"), (0.0, "once"), (1.0, "once"), (1.0, "stepwise"))
# share of unequal results: another order of summation changes few, another formula a quarter
_PROBED_DIFFERENCE = 0.02
_PROBE_ELEMENTS = 2**14
_NORMS = "diffusers.models.normalization."
_ADAPTIVE = {
    f"{_NORMS}AdaLayerNormZero": Modulation(6, 0, 1, (2, 3, 4, 5)),
    f"{_NORMS}AdaLayerNormZeroSingle": Modulation(3, 0, 1, (2,)),
    f"{_NORMS}AdaLayerNormContinuous": Modulation(2, 1, 0),
}
_FEED_FORWARD = "diffusers.models.attention.FeedForward"


def make_producer(
    module: nn.Module, consumers: Consumers, concatenated: bool = False
) -> Producer | None:
    """Return the fused form of a norm or activation, ``None`` if there is none.

    ``concatenated`` is as in ``FusedActivation``.
    """
    if "forward" in vars(module):  # maybe offloading, which loads weights in this forward alone
        return None
    modulation = _ADAPTIVE.get(_full_name(module))
    if modulation is not None:
        inner = recognize_norm(module.get_submodule("norm"))
        embedded = getattr(module, "emb", None) is not None
        if inner is None or inner.kind != "layer_norm" or embedded:
            return None
        return FusedAdaptiveNorm(module, inner.eps, modulation, consumers)
    kind = computed_activation(module)
    if kind is not None:
        return FusedActivation(module, kind, consumers, concatenated)
    formula = recognize_norm(module)
    return None if formula is None else FusedNorm(module, formula, consumers)


def norm_forward(module: nn.Module) -> NormForward | None:
    """Return a ``forward`` for an RMS norm of a known library, ``None`` for any other module.

    torch's own norms need none: they are one launch already.
    """
    formula = recognize_norm(module) if may_own_forward(module) else None
    return None if formula is None or formula.kind != "rms_norm" else NormForward(module, formula)


def rotary_forward(module: nn.Module) -> RotaryForward | None:
    """Return a ``forward`` for an attention with rotary embedding, ``None`` for other modules."""
    known = may_own_forward(module) and calls_rotary(type(module).forward)
    return RotaryForward(module) if known else None


def may_own_forward(module: nn.Module) -> bool:
    """Return whether a trial run shows all that a module's ``forward`` does.

    That holds for ``forward`` of known libraries' classes; users' classes may keep or read state.
    """
    known = type(module).__module__.startswith(("transformers.models.", "diffusers."))
    return known and "forward" not in vars(module)


def can_produce(module: nn.Module) -> bool:
    """Return whether a module has a fused form."""
    known = _full_name(module) in _ADAPTIVE or computed_activation(module) is not None
    return known or recognize_norm(module) is not None


def computed_activation(module: nn.Module) -> str | None:
    """Name the activation of a module, gated or not; ``None`` if it is none."""
    return activation_kind(module) or _gated_kind(module)


def recognize_norm(norm: nn.Module) -> NormFormula | None:
    """Find out what a norm computes, by trying it on random numbers and weights.

    Names do not say whether one is added to a weight, or where 16-bit results are rounded; one run
    of the norm in bf16 does. It also confirms that an ``nn.RMSNorm`` without epsilon uses that of
    fp32, in which torch computes. Known are norms with a ``weight [K]`` or ``normalized_shape`` and
    an epsilon named in ``EPSILONS``; their Parameters may be on the meta device.
    """
    if norm._modules:  # a whole model may warn at each attribute that is read
        return None
    try:
        eps = next((e for n in EPSILONS if (e := getattr(norm, n, None)) is not None), None)
        weight = getattr(norm, "weight", None)
        shape = tuple(getattr(norm, "normalized_shape", getattr(weight, "shape", ())))
    except Exception:  # a property raised, or a shape is a number
        return None
    if eps is None and isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(torch.float32).eps
    if not isinstance(eps, float) or len(shape) != 1:
        return None
    if isinstance(norm, nn.LayerNorm):
        formulas = [NormFormula("layer_norm", eps)]
    elif isinstance(weight, Tensor) and not norm._buffers and set(norm._parameters) == {"weight"}:
        formulas = [NormFormula("rms_norm", eps, *rest) for rest in _RMS_FORMULAS]
    else:
        return None
    random = torch.Generator().manual_seed(0)
    rows = max(4, min(16, _PROBE_ELEMENTS // max(shape[0], 1)))
    try:
        with on_trial():
            drawn = {
                n: None if p is None else nn.Parameter(_uniform(p.shape, random), False)
                for n, p in norm._parameters.items()
            }
            twin = isolated_copy(norm, _parameters=drawn)
            x = 4 * _uniform((rows, *shape), random) - 4
            expected = type(norm).forward(twin, x.clone())
    except Exception:  # it takes other arguments than one tensor, or is no norm
        return None
    for formula in formulas:
        if _differs(expected, _normed(formula, x, twin)) <= _PROBED_DIFFERENCE:
            return formula
    return None


def fuse_feed_forward(module: nn.Module) -> FusedGatedMlp | FusedFeedForward | None:
    """Return the fused form of a known MLP or diffusers' ``FeedForward``, else ``None``."""
    if "forward" in vars(module):
        return None
    if is_feed_forward(module):
        net = list(module.get_submodule("net").children())
        dropouts = all(type(m) is nn.Dropout for m in (net[1], *net[3:]))
        kind, gated = first_kind(net[0])
        return FusedFeedForward(module, kind, gated) if dropouts and kind else None
    kind = activation_kind(getattr(module, "act_fn", None))
    return FusedGatedMlp(module, kind) if kind is not None and _is_gated(module) else None


def _is_gated(mlp: nn.Module) -> bool:
    """Try whether a module computes ``down(act(gate(x)) * up(x))``, with stub children."""
    random = torch.Generator().manual_seed(0)
    stubs = {name: RandomChild(random) for name in mlp._modules}
    try:
        gate, up, down = (stubs[f"{part}_proj"] for part in ("gate", "up", "down"))
        with on_trial():
            x = torch.rand(2, 8, generator=random, dtype=torch.float64)
            twin = isolated_copy(mlp, _modules=dict(stubs))
            set_training(twin, True)  # a dropout then changes the result
            expected = type(mlp).forward(twin, x)
            found = down(stubs["act_fn"](gate(x)) * up(x))
    except Exception:  # a module that cannot run with stubs computes something else
        return False
    return isinstance(expected, Tensor) and torch.equal(expected, found)


def _gated_kind(module: nn.Module) -> str | None:
    """Return the activation of a module that computes ``act(first half) * second half``."""
    if list(module._modules) != ["gate_fn"] or module._parameters or module._buffers:
        return None
    kind, random = activation_kind(module._modules["gate_fn"]), torch.Generator().manual_seed(0)
    if kind is None:
        return None
    # large values show clamps, and bf16 shows where results are rounded
    x = torch.randn(2, 8, 8, generator=random) * 10.0 ** torch.arange(-3, 5)[:, None]
    for given in (x, x.bfloat16()):
        try:
            with on_trial():
                expected = type(module).forward(module, given)
        except Exception:  # it may take another number of columns
            return None
        found = reference.activated(kind, *given.chunk(2, -1))
        if not isinstance(expected, Tensor) or expected.dtype != found.dtype:
            return None
        if not torch.equal(expected, found):
            return None
    return kind


def is_feed_forward(module: nn.Module) -> bool:
    """Return whether a module is diffusers' ``FeedForward``, which is fused in any block."""
    return _full_name(module) == _FEED_FORWARD


def _full_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _uniform(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return (0.5 + torch.rand(shape, generator=random)).bfloat16()


def _normed(formula: NormFormula, x: Tensor, norm: nn.Module) -> Tensor:
    if formula.kind == "layer_norm":
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        return reference.layer_normed(x, weight, bias, None, formula.eps, "stepwise")
    weight = norm.get_parameter("weight")
    return reference.rms_normed(x, weight, formula.eps, formula.weight_offset, formula.rounding)


def _differs(expected: object, found: Tensor) -> float:
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return 1.0
    if expected.dtype != found.dtype or not torch.allclose(expected, found, rtol=2**-6, atol=2**-9):
        return 1.0
    return (expected != found).float().mean().item()
