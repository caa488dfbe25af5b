"""FLUX files of Black Forest Labs (``fp8r``): E4M3 ``weight`` and fp32 ``weight_scale [N]``.

They have the names and joined layers of the original FLUX. diffusers renames and splits them; a
tensor class of diffusers keeps codes and scales together meanwhile (here: a bundle).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import CheckpointError, UnsupportedError

_ROWS = "fp8r"


def bundled(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Join each FP8 weight of a file and its scales into a bundle.

    The file has E4M3 ``X.weight [N, K]`` with fp32 ``X.weight_scale [N]``. Raises
    ``UnsupportedError`` for NVFP4 and for a diffusers without that tensor class, and
    ``CheckpointError`` if a weight is not E4M3, or has not one scale per row.
    """
    make = _bundle_class()
    layers = [n.removesuffix(".weight_scale") for n in state_dict if n.endswith(".weight_scale")]
    found = dict(state_dict)
    for layer in layers:
        weight, scale = found.get(f"{layer}.weight"), found.pop(f"{layer}.weight_scale")
        if f"{layer}.weight_scale_2" in found:
            raise UnsupportedError(
                f"{layer} is NVFP4.",
                "FP8 layers hold one code in a byte.",
                "Take the fp8r file, or diffusers' own BFLQuantizationConfig.",
            )
        rows = () if weight is None else tuple(weight.shape[:1])
        if weight is None or weight.dtype != torch.float8_e4m3fn or tuple(scale.shape) != rows:
            kind = "no weight" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise CheckpointError(
                f"{layer} has {kind} and {scale.dtype} scales {list(scale.shape)}.",
                "A file of Black Forest Labs has E4M3 codes [N, K] and fp32 scales [N].",
                "Load files of another form with fp8kit.load(directory, model).",
            )
        found[f"{layer}.weight"] = make(weight, _ROWS, scale)
    return found


def is_bundle(value: object) -> bool:
    """Return whether a value of a state_dict is a bundle."""
    return getattr(value, "quant_type", None) == _ROWS


def parts_of(bundle: Any) -> dict[str, Tensor]:
    """Return the codes ``[N, K]`` and fp32 scales ``[N, 1]`` of a bundle."""
    return {"weight": bundle.as_tensor(), "weight_scale": bundle.weight_scale.float()[:, None]}


def _bundle_class() -> Any:
    try:
        from diffusers.quantizers.bfl.utils import BFLQuantizedParameter
    except ImportError as error:
        raise UnsupportedError(
            "This diffusers does not know FP8 files of Black Forest Labs.",
            "Its conversion of their names and joined layers is needed.",
            "Upgrade diffusers to 0.42 or later.",
        ) from error
    return BFLQuantizedParameter
