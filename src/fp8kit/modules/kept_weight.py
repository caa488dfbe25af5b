"""A dense weight kept beside the codes: when it changes, it is quantized again."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.modules.entries import quantize_weight, stored_tensors
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

Made = tuple[Tensor, int, weakref.ref[Tensor]]  # a kept weight, its version, the codes made of it


def counted(original: Tensor) -> Tensor:
    """Return a tensor whose changes torch counts: a copy if it was made in inference mode."""
    with torch.inference_mode(False):
        return original.clone() if version(original) == UNCOUNTED else original


def follow_original(layer: Fp8Linear) -> None:
    """Quantize the kept dense weight again if it was changed or replaced since the last time.

    Codes on meta, which offloading puts there between calls, are quantized once they are back.
    Raises ``UnsupportedError`` if a change cannot be followed: it is not counted, or the layer's
    own codes are replaced for a call, as by ``functional_call``.
    """
    if torch.compiler.is_compiling() or is_followed(layer):
        return
    original, codes = layer.original_weight, layer.codes
    if original is None or codes.is_meta or layer.weight_scale.is_meta:
        return
    if version(original) == UNCOUNTED:
        raise UnsupportedError(
            f"The original_weight of {layer._described()} was made in inference mode.",
            "A kept weight is followed by its counter of changes, which such a tensor lacks.",
            "Assign a copy: with torch.inference_mode(False): layer.original_weight = w.clone()",
        )
    own = None if layer._quantized_from is None else layer._quantized_from[2]()
    replica = hasattr(layer, "_is_replica")  # of DataParallel, which makes a new one at each call
    if not (own is None or own is codes or replica or own.data_ptr() == codes.data_ptr()):
        raise UnsupportedError(
            f"The original_weight of {layer._described()} was changed, and this call computes with "
            "codes from elsewhere.",
            "A changed weight is quantized into the layer's own codes.",
            "Call the layer with its own weights first, or set layer.original_weight = None.",
        )
    with torch.inference_mode(codes.is_inference()), torch.no_grad():
        q = quantize_weight(original.to(codes.device), layer.scheme)
        for name, tensor in stored_tensors(q, layer.scheme, layer=layer.qualified_name).items():
            getattr(layer, "codes" if name == "weight" else name).copy_(tensor)
    layer.keep(original)


def is_followed(layer: Fp8Linear) -> bool:
    """Return whether a layer keeps no dense weight, or its codes were made of what it keeps now."""
    original, seen = layer.original_weight, layer._quantized_from
    if original is None or seen is None:  # files of older versions have None
        return original is None
    return seen[0] is original and seen[1] == version(original)


def codes_replaced(layer: Fp8Linear) -> None:
    """Note that the codes of a layer are in another Parameter now, which holds the same values."""
    codes = layer._parameters.get("weight")
    if layer._quantized_from is not None and codes is not None:
        layer._quantized_from = (*layer._quantized_from[:2], weakref.ref(codes))


def made_of_original(layer: Fp8Linear, source: Fp8Linear | None = None) -> Fp8Linear:
    """Mark the codes of a layer that was copied from ``source``, or loaded, and return the layer.

    They were made of its kept weight, unless the source's are on meta and were not. Not marked, it
    would be quantized again, maybe to other bits, if the kept weight has been cast since.
    """
    followed = source is None or is_followed(source)
    layer._quantized_from = None
    if layer.original_weight is not None and followed:
        layer.keep(layer.original_weight)
    return layer
