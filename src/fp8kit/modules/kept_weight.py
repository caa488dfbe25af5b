"""A dense weight kept beside the codes: when it changes, it is quantized again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.modules.entries import quantize_weight, stored_tensors
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear


def counted(original: Tensor) -> Tensor:
    """Return a tensor whose changes torch counts: a copy if it was made in inference mode."""
    with torch.inference_mode(False):
        return original.clone() if version(original) == UNCOUNTED else original


def follow_original(layer: Fp8Linear) -> None:
    """Quantize the kept dense weight again if it was changed or replaced since the last time."""
    if torch.compiler.is_compiling():
        return
    original = layer.original_weight
    if original is None:
        return
    seen = layer._quantized_from  # None for files of older versions
    if seen is not None and seen[0] is original and seen[1] == version(original):
        return
    if version(original) == UNCOUNTED:
        raise UnsupportedError(
            f"The original_weight of {layer._described()} was made in inference mode.",
            "A kept weight is followed by its counter of changes, which such a tensor lacks.",
            "Assign a copy: with torch.inference_mode(False): layer.original_weight = w.clone()",
        )
    with torch.inference_mode(layer.codes.is_inference()), torch.no_grad():
        q = quantize_weight(original.to(layer.codes.device), layer.scheme)
        for name, tensor in stored_tensors(q, layer.scheme, layer=layer.qualified_name).items():
            getattr(layer, "codes" if name == "weight" else name).copy_(tensor)
    layer.keep(original)


def made_of_original(layer: Fp8Linear) -> Fp8Linear:
    """Mark a copied layer's codes as made from its kept weight, and return the layer.

    Else it would be quantized again, maybe to other bits, if the kept weight has been cast since.
    """
    if layer.original_weight is not None:
        layer.keep(layer.original_weight)
    return layer
