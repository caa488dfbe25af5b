"""Start a Triton kernel before the previous kernel of the stream ends (programmatic launch)."""

import functools

import torch
import triton
import triton.language as tl

# what the memory moves while one kernel ends and the first loads of the next are in flight
_AHEAD = tl.constexpr(6 * 10**6)  # bytes
# a smaller input was probably written just before and is still in the L2 cache
_LEAST = tl.constexpr(16 * 10**6)  # bytes


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel on a device can start before the previous one ends (sm90)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def join_stream(OVERLAP: tl.constexpr):
    """Let the next kernel of the stream start to prepare, then wait for the previous one.

    Called before any memory is touched, in a kernel launched with ``launch_pdl``. The next kernel
    waits for this one before it reads what this or an earlier one writes. What it reads before its
    wait, such as a weight, must be complete by then; the next kernel's launch makes sure of that.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, stride, rows, cols, total, EACH: tl.constexpr, OVERLAP: tl.constexpr):
    """Prefetch a program's first tile into the L2 cache while the previous kernel ends.

    Called before ``join_stream``. That is safe: no value is read, and what the previous kernel has
    yet to write goes through the same cache. Only the first programs prefetch, ``_AHEAD`` bytes
    together, and only inputs of at least ``_LEAST`` bytes. The tile's rows begin at ``ptr``,
    ``stride`` elements apart, with adjacent elements; each thread fetches at most one of them. The
    input has ``total`` elements, and a full tile has ``EACH``.
    """
    if OVERLAP:
        SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        large = total >= _LEAST // SIZE
        if large and cols > 0 and tl.program_id(0) < _AHEAD // (EACH * SIZE):
            # one request per row; rounded to vectors of 16 bytes, each within a page of the input
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
