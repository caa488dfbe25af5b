"""Norms and activations that end in FP8, in plain torch: the specification of every other backend.

Each producer (a norm or an activation) computes the result of the module that it replaces, rounded
to the dtype of its input; ``reference.quantize`` then defines codes and scales. All arithmetic is
IEEE ``float32``; ``rn`` below rounds to the dtype of ``x``, which changes nothing for ``float32``.

    add         t = rn(x + residual), which is also returned and normed instead of x
    rms norm    n = t * rsqrt(sum(t^2) * (1 / K) + eps)
    layer norm  c = x - sum(x) * (1 / K);  n = c * rsqrt(sum(c^2) * (1 / K) + eps)

    the result for n, with the norm's weight w and bias b, or an adaptive scale a and shift s:

    rms norm     stepwise  rn(rn(n) * w), w with an offset is rn(offset + w)      (LlamaRMSNorm)
                 once      rn(n * (offset + w))                                   (GemmaRMSNorm)
    layer norm             rn(n * w + b)                                          (F.layer_norm)
    adaptive     stepwise  rn(rn(rn(n * w + b) * rn(1 + a)) + s)    (eager torch, 16-bit a and s)
                 once      rn((n * w + b) * (1 + a) + s)
    activation             rn(rn(act(gate)) * up), or rn(act(gate)) without up       (LlamaMLP)

``K`` is inverted once, as torch's own mean does on CUDA. Two things are left open: the order of the
sums, and the last bits of ``rsqrt``, ``exp``, ``tanh`` and ``erf``; here torch decides both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.fused.problem import CodesFormat, FusedBackend
from fp8kit.quantizers import reference

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # how torch names them


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float,
    rounding: str,
    how: CodesFormat,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize the RMS norm of ``x``, or of ``x + residual``, which is the third result.

    ``x`` is bf16, fp16 or fp32 ``[..., K]``, the residual like it; the weight ``[K]`` has its dtype
    if ``rounding`` is ``"stepwise"``. ``weight_offset`` is 1 where checkpoints store ``w - 1``. A
    static scale is returned as it was given.
    """
    total = x if residual is None else x + residual
    y = rms_normed(total, weight, eps, weight_offset, rounding)
    return *quantized(y, how), None if residual is None else total


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, Tensor] | None,
    eps: float,
    rounding: str,
    how: CodesFormat,
) -> tuple[Tensor, Tensor]:
    """Quantize the layer norm of ``x``, plain or adaptive.

    ``x`` is bf16, fp16 or fp32 ``[..., K]``. A modulation, ``norm * (1 + scale) + shift``, has both
    as ``[B, K]`` for ``x`` of ``[B, ..., K]``, in its dtype if ``rounding`` is ``"stepwise"``.
    ``rounding`` matters only with a modulation. A static scale is returned as it was given.
    """
    return quantized(layer_normed(x, weight, bias, modulation, eps, rounding), how)


def activation(
    kind: str, gate: Tensor, up: Tensor | None, how: CodesFormat, left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize ``act(gate) * up``, or ``act(gate)``, after the columns ``left [..., K1]`` if any.

    ``kind`` is ``"silu"``, ``"gelu"`` (erf) or ``"gelu_tanh"``; ``gate`` is bf16, fp16 or fp32
    ``[..., K]``, and ``up`` like it. A static scale is returned as it was given.
    """
    y = activated(kind, gate, up)
    return quantized(y if left is None else torch.cat((left, y), -1), how)


def rms_normed(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float, rounding: str
) -> Tensor:
    """Return the RMS norm itself, in the dtype of ``x``; arguments as for ``rms_norm``."""
    wide = x.float()
    normed = wide * torch.rsqrt(_mean(wide.square()) + eps)
    if rounding == "once":
        scaled = weight.float() if weight_offset == 0 else weight.float() + weight_offset
        return (normed * scaled).to(x.dtype)
    return normed.to(x.dtype) * (weight if weight_offset == 0 else weight + weight_offset)


def layer_normed(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: tuple[Tensor, Tensor] | None,
    eps: float,
    rounding: str,
) -> Tensor:
    """Return the layer norm before it is quantized, in the dtype of ``x``."""
    wide = x.float()
    centered = wide - _mean(wide)
    y = centered * torch.rsqrt(_mean(centered.square()) + eps)
    if weight is not None:
        y = y * weight.float()
    if bias is not None:
        y = y + bias.float()
    if modulation is not None:
        if rounding == "stepwise":
            y = y.to(x.dtype)
        batch = (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
        scale, shift = (part.to(y.dtype).reshape(batch) for part in modulation)
        y = y * (1 + scale) + shift
    return y.to(x.dtype)


def activated(kind: str, gate: Tensor, up: Tensor | None) -> Tensor:
    """Return the activation before it is quantized, in the dtype of ``gate``."""
    y = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=_GELU[kind])
    return y if up is None else y * up


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys by the angles of their tokens.

    ``query`` and ``key`` are ``[batch, heads, tokens, width]``, each with its own number of heads;
    ``cos`` and ``sin`` ``[batch or 1, tokens, width]`` have their dtype. The halves of a head are
    the real and imaginary parts of its numbers. With ``half``, which swaps the halves and then
    negates the first, the result is ``rn(rn(x * cos) + rn(half(x) * sin))``.
    """
    cos, sin = cos[:, None], sin[:, None]

    def turned(x: Tensor) -> Tensor:
        real, imaginary = x.chunk(2, -1)
        return x * cos + torch.cat((-imaginary, real), -1) * sin

    return turned(query), turned(key)


def quantized(y: Tensor, how: CodesFormat) -> tuple[Tensor, Tensor]:
    """Quantize an intermediate result as ``how`` says."""
    scale, group, dtype, min_scale, scale_ub, scale_rounding, scale_layout = how
    if scale is not None:
        return reference.quantize_static(y, scale, group, dtype), scale
    options = (min_scale, scale_ub, scale_rounding, scale_layout)
    return reference.quantize(y, group, dtype, *options)


def _mean(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True) * (1 / max(x.shape[-1], 1))


BACKEND = FusedBackend(
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    activation=activation,
    rms_normed=rms_normed,
    rotated=rotated,
)
