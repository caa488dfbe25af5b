"""``load_weights``: load tensors from any source into a model, in any order, repeatedly."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fp8kit.checkpoint.loading import into_module
from fp8kit.checkpoint.loading.expected import NewLayers, other_beginning
from fp8kit.checkpoint.loading.placement import Placement
from fp8kit.conversion.patterns import LayerFilter
from fp8kit.errors import CheckpointError, InvalidType, InvalidValue, check_switch, some_of
from fp8kit.formats import FLOATS, Scheme
from fp8kit.io.arguments import as_device
from fp8kit.modules.libraries import bare
from fp8kit.ops.validation import check_decoded

_Load = tuple[NewLayers, Placement]
# loads that wait for another partial call; an entry is freed with its model
_UNFINISHED: WeakKeyDictionary[nn.Module, _Load] = WeakKeyDictionary()


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
    *,
    scheme: Scheme | str | None = None,
    include: Sequence[str] | LayerFilter | None = None,
    exclude: Sequence[str] | LayerFilter | None = None,
    device: torch.device | str | None = None,
    partial: bool = False,
    strict: bool = False,
) -> set[str]:
    """Load tensors that arrive in any order, and quantize each weight as soon as it is complete.

    Dense weights of FP8 layers are quantized, FP8 codes are taken as they are; q/k/v, gate/up and
    experts may arrive separately and be joined in the model, or the other way round. Tensors in
    memory are overwritten in place, any number of times, so CUDA graphs stay valid. If the call
    raises, the tensors that arrived before the error are loaded and the others are not, and a layer
    that an interrupt left with half of a weight computes NaN; what waits from partial calls is
    dropped, so bring all tensors again.

    Args:
        model: has FP8 layers already, or gets them by ``scheme``; its tensors may be on meta.
        weights: pairs of a name as in a checkpoint and a tensor on any device, whose memory the
            source may reuse when the next pair is requested; or a mapping, such as a state dict.
        scheme: what linear layers become, by the rules of ``fp8kit.plan``.
        include: as in ``fp8kit.plan``; only with ``scheme``.
        exclude: as in ``fp8kit.plan``; only with ``scheme``.
        device: where to move the model; by default it stays, and meta tensors go to the CPU.
        partial: another call follows, and incomplete weights wait for it. All these calls use the
            options of the first.
        strict: raise instead of warning about tensors the model does not use, and for layers that
            cannot be quantized.

    Returns:
        Names of the model's tensors that this call, and partial ones before it, have filled.

    Raises:
        CheckpointError: if a tensor arrives twice, does not fit, or contradicts its scale; and
            without ``partial``, if a weight is incomplete, a tensor is still on meta, or all names
            have another prefix than the model's, such as ``module.``. Also if code that only
            ``load_state_dict`` runs (a hook, an override) changes values.
        ConversionError: if a weight cannot be quantized, and as ``fp8kit.plan`` raises it.
        TypeError: if ``model`` is no module, an item is no pair of a name and a tensor, a weight to
            quantize is not bf16, fp16 or fp32, or ``partial`` or ``strict`` is no switch.
        ValueError: for an unknown scheme, patterns without a scheme, or a device that is not here.

    Example:
        >>> fp8kit.load_weights(model, trainer.named_parameters())
        >>> for bucket in buckets: fp8kit.load_weights(model, bucket, partial=True)
        >>> fp8kit.load_weights(model, [])  # all buckets were there: check that nothing waits
    """
    _check_arguments(model, weights)
    check_switch("partial", partial)
    check_switch("strict", strict)
    with bare(model) as model:
        where = as_device(device)
        load = _UNFINISHED.pop(model, None)
        if load is None:
            load = _begun(model, scheme, include, exclude, strict, where)
        layers, placement = load
        for pair in weights.items() if isinstance(weights, Mapping) else weights:
            name, tensor = _checked(pair)
            placement.put(name, tensor)
            if strict and placement.unused:
                raise CheckpointError(
                    f"{name} is not in the model.",
                    "With strict=True every tensor has a place.",
                    "Leave it out, or drop strict to get a warning.",
                )
        if partial:
            _UNFINISHED[model] = load
            return set(placement.placed)
        if placement.unused and placement.shapes and not placement.placed:
            if remedy := other_beginning(list(placement.shapes), set(placement.unused)):
                raise CheckpointError(
                    f"None of what came is in the model: {some_of(placement.unused)}.",
                    f"Its names are {some_of([*placement.shapes])}.",
                    remedy,
                )
        into_module.end(model, layers, placement)
        if where is not None:
            model.to(where)
        for note in into_module.Filled(placement.unused, placement.decoded).notes("The load"):
            warnings.warn(note, stacklevel=2)
        return placement.placed


def _check_arguments(model: object, weights: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"Got a {type(model).__name__} as the model.",
            "It must be the module that gets the weights.",
            "Pass the model first, then the weights.",
        )
    if isinstance(weights, (str, Path, Tensor)) or not isinstance(weights, Iterable):
        raise InvalidType(
            f"Got weights of type {type(weights).__name__}.",
            "They must be pairs of names and tensors, or a mapping.",
            "Pass a state dict; a checkpoint on disk is loaded by fp8kit.load(path, model).",
        )


def _checked(pair: object) -> tuple[str, Tensor]:
    match pair:
        case (str(name), Tensor() as tensor):
            check_decoded(name, tensor)
            return name, tensor
    raise InvalidType(
        f"Got {pair!r:.80} among the weights.",
        "Each is a pair of a name and a tensor.",
        "Pass model.state_dict(), or its items().",
    )


def _begun(
    model: nn.Module,
    scheme: Scheme | str | None,
    include: Sequence[str] | LayerFilter | None,
    exclude: Sequence[str] | LayerFilter | None,
    strict: bool,
    device: torch.device | None,
) -> _Load:
    floats = Counter(p.dtype for p in model.parameters() if p.dtype in FLOATS)
    high = floats.most_common(1)[0][0] if floats else torch.bfloat16
    layers = NewLayers()
    if scheme is not None:
        options = into_module.PlanOptions(scheme, include, exclude, strict)
        layers = into_module.layers_by_plan(model, options, high)
    elif include is not None or exclude is not None:
        raise InvalidValue(
            "Got include or exclude without a scheme.",
            "They choose the layers that become FP8.",
            "Pass scheme='FP8_DYNAMIC' too, or leave them out.",
        )
    return layers, into_module.begin(model, layers, device=device, high=high, owned=False)
