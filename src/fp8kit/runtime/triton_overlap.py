"""How a Triton kernel follows the one ahead of it in the stream: it starts before that one ends."""

import functools

import torch
import triton
import triton.language as tl

# what the memory moves while one kernel ends and the next one's first loads are on their way
_AHEAD = tl.constexpr(6 * 10**6)  # bytes
# less was probably written a moment ago and is in the L2 cache
_LEAST = tl.constexpr(16 * 10**6)  # bytes


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels on a device can start before the one ahead of them ends (sm90)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def join_stream(OVERLAP: tl.constexpr):
    """Let the kernel behind in the stream start to prepare, then wait for the one ahead.

    Called before any memory is touched, in a kernel launched with ``launch_pdl``. The kernel behind
    waits for this one before it reads what this one or an earlier one writes. What it reads before,
    such as a weight, has to be older than the kernel ahead: that is for it to make sure.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, stride, rows, cols, total, EACH: tl.constexpr, OVERLAP: tl.constexpr):
    """Fetch a program's first tile into the L2 cache while the kernel ahead ends.

    Called before ``join_stream``, which is allowed: nothing is read, and what the kernel ahead has
    yet to write goes through the same cache. Only the first programs do it, and only for inputs
    that are larger than what the memory moves meanwhile. Rows, whose elements are adjacent, begin
    at ``ptr`` and are ``stride`` apart; as many are fetched as the program has threads. The input
    has ``total`` elements, and a tile that lacks none has ``EACH``.
    """
    if OVERLAP:
        SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        large = total >= _LEAST // SIZE
        if large and cols > 0 and tl.program_id(0) < _AHEAD // (EACH * SIZE):
            # a request per row; whole vectors of 16 bytes lie in the same page as their first byte
            tl.inline_asm_elementwise(
                "{ .reg .pred mine; .reg .b32 row; .reg .b64 at;"
                " mov.u32 row, %tid.x; setp.lt.s32 mine, row, $3;"
                " cvt.u64.u32 at, row; mad.lo.s64 at, at, $2, $1; and.b64 at, at, -16;"
                " @mine cp.async.bulk.prefetch.L2.global [at], $4; mov.u32 $0, 0; }",
                "=r,l,l,r,r",
                [
                    ptr.to(tl.int64),
                    tl.cast(stride, tl.int64) * SIZE,
                    tl.cast(rows, tl.int32),
                    (tl.cast(cols, tl.int32) * SIZE + 15) // 16 * 16,
                ],
                tl.int32,
                is_pure=False,
                pack=1,
            )
