"""In which form MXFP8 layers and experts compute: as they are, or rebased to rows or blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fp8kit.dispatch.device import capability
from fp8kit.formats import MX_FORMS, SCHEMES, QTensor, Scheme
from fp8kit.modules.entries import rebased_tensors
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import frozen
from fp8kit.quantizers.rebase import Rebased, rebase, restore
from fp8kit.runtime.replay_cache import ReplayCache

MX_CORES = (10, 0)  # the first compute capability whose tensor cores read MX scales
LARGEST_CHANGE = 1e-4
_ROW, _BLOCK, _EMULATED = MX_FORMS.values()
_UNITS = {_ROW: "row", _BLOCK: "128x128 block"}


def form_on(scheme: Scheme, capability: tuple[int, int] | None) -> Scheme:
    """Return the scheme that layers of a scheme compute with on a device.

    Args:
        scheme: what was asked for; only plain ``MXFP8`` leaves a choice.
        capability: CUDA compute capability, ``None`` elsewhere.

    Example:
        >>> form_on(Scheme.of("MXFP8"), (9, 0)).name
        'MXFP8_ROW'
    """
    chooses = scheme == SCHEMES["MXFP8"] and (capability is None or capability < MX_CORES)
    return _ROW if chooses else scheme


def settle(
    layers: Mapping[str, Fp8Linear | ExpertTensors], form: Scheme | None = None
) -> list[str]:
    """Give MXFP8 layers the form in which they compute, in place; ``form_note`` tells it of each.

    Both stacks of a module of experts get the same form.

    Args:
        layers: by name, with weights in memory; others than plain ``MXFP8`` stay as they are.
        form: one of ``MX_FORMS``; by default layers are rebased whose device has no tensor cores
            for MX.

    Returns:
        A sentence for each layer that did not get the wanted form, by name, with the reason.
    """
    fallen = []
    seen: set[int] = set()
    for name, layer in layers.items():
        weights = _weights(layer)
        where = next(iter(weights.values())).device
        wanted = form or form_on(layer.scheme, capability(where))
        if where.type == "meta" or layer.scheme != SCHEMES["MXFP8"] or wanted == layer.scheme:
            continue
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        taken, found, note = _rebased(weights, wanted)
        _take_form(layer, taken, found, note)
        if taken != wanted:
            fallen.append(f"{name}: {note}")
    return fallen


def stored_weight(layer: Fp8Linear) -> QTensor:
    """Return the weight of a layer as checkpoints hold it: a view, or the MX weight it was.

    Args:
        layer: of any scheme.
    """
    q = layer.quantized_weight()
    return restore(q, layer.weight_exponents.detach()) if layer.scheme.rebased else q


def _weights(layer: Fp8Linear | ExpertTensors) -> dict[str, QTensor]:
    """View the weights of a layer by the names of their Parameters."""
    if isinstance(layer, Fp8Linear):
        return {"weight": layer.quantized_weight()}
    return {name: layer.quantized(name) for name in layer.stacks.names}


def _take_form(
    layer: Fp8Linear | ExpertTensors, form: Scheme, found: Mapping[str, Rebased], note: str
) -> None:
    layer.scheme, layer.form_note = form, note
    for name, weight in found.items():
        for key, tensor in rebased_tensors(weight, name).items():
            setattr(layer, key, frozen(tensor))
    if isinstance(layer, Fp8Linear):
        layer.replays = ReplayCache()


@torch.no_grad()
def _rebased(
    weights: Mapping[str, QTensor], wanted: Scheme
) -> tuple[Scheme, dict[str, Rebased], str]:
    """Return the first form that keeps all weights, and what it changes or why it is no other."""
    if wanted == _EMULATED:
        return wanted, {}, "as asked, activations are quantized to MX and products are emulated"
    said: list[str] = []
    for form in (wanted, _BLOCK if wanted == _ROW else _ROW):
        found = {name: rebase(q, form.weight) for name, q in weights.items()}
        size = told_change(found.values())
        if max(x.largest_change for x in found.values()) <= LARGEST_CHANGE:
            told = "".join(f"{reason}; " for reason in said)
            unit = f"MXFP8 rebased to one power of two per {_UNITS[form]}"
            return form, found, f"{told}{unit}, which changes {size}"
        said.append(f"one power of two per {_UNITS[form]} would change {size}")
    return _EMULATED, {}, f"{'; '.join(said)}; so it stays MX and is emulated"


def told_change(weights: Iterable[Rebased]) -> str:
    """Say how many values of weights changed, and by how much (see ``Rebased.largest_change``).

    Args:
        weights: of one layer.
    """
    every = list(weights)
    changed, count = sum(x.changed for x in every), sum(x.q.data.numel() for x in every)
    largest = max(x.largest_change for x in every)
    return f"{changed} of {count} values, in no row by more than {largest:.1e} of its groups' norms"
