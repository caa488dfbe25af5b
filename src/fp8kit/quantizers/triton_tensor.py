"""One scale for the whole tensor: given, or taken from the data in a second launch.

    scale = max(max |x| / fp8_max, min_scale)        data = fp8(x / scale)

The first launch leaves one partial amax per program; every program of the second reduces all of
them and walks the tensor backwards, so that it begins with the part that is still in the cache. A
tensor of a few thousand elements needs one launch: every program takes the amax of all of it.
Maxima do not depend on the order, so the result is the same in every case and run.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.quantizers.triton_encode import (
    LOADS,
    ScaleRule,
    amax_of,
    appended,
    encode_quotient,
    few_warps,
    float_scale,
    is_safe,
    magnitude,
)
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps, prefetch

SMALL = 32768
_MB = 2**20
_KEPT = 24 * _MB  # bytes of x's end that wait in the cache for the second launch
_LARGEST_KEPT = 128 * _MB  # x up to this size has its end kept
_READ_ONCE = 60 * _MB  # x up to this size is evicted first, which leaves the cache to its codes


class TensorTile(NamedTuple):
    """How a tensor is tiled.

    A tile has ``block`` elements, a power of two; a step of a program has ``held`` tiles.
    ``partials`` programs compute the amax, ``programs`` programs encode.
    """

    block: int
    held: int
    partials: int
    programs: int
    warps: int


def tensor_tile(numel: int, itemsize: int, processors: int) -> TensorTile:
    """Choose a tile for ``numel`` elements: many steps per program once the GPU is full.

    A thread loads 16 bytes of each tile, so that the threads of a warp read without gaps.
    """
    lanes = 32 * 16 // itemsize  # elements that one warp loads with 16 bytes per thread
    if numel > 32 * LOADS * lanes * processors:
        warps, held = 8, LOADS
    else:
        warps, held = few_warps(numel, lanes, processors), 1
    block = warps * lanes
    programs = min(triton.cdiv(numel, block * held), 8 * processors)
    return TensorTile(block, held, min(programs, 4 * processors), programs, warps)


@triton.jit
def _offsets(index, stride_xm, stride_xk, K: tl.constexpr):
    # K == 0 stands for a contiguous tensor
    if K == 0:
        return index
    else:
        return index // K * stride_xm + index % K * stride_xk


@triton.jit
def _load_tile(x_ptr, index, numel, stride_xm, stride_xk, K: tl.constexpr, EVICTION: tl.constexpr):
    offset = _offsets(index, stride_xm, stride_xk, K)
    return tl.load(x_ptr + offset, mask=index < numel, other=0.0, eviction_policy=EVICTION)


@triton.jit(do_not_specialize=["kept_from"])
def _amax_kernel(
    x_ptr,  # [M, K]
    partial_ptr,  # [programs], in the dtype of x
    numel,
    kept_from,  # the first step whose elements should stay in the cache
    stride_xm,
    stride_xk,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if K == 0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        prefetch(x_ptr + start, 0, 1, min(BLOCK, numel - start), numel, BLOCK, OVERLAP)
    join_stream(OVERLAP)
    bits = tl.zeros([BLOCK], tl.int32)
    steps = tl.cdiv(numel, BLOCK)
    step = tl.program_id(0)
    while step < kept_from:  # Triton 3.6 interprets no range of tensors
        index = step.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = _load_tile(x_ptr, index, numel, stride_xm, stride_xk, K, "evict_first")
        bits = tl.maximum(bits, magnitude(x))
        step += tl.num_programs(0)
    while step < steps:
        index = step.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = _load_tile(x_ptr, index, numel, stride_xm, stride_xk, K, "evict_last")
        bits = tl.maximum(bits, magnitude(x))
        step += tl.num_programs(0)
    amax = amax_of(tl.max(bits, 0), None, x_ptr.dtype.element_ty)
    tl.store(partial_ptr + tl.program_id(0), amax)


@triton.jit
def _store_codes(held, first, scale, data_ptr, numel, DIVISION: tl.constexpr,
                 FP8_MAX: tl.constexpr, HELD: tl.constexpr):  # fmt: skip
    BLOCK: tl.constexpr = held[0].shape[0]
    for i in tl.static_range(HELD):
        index = first + i * BLOCK + tl.arange(0, BLOCK)
        codes = encode_quotient(held[i], scale, DIVISION, FP8_MAX)
        tl.store(data_ptr + index, codes, mask=index < numel)


@triton.jit
def _tensor_kernel(
    x_ptr,  # [M, K]
    amax_ptr,  # [n_amax] with the same amax as x: the partials, or x itself
    scale_ptr,  # [1]
    scale_ub_ptr,  # [1] or None
    data_ptr,  # [M, K] bytes, contiguous
    numel,
    n_amax,
    stride_xm,
    stride_xk,
    min_scale,
    K: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    SCAN: tl.constexpr,
    EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if SCAN == 0 and K == 0:
        end = numel - tl.program_id(0).to(tl.int64) * (HELD * BLOCK)
        start = max(0, end - HELD * BLOCK)
        prefetch(x_ptr + start, 0, 1, end - start, numel, HELD * BLOCK, OVERLAP)
    join_stream(OVERLAP)
    if SCAN == 0:
        scale = tl.load(scale_ptr)
    else:
        lane = tl.arange(0, SCAN)
        candidates = tl.load(amax_ptr + lane, mask=lane < n_amax, other=0.0)
        bits = tl.max(magnitude(candidates), 0)
        amax = amax_of(bits, scale_ub_ptr, amax_ptr.dtype.element_ty)
        scale = float_scale(amax, min_scale, DIVISION, FP8_MAX)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
    safe = is_safe(scale)
    steps = tl.cdiv(numel, HELD * BLOCK)
    step = tl.program_id(0)
    while step < steps:
        first = (steps - 1 - step).to(tl.int64) * (HELD * BLOCK)
        held = ()
        for i in tl.static_range(HELD):
            index = first + i * BLOCK + tl.arange(0, BLOCK)
            x = _load_tile(x_ptr, index, numel, stride_xm, stride_xk, K, EVICTION)
            held = appended(held, x)
        # Triton 3.6 miscompiles the integer steps of fnuz codes inside a run-time branch
        if SCAN > 0 or FP8_MAX == 224.0:
            _store_codes(held, first, scale, data_ptr, numel, DIVISION, FP8_MAX, HELD)
        elif safe:
            _store_codes(held, first, scale, data_ptr, numel, "safe", FP8_MAX, HELD)
        else:
            _store_codes(held, first, scale, data_ptr, numel, "ieee", FP8_MAX, HELD)
        step += tl.num_programs(0)


def quantize_tensor(
    x: Tensor,
    scale: Tensor,
    scale_ub: Tensor | None,
    data: Tensor,
    rule: ScaleRule,
    tile: TensorTile,
) -> None:
    """Quantize ``x`` as a whole into ``data``, reading (static) or writing ``scale``.

    ``x [M, K]`` has any strides, ``scale`` is ``float32 [1, 1]``, and ``data`` is contiguous
    ``uint8 [M, K]``.
    """
    numel, contiguous = x.numel(), x.is_contiguous()
    strides = (0, 0) if contiguous else x.stride()
    k = 0 if contiguous else x.shape[1]
    overlap = overlaps(x.device)
    amax, scan = x, 4096 if numel <= 4096 else SMALL
    programs = tile.programs
    if rule.static:
        scan, programs = 0, triton.cdiv(numel, tile.block * tile.held)
    elif numel > SMALL or not contiguous:
        amax = x.new_empty(tile.partials)
        scan = triton.next_power_of_2(tile.partials)
        step = tile.block * tile.held
        launch(
            _amax_kernel, tile.partials,
            x, amax, numel, _kept_from(x, step), *strides, K=k, BLOCK=step, num_warps=tile.warps,
            OVERLAP=overlap, launch_pdl=overlap,
        )  # fmt: skip
    launch(
        _tensor_kernel, programs,
        x, amax, scale, scale_ub, data, numel, amax.numel(), *strides, rule.min_scale,
        K=k, DIVISION=rule.division, FP8_MAX=rule.fp8_max, BLOCK=tile.block, HELD=tile.held,
        SCAN=scan, EVICTION="evict_first" if x.nbytes <= _READ_ONCE else "",
        num_warps=16 if scan == SMALL else tile.warps, enable_fp_fusion=False,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip


def _kept_from(x: Tensor, step: int) -> int:
    """Return the first step, of ``step`` elements, that stays in the cache for the second launch.

    A tensor much larger than the cache gets 0, one policy for all steps: there the order of the two
    launches alone keeps the right part, and a distinction costs time.
    """
    if x.nbytes > _LARGEST_KEPT:
        return 0
    before = x.numel() - _KEPT // x.element_size()
    return max(0, -(-before // step))
