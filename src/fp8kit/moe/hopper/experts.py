"""The layer of experts on Hopper in a few kernels, chained by programmatic dependent launch.

Pairs of a token and an expert are sorted, and tokens are quantized into rows in that order
(``pairs.cu``; many pairs are sorted by a kernel of their own). One grouped GEMM multiplies them by
gates and ups, activates and quantizes. A second one multiplies the result by the down weights and
writes each row to the place of its pair (``grouped_gemm.cu``; both are one kernel where
products are short).
The rows of each token are added in their order (``combine.cu``). A few tokens have two kernels of
their own (``dot_products.py``).

Nothing waits for the host. Rows of pairs have the dtype of the input. The bits of a token's result
depend on nothing but the token, and on whether it is one of few.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape, min_scale
from fp8kit.matmul.hopper.tile_config import round_up
from fp8kit.matmul.tma_operands import ALIGN
from fp8kit.moe import self_check
from fp8kit.moe.hopper import dot_products
from fp8kit.moe.hopper.launches import (
    SCALES,
    Call,
    Launch,
    Rows,
    Sorted,
    gathers,
    has_few_pairs,
    integers,
    pointers,
    row_pitch,
)
from fp8kit.moe.hopper.products import multiply
from fp8kit.moe.hopper.source import PairsVariant, combine_source, pairs_source
from fp8kit.moe.hopper.tile_config import (
    HALF,
    LEAST_WIDE,
    MOST_EXPERTS,
    PAIRS_OF_BLOCK,
    SHORT,
    SORT_CLUSTER,
    SORT_THREADS,
    THREADS,
    VECTOR,
    GroupedConfig,
    choose,
)
from fp8kit.moe.problem import (
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedProblem,
    MoeBackend,
)
from fp8kit.quantizers.scale_layout import pitch
from fp8kit.runtime import cuda_launch, nvrtc

_MOST_PAIRS = 2**21  # an expert's tiles of 64 are counted in 15 bits
_CHECKED_TOKENS = 97  # so many that pairs are not few
_CHECKED_FEW = 2  # so few that pairs have narrow tiles, or are computed by dot products
# rows of a token that a thread loads together, with few pairs and with many: more hide latency,
# fewer leave registers for as many threads as an SM may have
_AT_ONCE = {True: 8, False: 2}
_THREADS_PER_SM, _BLOCKS_PER_SM = 2048, 32
_LONG = 4096  # K of a product beside which its epilogue is short
_MOST_VECTORS = 8  # of 16 bytes of a token that a thread holds


def supports(problem: ExpertsProblem | GroupedProblem) -> str | None:
    """Return what the kernels lack for a problem, or how they failed on this GPU, if anything."""
    if isinstance(problem, GroupedProblem):
        return "computes whole layers"
    lacking = _lacking(problem)
    if lacking or not torch.cuda.is_available():
        return lacking
    if dot_products.serves(problem):
        return self_check.failure(problem, dot_products.experts, min(problem.m, _CHECKED_FEW))
    failure = (
        self_check.failure(problem, experts)
        or self_check.failure(problem, experts, _CHECKED_FEW)
        or self_check.failure(problem, _in_large_tiles, _CHECKED_TOKENS)
    )
    each = problem.m * problem.top_k / problem.experts  # or less, as m is rounded up
    if failure or not wide_tiles(problem) or each < LEAST_WIDE:
        return failure
    return self_check.failure(problem, _in_wide_tiles, _CHECKED_TOKENS)


def _in_large_tiles(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    return experts(operands, problem, choose(_MOST_PAIRS, 1))


def _in_wide_tiles(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    return experts(operands, problem, choose(LEAST_WIDE, 1, wide_tiles=1))


def _lacking(problem: ExpertsProblem) -> str | None:
    act, inner = problem.activation, problem.intermediate
    if problem.capability is None or problem.capability[0] != 9:
        return "written for sm90 (wgmma)"
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return "takes bf16 and fp16"
    if problem.w_dtype != torch.float8_e4m3fn:
        return "multiplies e4m3fn codes only"
    if problem.x_group not in SCALES or problem.w_group not in (ROW, TENSOR, BLOCK):
        return f"has no {problem.x_group} by {problem.w_group} scales"
    if problem.x_group == TENSOR and not problem.static_input:
        return "takes scales per tensor only if they are given"
    if problem.scale_rounding != "exact":
        return f"rounds no scales {problem.scale_rounding}"
    if not act.gated or act.kind not in ("silu", "gelu_tanh"):
        return f"has no {'' if act.gated else 'ungated '}{act.kind}"
    if act.interleaved and problem.w_group == BLOCK:
        return "has no blocks of interleaved gates and ups"
    blocks_alone = problem.x_group != GROUP128 or problem.static_intermediate
    if problem.w_group == BLOCK and blocks_alone:
        return "has blocks of weights for tokens in groups"
    if problem.m * problem.top_k > _MOST_PAIRS:
        return f"takes at most {_MOST_PAIRS} pairs"
    if problem.router_weight_on_input:
        return "applies the router's weights to the result"
    if not 0 < problem.experts <= MOST_EXPERTS:
        return f"takes 1 to {MOST_EXPERTS} experts"
    if not problem.hidden or not inner:
        return "takes weights that are not empty"
    if problem.hidden % ALIGN or inner % (HALF if problem.w_group == BLOCK else ALIGN):
        return f"needs H and I in multiples of {ALIGN}, with blocks I of {HALF}"
    if problem.hidden > VECTOR * THREADS * _MOST_VECTORS:
        return f"takes tokens of at most {VECTOR * THREADS * _MOST_VECTORS} values"
    return nvrtc.missing()


def experts(
    operands: ExpertOperands, problem: ExpertsProblem, config: GroupedConfig | None = None
) -> Tensor:
    """Compute a layer of experts; ``config`` replaces the choice by the number of pairs."""
    # copies, if any, come first: all later kernels start before their predecessors have ended
    operands = _loadable(operands)
    if config is None and dot_products.serves(problem):
        return dot_products.experts(operands, problem)
    x, pairs = operands.x, operands.ids.numel()
    config = config or _chosen(pairs, problem)
    tiles = config.token_tiles(pairs, problem.experts)
    shape, given = (tiles * config.tokens, problem.hidden), operands.w13.input_scale
    with torch.cuda.device(x.device):
        call = Call(operands, problem, config, _empty_sorted(pairs, *shape[:1], tiles, x.device))
        rows = _empty_rows(shape, problem.x_group, given, x.device)
        if gathers(call):
            rows = rows._replace(codes=torch.empty(x.shape, dtype=torch.uint8, device=x.device))
        shape, given = (shape[0], problem.intermediate), operands.w2.input_scale
        h = _empty_rows(shape, problem.intermediate_group, given, x.device)
        products, y = x.new_empty(pairs, problem.hidden), x.new_empty(x.shape)
        launches = (
            *_quantization(call, rows),
            *multiply(call, rows, h, products),
            _sum(call, products, y),
        )
        # Products may read routes before the previous kernel has ended: every block of the sort
        # waits for all earlier kernels, and only then lets the next kernel start.
        for kernel, blocks, arguments in launches:
            kernel.launch(blocks, arguments, overlap=True)
    return y


def _loadable(operands: ExpertOperands) -> ExpertOperands:
    """Return operands in layouts that the kernels load; those that already fit are not copied."""
    x = operands.x
    apart = x.shape[0] > 1 and x.stride(0) * x.element_size() % ALIGN
    x = x.contiguous() if x.stride(1) != 1 or x.data_ptr() % ALIGN or apart else x
    ids, weights = operands.ids.contiguous(), operands.weights.contiguous()
    return ExpertOperands(
        x, _loadable_weights(operands.w13), _loadable_weights(operands.w2), ids, weights
    )


def _loadable_weights(w: ExpertWeights) -> ExpertWeights:
    data = w.data
    if not data.is_contiguous() or data.data_ptr() % ALIGN:
        data = data.clone(memory_format=torch.contiguous_format)
    bias = None if w.bias is None else w.bias.contiguous()
    # a single scale per tensor may be one number, expanded to all experts
    scale = w.scale if w.scale.shape[1:] == (1, 1) else w.scale.contiguous()
    return ExpertWeights(data, scale, bias, w.input_scale)


def _chosen(pairs: int, problem: ExpertsProblem) -> GroupedConfig:
    long_features = problem.hidden if problem.intermediate > SHORT else 0
    many = _whole_blocks(problem)
    return choose(pairs, problem.experts, many, wide_tiles(problem), long_features)


def _whole_blocks(problem: ExpertsProblem) -> bool:
    """Return whether the 128 gates of a tile, and its ups, each lie in one scale block."""
    return problem.w_group != BLOCK or not problem.intermediate % BLOCK.rows


def wide_tiles(problem: ExpertsProblem) -> int:
    """Return up to how many tiles an expert may have for tiles of 144 tokens to beat those of 128.

    In the epilogue of the first product both warpgroups of such a tile wait for each other, which
    only a long K hides.
    """
    if problem.w_group == BLOCK or problem.x_group == GROUP128:  # promotions take longer
        return 0
    if problem.hidden < _LONG:
        return 0
    return 2 if problem.intermediate >= _LONG else 1


def _empty_sorted(pairs: int, rows: int, tiles: int, device: torch.device) -> Sorted:
    # one allocation; tiles come first, as they are read as 16-byte vectors
    whole = torch.empty(4 * tiles + pairs + rows + 3, dtype=torch.int32, device=device)
    listed, rest = whole[: 4 * tiles], whole[4 * tiles :]
    return Sorted(rest[:pairs], rest[pairs:-3], listed, rest[-3:])


def _empty_rows(
    shape: tuple[int, int], group: GroupShape | None, given: Tensor | None, device: torch.device
) -> Rows:
    assert group is not None
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    if given is not None:
        return Rows(codes, given, TENSOR)
    count, features = shape
    size = (count,) if group == ROW else (-(-features // group.cols), pitch(count))
    return Rows(codes, torch.empty(size, dtype=torch.float32, device=device), group)


def _quantization(call: Call, rows: Rows) -> list[Launch]:
    """Sort the pairs, and quantize each token into the rows of its pairs."""
    (x, _, _, ids, _), problem, config, found = call
    tokens, vectors = x.shape[0], problem.hidden // VECTOR
    how = (SCALES[rows.group], config.tokens, x.dtype)
    sizes = (gathers(call), -(-vectors // THREADS), *how)
    variants = [PairsVariant(THREADS, 1, int(has_few_pairs(call)), True, *sizes)]
    if not has_few_pairs(call):
        cluster = 1 if ids.numel() <= PAIRS_OF_BLOCK else SORT_CLUSTER
        variants.insert(0, PairsVariant(SORT_THREADS, cluster, 2, False, False, 1, *how))
    arguments = (
        *pointers(ids),
        *integers(ids.element_size(), ids.numel(), problem.top_k, problem.experts),
        *pointers(found.row_of_pair, found.pair_of_row, found.tiles, found.tile_count, x),
        ctypes.c_longlong(x.stride(0) * x.element_size()),
        *integers(vectors),
        *pointers(rows.codes, rows.scale),
        *integers(row_pitch(rows)),
        *pointers(rows.scale if rows.group == TENSOR else None),
        ctypes.c_float(min_scale(rows.group, problem.w_dtype, "activation")),
    )
    launches = []
    for variant in variants:
        counters = (variant.threads // 32 + 2) * problem.experts
        shared = 4 * (counters if variant.sorts == 2 else problem.top_k)
        kernel = _pairs_kernel(variant, shared, x.device.index)
        blocks = tokens if variant.quantizes else variant.cluster
        launches.append(Launch(kernel, blocks, arguments))
    return launches


def _sum(call: Call, products: Tensor, y: Tensor) -> Launch:
    """Add the rows of each token."""
    vectors = y.shape[1] // VECTOR
    sizes = combine_sizes(vectors, has_few_pairs(call))
    arguments = (
        *pointers(products, call.found.row_of_pair, call.operands.weights, y),
        *integers(call.problem.top_k, vectors),
    )
    pair_bytes = 8
    kernel = _combine_kernel(*sizes, pair_bytes * call.problem.top_k, y.dtype, y.device.index)
    return Launch(kernel, y.shape[0] * -(-vectors // sizes[0]), arguments)


def combine_sizes(vectors: int, few_pairs: bool) -> tuple[int, int, int]:
    """Return a block's threads, the rows that each loads together, and an SM's least blocks."""
    threads = min(THREADS, round_up(vectors, 32))
    blocks = 1 if few_pairs else min(_THREADS_PER_SM // threads, _BLOCKS_PER_SM)
    return threads, _AT_ONCE[few_pairs], blocks


@functools.cache
def _pairs_kernel(variant: PairsVariant, shared: int, device: int) -> cuda_launch.Kernel:
    sizes, place = (variant.threads, variant.cluster, shared), torch.device("cuda", device)
    return cuda_launch.Kernel(pairs_source(variant), "sort_and_quantize", *sizes, place)


@functools.cache
def _combine_kernel(
    threads: int, at_once: int, blocks_per_sm: int, shared: int, dtype: torch.dtype, device: int
) -> cuda_launch.Kernel:
    sizes, place = (threads, 1, shared), torch.device("cuda", device)
    source = combine_source(threads, at_once, blocks_per_sm, dtype)
    return cuda_launch.Kernel(source, "combine_rows", *sizes, place)


BACKEND = MoeBackend(supports=supports, experts=experts, grouped=None)
