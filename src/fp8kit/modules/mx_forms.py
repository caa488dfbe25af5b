"""The form (scheme) in which MXFP8 layers compute: with MX scales, or rebased to coarser ones."""

from __future__ import annotations

from collections.abc import Mapping

from fp8kit.dispatch.device import capability
from fp8kit.formats import MX_FORMS, SCHEMES, QTensor, Scheme
from fp8kit.modules.entries import rebased_tensors
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import frozen
from fp8kit.quantizers.rebase import Rebased, rebase_or_decline, restore
from fp8kit.runtime.replay_cache import ReplayCache

MX_CORES = (10, 0)  # the first compute capability whose tensor cores read MX scales
FP8_CORES = (8, 9)  # the first whose tensor cores read FP8
_ROW, _BLOCK, _ROW_WEIGHT_ONLY, _WEIGHT_ONLY, _EMULATED = MX_FORMS.values()
_FORMS = {_ROW: (_ROW, _BLOCK), _BLOCK: (_BLOCK, _ROW), _ROW_WEIGHT_ONLY: (_ROW_WEIGHT_ONLY,)}


def form_on(scheme: Scheme, capability: tuple[int, int] | None, experts: bool = False) -> Scheme:
    """Return the scheme with which layers of a scheme compute on a device.

    It differs for plain ``MXFP8`` alone. No kernel for experts multiplies MX, on any device.
    """
    if scheme != SCHEMES["MXFP8"] or (capability and capability >= MX_CORES and not experts):
        return scheme
    return _ROW_WEIGHT_ONLY if capability and capability < FP8_CORES else _ROW


def named_form(scheme: Scheme, of_fp8: bool = False) -> Scheme | None:
    """Return the form of MXFP8 layers that a scheme names; ``None`` leaves it to the device.

    With ``of_fp8``, FP8_DYNAMIC, FP8_BLOCK and FP8_WEIGHT_ONLY name the forms of the same
    granularities.
    """
    alike = (f for f in _FORMS if (f.weight, f.activation) == (scheme.weight, scheme.activation))
    if scheme in MX_FORMS.values():
        return scheme
    return next(alike, None) if of_fp8 and scheme in SCHEMES.values() else None


def set_forms(
    layers: Mapping[str, Fp8Linear | ExpertTensors], form: Scheme | None = None
) -> list[str]:
    """Bring MXFP8 layers into the form in which they compute, in place, and set ``form_note``.

    Both stacks of a module of experts get the same form. Layers of other schemes than plain
    ``MXFP8`` are not changed. ``form`` is one of ``MX_FORMS``, by default ``form_on`` their device.
    Returns a sentence for each layer that did not get the wanted form: its name and the reason.
    """
    fallen = []
    for name, layer in layers.items():
        weights = _weights(layer)
        where = next(iter(weights.values())).device
        wanted = form or form_on(layer.scheme, capability(where), isinstance(layer, ExpertTensors))
        if where.type == "meta" or layer.scheme != SCHEMES["MXFP8"] or wanted == layer.scheme:
            continue
        taken, found, note = _rebased(weights, wanted)
        _take_form(layer, taken, found, note)
        if taken != wanted:
            fallen.append(f"{name}: {note}")
    return fallen


def stored_weight(layer: Fp8Linear) -> QTensor:
    """Return a layer's weight as checkpoints hold it: a view, or the MX weight before rebasing."""
    q = layer.quantized_weight()
    if not layer.scheme.rebased:
        return q
    what = f"The weight of {layer.qualified_name or 'an Fp8Linear'}"
    return restore(q, layer.weight_exponents.detach(), what)


def _weights(layer: Fp8Linear | ExpertTensors) -> dict[str, QTensor]:
    """View the weights of a layer by the names of their Parameters."""
    if isinstance(layer, Fp8Linear):
        return {"weight": layer.quantized_weight()}
    return {name: layer.quantized(name) for name in layer.stacks.names}


def _take_form(
    layer: Fp8Linear | ExpertTensors, form: Scheme, found: Mapping[str, Rebased], note: str
) -> None:
    stored = [rebased_tensors(weight, name) for name, weight in found.items()]
    made = {key: frozen(tensor) for tensors in stored for key, tensor in tensors.items()}
    layer._parameters.update(made)  # all at once: an interrupt must not leave half of them
    layer.scheme, layer.form_note = form, note
    if isinstance(layer, Fp8Linear):
        layer.replays = ReplayCache()


def _rebased(
    weights: Mapping[str, QTensor], wanted: Scheme
) -> tuple[Scheme, dict[str, Rebased], str]:
    """Return the first form that keeps all weights, their tensors, and a note with the reason."""
    if wanted == _EMULATED:
        return wanted, {}, "as asked, activations are quantized to MX and products are emulated"
    if wanted == _WEIGHT_ONLY:
        return wanted, {}, "as asked, the weight stays MX and activations have 16 bits"
    forms = {form.weight: form for form in _FORMS[wanted]}
    group, found, note = rebase_or_decline(weights, forms)
    if group is None:
        return _WEIGHT_ONLY, {}, f"{note}; so it stays MX, with activations in 16 bits"
    return forms[group], found, note
