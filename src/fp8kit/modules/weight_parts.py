"""Weights joined from parts with one scale each, and conversion between the e4m3 encodings.

Checkpoints store joined layers, such as q/k/v in one matrix, with one scale for each part. Products
need one scale per row, or one for the tensor. The rules are those of vLLM
(``convert_to_channelwise``, ``requantize_with_max_scale``, ``normalize_e4m3fn_to_e4m3fnuz``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.dispatch.device import architecture, native_codes
from fp8kit.errors import InvalidType, InvalidValue, check_strided, is_integer
from fp8kit.formats import E4M3FN, E4M3FNUZ, ROW, TENSOR, QTensor, Scheme, fp8_format
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import frozen
from fp8kit.ops.validation import check_quantized
from fp8kit.quantizers.encodings import recoded

# engines fill scales with this before loading; a part that still has it got no scale of its own
UNSET_SCALE = torch.finfo(torch.float8_e4m3fn).min
Coded = TypeVar("Coded", QTensor, nn.Module)
_FNUZ = "_FNUZ"  # ends the names of schemes


def join_scales(codes: Tensor, scales: Tensor, widths: Sequence[int]) -> QTensor:
    """Give every row of a fused weight the scale of its part: one per-channel column.

    Neither codes nor values change.

    Args:
        codes: FP8 ``[N, K]``, the parts below one another.
        scales: fp32, positive; one number for each part, in any shape, or one for all. ``-448``
            (the smallest e4m3fn number) marks a scale that was never loaded. Then exactly one
            other is there, and holds for all parts: the weight was fused before it was quantized.
        widths: rows of each part; their sum is N, and a part may have none.

    Returns:
        ``QTensor`` with the codes as they are, and scales ``[N, 1]``.

    Raises:
        TypeError: if ``codes`` is not FP8, or ``scales`` is not float32.
        ValueError: if widths or scales do not fit the weight, or a scale is not positive and
            finite.

    Example:
        >>> codes = torch.zeros(6, 4).to(torch.float8_e4m3fn)
        >>> fp8kit.join_scales(codes, torch.tensor([0.5, 2.0]), (4, 2)).scale.flatten().tolist()
        [0.5, 0.5, 0.5, 0.5, 2.0, 2.0]
    """
    each = _scale_of_each(codes, scales, widths)
    counts = torch.tensor(tuple(widths), device=codes.device)
    column = each.repeat_interleave(counts, output_size=codes.shape[0])
    return QTensor(codes, column.reshape(-1, 1), ROW)


def requantize(codes: Tensor, scales: Tensor, widths: Sequence[int]) -> QTensor:
    """Bring all parts of a fused weight to one scale, the largest of theirs.

    Parts of a smaller scale are decoded and quantized again with the largest one, which rounds
    them once more; parts of the largest scale keep their bytes. A weight with a single scale was
    fused before it was quantized, and is not changed.

    Args:
        codes: FP8 ``[N, K]``, the parts below one another; left as they are.
        scales: as in ``join_scales``.
        widths: as in ``join_scales``.

    Returns:
        ``QTensor`` with one scale ``[1, 1]``; its codes are ``codes`` itself if nothing changed.

    Raises:
        TypeError: as ``join_scales`` raises it.
        ValueError: likewise.

    Example:
        >>> q = fp8kit.requantize(codes, torch.tensor([0.5, 2.0]), (4, 2))
        >>> q.scale
        tensor([[2.]])
    """
    each = _scale_of_each(codes, scales, widths)
    sized = torch.tensor([w > 0 for w in widths], device=codes.device)
    largest = (each[sized] if sized.any() else each).amax().reshape(1, 1)
    parts = list(torch.split(codes, [int(w) for w in widths]))
    changed = [i for i, w in enumerate(widths) if w and not torch.equal(each[i], largest[0, 0])]
    for i in changed:
        values = functional.dequantize(QTensor(parts[i], each[i].reshape(1, 1), TENSOR))
        parts[i] = functional.quantize(values, TENSOR, dtype=codes.dtype, scale=largest).data
    joined = torch.cat([p.view(torch.uint8) for p in parts]).view(codes.dtype) if changed else codes
    return QTensor(joined, largest, TENSOR)


def recode(q: Coded, dtype: torch.dtype) -> Coded:
    """Write codes in the other e4m3 encoding: e4m3fn (NVIDIA, OCP) or e4m3fnuz (MI300).

    The same byte means half as much in e4m3fnuz, so bytes stay and scales are doubled, or halved on
    the way back; no value changes. Two bytes differ: negative zero, which is NaN in e4m3fnuz,
    becomes zero, and NaN stays NaN. A weight of e4m3fnuz that holds 240, whose byte is NaN in
    e4m3fn, is cast instead and keeps its scales; then codes under 2^-6 may be rounded.

    On MI300 ``load`` and ``convert`` make e4m3fnuz codes; checkpoints hold e4m3fn codes.

    Args:
        q: codes and scales of any granularity; or a model, whose FP8 layers are changed in place.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.

    Returns:
        ``QTensor`` of that dtype; ``q`` itself if it has that dtype already, or is a model.

    Raises:
        TypeError: if ``q`` is neither, or ``q`` or ``dtype`` has another FP8 encoding than these.
        ValueError: if an MX scale cannot be doubled or halved.

    Example:
        >>> q = fp8kit.quantize(torch.ones(2, 64))
        >>> float(fp8kit.recode(q, torch.float8_e4m3fnuz).scale[0, 0] / q.scale[0, 0])
        2.0
    """
    _check_encoding(dtype)
    if isinstance(q, nn.Module):
        for layer in q.modules():
            if isinstance(layer, Fp8Linear):
                _recode_layer(layer, dtype)
        return q
    check_quantized("q", q)
    _check_encoding(q.data.dtype)
    return recoded(q, dtype)


def _check_encoding(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in (E4M3FN.dtype, E4M3FNUZ.dtype):
        raise InvalidType(
            f"Got {dtype} to write in another encoding.",
            "Codes of float8_e4m3fn and float8_e4m3fnuz have the same bytes; others do not.",
            "Quantize again: fp8kit.quantize(fp8kit.dequantize(q), q.group, dtype=...).",
        )


def native_scheme(scheme: Scheme, device: torch.device) -> Scheme:
    """Return a scheme with its e4m3 dtype replaced by the encoding that a device multiplies."""
    dtype = native_codes(architecture(device))
    return _with_codes(scheme, dtype) if scheme.dtype == E4M3FN.dtype else scheme


def recode_for_devices(model: nn.Module) -> None:
    """Recode loaded FP8 layers whose codes their devices do not multiply, in place."""
    for layer in model.modules():
        if isinstance(layer, Fp8Linear):
            scheme = native_scheme(layer.scheme, layer.codes.device)
            if scheme.dtype != layer.scheme.dtype:
                _recode_layer(layer, scheme.dtype)


def _recode_layer(layer: Fp8Linear, dtype: torch.dtype) -> None:
    old = layer.quantized_weight()
    q = recode(old, dtype)
    if q is old:
        return
    layer.weight, layer.weight_scale = frozen(q.data), frozen(q.scale)
    if layer.input_scale is not None:
        factor = 2.0 if dtype == E4M3FNUZ.dtype else 0.5
        layer.input_scale = frozen(layer.input_scale.detach() * factor)
    layer.scheme = _with_codes(layer.scheme, dtype)


def _with_codes(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    name = scheme.name.removesuffix(_FNUZ) + (_FNUZ if dtype == E4M3FNUZ.dtype else "")
    return scheme if scheme.dtype == dtype else replace(scheme, name=name, dtype=dtype)


def _scale_of_each(codes: Tensor, scales: Tensor, widths: Sequence[int]) -> Tensor:
    """Return one scale for each part, ``[len(widths)]``; raise if scales or widths do not fit."""
    if not isinstance(codes, Tensor) or not isinstance(widths, Sequence):
        raise InvalidType(
            f"Got codes of type {type(codes).__name__}, and widths of {type(widths).__name__}.",
            "They must be codes [N, K], and the rows of each part.",
            "Pass q.data, q.scale and a tuple such as (64, 64).",
        )
    fp8_format(codes.dtype)
    if not isinstance(scales, Tensor) or scales.dtype != torch.float32:
        raise InvalidType(
            f"Got scales {getattr(scales, 'dtype', type(scales).__name__)}.",
            "Scales of parts are one float32 number for each, as a tensor.",
            "Convert them with .float().",
        )
    check_strided("scales", scales)
    whole = all(is_integer(w) and w >= 0 for w in widths)
    if codes.dim() != 2 or not widths or not whole or sum(widths) != codes.shape[0]:
        raise InvalidValue(
            f"Got widths {list(widths)} for a weight of shape {tuple(codes.shape)}.",
            "Widths are the rows of each part; together they are the rows of the weight.",
            "Pass one number of rows for each part, in order.",
        )
    if scales.is_meta or codes.is_meta:
        raise InvalidValue(
            "Got codes or scales on the meta device.",
            "Which scales arrived, and which is the largest, their values say.",
            "Load them first.",
        )
    flat = scales.reshape(-1).to(codes.device)
    if flat.numel() not in (1, len(widths)):
        raise InvalidValue(
            f"Got {flat.numel()} scales for {len(widths)} parts.",
            "There is one scale for each part, or one for all.",
            "Pass as many scales as widths.",
        )
    arrived = flat[flat != UNSET_SCALE]
    if arrived.numel() < flat.numel():
        if arrived.numel() != 1:
            raise InvalidValue(
                f"Got {arrived.numel()} of {flat.numel()} scales; the others are unset.",
                "All parts have a scale, or one has it for all of them.",
                "Load the missing scales first.",
            )
        flat = arrived
    if not bool((flat.isfinite() & (flat > 0)).all()):
        raise InvalidValue(
            f"Got scales from {flat.min().item():.4g} to {flat.max().item():.4g}.",
            "Scales are positive and finite.",
            "Look for the fault where they were made.",
        )
    return flat.expand(len(widths)) if flat.numel() == 1 else flat
