"""Choose the experts of each token in one launch, see ``top_k``.

A program has one row and one warp. Each expert has a 64-bit key, so that the largest key gives
score and index: the upper half is the score's bits, ordered as integers, the lower half the index,
counted from the end. Of equal scores the lowest index comes first, and NaN is the largest, as in
torch. Padding has the least key of all, so an id is never outside ``0 .. E - 1``.

The exponential is the hardware's, and a sum has another order than torch's: weights differ by a few
ulp of ``float32``, and so do scores that are that close to each other in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import FLOATS
from fp8kit.fused.triton_output import narrow
from fp8kit.moe import top_k
from fp8kit.moe.top_k import Formula, TopKBackend, TopKProblem
from fp8kit.quantizers.triton_encode import missing_gpu, widen
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps

_MOST_EXPERTS, _MOST_CHOSEN = 1024, 32  # of a row in a warp's registers
_NONE = tl.constexpr(-(2**63))
_NAN = tl.constexpr(2**31 - 1)  # above infinity
_TINY = tl.constexpr(top_k.TINY)


def supports(problem: TopKProblem) -> str | None:
    """Return the reason why the kernel does not cover a problem, ``None`` if it does."""
    if missing := missing_gpu(problem.capability, (8, 0)):
        return missing
    if problem.in_dtype not in FLOATS:
        return f"{problem.in_dtype} logits; the kernel reads bfloat16, float16 and float32"
    if problem.experts > _MOST_EXPERTS or problem.top_k > _MOST_CHOSEN:
        return f"{problem.top_k} of {problem.experts} experts; at most {_MOST_CHOSEN} of 1024"
    return None


@triton.jit
def _score(x, top, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return tl.div_rn(1.0, 1.0 + tl.exp(-x))
    else:
        return tl.div_rn(tl.exp(x - top), total)


@triton.jit
def _ordered(score):
    # integers in the order of the numbers, none of which is a negative zero
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(score != score, _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _choose_kernel(
    x_ptr,  # [M, E]
    bias_ptr,  # [E] or None
    ids_ptr,  # [M, K] contiguous
    weights_ptr,  # like ids
    stride_xm,
    scaling_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    x = widen(tl.load(x_ptr + row * stride_xm + expert, mask=expert < E, other=float("-inf")))
    top = tl.max(x, 0)
    total = 1.0 if SIGMOID else tl.sum(tl.where(expert < E, tl.exp(x - top), 0.0), 0)
    if SIGMOID and bias_ptr is None:
        worth = tl.where(x == 0.0, 0.0, x)
    else:
        worth = _score(x, top, total, SIGMOID)
    if bias_ptr is not None:
        worth += widen(tl.load(bias_ptr + expert, mask=expert < E, other=0.0))
    keys = (_ordered(worth).to(tl.int64) << 32) | (BLOCK_E - 1 - expert)
    keys = tl.where(expert < E, keys, _NONE)
    ids = tl.zeros([BLOCK_K], tl.int64)
    for i in range(K):
        best = tl.max(keys, 0)
        ids = tl.where(place == i, BLOCK_E - 1 - (best & (BLOCK_E - 1)), ids)
        keys = tl.where(keys == best, _NONE, keys)
    # read again: a warp would take as long to find the scores in its registers
    chosen = widen(tl.load(x_ptr + row * stride_xm + ids, mask=place < K, other=0.0))
    weights = tl.where(place < K, _score(chosen, top, total, SIGMOID), 0.0)
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.sum(weights, 0) + _TINY)
    weights = narrow(weights * scaling_factor, weights_ptr.dtype.element_ty)
    tl.store(ids_ptr + row * K + place, ids, mask=place < K)
    tl.store(weights_ptr + row * K + place, weights, mask=place < K)


def choose(logits: Tensor, bias: Tensor | None, how: Formula) -> tuple[Tensor, Tensor]:
    """Choose as ``top_k.choose`` does, with the same arguments."""
    m, experts = logits.shape
    if m == 0:
        return top_k.choose(logits, bias, how)
    x = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(m, how.top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(m, how.top_k, dtype=how.dtype, device=x.device)
    overlap = overlaps(x.device)
    with current(x.device):
        launch(
            _choose_kernel, m,
            x, None if bias is None else bias.contiguous(), ids, weights,
            x.stride(0), float(how.scaling_factor),
            E=experts, K=how.top_k, SIGMOID=how.scoring == "sigmoid", RENORMALIZE=how.renormalize,
            BLOCK_E=max(2, triton.next_power_of_2(experts)),
            BLOCK_K=max(2, triton.next_power_of_2(how.top_k)),  # casts take pairs
            OVERLAP=overlap, launch_pdl=overlap, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return ids, weights


BACKEND = TopKBackend(supports=supports, choose=choose)
