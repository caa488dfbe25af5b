"""Attention of one new token in Triton: keys and values are read once for all heads of a group.

A group is the heads that share keys and values. A program computes one chunk of a sequence's tokens
for one group; where there are several chunks, a second kernel weighs and adds their results in
order. Chunks have a fixed size, so the bits of a sequence's result depend neither on other
sequences nor on room for later tokens in a static cache.

Tokens that the mask hides are not read. A softmax runs in powers of two: ``exp(s) = 2^(s log2 e)``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.fused.attention import AttentionBackend, AttentionProblem
from fp8kit.fused.triton_output import narrow
from fp8kit.quantizers.triton_encode import INTERPRETED, missing_gpu, widen
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps

CHUNK = 128  # tokens of a program
_LEAST_ROWS = 16  # of an MMA
_MOST_GROUP, _MOST_DIM = 64, 256
_NARROW_DIM = 128  # up to which a chunk is one tile, also in the shared memory of an Ada
_LOG2_E = math.log2(math.e)


def supports(problem: AttentionProblem) -> str | None:
    """Return the reason why the kernels do not cover a problem, ``None`` if they do."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"{problem.dtype}; the kernels read bfloat16 and float16"
    if max(problem.head_dim, problem.value_dim) > _MOST_DIM or problem.group > _MOST_GROUP:
        most = f"at most {_MOST_GROUP} heads of {_MOST_DIM} elements"
        return f"{problem.group} heads of {problem.head_dim} and {problem.value_dim}; {most}"
    return missing_gpu(problem.capability, (8, 0))


@triton.jit
def _dot(x, y):
    if INTERPRETED:  # the interpreter takes the bits of bf16 for integers
        return tl.dot(widen(x), widen(y))
    else:
        return tl.dot(x, y)


@triton.jit(do_not_specialize=["tokens", "chunks", "stride_mb"])
def _attend_kernel(
    q_ptr,  # [B, H * GROUP, 1, D]
    k_ptr,  # [B, H, tokens, D]
    v_ptr,  # [B, H, tokens, DV]
    mask_ptr,  # uint8 [B, tokens], or None
    y_ptr,  # [B, H, GROUP, DV], float32 [B, H, GROUP, chunks, DV] where SPLIT
    top_ptr,  # float32 [B, H, GROUP, chunks], the largest score; None unless SPLIT
    sum_ptr,  # like top
    tokens,
    chunks,
    scale,  # times log2 e
    stride_qb,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    chunk, pair = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    b, h = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    g, d, dv = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_at = q_ptr + b * stride_qb + (h * GROUP + g[:, None]) * stride_qh + d[None, :]
    q = tl.load(q_at, mask=(g[:, None] < GROUP) & (d[None, :] < D), other=0.0)
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    first = chunk * CHUNK
    for start in range(first, tl.minimum(first + CHUNK, tokens), BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        seen = t < tokens
        if mask_ptr is not None:
            seen &= tl.load(mask_ptr + b * stride_mb + t, mask=seen, other=0) != 0
        at = t.to(tl.int64)[:, None]
        k = tl.load(k_ptr + at * stride_kt + d, mask=seen[:, None] & (d[None, :] < D), other=0.0)
        v = tl.load(v_ptr + at * stride_vt + dv, mask=seen[:, None] & (dv[None, :] < DV), other=0.0)
        scores = tl.where(seen[None, :], _dot(q, tl.trans(k)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + _dot(narrow(weights, DTYPE), v)
        top = higher
    head = pair.to(tl.int64) * GROUP + g
    if SPLIT:
        at = head * chunks + chunk
        tl.store(top_ptr + at, top, mask=g < GROUP)
        tl.store(sum_ptr + at, total, mask=g < GROUP)
    else:
        at = head
        mixed /= tl.where(total == 0.0, 1.0, total)[:, None]
    y_at = y_ptr + at[:, None] * DV + dv[None, :]
    y = narrow(mixed, y_ptr.dtype.element_ty)
    tl.store(y_at, y, mask=(g[:, None] < GROUP) & (dv[None, :] < DV))


@triton.jit(do_not_specialize=["chunks"])
def _combine_kernel(
    x_ptr,  # float32 [heads, chunks, DV]
    top_ptr,  # float32 [heads, chunks]
    sum_ptr,  # like top
    y_ptr,  # [heads, DV]
    chunks,
    DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    head = tl.program_id(0).to(tl.int64)
    c, dv = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_DV)
    highest = tl.full([BLOCK_C], float("-inf"), tl.float32)
    for start in range(0, chunks, BLOCK_C):
        inside = start + c < chunks
        top = tl.load(top_ptr + head * chunks + start + c, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, top)
    base = tl.max(highest, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = tl.zeros([BLOCK_C], tl.float32)
    mixed = tl.zeros([BLOCK_C, BLOCK_DV], tl.float32)
    for start in range(0, chunks, BLOCK_C):
        at, inside = head * chunks + start + c, start + c < chunks
        weight = tl.exp2(tl.load(top_ptr + at, mask=inside, other=float("-inf")) - base)
        total += weight * tl.load(sum_ptr + at, mask=inside, other=0.0)
        x_at, there = x_ptr + at[:, None] * DV + dv, inside[:, None] & (dv[None, :] < DV)
        mixed += weight[:, None] * tl.load(x_at, mask=there, other=0.0)
    whole = tl.sum(total, 0)
    y = tl.sum(mixed, 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(y_ptr + head * DV + dv, narrow(y, y_ptr.dtype.element_ty), mask=dv < DV)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute as ``attention.attend`` does, with the same arguments."""
    batch, heads, _, dim = query.shape
    shared, tokens, value_dim = value.shape[1:]
    y = torch.empty(batch, 1, heads, value_dim, dtype=query.dtype, device=query.device)
    if not y.numel():
        return y
    if not tokens:
        return y.zero_()
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    seen = None if mask is None else _bytes(mask)
    chunks = triton.cdiv(tokens, CHUNK)
    parts = tops = sums = None
    if chunks > 1:
        size, device = (batch * heads, chunks), query.device
        parts = torch.empty(*size, value_dim, dtype=torch.float32, device=device)
        tops, sums = (torch.empty(size, dtype=torch.float32, device=device) for _ in range(2))
    overlap, group = overlaps(query.device), heads // shared
    one_tile = max(dim, value_dim) <= _NARROW_DIM
    block_dv = max(triton.next_power_of_2(value_dim), 16)
    with current(query.device):
        launch(
            _attend_kernel, batch * shared * chunks,
            query, key, value, seen, y if parts is None else parts, tops, sums,
            tokens, chunks, scale * _LOG2_E,
            query.stride(0), query.stride(1), *key.stride()[:3], *value.stride()[:3],
            0 if seen is None or batch > seen.shape[0] else seen.stride(0),
            H=shared, GROUP=group, D=dim, DV=value_dim, SPLIT=chunks > 1,
            CHUNK=CHUNK, BLOCK_T=CHUNK if one_tile else CHUNK // 2,
            BLOCK_G=max(triton.next_power_of_2(group), _LEAST_ROWS),
            BLOCK_D=max(triton.next_power_of_2(dim), 16), BLOCK_DV=block_dv,
            OVERLAP=overlap, launch_pdl=overlap,
            num_warps=4 if one_tile else 8, num_stages=2,
        )  # fmt: skip
        if parts is not None:
            launch(
                _combine_kernel, batch * heads,
                parts, tops, sums, y, chunks,
                DV=value_dim, BLOCK_C=16, BLOCK_DV=block_dv,
                OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
            )  # fmt: skip
    return y


def _bytes(mask: Tensor) -> Tensor:
    """Return a mask as bytes ``[batch or 1, tokens]`` with unit stride along tokens."""
    rows = mask[:, 0, 0].view(torch.uint8)
    return rows if rows.stride(1) == 1 else rows.contiguous()


BACKEND = AttentionBackend(supports=supports, attend=attend)
