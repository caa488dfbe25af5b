"""The own kernel on Hopper (``swap_ab.cu``).

    y[M, N] = (x[M, K] @ w[N, K].T) * x_scale * w_scale + bias

Weights are the rows of wgmma and tokens its columns, or above 64 rows the other way round where
that divides the work better. Row, tensor and 128-block scales; sums are promoted to fp32 every 128
of K. Up to 64 rows the bits of a row depend on N and K only; above, K is cut so that every
multiprocessor has work. The error against the exact product is that of DeepGEMM's promotion: 2^-13
per partial sum, a bias of -0.06 % on same-sign data. Up to four tokens are quantized inside.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8kit import cuda_driver, nvrtc
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.problem import MOST_VALUES, MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.swap_ab_cuts import choose_tile, every_cut, values_tile
from fp8kit.matmul.swap_ab_tile import PRODUCER_REGISTERS, TILE_K, Tile
from fp8kit.matmul.tma import ALIGN, aligned, by_column, row_pitch
from fp8kit.runtime.weight_hazards import mark_synchronized, safe_to_prefetch

MOST_ROWS = 16384
_SLOW_ROWS_OF_TORCH = 512  # up to which its fast sums and its kernel for single scales lose
# Multiplications from which a product lets what is ahead end: blocks that start while others end
# run where there is room, not next to those that read the same tiles, and take up to 6 % longer.
_LONG = 2**37
_PAIRS = (*((x, w) for x in (ROW, TENSOR) for w in (ROW, TENSOR)), (GROUP128, BLOCK))
_VALUES = (torch.bfloat16, torch.float16)  # dtypes of tokens that are quantized inside
_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}


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


def yields_to(problem: MatmulProblem) -> str:
    """Name the backend to prefer where nothing was measured."""
    single = problem.x_group == problem.w_group == TENSOR
    by_row = problem.w_group != BLOCK and problem.out_dtype == torch.bfloat16  # in one kernel
    quick = single or (problem.accum == "fast" and by_row)
    return "torch_native" if quick and problem.m > _SLOW_ROWS_OF_TORCH else ""


def row_counts(problem: MatmulProblem) -> list[int]:
    """Give row counts that run every kernel which problems of this power of two compile."""
    processors, blocks = _processors(torch.cuda.current_device()), problem.w_group == BLOCK
    size = problem.out_dtype.itemsize
    return every_cut(problem.m, problem.n, problem.k, processors, blocks, size)


def cut(problem: MatmulProblem) -> str:
    """Say how a product of as many rows as this power of two is cut; nothing without a GPU."""
    if not torch.cuda.is_available():
        return ""
    processors = _processors(torch.cuda.current_device())
    shape, blocks = (max(problem.m, 1), problem.n, problem.k), problem.w_group == BLOCK
    inside = None
    if shape[0] <= MOST_VALUES and problem.x_group != TENSOR and problem.out_dtype in _VALUES:
        inside = values_tile(*shape, processors, blocks)
    tile = inside or choose_tile(*shape, processors, blocks)
    return f"{tile}, which quantize their rows" if inside else str(tile)


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``."""
    x, x_scale, w, w_scale, bias = operands
    groups = (problem.x_group, problem.w_group)
    assert x_scale is not None
    (m, k), n, blocks = x.shape, w.shape[0], groups[1] == BLOCK
    x, w = aligned(x), aligned(w)
    with torch.cuda.device(x.device):
        tile = choose_tile(m, n, k, _processors(x.device.index), blocks)
        x_map = _code_map(x, tile.tokens)
        x_scale = by_column(x_scale) if blocks else x_scale
        scale_map = _scale_map(x_scale, tile.tokens) if blocks else x_map
        stride = 0 if groups[0] == TENSOR else x_scale.stride(0)
        tokens = _Tokens(x_map, scale_map, x_scale, stride)
        return _launch(tile, m, tokens, (w, w_scale), bias, groups, problem)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the kernel is passed for the left operand: codes or values."""

    x_map: Any
    scale_map: Any
    scale: Tensor | None = None
    scale_stride: int = 0
    values: Tensor | None = None
    min_scale: float = 0.0


def _launch(
    tile: Tile,
    m: int,
    tokens: _Tokens,
    w_q: tuple[Tensor, Tensor],
    bias: Tensor | None,
    groups: tuple[GroupShape | None, GroupShape],
    problem: MatmulProblem,
) -> Tensor:
    w, w_scale = w_q[0], w_q[1].contiguous()
    n, k = w.shape
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(m, n, dtype=problem.out_dtype, device=w.device)
    processors = _processors(w.device.index)
    blocks, size = groups[1] == BLOCK, problem.out_dtype.itemsize
    stored = tile.stores(m, n, processors, blocks, size)
    kernel = _kernel(
        tile,
        blocks,
        m <= tile.tokens,
        _KINDS[problem.out_dtype],
        _KINDS[torch.float32 if bias is None else bias.dtype],
        0 if tokens.values is None else _KINDS[tokens.values.dtype],
        stored,
        w.device.index,
    )
    order = tile.order(m, n, processors)
    # where threads write results the map is not read
    y_map = (
        cuda_driver.byte_tile_map(y.data_ptr(), m, 2 * n, 2 * n, *tile.box)
        if stored
        else tokens.x_map
    )
    kernel.launch(
        order.blocks,
        (
            _code_map(w, tile.weights),
            tokens.x_map,
            tokens.scale_map,
            y_map,
            cuda_driver.pointer(tokens.scale),
            cuda_driver.pointer(w_scale),
            cuda_driver.pointer(bias),
            cuda_driver.pointer(y),
            ctypes.c_int(m),
            ctypes.c_int(n),
            ctypes.c_int(k),
            ctypes.c_int(tokens.scale_stride),
            ctypes.c_int(0 if groups[1] == TENSOR else 1),
            ctypes.c_int(order.span),
            ctypes.c_uint(order.inverse),
            ctypes.c_int(order.full),
            cuda_driver.pointer(tokens.values),
            ctypes.c_longlong(0 if tokens.values is None else tokens.values.stride(0) * 2),
            ctypes.c_float(tokens.min_scale),
        ),
        overlap=m * n * k < _LONG and safe_to_prefetch(w),
    )
    mark_synchronized(w)
    return y


def run_values(operands: MatmulOperands, problem: MatmulProblem, min_scale: float) -> Tensor | None:
    """Quantize and multiply in one kernel, with the bits of two; ``None`` if they have to be two.

    Args:
        operands: ``x`` is bf16 or fp16 ``[M, K]``, to be quantized from its own maxima.
        problem: of the product; ``x_dtype`` is that of the codes.
        min_scale: floor under the scales of ``x``.
    """
    x, _, w, w_scale, bias = operands
    groups = (problem.x_group, problem.w_group)
    (m, k), n, blocks = x.shape, w.shape[0], groups[1] == BLOCK
    if groups[0] == TENSOR or x.dtype not in _VALUES or m > MOST_VALUES:
        return None
    if x.stride(1) != 1 or x.data_ptr() % ALIGN or (m > 1 and x.stride(0) * 2 % ALIGN):
        return None
    w = aligned(w)
    with torch.cuda.device(x.device):
        tile = values_tile(m, n, k, _processors(x.device.index), blocks)
        if tile is None:
            return None
        w_map = _code_map(w, tile.weights)
        # the kernel takes maps of codes and of their scales in any case, and reads neither here
        tokens = _Tokens(w_map, w_map, values=x, min_scale=min_scale)
        return _launch(tile, m, tokens, (w, w_scale), bias, groups, problem)


def _code_map(codes: Tensor, tile_rows: int) -> Any:
    pitch = row_pitch(codes)
    return cuda_driver.byte_tile_map(codes.data_ptr(), *codes.shape, pitch, tile_rows, TILE_K)


def _scale_map(scale: Tensor, tokens: int) -> Any:
    return cuda_driver.float_row_map(
        scale.data_ptr(), scale.shape[1], scale.shape[0], scale.stride(1), tokens
    )


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(
    tile: Tile,
    block_scales: bool,
    streamed: bool,
    out: int,
    bias: int,
    values: int,
    stored: bool,
    device: int,
) -> cuda_driver.Kernel:
    return cuda_driver.Kernel(
        source(tile, block_scales, streamed, out, bias, values, stored),
        "swap_ab",
        block=tile.threads,
        cluster=tile.split * tile.neighbors,
        shared_bytes=tile.shared_bytes(block_scales),
        device=torch.device("cuda", device),
    )


def source(
    tile: Tile,
    block_scales: bool,
    streamed: bool,
    out: int,
    bias: int,
    values: int = 0,
    stored: bool = False,
) -> str:
    """Write the CUDA source of one variant: constants first, and the operands of wgmma spelled out.

    Args:
        tile: the cut.
        block_scales: 1x128 by 128x128 scales instead of row or tensor scales.
        streamed: every weight is read once.
        out: tag of the result's dtype, a value of ``_KINDS``.
        bias: tag of the bias's dtype.
        values: tag of the tokens' dtype if they are quantized here.
        stored: the tensor memory accelerator writes the results.
    """
    constants = {
        "COLS": tile.cols,
        "GROUPS": tile.groups,
        "RUN": tile.run,
        "STAGES": tile.stages,
        "X_STAGES": tile.x_stages,
        "START": tile.start,
        "WINDOW": tile.window,
        "SPLIT": tile.split,
        "RESIDENT": tile.resident,
        "MEETING": 0 if streamed else tile.meeting,  # where neighbors have other weights
        "PRODUCERS": tile.threads - 128 * tile.groups,
        "STARTED": tile.started,
        "REGISTERS": tile.registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "TOKEN_ROWS": int(tile.token_rows),
        "BLOCK_SCALES": int(block_scales),
        "STREAMED": int(streamed),
        "STORED": int(stored),
        "PASS": tile.at_once,
        "HELD": tile.held,
        "OUT_KIND": out,
        "BIAS_KIND": bias,
        "VALUES": tile.values,
        "VECTORS": tile.vectors,
        "KIND": values,
    }
    registers = tile.cols // 2
    text = nvrtc.joined(constants, "quantizers/encode.cuh", "matmul/swap_ab.cu")
    for mark, value in (
        ("@D@", ", ".join(f"%{i}" for i in range(registers))),
        ("@OUT@", ", ".join(f'"+f"(d[{i}])' for i in range(registers))),
        ("@A@", f"%{registers}"),
        ("@B@", f"%{registers + 1}"),
        ("@ADD@", f"%{registers + 2}"),
        ("@COLS@", str(tile.cols)),
    ):
        text = text.replace(mark, value)
    return text


BACKEND = MatmulBackend(
    supports=supports,
    run=run,
    quantize_in_gemm=run_values,
    cut=cut,
    row_counts=row_counts,
    yields_to=yields_to,
)
