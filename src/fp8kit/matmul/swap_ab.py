"""The own kernel on Hopper: weights as the wgmma rows, tokens as its columns (``swap_ab.cu``).

    y[M, N] = (x[M, K] @ w[N, K].T) * x_scale * w_scale + bias

Row, tensor and 128-block scales; sums are promoted to fp32 every 128 of K. Up to 64 rows the bits
of a row depend on N and K only; above, K is cut so that every multiprocessor has work. The error
against the exact product is that of DeepGEMM's promotion: 2^-13 per partial sum, a bias of -0.06 %
on same-sign data.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from fp8kit import nvrtc
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import MatmulProblem
from fp8kit.matmul.tma import ALIGN, aligned, by_column

MOST_ROWS = 512
_FEW_ROWS = 64
_MOST_TOKENS = 128
_TILE_K = 128
_OUT_PITCH = 144
_SHARED_PER_BLOCK = 227 * 1024
_SHARED_PER_PROCESSOR = 228 * 1024
_SPAN = 2048  # tokens whose codes stay in the L2 cache while weights pass
_PAIRS = (*((x, w) for x in (ROW, TENSOR) for w in (ROW, TENSOR)), (GROUP128, BLOCK))
_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Tile:
    """How one problem is cut.

    Args:
        tokens: columns of a tile: 8 or a multiple of 16.
        groups: consumer warpgroups of a block, 64 weight rows each.
        parts: tiles along K that a warpgroup multiplies before it waits for the first, 1 or 2.
        stages: tiles of 128 along K in shared memory.
        split: blocks of a cluster that split K.
        resident: blocks per multiprocessor if they are spread evenly. No more may fit: blocks that
            start while the quantizer still runs would crowd where it is not.
    """

    tokens: int
    groups: int
    parts: int
    stages: int
    split: int
    resident: int

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.groups

    @property
    def registers(self) -> int:
        """Registers per consumer thread if they are taken from the producer, else 0."""
        accumulators = (1 + self.parts) * self.tokens // 2
        if self.resident > 1 or self.groups == 1 or accumulators <= 96:
            return 0
        return (65536 // 128 - 24) // self.groups // 8 * 8

    @property
    def threads(self) -> int:
        """Threads of a block; a whole warpgroup produces if it is to give registers away."""
        return 128 * self.groups + (128 if self.registers else 32)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: what the block needs, or what keeps others out."""
        return max(self.needed_bytes, _SHARED_PER_PROCESSOR // (self.resident + 1))

    @property
    def needed_bytes(self) -> int:
        """Room to align, the ring with its scales, and results on their way out."""
        ring = self.stages * _stage_bytes(self.tokens, self.groups)
        halved = self.tokens > 64 and self.tokens % 32 == 0
        results = self.groups * (self.tokens // 2 if halved else self.tokens) * _OUT_PITCH
        sums = self.tokens * (self.rows + 4) * 4
        return 1024 + (max(ring, sums) if self.split > 1 else ring + results)

    @property
    def static_bytes(self) -> int:
        """Static shared memory: barriers and the scales of a tile."""
        return 16 * self.stages + 4 * (self.groups * self.tokens + self.rows)

    def blocks(self, m: int, n: int, processors: int) -> int:
        """Blocks to launch: one per tile while K is split, else few that take tile after tile."""
        tiles = -(-n // self.rows) * -(-m // self.tokens)
        return tiles * self.split if self.split > 1 else min(tiles, processors * self.resident)


def choose_tile(m: int, n: int, k: int, processors: int) -> Tile:
    """Cut a problem so that every multiprocessor has work.

    Up to 64 rows the weights alone matter, and the cut along K depends on N and K only: it decides
    the order of the sum. Above, the cut is the fastest by ``_microseconds``.

    Args:
        m: rows of ``x``.
        n: rows of ``w``.
        k: columns of both.
        processors: multiprocessors of the GPU.
    """
    if m > _FEW_ROWS:
        columns = -(-m // _MOST_TOKENS)
        tokens = -(-m // (16 * columns)) * 16
        cuts = [(g, split) for split in (1, 2, 3, 4) for g in (1, 2, 3)]
        groups, split = min(
            cuts, key=lambda cut: _microseconds(cut[0], cut[1], tokens, m, n, k, processors)
        )
        return _deepest(tokens, groups, 1 if groups == 3 else 2, split)
    tokens = max(8, 1 << (m - 1).bit_length())
    blocks, steps = -(-n // 64), -(-k // _TILE_K)
    split = 1
    while split < 4 and blocks * split * split <= processors and steps >= 8 * split:
        split *= 2
    # blocks with rings of 64 KiB that share a multiprocessor hide each other's start and end
    groups = 2 if blocks >= 2 * processors else 1
    stages = 64 * 1024 // _stage_bytes(tokens, groups)
    resident = min(3, -(-(-(-n // (64 * groups)) * split) // processors))
    parts = 2 if resident == 1 else 1
    return Tile(tokens, groups, parts, max(stages, 6 if resident == 1 else 2), split, resident)


def _microseconds(
    groups: int, split: int, tokens: int, m: int, n: int, k: int, processors: int
) -> float:
    # fitted to 60 measured cuts of 7 layers at 128 to 512 rows on an H200; most within 10 %
    tiles, steps = -(-n // (64 * groups)) * -(-m // tokens), -(-k // _TILE_K)
    # clusters of 3 and 4 do not fill the processing clusters of 16 and 18 multiprocessors
    room = {1: processors, 2: processors // 2, 3: processors * 39 // 132, 4: processors * 30 // 132}
    rounds = -(-tiles // room[split])
    step = {1: 0.30, 2: 0.42, 3: 0.58}[groups] * (0.35 + 0.65 * tokens / _MOST_TOKENS)
    fixed = {1: 3.5, 2: 5.5, 3: 6.5, 4: 7.5}[split]
    if split > 1:
        return rounds * (fixed + -(-steps // split) * step)
    return fixed + rounds * (steps * step + (rounds > 1))


def _stage_bytes(tokens: int, groups: int) -> int:
    return (64 * groups + tokens) * _TILE_K + -(-tokens // 32) * 128


def _deepest(tokens: int, groups: int, parts: int, split: int) -> Tile:
    for stages in range(16, 2, -1):
        tile = Tile(tokens, groups, parts, stages, split, 1)
        if tile.needed_bytes + tile.static_bytes <= _SHARED_PER_BLOCK:
            return tile
    raise AssertionError(f"no ring fits beside {tokens} tokens")


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
        tile = choose_tile(m, n, k, _processors(x.device.index))
        blocks = groups[1] == BLOCK
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
                nvrtc.byte_tile_map(w.data_ptr(), n, k, tile.rows, _TILE_K),
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
            overlap=problem.after_quantize,
        )
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
        "TOKENS": tile.tokens,
        "GROUPS": tile.groups,
        "PARTS": tile.parts,
        "STAGES": tile.stages,
        "SPLIT": tile.split,
        "RESIDENT": tile.resident,
        "PRODUCERS": tile.threads - 128 * tile.groups,
        "REGISTERS": tile.registers,
        "BLOCK_SCALES": int(block_scales),
        "STREAMED": int(streamed),
        "OUT_KIND": out,
        "BIAS_KIND": bias,
    }
    registers = tile.tokens // 2
    text = resources.files("fp8kit.matmul").joinpath("swap_ab.cu").read_text()
    for mark, value in (
        ("@D@", ", ".join(f"%{i}" for i in range(registers))),
        ("@OUT@", ", ".join(f'"+f"(d[{i}])' for i in range(registers))),
        ("@A@", f"%{registers}"),
        ("@B@", f"%{registers + 1}"),
        ("@ADD@", f"%{registers + 2}"),
        ("@TOKENS@", str(tile.tokens)),
    ):
        text = text.replace(mark, value)
    return "".join(f"#define {k} {v}\n" for k, v in constants.items()) + text
