"""What ``load_state_dict`` makes of the entries of an FP8 layer, and how a weight is quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8kit import functional
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import FP8_FORMATS, MX, QTensor, Scheme, check_scale
from fp8kit.ops import validation

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear


def quantized_entries(
    layer: Fp8Linear, state_dict: dict[str, Any], prefix: str, assign: bool
) -> dict[str, Any]:
    """Return the entries of a ``state_dict`` as an ``Fp8Linear`` stores them.

    Args:
        layer: what they are for; what it kept of an earlier dense weight is updated or dropped.
        state_dict: FP8 codes with scales, or a dense weight, beside anything else.
        prefix: of the layer's names.
        assign: whether the tensors will be taken as they are, and with them their device.

    Raises:
        CheckpointError: if codes or scales come without each other or do not fit the layer.
    """
    weight = state_dict.get(prefix + "weight")
    scale = state_dict.get(prefix + "weight_scale")
    if weight is None and scale is not None:
        raise CheckpointError(
            teach(
                f"{prefix}weight_scale comes without {prefix}weight.",
                "New scales under old codes would change every weight.",
                "Load both in one call.",
            )
        )
    if weight is None:
        return state_dict
    if weight.dtype in FP8_FORMATS:
        if scale is None:
            raise CheckpointError(
                teach(
                    f"{prefix}weight is {weight.dtype} and has no {prefix}weight_scale.",
                    "FP8 codes mean nothing without their scales.",
                    "Load the scale in the same call, or load a dense weight.",
                )
            )
        check_scale(scale, weight.shape, layer.scheme.weight, weight.device)
        validation.check_codes(f"{prefix}weight", weight.dtype, layer.scheme)
        layer.original_weight = None  # it is not what these codes were made from
        return state_dict
    weight = weight.t() if layer.transposed and weight.dim() == 2 else weight
    if tuple(weight.shape) != (layer.out_features, layer.in_features):
        return state_dict
    if scale is not None:
        raise CheckpointError(
            teach(
                f"{prefix}weight is {weight.dtype} and comes with a weight_scale.",
                "A dense weight has no scale.",
                "Drop the scale, or load the FP8 weight it belongs to.",
            )
        )
    device = weight.device if assign else layer.codes.device
    q = quantize_weight(weight.detach().to(device), layer.scheme)
    entries = dict(state_dict)
    entries[prefix + "weight"], entries[prefix + "weight_scale"] = q.data, q.scale
    if layer.input_scale is not None:  # a dense checkpoint keeps what calibration found
        entries.setdefault(prefix + "input_scale", layer.input_scale.detach())
    if layer.original_weight is not None:
        layer.original_weight.copy_(weight.detach())
        layer.keep(layer.original_weight)
    return entries


def quantize_weight(weight: Tensor, scheme: Scheme) -> QTensor:
    """Quantize a dense weight ``[N, K]`` as a scheme stores it.

    Args:
        weight: bf16, fp16 or fp32.
        scheme: gives granularity, dtype and rounding of the scales.

    Raises:
        TypeError: if the weight is not a float tensor.
    """
    return functional.quantize(
        weight,
        scheme.weight,
        dtype=scheme.dtype,
        scale_rounding="up" if scheme.ue8m0 and scheme.weight != MX else None,
        role="weight",
    )
