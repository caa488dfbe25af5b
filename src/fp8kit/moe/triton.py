"""The experts in Triton: any pair of scales, on NVIDIA GPUs from sm80, without a host sync.

Pairs are sorted by expert with torch's own kernels. One kernel then multiplies the gathered rows by
gates and ups, activates and quantizes. A second one multiplies the result by the down weights and
writes each row to the place of its pair. A third adds the rows of each token in their order. Rows
of pairs have the dtype of the input.

A product is tiled as in ``triton_gemm`` for as many rows as an expert has on average, but K is not
split, so the bits of a row depend on nothing but the row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fp8kit.dispatch.device import current
from fp8kit.formats import GROUP128, TENSOR, GroupShape, fp8_format, min_scale, scale_shape
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MatmulProblem, m_bucket
from fp8kit.matmul.triton_gemm import (
    Device,
    TritonTile,
    choose_tile,
    decoded,
    device_facts,
    scale_strides,
)
from fp8kit.moe import self_check
from fp8kit.moe.loop import Input, quantized_input
from fp8kit.moe.pairs import SortedPairs, sorted_pairs
from fp8kit.moe.problem import (
    ExpertOperands,
    ExpertsProblem,
    ExpertWeights,
    GroupedOperands,
    GroupedProblem,
    MoeBackend,
)
from fp8kit.moe.triton_kernels import activated_kernel, combine_kernel, grouped_kernel
from fp8kit.quantizers.triton_encode import INTERPRETED, division_of
from fp8kit.runtime.triton_launch import launch

_FEATURES = GROUP128.cols  # of a tile of activations: the group of the second product
_MOST_ROWS = 64  # of a tile: gathered rows, and two sums, leave no registers for more
_STAGES = 4
_RESERVED = 4096  # bytes of shared memory that pipeline stages cannot have
_SUMMED = 512
_SHARED = ("FORM", "BLOCK_M", "BLOCK_N", "BLOCK_K")


class Launch(NamedTuple):
    """A kernel under ``triton.jit`` with the arguments of ``launch``."""

    kernel: Any
    blocks: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self.constants | self.options


class Rows(NamedTuple):
    """The rows that a product multiplies: codes and scales, or 16-bit values without a group."""

    data: Tensor
    scale: Tensor | None
    group: GroupShape | None


def supports(problem: ExpertsProblem | GroupedProblem) -> str | None:
    """Return what the kernels lack for a problem, or how they failed on this GPU, if anything."""
    if isinstance(problem, GroupedProblem):
        sizes = (problem.experts, problem.n, problem.k)
        lacking = triton_gemm.supports(_dense(problem))
    else:
        sizes = (problem.experts, problem.hidden, problem.intermediate)
        lacking = triton_gemm.supports(_first(problem)) or triton_gemm.supports(_second(problem))
    if 0 in sizes:
        return "multiplies by weights that are not empty"
    if lacking or not torch.cuda.is_available():
        return lacking
    return self_check.failure(problem, grouped if isinstance(problem, GroupedProblem) else experts)


def experts(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Compute a layer of experts."""
    operands = operands.placed(problem.experts)
    with current(operands.x.device):
        pairs, facts = sorted_pairs(operands.ids, problem.experts), device_facts(operands.x.device)
        source = quantized_input(operands, problem)
        h = empty_intermediate(operands, problem)
        first = activated_launch(operands, problem, source, pairs, h, facts)
        launch(first.kernel, first.blocks, *first.arguments, **first.named)
        count = operands.ids.numel()
        rows = operands.x.new_empty(count, problem.hidden)
        product = second_product(problem, count)
        second = product_launch(product, h, operands.w2, pairs.offsets, pairs.order, rows, facts)
        launch(second.kernel, second.blocks, *second.arguments, **second.named)
        return _combined(rows, operands, problem)


def grouped(operands: GroupedOperands, problem: GroupedProblem) -> Tensor:
    """Multiply rows that are sorted by expert."""
    x = operands.x
    with current(x.device):
        y = torch.zeros(x.shape[0], problem.n, dtype=problem.out_dtype, device=x.device)
        # whatever the offsets are, no row outside of x is read or written
        offsets = operands.offsets.long().clamp(0, x.shape[0]).cummax(0).values
        each = m_bucket(-(-problem.m // problem.experts))
        product = Product(_dense(problem), each, x.shape[0])
        rows = Rows(x, operands.x_scale, problem.x_group)
        facts = device_facts(x.device)
        made = product_launch(product, rows, operands.w, offsets, None, y, facts)
        launch(made.kernel, made.blocks, *made.arguments, **made.named)
    return y


@dataclass(frozen=True, slots=True)
class Product:
    """A product of rows by their experts' weights.

    ``dense`` describes the product of one row, and ``rows_each`` is how many of the ``rows`` an
    expert has on average.
    """

    dense: MatmulProblem
    rows_each: int
    rows: int

    def tiles(self, experts: int, rows: int) -> int:
        """Return the most tiles of ``rows`` rows that any distribution of rows can need."""
        used = min(experts, self.rows)
        return (self.rows - used) // rows + used


@functools.lru_cache(maxsize=4096)
def cut_product(dense: MatmulProblem, rows_each: int, device: Device, weights: int) -> TritonTile:
    """Choose the tile of a grouped product.

    ``weights`` is 0 for a plain product. For the first product of a layer it is the number of
    weight rows per feature, 1 or 2, and a tile has the features of one group of the second product.
    """
    problem = replace(dense, m=rows_each)
    tile = choose_tile(problem, device)
    # wgmma reads operands from shared memory; elsewhere operands or partial sums need registers
    most = _MOST_ROWS if (problem.capability or (9, 0))[0] == 9 else _MOST_ROWS // 2
    rows, cols, warps = min(tile.rows, most), tile.cols, tile.warps
    if weights:
        cols, warps = _FEATURES, 4 * weights
    stage = tile.depth * (max(weights, 1) * cols + rows * (2 if problem.x_group is None else 1))
    room = (device.shared - _RESERVED) // stage
    stages = 2 if problem.k % 16 else max(2, min(room, -(-problem.k // tile.depth), _STAGES))
    return TritonTile(rows, cols, tile.depth, 1, 1, warps, stages)


def second_product(problem: ExpertsProblem, rows: int) -> Product:
    """Describe the second product of a layer, of ``rows`` pairs."""
    return Product(_second(problem), _rows_each(problem), rows)


def empty_intermediate(operands: ExpertOperands, problem: ExpertsProblem) -> Rows:
    """Allocate the input of the second product, a row for each pair; a given scale is used."""
    group, x = problem.intermediate_group, operands.x
    shape = (operands.ids.numel(), problem.intermediate)
    if group is None:
        return Rows(x.new_empty(shape), None, None)
    scale = operands.w2.input_scale
    if scale is None:
        scale = x.new_empty(scale_shape(shape, group), dtype=torch.float32)
    return Rows(x.new_empty(shape, dtype=problem.w_dtype), scale, group)


def activated_launch(
    operands: ExpertOperands,
    problem: ExpertsProblem,
    source: Input,
    pairs: SortedPairs,
    h: Rows,
    facts: Device,
) -> Launch:
    """Describe the first product with its activation, from ``source`` into ``h``.

    It writes ``h`` in the order of ``pairs``.
    """
    w, act, inner = operands.w13, problem.activation, problem.intermediate
    product = Product(_first(problem), _rows_each(problem), operands.ids.numel())
    tile = cut_product(product.dense, product.rows_each, facts, 2 if act.gated else 1)
    tiles = product.tiles(problem.experts, tile.rows)
    codes, strides = _operands(w, Rows(source.data, source.scale, problem.x_group), product.dense)
    floor = min_scale(GROUP128, problem.w_dtype, "activation")
    written = h.data if h.group is None else h.data.view(torch.uint8)
    arguments = (
        *codes, w.bias, written, h.scale, pairs.order, pairs.offsets,
        _tile_starts(pairs.offsets, tile.rows), problem.experts, tiles, inner, problem.hidden,
        *strides, floor, act.limit or 0.0, act.alpha, act.up_offset,
    )  # fmt: skip
    constants = product_constants(product.dense, tile, problem.experts)
    constants |= intermediate_constants(problem) | {"FAN": source.fan}
    blocks = tiles * triton.cdiv(inner, _FEATURES)
    return Launch(activated_kernel, blocks, arguments, constants, launch_options(tile))


def product_launch(
    product: Product,
    rows: Rows,
    w: ExpertWeights,
    offsets: Tensor,
    places: Tensor | None,
    y: Tensor,
    facts: Device,
) -> Launch:
    """Describe the product of rows that are sorted by expert, into ``y``.

    ``places`` has for each row the row of its result in the contiguous ``y``; ``None``: the same.
    """
    count, n, k = w.data.shape
    tile = cut_product(product.dense, product.rows_each, facts, 0)
    tiles = product.tiles(count, tile.rows)
    codes, strides = _operands(w, rows, product.dense)
    arguments = (
        *codes, w.bias, y, places, offsets, _tile_starts(offsets, tile.rows), count, tiles, n,
        k, *strides,
    )  # fmt: skip
    constants = product_constants(product.dense, tile, count)
    blocks = tiles * triton.cdiv(n, tile.cols)
    return Launch(grouped_kernel, blocks, arguments, constants, launch_options(tile))


def _combined(rows: Tensor, operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Add the rows of each token."""
    y = torch.empty_like(operands.x, memory_format=torch.contiguous_format)
    weights = None if problem.router_weight_on_input else operands.weights.contiguous()
    pointers, hidden = (rows, operands.ids.contiguous(), weights, y), problem.hidden
    blocks = y.shape[0] * triton.cdiv(hidden, _SUMMED)
    launch(combine_kernel, blocks, *pointers, hidden, TOP_K=problem.top_k, BLOCK_H=_SUMMED)
    return y


def product_constants(dense: MatmulProblem, tile: TritonTile, experts: int) -> dict[str, Any]:
    """Return the constants that both product kernels are compiled with."""
    found = triton_gemm.product_constants(dense, tile)
    return {name: found[name] for name in _SHARED} | {"SEARCH": (experts - 1).bit_length()}


def intermediate_constants(problem: ExpertsProblem) -> dict[str, Any]:
    """Return the constants of ``activated_kernel`` that describe its activation and result."""
    group, act = problem.intermediate_group, problem.activation
    scales = "none" if group is None else "static" if group == TENSOR else "group"
    floor = min_scale(GROUP128, problem.w_dtype, "activation")
    return {
        "ACT": act.kind, "GATED": act.gated, "INTERLEAVED": act.interleaved,
        "LIMITED": act.limit is not None, "SCALES": scales,
        "DIVISION": division_of(GROUP128, floor, None, problem.scale_rounding),
        "FP8_MAX": fp8_format(problem.w_dtype).max,
    }  # fmt: skip


def launch_options(tile: TritonTile) -> dict[str, Any]:
    """Return the compiler's options for one tile."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def _tile_starts(offsets: Tensor, rows: int) -> Tensor:
    """Return the first tile of each expert, then the number of all tiles, int32 ``[E + 1]``."""
    tiles = (offsets.diff() + (rows - 1)) // rows
    return torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).int()


def _operands(
    w: ExpertWeights, rows: Rows, dense: MatmulProblem
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Return weight, rows and their scales as the kernels take them, and their strides."""
    weight = w.data if w.data.stride(2) == 1 else w.data.contiguous()
    x = rows.data if rows.data.stride(1) == 1 else rows.data.contiguous()
    if INTERPRETED.value or decoded(dense):
        weight = weight.view(torch.uint8)
        x = x if dense.x_group is None else x.view(torch.uint8)
    w_scales = (0, 0) if dense.w_group == TENSOR else w.scale.stride()[1:]
    x_scales = scale_strides(rows.scale, rows.group)
    strides = (*weight.stride(), *x.stride(), w.scale.stride(0), *w_scales, *x_scales)
    return (weight, x, w.scale, rows.scale), strides


def _rows_each(problem: ExpertsProblem) -> int:
    return m_bucket(-(-problem.m * problem.top_k // problem.experts))


def _first(p: ExpertsProblem) -> MatmulProblem:
    columns = p.activation.columns(p.intermediate)
    return _of_one_row(p, (columns, p.hidden), p.x_group, torch.float32)


def _second(p: ExpertsProblem) -> MatmulProblem:
    return _of_one_row(p, (p.hidden, p.intermediate), p.intermediate_group, p.x_dtype)


def _dense(p: GroupedProblem) -> MatmulProblem:
    return _of_one_row(p, (p.n, p.k), p.x_group, p.out_dtype)


def _of_one_row(
    p: ExpertsProblem | GroupedProblem,
    shape: tuple[int, int],
    x_group: GroupShape | None,
    out_dtype: torch.dtype,
) -> MatmulProblem:
    codes = isinstance(p, ExpertsProblem) and x_group is not None
    return MatmulProblem(
        1, *shape, x_group, p.w_group, p.w_dtype if codes else p.x_dtype, p.w_dtype, out_dtype,
        False, "precise", False, p.device_type, p.capability,
    )  # fmt: skip


BACKEND = MoeBackend(supports=supports, experts=experts, grouped=grouped)
