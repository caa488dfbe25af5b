"""Quantize on a CPU piece by piece, so that everything between input and codes stays in cache.

The result is that of ``reference``, bit for bit. It is faster because maxima are taken of the bits,
one piece at a time is widened to fp32, and nothing is clamped or searched for NaN where the scale
makes both impossible.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8kit.formats import MX, TENSOR, GroupShape, fp8_format
from fp8kit.quantizers import reference
from fp8kit.quantizers.problem import QuantizeProblem, QuantizerBackend
from fp8kit.quantizers.scale_layout import laid_out

# elements: input, fp32 copy and codes of a piece stay in cache; with several threads pieces are
# larger, since the threads wait for each other after every operation
_PIECE, _PIECE_PER_THREAD = 2**18, 2**20
_BITS = {
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float32: (torch.int32, 0x7FFFFFFF),
}


def supports(problem: QuantizeProblem) -> str | None:
    """Accept quantization of the three float dtypes."""
    return None if problem.in_dtype in _BITS else f"reads no {problem.in_dtype}"


def quantize(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype,
    min_scale: float,
    scale_ub: Tensor | None,
    scale_rounding: str,
    scale_layout: str = "row",
    data: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize with scales taken from the data; arguments as in ``reference``."""
    if not _covers_evenly(x, group):
        same = (group, dtype, min_scale, scale_ub, scale_rounding, scale_layout, data)
        return reference.quantize(x, *same)
    fmt = fp8_format(dtype)
    options = (group, fmt, min_scale, scale_ub, scale_rounding)
    # amax / (amax / fp8_max) exceeds fp8_max by at most a rounding error, which the cast rounds off
    clamped = scale_ub is not None or (group == MX and scale_rounding == "floor")
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.empty(rows.shape, dtype=dtype)
    if group == TENSOR:
        parts = [_amax(piece, group) for piece, *_ in _pieces(rows, codes, group)]
        scale = reference.scales(torch.stack(parts).amax(0), *options)
        for piece, out, wide in _pieces(rows, codes, group):
            _encode(piece, out, wide, scale, group, fmt.max if clamped else None)
    else:
        found = []
        for piece, out, wide in _pieces(rows, codes, group):
            found.append(reference.scales(_amax(piece, group), *options))
            _encode(piece, out, wide, found[-1], group, fmt.max if clamped else None)
        scale = torch.cat(found).reshape(*x.shape[:-1], -1) if group.rows == 1 else torch.cat(found)
    codes = _with_nan(codes, scale, group, fmt.nan_code).view(x.shape)
    return codes if data is None else data.copy_(codes), laid_out(scale, scale_layout)


def quantize_static(x: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype) -> Tensor:
    """Quantize with one given scale per tensor; other granularities are left to ``reference``."""
    fmt = fp8_format(dtype)
    if group != TENSOR or not _covers_evenly(x, group) or not scale.isfinite().all():
        return reference.quantize_static(x, scale, group, dtype)
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.empty(rows.shape, dtype=dtype)
    for piece, out, wide in _pieces(rows, codes, group):
        if _amax(piece, group).isnan().any():
            out.copy_(reference.quantize_static(piece, scale, group, dtype))
        else:
            _encode(piece, out, wide, scale, group, fmt.max)
    return codes.view(x.shape)


def _covers_evenly(x: Tensor, group: GroupShape) -> bool:
    """Return whether groups cover ``x`` evenly, and pieces of whole rows can hold them."""
    if x.numel() == 0:
        return False
    if group.rows > 1 and (group.cols == -1 or x.dim() != 2 or x.shape[0] % group.rows):
        return False
    return group.cols == -1 or x.shape[-1] % group.cols == 0


def _pieces(x: Tensor, codes: Tensor, group: GroupShape) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Cut input and output into pieces of whole rows and groups, each with an fp32 buffer."""
    threads = torch.get_num_threads()
    step = max(1, (_PIECE if threads == 1 else _PIECE_PER_THREAD * threads) // x.shape[1])
    if group.rows > 1:
        step = -(-step // group.rows) * group.rows
    room = torch.empty(min(step, len(x)), x.shape[1], dtype=torch.float32, device=x.device)
    for piece, out in zip(x.split(step), codes.split(step), strict=True):
        yield piece, out, room[: len(piece)]


def _amax(x: Tensor, group: GroupShape) -> Tensor:
    """Return the largest magnitude of each group; compared as bits, NaN is above infinity."""
    integer, mask = _BITS[x.dtype]
    bits = x.view(integer) & mask
    if group == TENSOR:
        found = bits.amax().reshape(1, 1)
    elif group.cols == -1:
        found = bits.amax(-1, keepdim=True)
    else:
        found = bits.view(-1, group.rows, bits.shape[1]).amax(1) if group.rows > 1 else bits
        found = found.view(len(found), -1, group.cols).amax(-1)
    return found.view(x.dtype).float()


def _encode(
    x: Tensor, out: Tensor, wide: Tensor, scale: Tensor, group: GroupShape, largest: float | None
) -> None:
    """Write the codes of a piece; those of groups with a NaN scale are not defined."""
    divisor = reference.multipliers(scale, group)
    wide.copy_(x)
    if group == TENSOR or group.cols == -1:
        wide /= divisor
    elif group.rows == 1:
        wide.view(len(wide), -1, group.cols).div_(divisor[:, :, None])
    else:
        blocks = wide.view(len(divisor), group.rows, -1, group.cols)
        blocks /= divisor[:, None, :, None]
    if largest is not None:
        wide.clamp_(-largest, largest)
    out.copy_(wide)


def _with_nan(codes: Tensor, scale: Tensor, group: GroupShape, nan_code: int) -> Tensor:
    """Fill groups whose scale is NaN with the canonical NaN code."""
    matrix = scale.reshape(-1, scale.shape[-1])
    if reference.multipliers(matrix, group).isnan().any():
        nan = reference.expand_scale(matrix, tuple(codes.shape), group).isnan()
        codes.view(torch.uint8).masked_fill_(nan, nan_code)
    return codes


BACKEND = QuantizerBackend(supports=supports, quantize=quantize, quantize_static=quantize_static)
