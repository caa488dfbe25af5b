"""Options of an ``Fp8Linear`` that may be set at any time, combined whenever one is set."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8kit.errors import InvalidValue, UnsupportedError, check_choice, check_switch
from fp8kit.formats import Scheme, stack_scale_shape
from fp8kit.ops import validation
from fp8kit.runtime.replay_cache import Options

if TYPE_CHECKING:
    from fp8kit.modules.expert_tensors import ExpertTensors
    from fp8kit.modules.linear import Fp8Linear

NAMES = ("accum", "batch_invariant", "out_dtype", "scale_ub")
CHECKED = ("scheme", "input_scale", *NAMES)


def checked(layer: Fp8Linear, name: str, value: Any) -> Any:
    """Return the checked value of an option, as a layer holds it.

    Raises ``TypeError`` for an ``out_dtype`` that results cannot have, and a ``batch_invariant``
    that is no bool. Raises ``ValueError`` for an unknown ``accum``; for a ``scale_ub`` that is not
    positive and finite, or under a scheme without dynamic activation scales; for an input scale
    that the scheme does not use, or lacks; and for a scheme that is unknown or reads other codes or
    scales than the layer holds.
    """
    if name == "scheme":
        return checked_scheme(layer, value)
    if name == "input_scale":
        return _checked_input_scale(layer, value)
    if name == "out_dtype" and value is not None:
        validation.check_out_dtype(value)
    if name == "batch_invariant":
        check_switch(name, value)
    if name == "accum":
        check_choice(name, value, ("precise", "fast"))
    if name != "scale_ub" or value is None:
        return value
    try:
        bound = math.nan if isinstance(value, bool) else float(value)
    except (RuntimeError, TypeError, ValueError):
        bound = math.nan
    if not 0 < bound < math.inf:
        raise InvalidValue(
            f"Got scale_ub={value!r:.80}.",
            "It bounds the amax of activations: it is positive and finite.",
            "Pass the largest magnitude that is to be kept, or None for no bound.",
        )
    if layer.scheme.activation is None or layer.scheme.static:
        raise InvalidValue(
            f"Got scale_ub for a layer of scheme {layer.scheme}.",
            "Its activations have no scale of their own, which it could bound.",
            "Leave scale_ub out, or use a dynamic scheme.",
        )
    return bound


def checked_scheme(
    layer: Fp8Linear | ExpertTensors, value: Any, name: str = "weight", fixed: str = "input_scale"
) -> Scheme:
    """Return a scheme by its name, or itself; refuse one that reads other codes or scales.

    ``name`` is that of the codes, ``fixed`` that of the input scale.
    """
    scheme, held = Scheme.of(value), layer._parameters
    codes, scale = held.get(name), held.get(f"{name}_scale")
    if codes is None or scale is None:  # a new layer, or a parametrized weight
        return scheme
    static, rebased = held.get(fixed) is not None, f"{name}_exponents" in held
    scales = stack_scale_shape(codes.shape, scheme.weight)
    wanted = (scheme.dtype, scales, scheme.static, scheme.rebased)
    if (codes.dtype, scale.shape, static, rebased) != wanted:
        raise InvalidValue(
            f"Got scheme {scheme} for a layer that holds codes and scales of {layer.scheme}.",
            "A scheme says how they are read; setting one quantizes nothing.",
            "Quantize again: Fp8Linear.from_linear(layer.to_linear(), scheme), or of experts "
            "Fp8Experts.from_dense with the dense stacks.",
        )
    return scheme


def _checked_input_scale(layer: Fp8Linear, value: Any) -> Any:
    if (value is not None) != layer.scheme.static:
        raise InvalidValue(
            f"Got input_scale={value!r:.80} for a layer of scheme {layer.scheme}.",
            "Layers of a static scheme, such as FP8, have one; others scale each input anew.",
            "Make the layer with it: Fp8Linear.from_quantized(q, scheme='FP8', input_scale=...).",
        )
    return value


def check_new(
    layer: nn.Module,
    in_features: object,
    out_features: object,
    bias: object,
    device: object,
    dtype: object,
) -> None:
    """Refuse arguments of a new layer, with ``TypeError`` or ``ValueError``, and one that has any.

    The latter raises ``UnsupportedError``, before the layer has changed.
    """
    if "scheme" in vars(layer):
        raise UnsupportedError(
            f"__init__ was called again on {layer!r:.100}.",
            "It would drop the FP8 weight, and none is drawn at random.",
            "Convert a new dense layer, as Fp8Linear.from_linear(nn.Linear(64, 64)) does.",
        )
    check_switch("bias", bias)
    validation.check_size("in_features", in_features)
    validation.check_size("out_features", out_features)
    validation.check_device(device)
    validation.check_precision(dtype)


def options_of(layer: Fp8Linear) -> Options:
    """Return the options of ``operators.LINEAR`` that a layer computes with."""
    x, w = layer.scheme.activation, layer.scheme.weight
    rounding = validation.default_rounding(x, layer.scheme.ue8m0)
    groups = (None if x is None else (x.rows, x.cols), (w.rows, w.cols))
    return (*groups, rounding, layer.accum, layer.batch_invariant, layer.out_dtype)


def bound_of(layer: Fp8Linear) -> Tensor | None:
    """Return ``scale_ub`` as operators take it: an fp32 scalar tensor on the layer's device."""
    if layer.scale_ub is None:
        return None
    return torch.full((), layer.scale_ub, dtype=torch.float32, device=layer.codes.device)


def described(layer: Fp8Linear) -> str:
    """Name scheme, dtype and the options that differ from the defaults, for ``print(model)``."""
    usual = {name: getattr(type(layer), name) for name in NAMES}
    found = {name: getattr(layer, name) for name in NAMES}
    said = f", scheme={layer.scheme}, compute_dtype={layer.compute_dtype}"
    return said + "".join(f", {name}={v}" for name, v in found.items() if v != usual[name])
