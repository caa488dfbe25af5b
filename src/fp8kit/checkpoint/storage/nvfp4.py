"""Read NVFP4 weights: they are decoded and quantized to FP8 on read.

    value = e2m1 code * e4m3 scale of its 16 or 32 columns * fp32 factor of the tensor
The product of code and scale has up to six significant bits and FP8 has four, so that rounding adds
an error, which is measured for each layer. ModelOpt stores the factor, compressed-tensors its
reciprocal. ComfyUI has ModelOpt's names, the other half of a byte first, and scales in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.checkpoint.schema.decoding import no_numbers
from fp8kit.checkpoint.storage import fp4
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.errors import CheckpointError
from fp8kit.formats import SCHEMES, GroupShape, QTensor, Scheme, scale_dtype, scale_shape
from fp8kit.modules.entries import quantize_weight
from fp8kit.quantizers.scale_layout import unswizzle_scales

DEFAULT = SCHEMES["FP8_DYNAMIC"]
_SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "MXFP8")
# to one scale; ModelOpt's recipes for MLPs with weights alone have the second
_COLUMNS = (16, 32)
# of each exporter: codes, factor, whether it divides, and what belongs to activations
_LAYOUTS = (
    ("weight_packed", "weight_global_scale", True, "input_global_scale"),
    ("weight", "weight_scale_2", False, "input_scale"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedPart(TensorInfo):
    """Codes or scales that an NVFP4 weight has once it is FP8.

    On disk are ``codes``, bytes of two FP4 codes ``[N, K / 2]``, e4m3 scales ``groups`` of shape
    ``[N, K / columns]`` and one fp32 ``factor``, by which scales are multiplied unless it
    ``divides``. If ``tiled``, scales lie in 128x4 tiles, and the high half of a byte is its first
    value.
    """

    layer: str
    codes: TensorInfo
    groups: TensorInfo
    factor: TensorInfo
    columns: int
    divides: bool
    tiled: bool
    scheme: Scheme


def as_fp8(
    tensors: Mapping[str, TensorInfo], scheme: Scheme | None, tiled: bool
) -> dict[str, TensorInfo]:
    """Return tensors with NVFP4 weights replaced by the FP8 tensors that reading makes of them.

    They become ``scheme``, by default ``FP8_DYNAMIC``; ``tiled`` files were packed as ComfyUI does
    it. Raises ``CheckpointError`` if they cannot become that.
    """
    found, wanted = dict(tensors), scheme or DEFAULT
    for name, info in tensors.items():
        layer, _, kind = name.rpartition(".")
        for codes, factor, divides, inputs in _LAYOUTS:
            groups = tensors.get(f"{layer}.weight_scale")
            whole = tensors.get(f"{layer}.{factor}")
            if kind != codes or groups is None or whole is None:
                continue
            sides = _COLUMNS[:1] if tiled or divides else _COLUMNS
            columns = next((n for n in sides if _fit(info, groups, whole, n, tiled)), 0)
            if not columns:
                continue
            _check_scheme(name, wanted)
            shape = (info.shape[0], 2 * info.shape[1])
            for own in (codes, "weight_scale", factor, inputs):
                found.pop(f"{layer}.{own}", None)
            part = ConvertedPart(
                info.name, info.shard, wanted.dtype, shape, info.offset, layer=layer, codes=info,
                groups=groups, factor=whole, columns=columns, divides=divides, tiled=tiled,
                scheme=wanted,
            )  # fmt: skip
            group = wanted.weight
            scales = scale_shape(shape, group)
            found[f"{layer}.weight"] = part
            found[f"{layer}.weight_scale"] = replace(part, dtype=scale_dtype(group), shape=scales)
    return found


def check_order(parts: Sequence[ConvertedPart], metadata: Mapping[str, str]) -> None:
    """Refuse what ModelOpt prepared for one file, where scales lie row by row or in tiles.

    ``parts`` are those of all files, ``metadata`` the texts in their headers. Tiles pad scales: one
    matrix whose scales would be padded and are not shows that none lies in tiles.
    """
    shapes = [part.groups.shape for part in parts if not (part.tiled or part.divides)]
    either = all(rows % 128 == 0 and cols % 4 == 0 for rows, cols in shapes)
    if shapes and either and "quantization_config" in metadata:
        raise CheckpointError(
            f"{parts[0].shard} is NVFP4, with quantization_config in its header.",
            "ModelOpt writes that where it pads, merges or swizzles; its scales lie row by row or "
            "in tiles, which the file does not say.",
            "Export it as a folder, without swizzling and padding.",
        )


@torch.no_grad()
def convert(part: ConvertedPart, read: Callable[[TensorInfo], Tensor]) -> tuple[QTensor, float]:
    """Return an NVFP4 weight in FP8, and the relative error (of norms) that this adds.

    Raises ``CheckpointError`` unless scales are finite and >= 0, and the factor finite and > 0.
    """
    shape = (part.codes.shape[0], 2 * part.codes.shape[1])
    packed, groups, factor = (read(info) for info in (part.codes, part.groups, part.factor))
    if part.tiled:
        packed = packed >> 4 | packed << 4
        sides = scale_shape(shape, GroupShape(1, part.columns))
        groups = unswizzle_scales(groups.view(torch.uint8), sides).view(groups.dtype)
    codes, groups = fp4.unpack(packed.flatten(), shape).float(), groups.float()
    factor = factor.float().reshape(())
    if not (groups.isfinite().all() and (groups >= 0).all() and 0 < factor < torch.inf):
        raise no_numbers(
            f"{part.shard}: the scales of {part.codes.name} hold NaN or negative values."
        )
    scale = groups / factor if part.divides else groups * factor
    dense = codes * scale.repeat_interleave(part.columns, -1)
    q = quantize_weight(dense, part.scheme)
    change, norm = functional.dequantize(q, torch.float32).sub_(dense).norm(), dense.norm()
    return q, (change / norm).item() if norm > 0 else 0.0


def conversion_notes(errors: Mapping[str, float], scheme: Scheme) -> list[str]:
    """Return a sentence about the error of converting NVFP4 layers, if there is any."""
    if not any(errors.values()):
        return []
    worst, mean = max(errors, key=lambda n: errors[n]), sum(errors.values()) / len(errors)
    return [
        f"{len(errors)} NVFP4 weights were quantized to {scheme}, which most products of an FP4 "
        f"code and its scale are no values of: relative error {mean:.1e} on average, "
        f"{errors[worst]:.1e} at most ({worst})."
    ]


def _fit(
    codes: TensorInfo, groups: TensorInfo, factor: TensorInfo, columns: int, tiled: bool
) -> bool:
    if codes.dtype != torch.uint8 or len(codes.shape) != 2 or codes.shape[1] % (columns // 2):
        return False
    rows, cols = scale_shape((codes.shape[0], 2 * codes.shape[1]), GroupShape(1, columns))
    wanted = (rows + -rows % 128, cols + -cols % 4) if tiled else (rows, cols)
    alike = groups.dtype == torch.float8_e4m3fn and groups.shape == wanted
    return alike and factor.dtype == torch.float32 and factor.shape in ((), (1,))


def _check_scheme(name: str, scheme: Scheme) -> None:
    if scheme.name not in _SCHEMES:
        raise CheckpointError(
            f"Got scheme={scheme} for {name}, which is NVFP4.",
            f"NVFP4 weights become {', '.join(_SCHEMES)}.",
            "Pass one of these, or leave scheme out for FP8_DYNAMIC.",
        )
