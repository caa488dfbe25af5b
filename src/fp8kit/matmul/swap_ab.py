"""The own kernel for few rows: weights as the wgmma rows, split K in clusters (``swap_ab.cu``).

    y[M, N] = (x[M, K] @ w[N, K].T) * x_scale * w_scale + bias

Row, tensor and 128-block scales; sums are promoted to fp32 every 128 of K; the bits of a row depend
on N and K only. The error against the exact product is that of DeepGEMM's promotion: 2^-13 per
partial sum, a bias of -0.06 % on same-sign data.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from fp8kit import nvrtc
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import MatmulProblem

MOST_ROWS = 64
_TILE_K = 128
_ALIGN = 16
_SHARED_PER_PROCESSOR = 228 * 1024
_PAIRS = (*((x, w) for x in (ROW, TENSOR) for w in (ROW, TENSOR)), (GROUP128, BLOCK))
_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Tile:
    """How one problem is cut.

    Args:
        tokens: columns of the tile, the row count rounded up to a power of two from 8.
        stages: tiles in flight in shared memory.
        cluster: blocks that split K.
        groups: warpgroups of 64 weight rows each.
        resident: blocks per multiprocessor if they are spread evenly. No more may fit: blocks that
            start while the quantizer still runs would crowd where it is not.
    """

    tokens: int
    stages: int
    cluster: int
    groups: int
    resident: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring and room to align it, or what keeps others out."""
        ring = self.stages * (64 * self.groups + self.tokens) * _TILE_K + 1024
        return max(ring, _SHARED_PER_PROCESSOR // (self.resident + 1))


def choose_tile(m: int, n: int, k: int, processors: int) -> Tile:
    """Cut a problem so that every multiprocessor streams weights.

    The cut along K depends on N and K alone, never on M: it decides the order of the sum.

    Args:
        m: rows of ``x``.
        n: rows of ``w``.
        k: columns of both.
        processors: multiprocessors of the GPU.
    """
    tokens = max(8, 1 << (m - 1).bit_length())
    blocks, steps = -(-n // 64), -(-k // _TILE_K)
    cluster = 1
    while cluster < 4 and blocks * cluster * cluster <= processors and steps >= 8 * cluster:
        cluster *= 2
    # three blocks of 64 KiB rings on a multiprocessor hide each other's start and end
    groups = 2 if blocks >= 2 * processors else 1
    stages = 64 * 1024 // ((64 * groups + tokens) * _TILE_K)
    resident = -(-(-(-n // (64 * groups)) * cluster) // processors)
    stages = max(stages, 6) if resident == 1 else stages
    return Tile(tokens, stages, cluster, groups, min(resident, 3))


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
    if problem.k % _ALIGN:
        return f"needs K in multiples of {_ALIGN}, got {problem.k}"
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
    x, w, w_scale = _aligned(x), _aligned(w), w_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(m, n, dtype=problem.out_dtype, device=x.device)
    with torch.cuda.device(x.device):
        tile = choose_tile(m, n, k, _processors(x.device.index))
        kernel = _kernel(
            tile,
            groups[1] == BLOCK,
            _KINDS[problem.out_dtype],
            _KINDS[torch.float32 if bias is None else bias.dtype],
            x.device.index,
        )
        rows = 64 * tile.groups
        kernel.launch(
            -(-n // rows) * tile.cluster,
            (
                nvrtc.byte_tile_map(w.data_ptr(), n, k, rows, _TILE_K),
                nvrtc.byte_tile_map(x.data_ptr(), m, k, tile.tokens, _TILE_K),
                nvrtc.pointer(x_scale),
                nvrtc.pointer(w_scale),
                nvrtc.pointer(bias),
                nvrtc.pointer(y),
                ctypes.c_int(m),
                ctypes.c_int(n),
                ctypes.c_int(k),
                ctypes.c_int(
                    x_scale.stride(0) if x_scale.shape[0] > 1 or groups[0] != TENSOR else 0
                ),
                ctypes.c_int(x_scale.stride(1)),
                ctypes.c_int(0 if groups[1] == TENSOR else 1),
            ),
            overlap=problem.after_quantize,
        )
    return y


def _aligned(codes: Tensor) -> Tensor:
    codes = codes.contiguous()
    return codes if codes.data_ptr() % _ALIGN == 0 else codes.clone()


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(tile: Tile, block_scales: bool, out: int, bias: int, device: int) -> nvrtc.Kernel:
    return nvrtc.Kernel(
        source(tile, block_scales, out, bias),
        "swap_ab",
        block=128 * tile.groups + 32,
        cluster=tile.cluster,
        shared_bytes=tile.shared_bytes,
        device=torch.device("cuda", device),
    )


def source(tile: Tile, block_scales: bool, out: int, bias: int) -> str:
    """Write the CUDA source of one variant: constants first, and the operands of wgmma spelled out.

    Args:
        tile: the cut.
        block_scales: 1x128 by 128x128 scales instead of row or tensor scales.
        out: tag of the result's dtype, a value of ``_KINDS``.
        bias: tag of the bias's dtype.
    """
    constants = {
        "TOKENS": tile.tokens,
        "STAGES": tile.stages,
        "CLUSTER": tile.cluster,
        "GROUPS": tile.groups,
        "BLOCK_SCALES": int(block_scales),
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
