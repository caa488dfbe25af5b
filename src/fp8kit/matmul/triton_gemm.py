"""The product in Triton: every pair of scales, any shape and strides, on NVIDIA GPUs from sm80.

There are two families of tiles, both in ``triton_gemm_kernels``. FP8 tensor cores (sm89 and later)
serve row, tensor and group scales at any number of rows. Decoding in registers serves the rest:
16-bit activations, MX scales, e4m3fnuz codes, and devices without FP8. It streams the weight once
as bytes, which is worth it as long as reading the weight takes most of the time.

The tile of a problem is a pure function of its shape and the device: nothing is tuned at run time.
With few tiles K is split, and a second launch adds the partial sums in their order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import MX, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.triton_gemm_kernels import (
    FACTOR,
    GROUPS,
    MICRO,
    NONE,
    Form,
    product_kernel,
    sum_kernel,
)
from fp8kit.quantizers.triton_encode import INTERPRETED, missing_gpu
from fp8kit.runtime.triton_launch import launch

DECODED_ROWS = 64
_DEPTH = 128
_PROMOTED = 128  # products of one sum in the tensor core: 256 left a bias of 2e-3 on an H200
_DEEPEST = 512
_SPLIT_STEPS = 4  # no part of K is shorter: its program must have time to stream
_RAGGED_DEPTH = 32
_RESERVED = 4096  # bytes of shared memory per program that pipeline stages cannot have
_PREFETCHED = 8  # lines of 128 bytes per weight row that are prefetched before the input is ready
_SUMMED = 512
_FORMATS = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}
_COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Device(NamedTuple):
    """What the choice of a tile depends on: multiprocessors, and bytes of shared memory on each."""

    processors: int
    shared: int


class TritonTile(NamedTuple):
    """How one problem is tiled.

    A tile has ``rows`` tokens and ``cols`` weight rows. ``splits`` programs share its K; each
    computes ``chunks`` sums one after the other, in steps of ``depth`` codes, with ``stages`` steps
    in flight.
    """

    rows: int
    cols: int
    depth: int
    splits: int
    chunks: int
    warps: int
    stages: int


def decoded(problem: MatmulProblem) -> bool:
    """Return whether codes are decoded to 16 bits instead of multiplied as FP8."""
    fnuz = torch.float8_e4m3fnuz in (problem.x_dtype, problem.w_dtype)
    unscaled = problem.x_group is None or MX in (problem.x_group, problem.w_group)
    return unscaled or fnuz or not _native(problem)


def most_step_columns(problem: MatmulProblem) -> int:
    """Return the most columns that a step may have.

    A step has one scale. Where sums are precise, an FP8 tensor core also adds up no more than one
    step before ``float32`` takes over. Decoded codes are summed in ``float32`` from the start.
    """
    short = problem.accum == "precise" and not decoded(problem)
    groups = (problem.x_group, problem.w_group)
    most = _PROMOTED if short else _DEEPEST
    return min([most, *(group.cols for group in groups if _in_groups(group))])


@functools.lru_cache(maxsize=4096)
def choose_tile(problem: MatmulProblem, device: Device) -> TritonTile:
    """Choose the tile of a problem so that every multiprocessor streams the weight.

    With ``batch_invariant`` the number of parts of K does not depend on ``m``; with more than 64
    rows, one program sums them all.
    """
    m, n, invariant = max(problem.m, 1), problem.n, problem.batch_invariant
    grouped = _in_groups(problem.x_group) or _in_groups(problem.w_group)
    # loads that are no 16-byte copies wait in registers, so a step must have few columns
    depth = min(_RAGGED_DEPTH if problem.k % 16 else _DEPTH, most_step_columns(problem))
    if decoded(problem):
        # two warps multiply with mma, whose operands may be permuted along K: wgmma would want the
        # decoded weight in the order of memory, read from shared memory two bytes at a time
        plain = _native(problem) and problem.w_group in (ROW, TENSOR)
        highest = 16 if invariant else 64 if plain else 32
        rows, cols, warps, resident, most = min(max(m, 8), highest), 64, 2, 4, 6
    elif m <= 128 and not (invariant and m > 64):
        rows, cols, warps, resident, most = max(m, 16), 64, 4, 1, 3
    else:
        # chunks, and partial sums that come from tensor memory, need registers of their own
        narrow = invariant or (grouped and problem.capability and problem.capability[0] == 10)
        rows, cols, warps, resident, most = 64 if narrow else 128, 128, 8, 1, 1
    steps = -(-problem.k // depth)
    tiles = -(-n // 64) if invariant else -(-n // cols) * -(-m // rows)
    parts = 1
    while tiles * parts * 2 <= resident * device.processors and steps >= 2 * _SPLIT_STEPS * parts:
        parts *= 2
    splits, chunks = (1, parts) if invariant and m > 64 else (parts, 1)
    programs = -(-n // cols) * -(-m // rows) * splits
    stage = depth * (cols + rows * (2 if problem.x_group is None else 1))
    sharing = min(-(-programs // device.processors), most)
    sharing = max(1, min(sharing, device.shared // (3 * stage + _RESERVED)))
    room = (device.shared // sharing - _RESERVED) // stage
    stages = 2 if problem.k % 16 else min(room, -(-steps // parts), 4 if m > 64 else 12)
    return TritonTile(rows, cols, depth, splits, chunks, warps, max(2, stages))


def cut(problem: MatmulProblem) -> str:
    """Return how a product of ``problem.m`` rows, a power of two, is tiled."""
    tile = choose_tile(problem, device_facts(torch.device(problem.device_type)))
    parts = f", K in {tile.splits * tile.chunks} parts" if tile.splits * tile.chunks > 1 else ""
    return f"tiles of {tile.rows} rows by {tile.cols} weights, {tile.stages} stages{parts}"


def supports(problem: MatmulProblem) -> str | None:
    """Return what the kernels lack for a problem, if anything."""
    if problem.architecture:
        return "needs an NVIDIA GPU"
    if missing := missing_gpu(problem.capability, (8, 0)):
        return missing
    if problem.x_group is None and problem.x_dtype not in _COMPUTE:
        return f"multiplies 16-bit activations by FP8 weights, got {problem.x_dtype}"
    if problem.w_group == MX and problem.x_dtype == torch.float16:
        return "MX-scaled values exceed float16"
    for group in (problem.x_group, problem.w_group):
        if _in_groups(group) and (group.cols < 32 or group.cols & (group.cols - 1)):
            return f"has no {group} scales: groups along K are powers of two from 32"
    if decoded(problem) and problem.m > DECODED_ROWS and not problem.batch_invariant:
        return f"over {DECODED_ROWS} rows it is faster to decode the weight once"
    return None


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``; ``x_scale`` is ``None`` if ``x`` is not quantized."""
    device = operands.x.device
    with current(device):
        return run_tile(operands, problem, choose_tile(problem, device_facts(device)))


def run_tile(operands: MatmulOperands, problem: MatmulProblem, tile: TritonTile) -> Tensor:
    """Multiply as ``run`` does, but with a given tile; the benchmark compares tiles with it."""
    x, w = _streamable(operands.x), _streamable(operands.w)
    x_scale, w_scale, bias = operands.x_scale, operands.w_scale, operands.bias
    m, n = x.shape[0], w.shape[0]
    y = parts = torch.empty(m, n, dtype=problem.out_dtype, device=x.device)
    if tile.splits > 1:
        parts = torch.empty(tile.splits, m, n, dtype=torch.float32, device=x.device)
    bias = None if bias is None else bias.contiguous()
    pointers = (w, x, w_scale, x_scale, bias if tile.splits == 1 else None, parts)
    blocks = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.cols) * tile.splits
    arguments, constants = product_arguments(pointers, problem), product_constants(problem, tile)
    launch(product_kernel, blocks, *arguments, **constants, **launch_options(problem, tile))
    if tile.splits > 1:
        shared = ("FORM", "SPLITS", "OVERLAP")
        launch(
            sum_kernel, m * triton.cdiv(n, _SUMMED),
            parts, w_scale, x_scale, bias, y, m, n, arguments[-4], arguments[-2],
            **{name: constants[name] for name in shared}, BLOCK_N=_SUMMED,
            **launch_options(problem, tile._replace(warps=4, stages=1)),
        )  # fmt: skip
    return y


def product_arguments(
    pointers: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor],
    problem: MatmulProblem,
) -> tuple[object, ...]:
    """Return the arguments of ``product_kernel`` for one call.

    ``pointers`` are ``w``, ``x``, their scales, bias and result.
    """
    w, x, w_scale, x_scale, bias, y = pointers
    (m, k), n = x.shape, w.shape[0]
    if INTERPRETED.value or decoded(problem):
        w = w.view(torch.uint8)
        x = x if problem.x_group is None else x.view(torch.uint8)
    return (
        w, x, w_scale, x_scale, bias, y, m, n, k, *w.stride(), *x.stride(),
        *scale_strides(w_scale, problem.w_group), *scale_strides(x_scale, problem.x_group),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def product_constants(problem: MatmulProblem, tile: TritonTile) -> dict[str, object]:
    """Return the constants of ``product_kernel``; calls share this dict, so do not change it."""
    assert tile.depth <= most_step_columns(problem)
    dtype: object = None
    if INTERPRETED.value:
        dtype = tl.float32
    elif decoded(problem):
        dtype = _COMPUTE.get(problem.x_dtype, tl.bfloat16)
    w_kind, w_rows, w_cols = _kind(problem.w_group)
    x_kind, x_rows, x_cols = _kind(problem.x_group)
    ahead = _overlaps(problem) and problem.m <= DECODED_ROWS
    form = Form(
        w_kind, x_kind, w_rows, w_cols, x_rows, x_cols, _FORMATS[problem.w_dtype],
        _FORMATS.get(problem.x_dtype, ""), dtype, _native(problem), problem.accum == "fast",
        problem.k % tile.depth == 0,
    )  # fmt: skip
    return {
        "FORM": form, "BLOCK_M": tile.rows, "BLOCK_N": tile.cols, "BLOCK_K": tile.depth,
        "SPLITS": tile.splits, "CHUNKS": tile.chunks,
        "PREFETCH": _PREFETCHED if ahead else 0, "OVERLAP": _overlaps(problem),
    }  # fmt: skip


def launch_options(problem: MatmulProblem, tile: TritonTile) -> dict[str, object]:
    """Return the compiler's options for one tile."""
    overlap = {"launch_pdl": True} if _overlaps(problem) else {}
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True, **overlap}


def _overlaps(problem: MatmulProblem) -> bool:
    return problem.capability is not None and problem.capability >= (9, 0)


def _native(problem: MatmulProblem) -> bool:
    return problem.capability is None or problem.capability >= (8, 9)


def _in_groups(group: GroupShape | None) -> TypeGuard[GroupShape]:
    return group is not None and group.cols != -1 and group != MX


def _kind(group: GroupShape | None) -> tuple[int, int, int]:
    """Return how scales are applied, and how many rows and columns share one."""
    if group is None:
        return NONE.value, 1, 1
    if group == MX:
        return MICRO.value, 1, 32
    if group.cols == -1:
        return FACTOR.value, max(group.rows, 1), 1
    return GROUPS.value, group.rows, group.cols


def _streamable(operand: Tensor) -> Tensor:
    """Copy an operand that 16-byte loads cannot read, unless its shape rules them out anyway."""
    operand = operand if operand.stride(1) == 1 else operand.contiguous()
    size = operand.element_size()
    aligned = operand.data_ptr() % 16 == 0 and operand.stride(0) * size % 16 == 0
    if aligned or operand.shape[1] * size % 16:
        return operand
    return operand.clone(memory_format=torch.contiguous_format)


def scale_strides(scale: Tensor | None, group: GroupShape | None) -> tuple[int, int]:
    """Return the strides of a matrix' scales; zeros for a single scale, or none."""
    if scale is None or group == TENSOR:
        return 0, 0
    return scale.stride(0), scale.stride(1)


@functools.cache
def device_facts(device: torch.device) -> Device:
    """Return what the choice of a tile depends on; the interpreter runs the tiles of an H200."""
    if device.type != "cuda":
        return Device(132, 228 * 1024)
    found = torch.cuda.get_device_properties(device)
    return Device(found.multi_processor_count, found.shared_memory_per_multiprocessor)


BACKEND = MatmulBackend(supports=supports, run=run, cut=cut)
