"""Quantization in plain torch, as the published sources define it."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantized(
    x: Tensor, *, per_row: bool = True, bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return codes of a matrix and its scale, ``[rows, 1]`` or ``[1, 1]``."""
    wide = x.float()
    amax = wide.abs().amax(1, keepdim=True) if per_row else wide.abs().amax().reshape(1, 1)
    amax = amax if bound is None else amax.clamp(max=bound)
    return with_scale(wide, amax / LARGEST), amax / LARGEST


def with_scale(x: Tensor, scale: Tensor) -> Tensor:
    """Return codes of a matrix for a given scale."""
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values of codes in fp32."""
    return codes.float() * scale


class OnGpu(Tensor):
    """A tensor in CPU memory whose ``is_cuda`` is true, so that the path with FP8 weights runs."""

    is_cuda = True  # type: ignore[assignment]


def on_gpu(x: Tensor) -> Tensor:
    """Return a tensor that claims to be on a GPU."""
    return x.as_subclass(OnGpu)


def plain(y: Tensor) -> Tensor:
    """Undo ``on_gpu``."""
    return y.as_subclass(Tensor)
