"""In which form an MXFP8 layer computes: as it is, or rebased to rows or blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8kit.dispatch.device import capability
from fp8kit.formats import MX_FORMS, SCHEMES, QTensor, Scheme
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


def settle(layers: Mapping[str, Fp8Linear], form: Scheme | None = None) -> list[str]:
    """Give MXFP8 layers the form in which they compute, in place; ``form_note`` tells it of each.

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
        where = layer.codes.device
        wanted = form or form_on(layer.scheme, capability(where))
        if where.type == "meta" or layer.scheme != SCHEMES["MXFP8"] or wanted == layer.scheme:
            continue
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        taken, found, note = _rebased(layer, wanted)
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


def _take_form(layer: Fp8Linear, form: Scheme, weight: Rebased | None, note: str) -> None:
    layer.scheme, layer.form_note = form, note
    if weight is not None:
        layer.weight, layer.weight_scale = frozen(weight.q.data), frozen(weight.q.scale)
        layer.weight_exponents = frozen(weight.exponents)
    layer.replays = ReplayCache()


@torch.no_grad()
def _rebased(layer: Fp8Linear, wanted: Scheme) -> tuple[Scheme, Rebased | None, str]:
    """Return the first form that keeps the weight, and what it changes or why it is not another."""
    if wanted == _EMULATED:
        return wanted, None, "as asked, activations are quantized to MX and products are emulated"
    q = layer.quantized_weight()
    said: list[str] = []
    for form in (wanted, _BLOCK if wanted == _ROW else _ROW):
        found = rebase(q, form.weight)
        size = f"{found.changed} of {q.data.numel()} values, by {found.largest_change:.1e} at most"
        if found.largest_change <= LARGEST_CHANGE:
            told = "".join(f"{reason}; " for reason in said)
            unit = f"MXFP8 rebased to one power of two per {_UNITS[form]}"
            return form, found, f"{told}{unit}, which changes {size}"
        said.append(f"one power of two per {_UNITS[form]} would change {size}")
    return _EMULATED, None, f"{'; '.join(said)}; so it stays MX and is emulated"
