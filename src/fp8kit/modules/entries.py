"""How ``load_state_dict`` fills FP8 layers and experts, and how dense weights are quantized."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.errors import CheckpointError, InvalidType
from fp8kit.formats import E4M3FN, FLOATS, FP8_FORMATS, MX, QTensor, Scheme, check_scale
from fp8kit.ops import validation
from fp8kit.quantizers.encodings import recoded
from fp8kit.quantizers.rebase import Rebased, rebase

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

_BY_SHARDS = (
    "Of files that divide them, fill the model by fp8kit.load(dir, model) or "
    "accelerate.load_checkpoint_in_model."
)


def quantized_entries(
    layer: Fp8Linear, state_dict: dict[str, Any], prefix: str, assign: bool
) -> dict[str, Any]:
    """Return the entries of a ``state_dict`` as an ``Fp8Linear`` stores them.

    The weight arrives as FP8 codes with scales, or dense; a dense one is quantized. A dense weight
    that the layer keeps (``original_weight``) is updated, or dropped if codes arrive. With
    ``assign`` the layer will take the tensors as they are, so they stay on their device. Raises
    ``CheckpointError`` if codes or scales come without each other or do not fit the layer.
    """
    state_dict = _as_held(state_dict, prefix)
    weight = state_dict.get(prefix + "weight")
    scale = state_dict.get(prefix + "weight_scale")
    if not isinstance(weight, Tensor | None):
        return state_dict  # torch names what is no tensor
    if weight is None and scale is not None:
        raise CheckpointError(
            f"{prefix}weight_scale comes without {prefix}weight.",
            "New scales under old codes would change every weight.",
            f"Load both in one call. {_BY_SHARDS}",
        )
    if weight is None:
        return state_dict
    if weight.dtype in FP8_FORMATS:
        if scale is None:
            raise CheckpointError(
                f"{prefix}weight is {weight.dtype} and has no {prefix}weight_scale.",
                "FP8 codes mean nothing without their scales.",
                f"Load the scale in the same call, or load a dense weight. {_BY_SHARDS}",
            )
        validation.check_codes(f"{prefix}weight", weight.dtype, layer.scheme)
        check_shapes(layer, state_dict, prefix, "weight", "input_scale", "weight_exponents")
        as_mx = check_form(layer.scheme, prefix + "weight", state_dict)
        group = MX if as_mx else layer.scheme.weight
        check_scale(scale, weight.shape, group, weight.device)
        own, held = scale.data_ptr() == layer.weight_scale.data_ptr() != 0, layer.codes
        if own and not torch.equal(*(w.to(held.device).view(torch.uint8) for w in (weight, held))):
            raise CheckpointError(
                f"{prefix}weight is not what the layer holds, and {prefix}weight_scale is its own.",
                "Other codes need other scales; a merge that adds to codes takes them for numbers.",
                "Add to layer.to_linear().weight instead, and load the sum without a scale. "
                + _BY_SHARDS,
            )
        layer.original_weight = None  # the new codes were not made from it
        if not as_mx:
            return state_dict
        return state_dict | stored_entries(QTensor(weight, scale, MX), layer.scheme, prefix)
    weight = weight.t() if layer.transposed and weight.dim() == 2 else weight
    if tuple(weight.shape) != (layer.out_features, layer.in_features):
        return state_dict
    # set_model_state_dict of torch.distributed fills missing entries with the layer's own
    if scale is not None and scale is not layer.weight_scale:
        raise CheckpointError(
            f"{prefix}weight is {weight.dtype} and comes with a weight_scale.",
            "A dense weight has no scale.",
            "Drop the scale, load the FP8 weight it belongs to, or view bytes of codes as FP8.",
        )
    device = weight.device if assign else layer.codes.device
    q = quantize_weight(weight.detach().to(device), layer.scheme, f"{prefix}weight")
    entries = state_dict | stored_entries(q, layer.scheme, prefix)
    if layer.input_scale is not None:  # a dense checkpoint has none: keep the calibrated one
        entries.setdefault(prefix + "input_scale", layer.input_scale.detach())
    if layer.original_weight is not None:
        layer.original_weight.copy_(weight.detach())
        layer.keep(layer.original_weight)
    return entries


def _as_held(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return entries with names and scale shapes of files in those that a layer has.

    Trainers fill models from the files that ``save_pretrained`` wrote, name by name.
    """
    inverse, scale = f"{prefix}weight_scale_inv", f"{prefix}weight_scale"
    if inverse in state_dict and scale not in state_dict:
        state_dict = {scale if n == inverse else n: t for n, t in state_dict.items()}
    held = {n: state_dict[n] for n in (scale, f"{prefix}input_scale") if n in state_dict}
    one = {n: t for n, t in held.items() if isinstance(t, Tensor) and t.shape in ((), (1,))}
    flat = {n: t.reshape(1, 1) for n, t in one.items()}
    return state_dict | flat if flat else state_dict


def check_shapes(layer: nn.Module, state_dict: Mapping[str, Any], prefix: str, *kinds: str) -> None:
    """Refuse codes and scales of other shapes than a layer's Parameters of these names.

    torch would refuse the one with another shape, and load the others: codes and scales of two
    weights.
    """
    for kind in kinds:
        held, given = layer._parameters.get(kind), state_dict.get(prefix + kind)
        # nn.Module names what is no tensor
        if held is not None and isinstance(given, Tensor) and held.shape != given.shape:
            raise CheckpointError(
                f"size mismatch for {prefix}{kind}: it is {list(given.shape)}.",
                f"The layer holds {list(held.shape)}.",
                "Load the weights of the model that was built.",
            )


def check_form(scheme: Scheme, name: str, state_dict: Mapping[str, Any]) -> bool:
    """Return whether a ``state_dict`` has MX weights that must still be rebased for a scheme.

    ``name`` is that of the codes; their scales are in the ``state_dict``, too. Raises
    ``CheckpointError`` for rebased weights if the scheme is not rebased, and for weights that are
    neither MX nor rebased if it is.
    """
    as_mx = scheme.rebased and state_dict[f"{name}_scale"].dtype == torch.uint8
    with_exponents = f"{name}_exponents" in state_dict
    if with_exponents and not scheme.rebased:
        raise CheckpointError(
            f"{name} comes with {name}_exponents, and the layer is {scheme}.",
            "MX weights that were rebased have such exponents, and load into rebased layers.",
            "Make the layer with the scheme of the one that was saved, such as MXFP8_ROW.",
        )
    if scheme.rebased and not (as_mx or with_exponents):
        raise CheckpointError(
            f"{name} has no MX scales and no {name}_exponents, and the layer is {scheme}.",
            "It holds an MX weight: codes with E8M0 bytes, or rebased ones with exponents.",
            "Load such a weight, or make the layer with FP8_DYNAMIC or another FP8 scheme.",
        )
    return as_mx


def stored_tensors(
    weight: QTensor, scheme: Scheme, name: str = "weight", layer: str = ""
) -> dict[str, Tensor]:
    """Return the tensors that a layer of a scheme holds for a weight, by name.

    The weight is as ``quantize_weight`` returns it: for a rebased scheme with MX scales. A layer
    keeps its scheme when it gets a new weight, so a weight that loses precision by rebasing warns.
    """
    if not scheme.rebased:
        return {name: weight.data, f"{name}_scale": weight.scale}
    found = rebase(weight, scheme.weight)
    if found.loses:
        warnings.warn(
            f"{layer}{'.' * bool(layer)}{name} in the form {scheme} {found.loses}; convert or load "
            "the model anew with MXFP8, which then leaves this weight as it is.",
            stacklevel=3,
        )
    return rebased_tensors(replace(found, q=recoded(found.q, scheme.dtype)), name)


def rebased_tensors(weight: Rebased, name: str) -> dict[str, Tensor]:
    """Return the tensors that a layer holds for a rebased weight, by name."""
    found = {name: weight.q.data, f"{name}_scale": weight.q.scale}
    return found | {f"{name}_exponents": weight.exponents}


def stored_entries(
    weight: QTensor, scheme: Scheme, prefix: str, name: str = "weight"
) -> dict[str, Tensor]:
    """Return ``stored_tensors`` under the names of a ``state_dict``."""
    found = stored_tensors(weight, scheme, name, prefix.rstrip("."))
    return {prefix + own: tensor for own, tensor in found.items()}


def quantize_weight(weight: Tensor, scheme: Scheme, name: str = "The weight") -> QTensor:
    """Quantize a dense weight ``[N, K]`` as a checkpoint of a scheme stores it.

    For rebased schemes that is MX with e4m3fn codes, which alone are rebased.
    The weight is bf16, fp16 or fp32; other dtypes raise a ``TypeError`` that has its ``name``, and
    so do quantized tensors of other libraries.
    """
    if isinstance(weight, Tensor):
        validation.check_decoded(name, weight)
    if isinstance(weight, Tensor) and weight.dtype not in FLOATS:
        raise InvalidType(
            f"{name} is {weight.dtype}.",
            "FP8 is made from bf16, fp16 or fp32.",
            "Cast it, by .float(), if it holds numbers; or leave its layer dense.",
        )
    group, dtype = (MX, E4M3FN.dtype) if scheme.rebased else (scheme.weight, scheme.dtype)
    return functional.quantize(
        weight,
        group,
        dtype=dtype,
        scale_rounding="up" if scheme.ue8m0 and group != MX else None,
        role="weight",
    )
