"""A layer of experts of a few tokens: two kernels of dot products.

``gates_and_ups.cu`` stores activated values, and ``downs.cu`` the result. Few tokens read most
weights of their experts once and multiply little, so the sort, the quantizer and the sum of rows,
which tiles of tokens need, would take a good part of the time.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from fp8kit.formats import GROUP128, ROW, min_scale
from fp8kit.matmul.hopper.tile_config import round_up
from fp8kit.moe.hopper.launches import SCALES, Launch, integers, layer_variant, pointers
from fp8kit.moe.hopper.source import DotProductsVariant, dot_products_source
from fp8kit.moe.hopper.tile_config import GROUP, SMEM, VECTOR
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, ExpertWeights
from fp8kit.runtime import cuda_launch

_ROWS = 8  # weight rows of a block, which computes as many features
_LEAST_GATE_WARPS, _MOST_DOWN_WARPS = 4, 16
_CLUSTER = 2  # blocks of the second kernel that share the work of quantizing
_MOST_PAIRS = 32  # of a token, one for each lane of a warp
_MOST_TOKENS = 8
_LEAST_EXPERTS = 2  # for each pair of several tokens, most of which then have an expert alone
_STATIC_SMEM = 2560  # of a block, in bytes, beside the token in fp16


def serves(problem: ExpertsProblem) -> bool:
    """Return whether a layer has so few tokens, and is so small, that these kernels are faster.

    The weights of a block are in shared memory. Where two blocks of down weights do not fit into an
    SM, a ring of stages is faster. The bits differ from those of the same token among many.
    """
    if problem.m > _MOST_TOKENS or problem.batch_invariant or problem.top_k > _MOST_PAIRS:
        return False
    if problem.m > 1 and problem.m * problem.top_k * _LEAST_EXPERTS > problem.experts:
        return False
    gates = gate_bytes(problem) + 2 * problem.hidden + _STATIC_SMEM
    return gates <= SMEM and down_bytes(problem) + _STATIC_SMEM <= SMEM // 2


def experts(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Compute a layer of experts; operands have the layouts that kernels load."""
    x, ids, chosen = operands.x, operands.ids, variant(operands, problem)
    with torch.cuda.device(x.device):
        h = x.new_empty(ids.numel(), problem.intermediate, dtype=torch.float32)
        y = x.new_empty(x.shape)
        # the second kernel reads routes and weights before the first has ended: every block of the
        # first waits for all earlier kernels, and only then lets the second start
        for kernel, blocks, arguments in (
            _gates_and_ups(operands, problem, chosen, h),
            _downs(operands, problem, chosen, h, y),
        ):
            kernel.launch(blocks, arguments, overlap=True)
    return y


def _gates_and_ups(
    operands: ExpertOperands, problem: ExpertsProblem, chosen: DotProductsVariant, h: Tensor
) -> Launch:
    x, w, _, ids, _ = operands
    assert problem.x_group is not None
    act, inner = problem.activation, problem.intermediate
    step, up_row = (2, 1) if act.interleaved else (1, inner)
    arguments = (
        *_routes(ids, problem),
        *integers(x.shape[0]),
        *pointers(x),
        *integers(x.stride(0) // VECTOR),
        *pointers(w.input_scale),
        ctypes.c_float(min_scale(problem.x_group, problem.w_dtype, "activation")),
        *_weights(w, problem),
        *integers(step, up_row),
        *(ctypes.c_float(v) for v in (act.limit or 0.0, act.alpha, act.up_offset)),
        *pointers(h),
    )
    kernel = _gates_kernel(chosen, gate_bytes(problem), x.device.index)
    return Launch(kernel, ids.numel() * (inner // _ROWS), arguments)


def _downs(
    operands: ExpertOperands,
    problem: ExpertsProblem,
    chosen: DotProductsVariant,
    h: Tensor,
    y: Tensor,
) -> Launch:
    (_, _, w, ids, weights), tokens = operands, y.shape[0]
    kernel = _downs_kernel(chosen, down_bytes(problem), y.device.index)
    clusters = max(1, kernel.most_blocks // tokens // _CLUSTER)  # of a token
    of_token = min(problem.hidden // _ROWS, clusters * _CLUSTER)
    arguments = (
        *_routes(ids, problem),
        *integers(tokens, of_token * _ROWS),
        *pointers(weights, h, w.input_scale),
        ctypes.c_float(min_scale(GROUP128, problem.w_dtype, "activation")),
        *_weights(w, problem),
        *pointers(y),
    )
    return Launch(kernel, of_token * tokens, arguments)


def _routes(ids: Tensor, problem: ExpertsProblem) -> list[Any]:
    return [*pointers(ids), *integers(ids.element_size(), problem.experts)]


def _weights(w: ExpertWeights, problem: ExpertsProblem) -> list[Any]:
    strides = (w.scale.stride(0), int(problem.w_group == ROW))
    return [*pointers(w.data, w.scale, w.bias), *integers(w.data.shape[1], *strides)]


def variant(operands: ExpertOperands, problem: ExpertsProblem) -> DotProductsVariant:
    """Return the settings that both kernels are compiled for."""
    assert problem.x_group is not None
    padded, gate_warps = round_up(problem.hidden, GROUP), _gate_warps(problem)
    sizes = (problem.hidden, problem.intermediate, problem.top_k, _ROWS, _CLUSTER)
    return DotProductsVariant(
        operands.x.shape[0] == 1, *sizes, gate_warps, *_down_warps(problem),
        -(-padded // (VECTOR * 32 * gate_warps)), SCALES[problem.x_group],
        layer_variant(operands, problem),
    )  # fmt: skip


def _groups(problem: ExpertsProblem) -> int:
    """Return the number of groups of a pair's intermediate."""
    return -(-problem.intermediate // GROUP)


def _gate_warps(problem: ExpertsProblem) -> int:
    """Return the warps of a block of the first kernel, more where an SM has few such blocks."""
    blocks = SMEM // (gate_bytes(problem) + 2 * problem.hidden + _STATIC_SMEM)
    return max(_LEAST_GATE_WARPS, 16 // blocks // 4 * 4)


def _down_warps(problem: ExpertsProblem) -> tuple[int, int]:
    """Return the warps of a block of the second kernel, and how many share a pair."""
    pairs = -(-problem.top_k // -(-problem.top_k // _MOST_DOWN_WARPS))
    # a warp with only one group ends before it has hidden any latency
    sharing = max(1, min(_MOST_DOWN_WARPS // pairs, _groups(problem) // 2))
    return pairs * sharing, sharing


def gate_bytes(problem: ExpertsProblem) -> int:
    """Return the dynamic shared memory of a block of the first kernel: its weights."""
    return 2 * _ROWS * problem.hidden


def down_bytes(problem: ExpertsProblem) -> int:
    """Return that of the second: weights, and the intermediate's codes and scales."""
    return problem.top_k * (_ROWS * problem.intermediate + _groups(problem) * (GROUP + 4))


@functools.cache
def _gates_kernel(chosen: DotProductsVariant, shared: int, device: int) -> cuda_launch.Kernel:
    source, place = dot_products_source(chosen, "gates_and_ups"), torch.device("cuda", device)
    return cuda_launch.Kernel(source, "gates_and_ups", 32 * chosen.gate_warps, 1, shared, place)


@functools.cache
def _downs_kernel(chosen: DotProductsVariant, shared: int, device: int) -> cuda_launch.Kernel:
    source, place = dot_products_source(chosen, "downs"), torch.device("cuda", device)
    return cuda_launch.Kernel(source, "downs", 32 * chosen.down_warps, _CLUSTER, shared, place)
