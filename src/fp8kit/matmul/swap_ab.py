"""The own kernel on Hopper (``swap_ab.cu``).

    y[M, N] = (x[M, K] @ w[N, K].T) * x_scale * w_scale + bias

Weights are the rows of wgmma and tokens its columns, or above 64 rows the other way round where
that divides the work better. Row, tensor and 128-block scales; sums are promoted to fp32 every 128
of K. Up to 64 rows the bits of a row depend on N and K only; above, K is cut so that every
multiprocessor has work. The error against the exact product is that of DeepGEMM's promotion: 2^-13
per partial sum, a bias of -0.06 % on same-sign data.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from fp8kit import nvrtc, tape
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import MatmulProblem
from fp8kit.matmul.tma import ALIGN, aligned, by_column

MOST_ROWS = 512
_FEW_ROWS = 64
_ONE_ROUND = 256  # rows up to which few blocks take a second tile
_MOST_COLS = 128
_TOKEN_ROWS_COLS = (80, 96, 128, 144, 160)  # weights of a tile whose rows are tokens
_TILE_K = 128
_SHARED_PER_PROCESSOR = 228 * 1024
_SPAN = 2048  # tokens whose codes stay in the L2 cache while weights pass
_PAIRS = (*((x, w) for x in (ROW, TENSOR) for w in (ROW, TENSOR)), (GROUP128, BLOCK))
_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Tile:
    """How one problem is cut.

    Args:
        cols: columns of a tile: 8 or a multiple of 16.
        groups: consumer warpgroups of a block, 64 rows of the tile each.
        run: products along K of which each is added while the next is computed; 1 saves the
            registers of a second one.
        stages: weight tiles of 128 along K in shared memory.
        x_stages: token tiles likewise.
        window: weight tiles that are requested and have not arrived, at most.
        split: blocks of a cluster that split K.
        resident: blocks per multiprocessor if they are spread evenly. No more may fit: blocks that
            start while the quantizer still runs would crowd where it is not.
        token_rows: tokens are the rows and weights the columns, instead of the other way round.
    """

    cols: int
    groups: int
    run: int
    stages: int
    x_stages: int
    window: int
    split: int
    resident: int
    token_rows: bool = False

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.rows if self.token_rows else self.cols

    @property
    def weights(self) -> int:
        """Weight rows of a tile."""
        return self.cols if self.token_rows else self.rows

    @property
    def registers(self) -> int:
        """Registers per consumer thread if they are taken from the producer, else 0."""
        accumulators = (2 if self.run == 1 else 3) * self.cols // 2
        even = 65536 // _up(128 * self.groups + 64, 128)
        if self.resident > 1 or accumulators + 56 <= even:
            return 0
        return (65536 // 128 - 24) // self.groups // 8 * 8

    @property
    def threads(self) -> int:
        """Threads of a block; a whole warpgroup produces if it is to give registers away."""
        return 128 * self.groups + (128 if self.registers else 64)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: what the block needs, or what keeps others out."""
        return max(self.needed_bytes, _SHARED_PER_PROCESSOR // (self.resident + 1))

    @property
    def needed_bytes(self) -> int:
        """Room to align, the ring with its scales, parts of peers, and results on their way out."""
        ring = self.stages * self.weights * _TILE_K
        ring += self.x_stages * (self.tokens * _TILE_K + _up(self.tokens, 32) * 4)
        fragments = self.cols // 8
        share = 1 if fragments == 1 else _up(_up(fragments, self.split) // self.split, 2)
        parts = (self.split - 1) * share * 2048 * self.groups
        at_once = next((p for p in (64, 48, 80) if self.cols > 80 and not self.cols % p), self.cols)
        lines, line = (64, at_once * 2 + 16) if self.token_rows else (at_once, 144)
        return 1024 + ring + parts + self.groups * lines * line

    @property
    def static_bytes(self) -> int:
        """Static shared memory: barriers and the scales of a tile."""
        return 16 * (self.stages + self.x_stages) + 8 + 4 * (self.groups * self.cols + self.rows)

    def blocks(self, m: int, n: int, processors: int) -> int:
        """Blocks to launch: as many as there is room for and work."""
        tiles = -(-n // self.weights) * -(-m // self.tokens)
        return min(tiles, _clusters(processors)[self.split] * self.resident) * self.split


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, processors: int, block_scales: bool) -> Tile:
    """Cut a problem so that every multiprocessor has work.

    Up to 64 rows the weights alone matter, and the cut along K depends on N and K only: it decides
    the order of the sum. Above, the cut is the fastest by ``_microseconds``.

    Args:
        m: rows of ``x``.
        n: rows of ``w``.
        k: columns of both.
        processors: multiprocessors of the GPU.
        block_scales: scales per 1x128 and 128x128 elements.
    """
    if m <= _FEW_ROWS:
        return _few_rows(max(8, 1 << (m - 1).bit_length()), n, k, processors)
    even = -(-m // (16 * -(-m // _MOST_COLS))) * 16  # tokens of a tile, if all have as many
    cuts = [(False, even, groups) for groups in (1, 2, 3)]
    cuts += [(True, cols, groups) for cols in _TOKEN_ROWS_COLS for groups in (1, 2, 3)]
    tiles = [
        _deepest(cols, groups, split, 1, token_rows, m <= _ONE_ROUND)
        for token_rows, cols, groups in cuts
        for split in (1, 2, 3, 4)
        if cols <= _MOST_COLS or (groups == 2 and split == 1)  # registers for more are not there
    ]
    return min(tiles, key=lambda tile: _microseconds(tile, m, n, k, processors, block_scales))


def _few_rows(cols: int, n: int, k: int, processors: int) -> Tile:
    # within 2 % of the best of 1300 measured cuts of 23 layers on an H200 at 1, 16 and 64 rows; all
    # of a layer split alike
    tiles, pairs, steps = -(-n // 64), -(-n // 128), -(-k // _TILE_K)
    fill, room = tiles / processors, _clusters(processors)
    if steps >= 64 and 2 * room[4] < 3 * pairs <= 3 * room[4]:
        return _deepest(cols, 2, 4, 1)
    if 0.36 < fill and tiles <= 2 * room[3] and steps >= 24:
        return _deepest(cols, 2, 3, 1)
    if fill <= 0.5:
        split = max(s for s in (1, 2, 3, 4) if s == 1 or (steps >= 8 * s and tiles <= room[s]))
        return _deepest(cols, 1, split, 1)
    if fill <= 1:
        return _deepest(cols, 2, 2, 1) if steps >= 24 else _deepest(cols, 1, 1, 1)
    if fill <= 1.25:
        return _deepest(cols, 1, 2, 3) if steps >= 24 else _deepest(cols, 1, 1, 2)
    if processors < pairs < 1.3 * processors and tiles <= 3 * processors:
        return _deepest(cols, 1, 1, 3)
    return _deepest(cols, 2, 1, 1)


def _microseconds(tile: Tile, m: int, n: int, k: int, processors: int, block_scales: bool) -> float:
    # fitted to 1900 measured cuts of 15 layers at 96 to 512 rows on an H200: the cut with the least
    # of these takes 1.2 % longer than the best one in the mean; a step is the multiplication or the
    # way of its operands from the L2 cache
    tiles = -(-n // tile.weights) * -(-m // tile.tokens)
    clusters = _clusters(processors)[tile.split]
    full, left = divmod(tiles, clusters * tile.split)
    steps = -(-k // _TILE_K)
    part, sums, blocks = steps, 0.0, min(tiles, processors)
    if tile.split > 1 and 0 < left <= clusters:
        part, sums = _up(-(-steps // tile.split), 4), (2.1, 2.5, 3.3)[tile.split - 2]
        blocks = min(tiles * tile.split, processors)
    area = tile.groups * tile.cols / _MOST_COLS
    step = (0.17, 0.20, 0.29)[tile.groups - 1] + 0.052 * area
    step += 0.13 if tile.run == 1 and tile.groups < 3 else 0.0
    if block_scales:
        step *= 1.37 if tile.token_rows else 1.47
    step = max(step, (tile.rows + tile.cols) * _TILE_K * blocks / 14.8e6)
    write = 0.68 * area
    multiply = full * (steps * step + write) + (left > 0) * (part * step + write + sums)
    return max(multiply, n * k / 4.8e6)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@functools.cache
def _clusters(processors: int) -> dict[int, int]:
    # those of 3 and 4 do not fill the processing clusters of 16 and 18 multiprocessors
    found = {
        1: processors,
        2: processors // 2,
        3: processors * 39 // 132,
        4: processors * 30 // 132,
    }
    return {split: max(1, room) for split, room in found.items()}


@functools.cache
def _deepest(
    cols: int,
    groups: int,
    split: int,
    resident: int,
    token_rows: bool = False,
    one_round: bool = True,
) -> Tile:
    """Give as many stages as there is room for."""
    run = 1 if groups == 3 or resident > 1 or cols > _MOST_COLS else 4
    few = (64 * groups if token_rows else cols) <= _FEW_ROWS
    # tokens come soon after they are asked for, weights are to be here before the tokens are
    shallow = few or (groups == 2 and not token_rows and one_round)
    # enough to keep the memory busy; what has to arrive before it would wait behind more
    window = 6 if (groups, resident) == (1, 1) else 4
    for stages in range(24, 1, -1):
        x_stages = min(stages, 4) if shallow else stages
        ahead = min(stages, window) if few else stages
        tile = Tile(cols, groups, run, stages, x_stages, ahead, split, resident, token_rows)
        if tile.needed_bytes + tile.static_bytes <= _SHARED_PER_PROCESSOR // resident - 1024:
            return tile
    raise AssertionError(f"no ring fits beside {cols} columns")


def supports(problem: MatmulProblem) -> str | None:
    """Say what this kernel lacks for a problem, if anything."""
    if problem.capability is None or problem.capability[0] != 9:
        return "written for sm90 (wgmma)"
    if problem.m > MOST_ROWS:
        return f"made for at most {MOST_ROWS} rows"
    if problem.batch_invariant:
        return "more rows than it takes would go to another kernel"
    if (problem.x_group, problem.w_group) not in _PAIRS:
        return f"has no {problem.x_group} by {problem.w_group} scales"
    if problem.x_dtype != torch.float8_e4m3fn or problem.w_dtype != torch.float8_e4m3fn:
        return "multiplies e4m3fn codes only"
    if problem.k % ALIGN:
        return f"needs K in multiples of {ALIGN}, got {problem.k}"
    return nvrtc.missing()


def run(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    groups: tuple[GroupShape | None, GroupShape],
    problem: MatmulProblem,
) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``."""
    assert x_scale is not None
    (m, k), n = x.shape, w.shape[0]
    x, w, w_scale = aligned(x), aligned(w), w_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(m, n, dtype=problem.out_dtype, device=x.device)
    with torch.cuda.device(x.device):
        blocks = groups[1] == BLOCK
        tile = choose_tile(m, n, k, _processors(x.device.index), blocks)
        x_map = nvrtc.byte_tile_map(x.data_ptr(), m, k, tile.tokens, _TILE_K)
        x_scale = by_column(x_scale) if blocks else x_scale
        kernel = _kernel(
            tile,
            blocks,
            m <= tile.tokens,
            _KINDS[problem.out_dtype],
            _KINDS[torch.float32 if bias is None else bias.dtype],
            x.device.index,
        )
        kernel.launch(
            tile.blocks(m, n, _processors(x.device.index)),
            (
                nvrtc.byte_tile_map(w.data_ptr(), n, k, tile.weights, _TILE_K),
                x_map,
                _scale_map(x_scale, tile.tokens) if blocks else x_map,
                nvrtc.pointer(x_scale),
                nvrtc.pointer(w_scale),
                nvrtc.pointer(bias),
                nvrtc.pointer(y),
                ctypes.c_int(m),
                ctypes.c_int(n),
                ctypes.c_int(k),
                ctypes.c_int(0 if groups[0] == TENSOR else x_scale.stride(0)),
                ctypes.c_int(0 if groups[1] == TENSOR else 1),
                ctypes.c_int(_SPAN // tile.tokens),
            ),
            overlap=tape.settled(w),
        )
    tape.settle(w)
    return y


def _scale_map(scale: Tensor, tokens: int) -> Any:
    return nvrtc.float_row_map(
        scale.data_ptr(), scale.shape[1], scale.shape[0], scale.stride(1), tokens
    )


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(
    tile: Tile, block_scales: bool, streamed: bool, out: int, bias: int, device: int
) -> nvrtc.Kernel:
    return nvrtc.Kernel(
        source(tile, block_scales, streamed, out, bias),
        "swap_ab",
        block=tile.threads,
        cluster=tile.split,
        shared_bytes=tile.shared_bytes,
        device=torch.device("cuda", device),
    )


def source(tile: Tile, block_scales: bool, streamed: bool, out: int, bias: int) -> str:
    """Write the CUDA source of one variant: constants first, and the operands of wgmma spelled out.

    Args:
        tile: the cut.
        block_scales: 1x128 by 128x128 scales instead of row or tensor scales.
        streamed: every weight is read once.
        out: tag of the result's dtype, a value of ``_KINDS``.
        bias: tag of the bias's dtype.
    """
    constants = {
        "COLS": tile.cols,
        "GROUPS": tile.groups,
        "RUN": tile.run,
        "STAGES": tile.stages,
        "X_STAGES": tile.x_stages,
        "WINDOW": tile.window,
        "SPLIT": tile.split,
        "RESIDENT": tile.resident,
        "PRODUCERS": tile.threads - 128 * tile.groups,
        "REGISTERS": tile.registers,
        "TOKEN_ROWS": int(tile.token_rows),
        "BLOCK_SCALES": int(block_scales),
        "STREAMED": int(streamed),
        "OUT_KIND": out,
        "BIAS_KIND": bias,
    }
    registers = tile.cols // 2
    text = resources.files("fp8kit.matmul").joinpath("swap_ab.cu").read_text()
    for mark, value in (
        ("@D@", ", ".join(f"%{i}" for i in range(registers))),
        ("@OUT@", ", ".join(f'"+f"(d[{i}])' for i in range(registers))),
        ("@A@", f"%{registers}"),
        ("@B@", f"%{registers + 1}"),
        ("@ADD@", f"%{registers + 2}"),
        ("@COLS@", str(tile.cols)),
    ):
        text = text.replace(mark, value)
    return "".join(f"#define {k} {v}\n" for k, v in constants.items()) + text
