"""FP4 codes, two to a byte, read as the FP8 codes of the same values.

Every e2m1 value is an e4m3 value, so an MXFP4 weight is an MXFP8 weight with the same exponents
(OCP MX v1.0): nothing is rounded. The low half of a byte is the first of its two values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.errors import CheckpointError
from fp8kit.formats import MX
from fp8kit.quantizers.scale_layout import E8M0_DTYPES

_CODES = torch.float8_e4m3fn
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, in the order of the codes

_PACKED = (torch.uint8, torch.int8)
_OF_STACKS = (".weight_scale", "_scale", "_scales", "_scale_inv", "_weight_scale")
# names of a matrix of bytes, and those of its exponents
_MATRICES = ("weight", "weight_packed")
_EXPONENTS = ("weight_scale", "weight_scale_inv", "scale")


def unpacked(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors with MXFP4 weights replaced by the FP8 tensors that reading makes of them.

    GPT-OSS stacks experts as ``X_blocks [E, N, K / 32, 16]`` beside ``X_scales``; its model holds
    them as ``X [E, K, N]``, which is what they become. compressed-tensors packs a matrix as
    ``X.weight_packed [N, K / 2]`` beside ``X.weight_scale``, Quark and ModelOpt as ``X.weight``;
    DeepSeek V4 has this as int8 beside ``X.scale``, or ``X.weight_scale_inv`` by Transformers'
    name. Raises ``CheckpointError`` for stacks of FP4 matrices in another layout, and for scales
    in tiles.
    """
    found = dict(tensors)
    for name, info in tensors.items():
        stack = name.removesuffix("_blocks")
        if stack != name and _are_blocks(info, tensors.get(f"{stack}_scales")):
            experts, rows, groups, _ = info.shape
            shape = (experts, groups * MX.cols, rows)
            found[stack] = replace(found.pop(name), dtype=_CODES, shape=shape, packed=True)
            found[f"{stack}_scale"] = found.pop(f"{stack}_scales")
        layer, _, kind = name.rpartition(".")
        beside = (tensors.get(f"{layer}.{scale}") for scale in _EXPONENTS)
        if kind in _MATRICES and any(_is_matrix(info, scale) for scale in beside):
            if kind == "weight":
                _refuse_tiles(info, tensors.get(f"{layer}.weight_scale"))
            sides = (info.shape[0], 2 * info.shape[1])
            held = replace(found.pop(name), dtype=_CODES, shape=sides, packed=True)
            found[f"{layer}.weight"] = held
    for name, info in found.items():
        if info.dtype in _PACKED and len(info.shape) == 3:
            _refuse_stack(name, info, found)
    return found


def unpack(data: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return FP8 codes for flat bytes of two FP4 codes each, K last.

    ``shape`` is ``(N, K)``, or ``(E, K, N)`` for a stack, which is transposed.
    """
    pairs = _pairs()[data.long()].view(_CODES)
    if len(shape) == 3:
        return pairs.view(shape[0], shape[2], shape[1]).transpose(-1, -2)
    return pairs.view(shape)


@functools.cache
def _pairs() -> Tensor:
    """Return the two codes of each byte, ``[256, 2]`` bytes."""
    halves = torch.tensor([*_VALUES, *(-v for v in _VALUES)]).to(_CODES).view(torch.uint8)
    every = torch.arange(256)
    return torch.stack((halves[every & 15], halves[every >> 4]), dim=1)


def _are_blocks(blocks: TensorInfo, scales: TensorInfo | None) -> bool:
    whole = blocks.dtype == torch.uint8 and len(blocks.shape) == 4 and blocks.shape[-1] == 16
    return whole and scales is not None and _bytes_of(scales, blocks.shape[:3])


def _is_matrix(packed: TensorInfo, scales: TensorInfo | None) -> bool:
    if packed.dtype not in _PACKED or len(packed.shape) != 2 or scales is None:
        return False
    rows, half = packed.shape
    return half % 16 == 0 and _bytes_of(scales, (rows, half // 16))


def _bytes_of(scales: TensorInfo, shape: tuple[int, ...]) -> bool:
    return scales.dtype in E8M0_DTYPES and scales.shape == shape


def _refuse_tiles(codes: TensorInfo, scales: TensorInfo | None) -> None:
    """Refuse E8M0 exponents beside U8 codes: only LightX2V writes them, in tiles; others use U8."""
    if codes.dtype == torch.uint8 and scales and scales.dtype == torch.float8_e8m0fnu:
        raise CheckpointError(
            f"{codes.shard}: {scales.name} is torch.float8_e8m0fnu beside codes that are uint8.",
            "LightX2V writes such scales, in tiles of 128x4; FP4 is read with scales row by row.",
            "Start from the high-precision checkpoint; or, if they lie row by row, save "
            "scale.view(torch.uint8).",
        )


def _refuse_stack(name: str, codes: TensorInfo, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a stack of FP4 whose groups run along its last side, or along the one before it."""
    layer = name.removesuffix("_packed").removesuffix(".weight")
    for scale in filter(None, (tensors.get(layer + ending) for ending in _OF_STACKS)):
        nv = scale.dtype == torch.float8_e4m3fn
        for axis, group in itertools.product((2, 1), (8, 16) if nv else (16,)):
            shape = list(codes.shape)
            shape[axis] //= group
            if tuple(shape) != scale.shape or not (nv or _bytes_of(scale, scale.shape)):
                continue
            shape = list(codes.shape)
            shape[axis] *= 2
            raise CheckpointError(
                f"{name} is a stack {shape} of {'NV' if nv else 'MX'}FP4 codes, with scales "
                f"{list(scale.shape)}.",
                "Stacks of FP4 are read as X_blocks [E, N, K / 32, 16] with X_scales, as "
                "GPT-OSS is published; others as one matrix per expert.",
                "Start from the checkpoint that it was made from, or export one matrix per expert "
                "(experts.0.up_proj...), as llm-compressor does; ModelOpt writes stacks for "
                "GPT-OSS and Llama 4.",
            )
