"""The experts in Triton: any pair of scales, on NVIDIA GPUs from sm80, without a host sync.

Pairs are sorted by expert with torch's own kernels. One kernel then multiplies the gathered rows by
gates and ups, activates and quantizes; one multiplies the result, and puts each row where its pair
belongs; one adds the rows of each token in their order. Rows of pairs have the dtype of the input.

The cut of a product is that of ``triton_gemm`` for as many rows as an expert has on average, with
one sum along K: the bits of a row depend on nothing but the row.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fp8kit.formats import TENSOR, GroupShape, fp8_format, min_scale, scale_shape
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MatmulProblem, m_bucket
from fp8kit.matmul.triton_gemm import Device, TritonTile, choose_tile, decoded, device_facts
from fp8kit.moe.loop import quantized_input
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

_FEATURES = 128  # of a tile of activations: the group of the second product
_MOST_ROWS = 64  # of such a tile, which holds two sums
_STAGES = 4
_RESERVED = 4096  # bytes of shared memory that the ring cannot have
_SUMMED = 512
_SHARED = (
    "W_KIND", "X_KIND", "W_ROWS", "W_COLS", "X_ROWS", "X_COLS", "W_FORMAT", "X_FORMAT", "DTYPE",
    "NATIVE", "FAST", "BLOCK_M", "BLOCK_N", "BLOCK_K", "EVEN_K",
)  # fmt: skip


def supports(problem: ExpertsProblem | GroupedProblem) -> str | None:
    """Return what the kernels lack for a problem, if anything."""
    products = (
        [_first(problem), _second(problem)]
        if isinstance(problem, ExpertsProblem)
        else [_dense(problem)]
    )
    for product in products:
        # a single row: how many there are does not matter here
        reason = triton_gemm.supports(product)
        if reason is not None:
            return reason
    return None


def experts(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Compute a layer of experts."""
    x, ids = operands.x, operands.ids
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        pairs = sorted_pairs(ids, problem.experts)
        h, h_scale = _activated(operands, problem, pairs)
        group = problem.intermediate_group
        second = _Product(_second(problem), _rows_each(problem), ids.numel())
        rows = torch.empty(ids.numel(), problem.hidden, dtype=problem.x_dtype, device=x.device)
        _multiply(second, (h, h_scale, group), operands.w2, pairs.offsets, rows, pairs.order)
        weights = None if problem.router_weight_on_input else operands.weights.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        blocks = x.shape[0] * triton.cdiv(problem.hidden, _SUMMED)
        sizes = {"TOP_K": problem.top_k, "BLOCK_H": _SUMMED}
        launch(combine_kernel, blocks, rows, ids.contiguous(), weights, y, problem.hidden, **sizes)
    return y


def grouped(operands: GroupedOperands, problem: GroupedProblem) -> Tensor:
    """Multiply rows that lie sorted by expert."""
    x, scale = operands.x, operands.x_scale
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        y = torch.zeros(x.shape[0], problem.n, dtype=problem.out_dtype, device=x.device)
        # whatever the offsets are, no row outside of x is read or written
        offsets = operands.offsets.long().clamp(0, x.shape[0]).cummax(0).values
        each = m_bucket(-(-problem.m // problem.experts))
        product = _Product(_dense(problem), each, x.shape[0])
        _multiply(product, (x, scale, problem.x_group), operands.w, offsets, y, None)
    return y


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of rows by their experts' weights.

    Args:
        dense: describes the product of one row.
        rows_each: how many rows an expert has on average.
        rows: how many there are.
    """

    dense: MatmulProblem
    rows_each: int
    rows: int

    def tile(self, device: torch.device, weights: int) -> TritonTile:
        """Cut it; ``weights`` are those that a program multiplies by at once, 0 for a plain one."""
        return cut_product(self.dense, self.rows_each, device_facts(device), weights)

    def tiles(self, experts: int, rows: int) -> int:
        """Return how many tiles of so many rows there can be, however rows are distributed."""
        used = min(experts, self.rows)
        return (self.rows - used) // rows + used


@functools.lru_cache(maxsize=4096)
def cut_product(dense: MatmulProblem, rows_each: int, device: Device, weights: int) -> TritonTile:
    """Cut a grouped product.

    Args:
        dense: describes the product of one row.
        rows_each: how many rows an expert has on average.
        device: what it runs on.
        weights: 0 for a plain product; else the features of a tile are a group of the second
            product, made of one weight or of two.
    """
    problem = _with_rows(dense, rows_each)
    tile = choose_tile(problem, device)
    rows, cols, warps = tile.rows, tile.cols, tile.warps
    if weights:
        rows, cols = min(rows, _MOST_ROWS), _FEATURES
        warps = 8 if rows * weights > 32 else 4
    stage = tile.depth * (max(weights, 1) * cols + rows * (2 if problem.x_group is None else 1))
    room = (device.shared - _RESERVED) // stage
    stages = 2 if problem.k % 16 else max(2, min(room, -(-problem.k // tile.depth), _STAGES))
    return TritonTile(rows, cols, tile.depth, 1, 1, warps, stages)


def _activated(
    operands: ExpertOperands, problem: ExpertsProblem, pairs: SortedPairs
) -> tuple[Tensor, Tensor | None]:
    """Compute what the second product reads, a row for each pair in the order of ``pairs``."""
    source, w, act = quantized_input(operands, problem), operands.w13, problem.activation
    count, inner = operands.ids.numel(), problem.intermediate
    product = _Product(_first(problem), _rows_each(problem), count)
    tile = product.tile(operands.x.device, 2 if act.gated else 1)
    constants = intermediate_constants(problem)
    kind = problem.x_dtype if constants["SCALES"] == "none" else torch.uint8
    h = torch.empty(count, inner, dtype=kind, device=operands.x.device)
    scale = operands.w2.input_scale
    if constants["SCALES"] == "group":
        groups = scale_shape((count, inner), GroupShape(1, _FEATURES))
        scale = torch.empty(groups, dtype=torch.float32, device=h.device)
    tiles = product.tiles(problem.experts, tile.rows)
    pointers = (*_codes(w, source.data, product.dense), w.scale, source.scale, w.bias, h, scale)
    launch(
        activated_kernel, tiles * triton.cdiv(inner, _FEATURES),
        *pointers, pairs.order, pairs.offsets, _tile_starts(pairs.offsets, tile.rows),
        problem.experts, tiles, inner, problem.hidden,
        *_strides(w, source.data, source.scale, problem.x_group, problem.w_group),
        min_scale(GroupShape(1, _FEATURES), problem.w_dtype, "activation"),
        act.limit or 0.0, act.alpha, act.up_offset,
        **product_constants(product.dense, tile, problem.experts), **constants, FAN=source.fan,
        **launch_options(tile),
    )  # fmt: skip
    return (h if kind != torch.uint8 else h.view(problem.w_dtype)), scale


def _multiply(
    product: _Product,
    rows: tuple[Tensor, Tensor | None, GroupShape | None],
    w: ExpertWeights,
    offsets: Tensor,
    y: Tensor,
    places: Tensor | None,
) -> None:
    """Multiply rows, with their scales and group, into ``y`` at ``places``."""
    (x, x_scale, x_group), (count, n, k) = rows, w.data.shape
    tile = product.tile(x.device, 0)
    tiles = product.tiles(count, tile.rows)
    launch(
        grouped_kernel, tiles * triton.cdiv(n, tile.cols),
        *_codes(w, x, product.dense), w.scale, x_scale, w.bias, y, places,
        offsets, _tile_starts(offsets, tile.rows), count, tiles, n, k,
        *_strides(w, x, x_scale, x_group, product.dense.w_group),
        **product_constants(product.dense, tile, count), **launch_options(tile),
    )  # fmt: skip


def product_constants(dense: MatmulProblem, tile: TritonTile, experts: int) -> dict[str, object]:
    """Give what both kernels of products compile in."""
    found = triton_gemm.product_constants(dense, tile)
    return {name: found[name] for name in _SHARED} | {"SEARCH": (experts - 1).bit_length()}


def intermediate_constants(problem: ExpertsProblem) -> dict[str, object]:
    """Give what ``activated_kernel`` compiles in about its result."""
    group, act = problem.intermediate_group, problem.activation
    scales = "none" if group is None else "static" if group == TENSOR else "group"
    rounding = "up" if problem.scale_rounding == "up" else "exact"
    floor = min_scale(GroupShape(1, _FEATURES), problem.w_dtype, "activation")
    return {
        "ACT": act.kind, "GATED": act.gated, "INTERLEAVED": act.interleaved,
        "LIMITED": act.limit is not None, "SCALES": scales,
        "DIVISION": division_of(GroupShape(1, _FEATURES), floor, None, rounding),
        "FP8_MAX": fp8_format(problem.w_dtype).max,
    }  # fmt: skip


def launch_options(tile: TritonTile) -> dict[str, object]:
    """Return the compiler's options for one cut."""
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def _tile_starts(offsets: Tensor, rows: int) -> Tensor:
    """Return where each expert's tiles begin, and behind them how many there are, as int32."""
    tiles = (offsets.diff() + (rows - 1)) // rows
    return torch.nn.functional.pad(tiles.cumsum(0), (1, 0)).int()


def _codes(w: ExpertWeights, x: Tensor, dense: MatmulProblem) -> tuple[Tensor, Tensor]:
    """Return weight and rows as the kernels take them."""
    weight = w.data if w.data.stride(2) == 1 else w.data.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    if INTERPRETED.value or decoded(dense):
        weight = weight.view(torch.uint8)
        x = x if dense.x_group is None else x.view(torch.uint8)
    return weight, x


def _strides(
    w: ExpertWeights,
    x: Tensor,
    x_scale: Tensor | None,
    x_group: GroupShape | None,
    w_group: GroupShape,
) -> tuple[int, ...]:
    weight = w.data.stride() if w.data.stride(2) == 1 else w.data.contiguous().stride()
    rows = x.stride() if x.stride(1) == 1 else (x.shape[1], 1)
    w_scales = (0, 0) if w_group == TENSOR else w.scale.stride()[1:]
    unscaled = x_scale is None or x_group == TENSOR
    x_scales = (0, 0) if unscaled or x_scale is None else x_scale.stride()
    return (*weight, *rows, w.scale.stride(0), *w_scales, *x_scales)


def _rows_each(problem: ExpertsProblem) -> int:
    return m_bucket(-(-problem.m * problem.top_k // problem.experts))


def _with_rows(dense: MatmulProblem, rows: int) -> MatmulProblem:
    return MatmulProblem(
        rows, dense.n, dense.k, dense.x_group, dense.w_group, dense.x_dtype, dense.w_dtype,
        dense.out_dtype, False, "precise", False, dense.device_type, dense.capability,
    )  # fmt: skip


def _first(p: ExpertsProblem) -> MatmulProblem:
    kind = p.x_dtype if p.x_group is None else p.w_dtype
    columns = p.activation.columns(p.intermediate)
    return MatmulProblem(
        1, columns, p.hidden, p.x_group, p.w_group, kind, p.w_dtype, torch.float32, False,
        "precise", False, p.device_type, p.capability,
    )  # fmt: skip


def _second(p: ExpertsProblem) -> MatmulProblem:
    kind = p.x_dtype if p.x_group is None else p.w_dtype
    return MatmulProblem(
        1, p.hidden, p.intermediate, p.intermediate_group, p.w_group, kind, p.w_dtype, p.x_dtype,
        False, "precise", False, p.device_type, p.capability,
    )  # fmt: skip


def _dense(p: GroupedProblem) -> MatmulProblem:
    return MatmulProblem(
        1, p.n, p.k, p.x_group, p.w_group, p.x_dtype, p.w_dtype, p.out_dtype, False,
        "precise", False, p.device_type, p.capability,
    )  # fmt: skip


BACKEND = MoeBackend(supports=supports, experts=experts, grouped=grouped)
