"""Checks of user input, with errors that say what to do; ``functional`` runs them once per call."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fp8kit.errors import (
    InvalidType,
    InvalidValue,
    check_choice,
    check_strided,
    check_switch,
    did_you_mean,
    is_integer,
)
from fp8kit.formats import (
    BLOCK,
    FLOATS,
    FP8_FORMATS,
    MX,
    ROW,
    SCHEMES,
    TENSOR,
    GroupShape,
    QTensor,
    Scheme,
)
from fp8kit.quantizers.scale_layout import LAYOUTS, has_columns

_STANDARD_SCHEMES = {
    ROW: SCHEMES["FP8_DYNAMIC"],
    TENSOR: SCHEMES["FP8_TENSOR"],
    BLOCK: SCHEMES["FP8_BLOCK"],
    MX: SCHEMES["MXFP8"],
}


def default_rounding(group: GroupShape | None, ue8m0: bool) -> str:
    """Return the default scale rounding: up for MX and for UE8M0 scales, else exact."""
    return "up" if ue8m0 or group == MX else "exact"


def check_layer_weight(
    weight: QTensor, bias: Tensor | None, scheme: Scheme, input_scale: Tensor | None
) -> None:
    """Refuse a weight, bias or input scale that does not fit a layer of a scheme."""
    check_quantized("weight", weight)
    check_operands(weight.data, weight.data, bias, "precise")
    check_codes("a weight", weight.data.dtype, scheme)
    activation_format(weight.group, scheme.stored, input_scale)


def activation_format(
    w_group: GroupShape, scheme: Scheme | str | None, input_scale: Tensor | None
) -> tuple[GroupShape | None, str]:
    """Return the activation granularity and scale rounding that go with those of a weight."""
    if scheme is None:
        if input_scale is not None:
            return TENSOR, "exact"
        if w_group not in _STANDARD_SCHEMES:
            raise InvalidValue(
                f"Got a weight in {w_group} groups and no scheme.",
                f"Only {', '.join(map(str, _STANDARD_SCHEMES))} weights have a standard one.",
                "Pass scheme=fp8kit.Scheme(name, weight=..., activation=...).",
            )
        scheme = _STANDARD_SCHEMES[w_group]
    scheme = Scheme.of(scheme)
    if scheme.weight != w_group:
        raise InvalidValue(
            f"Got a weight in {w_group} groups for scheme {scheme}.",
            f"{scheme} has {scheme.weight} weights.",
            "Quantize the weight for this scheme, or name the scheme of the weight.",
        )
    if scheme.static and input_scale is None:
        raise InvalidValue(
            f"Scheme {scheme} got no input_scale.",
            "Its activations use a calibrated scale.",
            "Pass input_scale, or use FP8_TENSOR or FP8_DYNAMIC.",
        )
    if input_scale is not None and not scheme.static:
        raise InvalidValue(
            f"Scheme {scheme} got an input_scale.",
            "It scales activations by their own amax.",
            "Leave input_scale out, or use the static scheme FP8.",
        )
    return scheme.activation, default_rounding(scheme.activation, scheme.ue8m0)


def check_quantized(name: str, q: object) -> None:
    """Refuse anything but a ``QTensor``, codes with their scales."""
    if not isinstance(q, QTensor):
        raise InvalidType(
            f"Got {name} of type {type(q).__name__}.",
            "It must be a QTensor: codes with the scales they belong to.",
            "Make one with fp8kit.quantize (role='weight' for a weight).",
        )
    check_local(f"{name}.data", q.data)


def check_quantized_input(
    x: QTensor,
    w_q: QTensor,
    scheme: Scheme | str | None,
    input_scale: Tensor | None,
    scale_ub: Tensor | None,
) -> None:
    """Refuse options that would quantize a quantized input, and a scheme of other granularities."""
    given = {"input_scale": input_scale, "scale_ub": scale_ub}
    extra = [name for name, value in given.items() if value is not None]
    if extra:
        raise InvalidValue(
            f"Got {' and '.join(extra)} for an input that is quantized already.",
            "Its scales are those of the QTensor.",
            f"Leave {' and '.join(extra)} out, or pass the tensor itself.",
        )
    found = None if scheme is None else Scheme.of(scheme)
    if found is not None and (found.activation, found.weight) != (x.group, w_q.group):
        raise InvalidValue(
            f"Got an input in {x.group} groups and a weight in {w_q.group} groups for scheme "
            f"{found}.",
            f"{found} has {found.activation} activations and {found.weight} weights.",
            "Quantize both for this scheme, or leave it out.",
        )


def check_tensor(name: str, x: object) -> None:
    """Refuse anything but a dense tensor of this process where a tensor is to be quantized."""
    if not isinstance(x, Tensor):
        raise InvalidType(
            f"Got {name} of type {type(x).__name__}.",
            "It must be a bfloat16, float16 or float32 tensor, which is quantized here.",
            "Pass a torch.Tensor; fp8kit.scaled_mm multiplies what is quantized already.",
        )
    if x.is_nested:
        raise InvalidType(
            f"Got {name} as a nested tensor.",
            "Rows of one dense tensor are quantized.",
            f"Pass each tensor of {name}.unbind(); Fp8Linear takes layout=torch.jagged as it is.",
        )
    check_local(name, x)
    check_decoded(name, x)
    if x.layout != torch.strided:
        raise InvalidType(
            f"Got {name} in the layout {x.layout}.",
            "Rows of dense tensors are quantized.",
            f"Pass {name}.to_dense().",
        )


def check_local(name: str, x: Tensor) -> None:
    """Refuse a tensor of which each process holds a part."""
    if type(x).__name__ == "DTensor":  # importing the class takes long
        raise InvalidType(
            f"Got {name} as a DTensor.",
            "Each process quantizes and multiplies tensors of its own.",
            f"Pass {name}.to_local() where rows are whole, else {name}.full_tensor(). What "
            "fully_shard has split is whole in a call of the module that it wrapped, and after "
            "that module's unshard().",
        )


def check_decoded(name: str, tensor: Tensor) -> None:
    """Refuse a quantized tensor of torchao or quanto, whose dtype is that of its numbers.

    Those of Transformer Engine pass: they decode themselves wherever they are computed with.
    """
    kind = type(tensor)
    if kind is Tensor or kind is Parameter:
        return
    library = kind.__module__.partition(".")[0]
    if library in ("torchao", "optimum") and kind.dequantize is not Tensor.dequantize:
        raise InvalidType(
            f"{name} is a {kind.__name__} of {library}.",
            "FP8 is made from plain tensors, or from codes beside their scales.",
            "Pass its .dequantize(); or load the file by fp8kit.load, if it is safetensors.",
        )


def check_float(name: str, x: Tensor) -> None:
    """Refuse anything but a dense bf16, fp16 or fp32 tensor."""
    check_tensor(name, x)
    if x.dtype not in FLOATS:
        raise InvalidType(
            f"Got {name} of dtype {x.dtype} and shape {tuple(x.shape)}.",
            "It must be bfloat16, float16 or float32.",
            "Codes go to fp8kit.scaled_mm with their scales; convert numbers by .float().",
        )


def check_layer_input(x: Tensor, codes: torch.dtype) -> None:
    """Refuse an input that a layer cannot quantize, naming the cause if the input has FP8 codes."""
    if isinstance(x, Tensor) and x.dtype == codes:
        check_tensor("x", x)
        raise InvalidType(
            f"Got x of dtype {x.dtype} and shape {tuple(x.shape)}, codes without scales.",
            "A layer takes bfloat16, float16 or float32, or a QTensor, and quantizes itself.",
            "Code that casts x to the dtype of an FP8 weight should take that of the layer's "
            "compute_dtype; else exclude the layer whose dtype it asks for.",
        )
    check_float("x", x)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Refuse a result dtype that is not bf16, fp16 or fp32."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise InvalidType(
            f"Got {dtype!r:.80} as the dtype of the result.",
            "Results are bfloat16, float16 or float32.",
            "Pass one of these.",
        )


def check_size(name: str, value: object) -> None:
    """Refuse a size of a layer that is not a whole number of at least 0."""
    if not is_integer(value) or value < 0:
        raise InvalidValue(
            f"Got {name}={value!r:.80}.",
            "It must be a whole number, 0 or more.",
            "Pass an int.",
        )


def check_device(device: object) -> None:
    """Refuse what names no device for a new layer; ``None`` stands for torch's default."""
    try:
        if isinstance(device, bool):
            raise TypeError("torch takes True for the device 1")
        torch.device("cpu" if device is None else device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise InvalidValue(
            f"Got device={device!r:.80}.",
            "It must be a device, such as 'cpu', 'cuda:0' or 'meta'.",
            "Pass one of these, or leave it out for torch's default device.",
        ) from error


def check_precision(dtype: object) -> None:
    """Refuse a dtype that cannot be the high precision of a layer or model; ``None`` may be."""
    known = isinstance(dtype, torch.dtype)
    if dtype is None or (known and dtype in FLOATS):
        return
    remedy = "Pass torch.bfloat16, or leave it out for that of the checkpoint."
    if known and dtype in FP8_FORMATS:
        remedy = "Choose FP8 by its scheme, such as scheme='FP8_DYNAMIC'."
    kind = InvalidValue if known else InvalidType
    raise kind(
        f"Got dtype={dtype!r:.80}.",
        "It must be the high precision of the model: bfloat16, float16 or float32.",
        remedy,
    )


def check_rounding(rounding: str | None, group: GroupShape) -> str:
    """Return the scale rounding or its default; refuse one that the granularity does not have."""
    legal = ("up", "floor") if group == MX else ("exact", "up")
    if rounding is None:
        return legal[0]
    if not isinstance(rounding, str) or rounding not in (*legal, "ceil"):
        raise InvalidValue(
            f"Got scale_rounding={rounding!r:.80} for {group} groups.",
            f"They take {legal[0]!r} or {legal[1]!r}.",
            "Pass one of these, or leave it out.",
        )
    return "up" if rounding == "ceil" else rounding


def check_layout(layout: object, group: GroupShape) -> None:
    """Refuse a layout of scales that is unknown, or that the group does not have."""
    if layout not in LAYOUTS or (layout == "column" and not has_columns(group)):
        raise InvalidValue(
            f"Got scale_layout={layout!r} for {group} groups.",
            "The layout is 'row', or 'column' for groups along a row.",
            "Pass scale_layout='row'.",
        )


def check_codes(name: str, dtype: torch.dtype, scheme: Scheme) -> None:
    """Refuse codes of another FP8 dtype than the scheme's."""
    if dtype != scheme.dtype:
        raise InvalidValue(
            f"Got {name} of {dtype} codes for scheme {scheme}.",
            f"It holds {scheme.dtype} codes.",
            "Pass a scheme with that dtype, or dequantize; copying would change the bits."
            if dtype in FP8_FORMATS
            else "Dense weights become FP8 by layer.load_state_dict; under fully_shard, a "
            "param_dtype needs ignored_params= with what is frozen.",
        )


def check_run_options(batch_invariant: bool, backend: object = None) -> None:
    """Refuse invalid options of how a product is computed."""
    check_switch("batch_invariant", batch_invariant)
    if backend is not None and not isinstance(backend, str):
        raise InvalidType(
            f"Got backend={backend!r:.80}.",
            "A backend is named by a word, such as 'dequantized'.",
            "Leave it out for the fastest that fits.",
        )


def check_row_counts(m: object) -> tuple[int, ...]:
    """Return row counts as a tuple; refuse anything but one positive integer or several."""
    one = not isinstance(m, Iterable) or isinstance(m, str | bytes | Tensor)
    rows: tuple[Any, ...] = (m,) if one else tuple(m)  # type: ignore[arg-type]
    integers = all(map(is_integer, rows))
    if not integers or min(rows, default=0) < 1:
        raise (InvalidValue if integers else InvalidType)(
            f"Got m={m!r:.80}.",
            "Row counts are positive integers: tokens in a call.",
            "Pass m=[1, 4096] for decode and prefill, for example.",
        )
    return tuple(map(int, rows))


def check_operands(x: Tensor, w: Tensor, bias: Tensor | None, accum: str) -> None:
    """Refuse operands of a matmul whose shapes, devices or options do not fit."""
    check_local("w", w)
    if w.dim() != 2 or x.dim() == 0 or x.shape[-1] != w.shape[1]:
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)} and a weight of shape {tuple(w.shape)}.",
            "x [..., K] is multiplied by a weight [N, K] of the same K.",
            "Check the orientation of the weight: rows are output features.",
        )
    if bias is not None and not isinstance(bias, Tensor):
        raise InvalidType(
            f"Got a bias of type {type(bias).__name__}.",
            f"A bias is a float tensor of shape ({w.shape[0]},), or None.",
            "Pass a torch.Tensor with one value per output feature.",
        )
    if bias is not None:
        check_strided("a bias", bias)
        check_decoded("The bias", bias)
    if bias is not None and (tuple(bias.shape) != (w.shape[0],) or bias.dtype not in FLOATS):
        raise InvalidValue(
            f"Got a bias of shape {tuple(bias.shape)} and dtype {bias.dtype}.",
            f"The weight {tuple(w.shape)} needs a bias ({w.shape[0]},) in bf16, fp16 or fp32.",
            "Pass one value per output feature, and call .float() on other dtypes.",
        )
    for name, tensor in (("weight", w), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise InvalidValue(
                f"Got x on {x.device} and a {name} on {tensor.device}.",
                "A matmul runs on one device.",
                "Move them to the same device.",
            )
    check_choice("accum", accum, ("precise", "fast"))


def check_operand(
    name: str, other: Tensor, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype | None
) -> None:
    """Refuse an operand of a fused operation that does not match its input ``x``.

    The operand must have ``shape`` and ``dtype``; a ``dtype`` of ``None`` means any float.
    """
    check_float(name, other)
    if dtype is not None and other.dtype != dtype:
        raise InvalidType(
            f"Got a {name} of dtype {other.dtype} for an input of {x.dtype}.",
            "Here both have one dtype.",
            f"Convert the {name}, or, for a norm, compute in fp32 with rounding='once'.",
        )
    if tuple(other.shape) != shape or other.device != x.device:
        raise InvalidValue(
            f"Got a {name} of shape {tuple(other.shape)} on {other.device}.",
            f"The input {tuple(x.shape)} on {x.device} needs {shape} on its device.",
            f"Reshape, expand or move the {name}.",
        )


def check_options(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse keywords that are not among the known ones."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InvalidType(
            f"Got {unknown}=, which is no option.",
            f"Options are {', '.join(known)}.",
            "Rename it or leave it out." + did_you_mean(unknown, known),
        )
