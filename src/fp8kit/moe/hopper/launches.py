"""The data that the launches of a layer of experts share: operands, sorted pairs, rows of codes."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.moe.hopper.source import LayerVariant
from fp8kit.moe.hopper.tile_config import FEW_PAIRS, GroupedConfig
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, ExpertWeights
from fp8kit.runtime import cuda_launch

SCALES = {ROW: 0, GROUP128: 1, TENSOR: 2}  # of tokens, as ``token.cuh`` counts them
# in large tiles, a product copies a row of a token so many times at most; else the quantizer does
_MOST_GATHERED = 4


class Sorted(NamedTuple):
    """The rows of sorted pairs, and the tiles of tokens that ``tiles.cuh`` defines; all int32.

    ``row_of_pair [M * k]`` is -1 for a pair without an expert, ``pair_of_row`` is ``[rows]``,
    ``tiles`` is ``[4 * tiles]``.
    """

    row_of_pair: Tensor
    pair_of_row: Tensor
    tiles: Tensor
    tile_count: Tensor


class Rows(NamedTuple):
    """Codes of rows or tokens; scales per row, per group (``[groups, rows]``), or a single one."""

    codes: Tensor
    scale: Tensor
    group: GroupShape


class Call(NamedTuple):
    """The call of a layer, which all its launches share."""

    operands: ExpertOperands
    problem: ExpertsProblem
    config: GroupedConfig
    found: Sorted


class Launch(NamedTuple):
    """A kernel, its grid and its arguments."""

    kernel: cuda_launch.Kernel
    blocks: int
    arguments: tuple[Any, ...]


def has_few_pairs(call: Call) -> bool:
    """Return whether each block sorts all pairs for itself."""
    return call.operands.ids.numel() <= FEW_PAIRS


def gathers(call: Call) -> bool:
    """Return whether the first product gathers the rows of pairs from tokens that are stored once.

    A gather copies a row for each 128 of I, which slows large tiles, whose time is that of MMAs.
    """
    if has_few_pairs(call):
        return False
    return call.config.copies_rows or call.problem.intermediate <= _MOST_GATHERED * GROUP128.cols


def row_pitch(rows: Rows) -> int:
    """Return the elements from group to group of scales; 0 without groups."""
    return rows.scale.stride(0) if rows.group == GROUP128 else 0


def layer_variant(operands: ExpertOperands, problem: ExpertsProblem) -> LayerVariant:
    """Return the settings that the kernels of both products are compiled for."""
    act, (w13, w2) = problem.activation, (operands.w13, operands.w2)
    return LayerVariant(
        problem.w_group == BLOCK, problem.static_intermediate, act.kind == "gelu_tanh",
        act.limit is not None, problem.x_dtype, (_bias_dtype(w13), _bias_dtype(w2)),
    )  # fmt: skip


def _bias_dtype(w: ExpertWeights) -> torch.dtype:
    return torch.float32 if w.bias is None else w.bias.dtype


def pointers(*tensors: Tensor | None) -> list[Any]:
    """Return the addresses of tensors as arguments of a kernel."""
    return [cuda_launch.pointer(t) for t in tensors]


def integers(*values: int) -> list[Any]:
    """Return 32-bit numbers as arguments of a kernel."""
    return [ctypes.c_int(v) for v in values]
