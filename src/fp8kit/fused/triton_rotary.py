"""Rotary embedding of queries and keys in one launch, rounded as eager torch rounds it.

PyTorch needs fourteen launches. A program rotates some heads of one token; the two halves of a head
are the real and imaginary parts of its numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.fused.triton_output import rounded_product, rounded_sum
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps

_BLOCK_H = 16  # heads of a program


@triton.jit
def _negated(x):
    if x.dtype == tl.float32:
        return -x
    else:  # flips the sign bit, which Triton's interpreter can do in each dtype
        return (x.to(tl.int16, bitcast=True) ^ -32768).to(x.dtype, bitcast=True)


@triton.jit
def _turn(x_ptr, y_ptr, stride_h, h, cos, sin, H: tl.constexpr, HALF: tl.constexpr):
    BLOCK_H: tl.constexpr = h.shape[0]
    BLOCK_D: tl.constexpr = cos[0].shape[0]
    d = tl.arange(0, BLOCK_D)[None, :]
    there = (h < H)[:, None] & (d < HALF)
    x_at = x_ptr + h.to(tl.int64)[:, None] * stride_h + d
    y_at = y_ptr + h[:, None] * 2 * HALF + d
    real, imaginary = tl.load(x_at, mask=there), tl.load(x_at + HALF, mask=there)
    shape: tl.constexpr = [BLOCK_H, BLOCK_D]
    c0, c1 = tl.broadcast_to(cos[0][None, :], shape), tl.broadcast_to(cos[1][None, :], shape)
    s0, s1 = tl.broadcast_to(sin[0][None, :], shape), tl.broadcast_to(sin[1][None, :], shape)
    left = rounded_sum(rounded_product(real, c0), rounded_product(imaginary, _negated(s0)))
    right = rounded_sum(rounded_product(imaginary, c1), rounded_product(real, s1))
    tl.store(y_at, left, mask=there)
    tl.store(y_at + HALF, right, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _rotary_kernel(
    q_ptr,  # [B, HQ, tokens, 2 HALF]
    k_ptr,  # [B, HK, tokens, 2 HALF]
    cos_ptr,  # [B or 1, tokens, 2 HALF]
    sin_ptr,  # like cos
    q_out_ptr,  # [B, tokens, HQ, 2 HALF] contiguous
    k_out_ptr,  # [B, tokens, HK, 2 HALF] contiguous
    tokens,
    stride_qb,
    stride_qh,
    stride_qt,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_cb,
    stride_ct,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    OF_Q: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    PARTS: tl.constexpr = OF_Q + (HK + BLOCK_H - 1) // BLOCK_H
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    b, t = row // tokens, row % tokens
    d = tl.arange(0, BLOCK_D)
    angle = b * stride_cb + t * stride_ct + d
    cos = tl.load(cos_ptr + angle, mask=d < HALF), tl.load(cos_ptr + angle + HALF, mask=d < HALF)
    sin = tl.load(sin_ptr + angle, mask=d < HALF), tl.load(sin_ptr + angle + HALF, mask=d < HALF)
    h = tl.arange(0, BLOCK_H)
    if part < OF_Q:
        x_ptr, y_ptr = q_ptr + b * stride_qb + t * stride_qt, q_out_ptr + row * HQ * 2 * HALF
        _turn(x_ptr, y_ptr, stride_qh, part * BLOCK_H + h, cos, sin, HQ, HALF)
    else:
        x_ptr, y_ptr = k_ptr + b * stride_kb + t * stride_kt, k_out_ptr + row * HK * 2 * HALF
        _turn(x_ptr, y_ptr, stride_kh, (part - OF_Q) * BLOCK_H + h, cos, sin, HK, HALF)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute as ``reference.rotated`` does, with the same arguments.

    All tensors have unit stride along the last dimension, whose extent is even; ``cos`` and ``sin``
    have the same strides.
    """
    batch, heads, tokens, width = query.shape
    key_heads, half = key.shape[1], width // 2
    turned = [
        torch.empty(batch, tokens, n, width, dtype=query.dtype, device=query.device)
        for n in (heads, key_heads)
    ]
    parts = triton.cdiv(heads, _BLOCK_H) + triton.cdiv(key_heads, _BLOCK_H)
    overlap = overlaps(query.device)
    launch(
        _rotary_kernel, batch * tokens * parts,
        query, key, cos, sin, *turned, tokens, *query.stride()[:3], *key.stride()[:3],
        0 if cos.shape[0] < batch else cos.stride(0), cos.stride(1),
        HQ=heads, HK=key_heads, HALF=half, BLOCK_H=_BLOCK_H,
        BLOCK_D=max(2, triton.next_power_of_2(half)),
        OVERLAP=overlap, launch_pdl=overlap, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    q, k = (y.transpose(1, 2) for y in turned)
    return q, k
