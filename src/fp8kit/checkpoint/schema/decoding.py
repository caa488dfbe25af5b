"""Decode tensors on disk to codes and scales in the shapes and dtypes of this package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.errors import CheckpointError
from fp8kit.formats import FP8_FORMATS, MX, ROW, scale_shape
from fp8kit.quantizers.scale_layout import unswizzle_scales

_FNUZ = torch.float8_e4m3fnuz
_FN = torch.float8_e4m3fn
_PIECE = 2**20


def decode_weight(layer: Layer, raw: Tensor, where: str) -> Tensor:
    """Return the codes of a layer: e4m3fn, K last.

    They are a view of ``raw``, the tensor on disk, unless bytes had to change. Raises
    ``CheckpointError`` if codes of e4m3fnuz hold NaN.
    """
    codes = raw.transpose(-1, -2) if layer.transposed else raw
    if layer.codes != _FNUZ:
        return codes
    if (raw.view(torch.uint8) == FP8_FORMATS[_FNUZ].nan_code).any():
        raise no_numbers(f"{where} holds NaN.")
    # read as e4m3fn, e4m3fnuz codes mean twice their value (so scales are halved), but 240 is NaN:
    # if it occurs, all codes are cast, which rounds only the smallest ones
    return codes.float().to(_FN) if _has_largest(raw) else codes.view(_FN)


def decode_scale(layer: Layer, raw: Tensor, weight: Callable[[], Tensor], where: str) -> Tensor:
    """Return the scales of a layer's weight: multipliers in fp32, or E8M0 bytes for MX.

    Their shape is ``scale_shape(layer.shape, layer.group)``. ``weight`` gives the codes on disk; it
    is called for e4m3fnuz only. Raises ``CheckpointError`` for a scale that is not finite and
    positive.
    """
    halved = layer.codes == _FNUZ and not _has_largest(weight())
    wanted = scale_shape(layer.shape, layer.group)
    if layer.group == MX:
        scale = raw.view(torch.uint8)
        scale = unswizzle_scales(scale, wanted) if layer.swizzled else scale
        if (scale == 255).any() or (halved and (scale == 0).any()):
            raise no_numbers(f"{where} holds NaN.")
        return (scale - 1 if halved else scale).reshape(wanted)
    scale = _positive(raw, halved, where)
    if layer.transposed and layer.group.rows > 1:
        scale = scale.transpose(-1, -2).contiguous()
    if layer.group == ROW and scale.numel() != torch.Size(wanted).numel():
        return _spread(scale, layer, wanted)
    return scale.reshape(wanted)


def decode_input_scale(layer: Layer, raw: Tensor, where: str) -> Tensor:
    """Return the scale of a layer's activations: ``[1, 1]``, or ``[E, 1]`` if a stack has several.

    Fused layers with one scale for each part get the largest, as engines do. Raises
    ``CheckpointError`` for a scale that is not finite and positive.
    """
    scale = _positive(raw, layer.codes == _FNUZ, where)
    stacked = len(layer.shape) == 3 and scale.numel() >= layer.shape[0] > 1
    return scale.reshape(layer.shape[0] if stacked else 1, -1).amax(1, keepdim=True)


def decode_cache_scale(raw: Tensor, fnuz: bool, where: str) -> Tensor:
    """Return a scale of the KV cache: fp32, ``[1]``, or ``[heads, 1, 1]``.

    Raises ``CheckpointError`` for a scale that is not finite and positive.
    """
    scale = _positive(raw, fnuz, where)
    return scale if scale.dim() == 3 else scale.reshape(1)


def check_codes(codes: Tensor, where: str) -> None:
    """Refuse codes that hold NaN, which no quantizer of finite weights writes."""
    if _has_largest(codes):
        raise no_numbers(f"{where} holds NaN.")


def _has_largest(codes: Tensor) -> bool:
    """Return whether a code has all bits but the sign: NaN in e4m3fn, 240 in e4m3fnuz.

    It looks at bytes, in pieces that stay in cache: ``isnan`` is two hundred times slower.
    """
    pieces = torch.split(codes.reshape(-1).view(torch.uint8), _PIECE)
    return any(bool((piece & 0x7F).amax() == 0x7F) for piece in pieces if piece.numel())


def _spread(scale: Tensor, layer: Layer, wanted: tuple[int, ...]) -> Tensor:
    """Repeat the scale of each part of a fused matrix, or of each matrix of a stack, per row."""
    stack, rows = wanted[:-2], wanted[-2]
    parts = scale.reshape(*stack, -1) if scale.numel() > 1 else scale.reshape(1)
    count = parts.shape[-1]
    widths = layer.widths or (rows // count,) * count
    spread = parts.repeat_interleave(torch.tensor(widths), dim=-1).unsqueeze(-1)
    return spread.expand(wanted).contiguous()


def _positive(raw: Tensor, halved: bool, where: str) -> Tensor:
    """Return scales in fp32, halved for e4m3fnuz; refuse those not finite and positive."""
    scale = raw.float()
    if not (scale.isfinite() & (scale > 0)).all():
        raise no_numbers(f"{where} holds NaN, infinite, zero or negative values.")
    return scale / 2 if halved else scale


def no_numbers(held: str) -> CheckpointError:
    """Return the error for codes or scales that are no valid numbers; ``held`` says where."""
    wanted = "Scales are finite and positive, codes are numbers."
    return CheckpointError(held, wanted, "The file is damaged: get or make it again.")


def cast_numbers(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor of a checkpoint; fp16 is refused for numbers that it makes infinite."""
    found = value.to(dtype)
    if dtype is not torch.float16 or not value.is_floating_point() or value.dtype is dtype:
        return found
    over = int((found.isinf() & value.isfinite()).sum())
    if over:
        raise beyond_fp16(f"{name} has {over} of {value.numel()}")
    return found


def check_cast(name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Refuse numbers that a cast to integers, or to real numbers, would change."""
    if torch.can_cast(value.dtype, dtype):
        return
    if value.is_complex() or not same_bytes(value.to(dtype).to(value.dtype), value):
        raise CheckpointError(
            f"{name} has numbers of {value.dtype} that {dtype} cannot hold.",
            f"The model holds it as {dtype}.",
            f"Build the model with a tensor of {value.dtype}.",
        )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare bits, because NaN is not equal to NaN."""
    return a.shape == b.shape and torch.equal(
        *(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    )


def beyond_fp16(names_have: str) -> CheckpointError:
    """Return the error for numbers that fp16 makes infinite; ``names_have`` begins its text."""
    return CheckpointError(
        f"{names_have} numbers beyond 65504.",
        "float16 would make infinities of them.",
        "Take bfloat16, which holds them: dtype=torch.bfloat16.",
    )
