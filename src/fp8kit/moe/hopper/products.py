"""The launches of both products: one kernel for both, or one for each."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8kit.formats import GROUP128, ROW, min_scale
from fp8kit.matmul.hopper.tile_config import TILE_K, round_up
from fp8kit.moe.hopper.launches import (
    Call,
    Launch,
    Rows,
    gathers,
    has_few_pairs,
    integers,
    layer_variant,
    pointers,
    row_pitch,
)
from fp8kit.moe.hopper.source import Variant, grouped_source
from fp8kit.moe.hopper.tile_config import GroupedConfig, Products
from fp8kit.moe.problem import ExpertWeights
from fp8kit.runtime import cuda_launch


def multiply(call: Call, rows: Rows, h: Rows, products: Tensor) -> list[Launch]:
    """Return the launches of both products, with the activation and quantization between them.

    They write the intermediate to ``h``, and the rows of pairs, ``[M * k, H]``, to ``products``.
    """
    if call.config.one_kernel(has_few_pairs(call), call.problem.intermediate):
        return [_product(call, rows, h, products, Products.BOTH)]
    first = call._replace(config=replace(call.config, narrow=False))
    return [
        _product(first, rows, h, products, Products.FIRST),
        _product(call, rows, h, products, Products.SECOND),
    ]


def _product(call: Call, rows: Rows, h: Rows, products: Tensor, which: Products) -> Launch:
    (x, _, _, ids, _), problem, config, found = call
    device = x.device.index
    pairs, experts = ids.numel(), problem.experts
    variant = Variant(
        which, Products.FIRST in which and has_few_pairs(call),
        Products.FIRST in which and gathers(call),
        rows.group == GROUP128, h.group == GROUP128, layer_variant(call.operands, problem),
    )  # fmt: skip
    kernel = _grouped_kernel(config, variant, device)
    arguments: list[Any] = []
    blocks = 0
    if Products.FIRST in which:
        arguments += _first_product(call, rows, h)
        blocks = config.blocks(pairs, experts, problem.intermediate, Products.FIRST)
    if Products.SECOND in which:
        arguments += _second_product(call, h, products)
        blocks = max(blocks, config.blocks(pairs, experts, problem.hidden, Products.SECOND))
    arguments += [
        *pointers(found.tiles, found.tile_count, ids),
        *integers(ids.element_size(), pairs, experts),
    ]
    blocks = round_up(blocks, config.cluster(which))
    return Launch(kernel, min(blocks, kernel.most_blocks), tuple(arguments))


def _first_product(call: Call, rows: Rows, h: Rows) -> list[Any]:
    """Return the arguments of the first product: tokens, gates and ups, and its result."""
    (_, w, *_), problem, config, _ = call
    act, inner = problem.activation, problem.intermediate
    # gates and ups alternate, so that each of two maps has every other row; or all gates come first
    step, up_row, up_map_row = (2, 1, 0) if act.interleaved else (1, inner, inner)
    return [
        *_operands(call, w, rows, step, up_map_row, -(-inner // config.features(Products.FIRST))),
        *integers(inner, step, up_row, w.data.shape[1]),
        *pointers(h.codes, h.scale),
        *integers(row_pitch(h)),
        ctypes.c_float(act.limit or 0.0),
        ctypes.c_float(act.alpha),
        ctypes.c_float(act.up_offset),
        ctypes.c_float(min_scale(GROUP128, problem.w_dtype, "activation")),
        *pointers(rows.codes, call.found.pair_of_row),
        *integers(problem.top_k),
    ]


def _second_product(call: Call, h: Rows, products: Tensor) -> list[Any]:
    """Return the arguments of the second product: rows, down weights, and its result by pair."""
    (_, _, w, *_), problem, config, found = call
    features = config.features(Products.SECOND)
    return [
        *_operands(call, w, h, 1, config.half_rows, -(-problem.hidden // features)),
        *integers(problem.hidden, 1, 0, w.data.shape[1]),
        *pointers(products, found.pair_of_row),
    ]


def _operands(
    call: Call, w: ExpertWeights, rows: Rows, step: int, second_map_row: int, tiles: int
) -> list[Any]:
    """Return maps, factors and biases of a product.

    An expert's features are ``step`` rows apart; ``second_map_row`` is the distance in rows of a
    map from the first half of a tile to the second; ``tiles`` cover the features of an expert.
    """
    _, n, k = w.data.shape
    return [
        *weight_maps(w.data, step, call.config),
        *_row_maps(rows, call.config),
        *integers(n // step, second_map_row, k, tiles),
        *pointers(rows.scale),
        *integers(rows.group == ROW),
        *pointers(w.scale),
        *integers(w.scale.stride(0), call.problem.w_group == ROW),
        *pointers(w.bias),
    ]


def weight_maps(data: Tensor, step: int, config: GroupedConfig) -> tuple[Any, Any]:
    """Describe the weight rows of both halves of a stage: every ``step``-th row of all experts.

    Codes are ``[E, N, K]``; ``step`` is 2 if gates and ups alternate: then one half has the gates,
    the other the ups.
    """
    (count, rows, k), address = data.shape, data.data_ptr()
    shape = (count * rows // step, k, step * k, config.half_rows, TILE_K)
    first = cuda_launch.byte_tile_map(address, *shape)
    return first, first if step == 1 else cuda_launch.byte_tile_map(address + k, *shape)


def _row_maps(rows: Rows, config: GroupedConfig) -> tuple[Any, Any]:
    """Return the maps of rows and of their scales; the latter is read only for scales of groups."""
    count, k = rows.codes.shape
    codes = cuda_launch.byte_tile_map(rows.codes.data_ptr(), count, k, k, config.tokens, TILE_K)
    if rows.group != GROUP128:
        return codes, codes
    groups, apart = rows.scale.shape
    place = rows.scale.data_ptr()
    return codes, cuda_launch.float_row_map(place, groups, apart, apart, config.tokens)


@functools.cache
def _grouped_kernel(config: GroupedConfig, variant: Variant, device: int) -> cuda_launch.Kernel:
    return cuda_launch.Kernel(
        grouped_source(config, variant),
        "grouped_gemm",
        block=config.threads(variant.gathers),
        cluster=config.cluster(variant.products),
        shared_bytes=config.smem_bytes(variant.products, variant.token_groups),
        device=torch.device("cuda", device),
        # blocks that wait for rows must all be resident, unless they take tiles from a counter
        cooperative=variant.products == Products.BOTH and config.takes_turns,
    )
