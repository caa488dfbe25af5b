"""The layer of experts on Hopper in four kernels, chained by programmatic dependent launch.

Pairs of a token and an expert are sorted, and tokens are quantized into rows in that order
(``pairs.cu``; many pairs are sorted by a kernel of their own). One grouped GEMM multiplies them by
gates and ups, activates and quantizes; one multiplies the result and puts each row where its pair
belongs (``grouped_gemm.cu``). The rows of each token are added in their order (``combine.cu``).

Nothing waits for the host. Rows of pairs have the dtype of the input. The bits of a token's result
depend on nothing but the token.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape, min_scale
from fp8kit.matmul.tma_operands import ALIGN
from fp8kit.moe import self_check
from fp8kit.moe.hopper.source import (
    PairsVariant,
    Variant,
    combine_source,
    grouped_source,
    pairs_source,
)
from fp8kit.moe.hopper.tile_config import FEW_PAIRS, HALF, GroupedConfig, choose
from fp8kit.moe.problem import (
    ExpertOperands,
    ExpertsProblem,
    GroupedProblem,
    MoeBackend,
)
from fp8kit.quantizers.scale_layout import pitch
from fp8kit.runtime import cuda_launch, nvrtc
from fp8kit.runtime.weight_hazards import mark_synchronized, safe_to_prefetch

MOST_EXPERTS = 1024
_SCALES = {ROW: 0, GROUP128: 1, TENSOR: 2}  # of tokens, as ``pairs.cu`` counts them
_SORT_THREADS, _THREADS = 1024, 256
_PAIRS_OF_BLOCK, _SORT_CLUSTER = 2048, 8  # that one block sorts, and blocks that sort more
_MOST_VECTORS = 8  # of 16 bytes of a token that a thread holds
_VECTOR = 8  # values of 16 bytes


def supports(problem: ExpertsProblem | GroupedProblem) -> str | None:
    """Return what the kernels lack for a problem, or how they failed on this GPU, if anything."""
    if isinstance(problem, GroupedProblem):
        return "computes whole layers"
    lacking = _lacking(problem)
    if lacking or not torch.cuda.is_available():
        return lacking
    return self_check.failure(problem, experts)


def _lacking(problem: ExpertsProblem) -> str | None:
    act, inner = problem.activation, problem.intermediate
    if problem.capability is None or problem.capability[0] != 9:
        return "written for sm90 (wgmma)"
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return "takes bf16 and fp16"
    if problem.w_dtype != torch.float8_e4m3fn:
        return "multiplies e4m3fn codes only"
    if problem.x_group not in _SCALES or problem.w_group not in (ROW, TENSOR, BLOCK):
        return f"has no {problem.x_group} by {problem.w_group} scales"
    if problem.x_group == TENSOR and not problem.static_input:
        return "takes scales per tensor only if they are given"
    if problem.scale_rounding != "exact":
        return f"rounds no scales {problem.scale_rounding}"
    if not act.gated or act.kind not in ("silu", "gelu_tanh"):
        return f"has no {'' if act.gated else 'ungated '}{act.kind}"
    if act.interleaved and problem.w_group == BLOCK:
        return "has no blocks of interleaved gates and ups"
    if problem.router_weight_on_input:
        return "applies the router's weights to the result"
    if not 0 < problem.experts <= MOST_EXPERTS:
        return f"takes 1 to {MOST_EXPERTS} experts"
    if not problem.hidden or not inner:
        return "takes weights that are not empty"
    if problem.hidden % ALIGN or inner % (HALF if problem.w_group == BLOCK else ALIGN):
        return f"needs H and I in multiples of {ALIGN}, with blocks I of {HALF}"
    if problem.hidden > _VECTOR * _THREADS * _MOST_VECTORS:
        return f"takes tokens of at most {_VECTOR * _THREADS * _MOST_VECTORS} values"
    return nvrtc.missing()


def experts(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Compute a layer of experts."""
    # there a half of the weights of a tile must lie in one block
    many = problem.w_group != BLOCK or not problem.intermediate % BLOCK.rows
    config = choose(operands.ids.numel(), problem.experts, many)
    return layer(operands, problem, config)


def layer(operands: ExpertOperands, problem: ExpertsProblem, config: GroupedConfig) -> Tensor:
    """Compute a layer of experts in tiles of one configuration; every one gives the same bits."""
    # copies, if any, are made first: behind that kernels start before their predecessors have ended
    ids, weights = operands.ids.contiguous(), operands.weights.contiguous()
    operands = operands._replace(x=_loadable(operands.x), ids=ids, weights=weights)
    device, pairs = operands.x.device, ids.numel()
    tiles = config.token_tiles(pairs, problem.experts)
    count = tiles * config.tokens
    with torch.cuda.device(device):
        found = _empty_sorted(pairs, count, tiles, device)
        given = operands.w13.input_scale, operands.w2.input_scale
        rows = _empty_rows((count, problem.hidden), problem.x_group, given[0], device)
        _sort_and_quantize(operands, problem, config, found, rows)
        group = problem.intermediate_group
        h = _empty_rows((count, problem.intermediate), group, given[1], device)
        result = (h.codes, h.scale)
        _multiply(rows, operands, result, found, problem, config, activated=True)
        products = operands.x.new_empty(pairs, problem.hidden)
        _multiply(h, operands, (products, None), found, problem, config, activated=False)
        return _combined(products, operands, found)


class _Sorted(NamedTuple):
    """Where pairs lie, and the tiles of tokens.

    Args:
        row_of_pair: int32 ``[M * k]``, -1 for a pair of no expert.
        pair_of_row: int32 ``[rows]``.
        tiles: int32 ``[T, 4]``, as ``tiles.cuh`` reads them.
        tile_count: int32 ``[1]``.
    """

    row_of_pair: Tensor
    pair_of_row: Tensor
    tiles: Tensor
    tile_count: Tensor


class _Rows(NamedTuple):
    """Codes of rows, with a scale for each, for each group (rows adjacent), or for all."""

    codes: Tensor
    scale: Tensor
    group: GroupShape


def _loadable(x: Tensor) -> Tensor:
    """Return rows whose columns are adjacent and that start at 16-byte boundaries."""
    apart = x.stride(0) * x.element_size() % ALIGN and x.shape[0] > 1
    return x.contiguous() if x.stride(1) != 1 or x.data_ptr() % ALIGN or apart else x


def _empty_sorted(pairs: int, rows: int, tiles: int, device: torch.device) -> _Sorted:
    # one allocation; tiles first, as they are read by 16 bytes
    sizes = [4 * tiles, pairs, rows, 1]
    listed, row_of_pair, pair_of_row, count = torch.empty(
        sum(sizes), dtype=torch.int32, device=device
    ).split(sizes)
    return _Sorted(row_of_pair, pair_of_row, listed, count)


def _empty_rows(
    shape: tuple[int, int], group: GroupShape | None, given: Tensor | None, device: torch.device
) -> _Rows:
    assert group is not None
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    if given is not None:
        return _Rows(codes, given, TENSOR)
    count, features = shape
    size = (count,) if group == ROW else (-(-features // group.cols), pitch(count))
    return _Rows(codes, torch.empty(size, dtype=torch.float32, device=device), group)


def _sort_and_quantize(
    operands: ExpertOperands,
    problem: ExpertsProblem,
    config: GroupedConfig,
    found: _Sorted,
    rows: _Rows,
) -> None:
    x, ids = operands.x, operands.ids
    tokens, vectors = x.shape[0], problem.hidden // _VECTOR
    held = -(-vectors // _THREADS)
    how = (_SCALES[rows.group], config.tokens, x.dtype)
    few = _few(operands)
    arguments = (
        cuda_launch.pointer(ids),
        ctypes.c_int(ids.element_size()),
        ctypes.c_int(ids.numel()),
        ctypes.c_int(problem.top_k),
        ctypes.c_int(problem.experts),
        cuda_launch.pointer(found.row_of_pair),
        cuda_launch.pointer(found.pair_of_row),
        cuda_launch.pointer(found.tiles),
        cuda_launch.pointer(found.tile_count),
        cuda_launch.pointer(x),
        ctypes.c_longlong(x.stride(0) * x.element_size()),
        ctypes.c_int(vectors),
        cuda_launch.pointer(rows.codes),
        cuda_launch.pointer(rows.scale),
        ctypes.c_int(_row_pitch(rows)),
        cuda_launch.pointer(rows.scale if rows.group == TENSOR else None),
        ctypes.c_float(min_scale(rows.group, problem.w_dtype, "activation")),
    )
    launches = [(PairsVariant(_THREADS, 1, int(few), True, held, *how), tokens)]
    if not few:
        cluster = 1 if ids.numel() <= _PAIRS_OF_BLOCK else _SORT_CLUSTER
        launches.insert(0, (PairsVariant(_SORT_THREADS, cluster, 2, False, 1, *how), cluster))
    for variant, blocks in launches:
        counters = (variant.threads // 32 + 1) * problem.experts
        shared = 4 * (counters if variant.sorts == 2 else problem.top_k)
        kernel = _pairs_kernel(variant, shared, x.device.index)
        kernel.launch(blocks, arguments, overlap=True)


def _few(operands: ExpertOperands) -> bool:
    return operands.ids.numel() <= FEW_PAIRS


def _row_pitch(rows: _Rows) -> int:
    return rows.scale.stride(0) if rows.group == GROUP128 else 0


def _multiply(
    rows: _Rows,
    operands: ExpertOperands,
    result: tuple[Tensor, Tensor | None],
    found: _Sorted,
    problem: ExpertsProblem,
    config: GroupedConfig,
    *,
    activated: bool,
) -> None:
    w, ids = operands.w13 if activated else operands.w2, operands.ids
    act, (capacity, k), kind = problem.activation, rows.codes.shape, problem.w_group
    count, expert_rows, _ = w.data.shape
    features = problem.intermediate if activated else problem.hidden
    codes, w_scale = w.data.contiguous(), w.scale.contiguous()
    bias = None if w.bias is None else w.bias.contiguous()
    groups, lists = rows.group == GROUP128, activated and _few(operands)
    variant = Variant(
        activated, lists, groups, kind == BLOCK, activated and problem.static_intermediate,
        activated and act.kind == "gelu_tanh", activated and act.limit is not None,
        problem.x_dtype, torch.float32 if bias is None else bias.dtype,
    )  # fmt: skip
    # an alternate row is a gate or an up; otherwise all gates come before all ups
    apart = 2 if activated and act.interleaved else 1
    box, address = HALF * config.warpgroups, codes.data_ptr()
    maps = [
        cuda_launch.byte_tile_map(
            address + i * k, count * expert_rows // apart, k, apart * k, box, 128
        )
        for i in range(apart)
    ]
    second_map_row = 0 if apart == 2 else features if activated else box
    x_map = cuda_launch.byte_tile_map(rows.codes.data_ptr(), capacity, k, k, config.tokens, 128)
    scale_map = x_map
    if groups:
        shape = (rows.scale.shape[0], capacity, rows.scale.stride(0), config.tokens)
        scale_map = cuda_launch.float_row_map(rows.scale.data_ptr(), *shape)
    y, y_scale = result
    w_tiles = -(-features // config.features(activated))
    sms = _sm_count(codes.device.index)
    grid = config.grid(ids.numel(), problem.experts, features, activated, sms)
    _grouped_kernel(config, variant, codes.device.index).launch(
        grid,
        (
            maps[0],
            maps[-1],
            x_map,
            scale_map,
            cuda_launch.pointer(rows.scale),
            ctypes.c_int(1 if rows.group == ROW else 0),
            cuda_launch.pointer(w_scale),
            ctypes.c_int(w_scale.stride(0)),
            ctypes.c_int(1 if kind == ROW else 0),
            cuda_launch.pointer(bias),
            cuda_launch.pointer(y),
            cuda_launch.pointer(y_scale),
            ctypes.c_int(0 if y_scale is None or y_scale.dim() < 2 else y_scale.stride(0)),
            cuda_launch.pointer(found.pair_of_row),
            cuda_launch.pointer(found.tiles),
            cuda_launch.pointer(found.tile_count),
            cuda_launch.pointer(ids),
            ctypes.c_int(ids.element_size()),
            ctypes.c_int(ids.numel()),
            ctypes.c_int(problem.experts),
            ctypes.c_int(features),
            ctypes.c_int(apart),
            ctypes.c_int(1 if apart == 2 else features),
            ctypes.c_int(expert_rows),
            ctypes.c_int(expert_rows // apart),
            ctypes.c_int(second_map_row),
            ctypes.c_int(k),
            ctypes.c_int(w_tiles),
            ctypes.c_float(min_scale(GROUP128, problem.w_dtype, "activation")),
            ctypes.c_float(act.limit or 0.0),
            ctypes.c_float(act.alpha),
            ctypes.c_float(act.up_offset),
        ),
        # without a list of its own the first product waits before it loads anything
        overlap=(activated and not lists) or safe_to_prefetch(codes),
    )
    if lists or not activated:
        mark_synchronized(codes)


def _combined(products: Tensor, operands: ExpertOperands, found: _Sorted) -> Tensor:
    x = operands.x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    weights, vectors = operands.weights, x.shape[1] // _VECTOR
    threads = min(_THREADS, -(-vectors // 32) * 32)
    _combine_kernel(threads, x.dtype, x.device.index).launch(
        x.shape[0] * -(-vectors // threads),
        (
            cuda_launch.pointer(products),
            cuda_launch.pointer(found.row_of_pair),
            cuda_launch.pointer(weights),
            cuda_launch.pointer(y),
            ctypes.c_int(operands.ids.shape[1]),
            ctypes.c_int(vectors),
        ),
        overlap=True,
    )
    return y


@functools.cache
def _sm_count(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _grouped_kernel(config: GroupedConfig, variant: Variant, device: int) -> cuda_launch.Kernel:
    return cuda_launch.Kernel(
        grouped_source(config, variant),
        "grouped_gemm",
        block=config.threads,
        cluster=config.cluster if variant.activated else 1,
        shared_bytes=config.smem_bytes(variant.activated, variant.token_groups),
        device=torch.device("cuda", device),
    )


@functools.cache
def _pairs_kernel(variant: PairsVariant, shared: int, device: int) -> cuda_launch.Kernel:
    sizes = (variant.threads, variant.cluster, shared)
    return _small_kernel(pairs_source(variant), "sort_and_quantize", sizes, device)


@functools.cache
def _combine_kernel(threads: int, dtype: torch.dtype, device: int) -> cuda_launch.Kernel:
    return _small_kernel(combine_source(threads, dtype), "combine_rows", (threads, 1, 0), device)


def _small_kernel(
    source: str, name: str, sizes: tuple[int, int, int], device: int
) -> cuda_launch.Kernel:
    block, cluster, shared = sizes
    place = torch.device("cuda", device)
    return cuda_launch.Kernel(
        source, name, block=block, cluster=cluster, shared_bytes=shared, device=place
    )


BACKEND = MoeBackend(supports=supports, experts=experts, grouped=None)
