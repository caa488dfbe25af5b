"""The Hopper GEMM (``gemm.cu``): whether it supports a problem, its kernels, and their launch.

    y[M, N] = (x[M, K] @ w[N, K].T) * x_scale * w_scale + bias

Scales are per row, per tensor or per 128 block. Sums are promoted to fp32 every 128 of K; the error
is that of DeepGEMM's promotion: 2^-13 per partial sum, a bias of -0.06 % on data of one sign. Up to
64 rows the bits of a row depend on N and K only. Up to four tokens may come in 16 bits and are
quantized in the GEMM.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR
from fp8kit.matmul.hopper.device import H200, Device, hopper
from fp8kit.matmul.hopper.heuristics import choose, choose_quantizing
from fp8kit.matmul.hopper.heuristics import row_counts as row_counts_of_kernels
from fp8kit.matmul.hopper.source import Variant, source
from fp8kit.matmul.hopper.tile_config import TILE_K, Schedule, TileConfig
from fp8kit.matmul.problem import IN_GEMM_ROWS, MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.tma_operands import ALIGN, aligned, by_column, row_pitch
from fp8kit.runtime import cuda_launch, nvrtc
from fp8kit.runtime.weight_hazards import mark_synchronized, safe_to_prefetch

MAX_ROWS = 16384
_GRANULARITIES = (*((x, w) for x in (ROW, TENSOR) for w in (ROW, TENSOR)), (GROUP128, BLOCK))
_QUANTIZED_DTYPES = (torch.bfloat16, torch.float16)  # of tokens that are quantized in the GEMM


def supports(problem: MatmulProblem) -> str | None:
    """Return what this backend lacks for a problem, ``None`` if nothing."""
    if problem.capability is None or problem.capability[0] != 9:
        return "written for sm90 (wgmma)"
    if problem.m > MAX_ROWS:
        return f"made for at most {MAX_ROWS} rows"
    if problem.batch_invariant:
        return f"batch_invariant=True: more than {MAX_ROWS} rows would run on another kernel"
    if (problem.x_group, problem.w_group) not in _GRANULARITIES:
        return f"has no {problem.x_group} by {problem.w_group} scales"
    if problem.x_dtype != torch.float8_e4m3fn or problem.w_dtype != torch.float8_e4m3fn:
        return "multiplies e4m3fn codes only"
    if problem.k % ALIGN:
        return f"needs K in multiples of {ALIGN}, got {problem.k}"
    return nvrtc.missing()


def yields_to(problem: MatmulProblem) -> str:
    """Return the backend to prefer where nothing was measured, empty if none."""
    single = problem.x_group == problem.w_group == TENSOR
    by_row = problem.w_group != BLOCK and problem.out_dtype == torch.bfloat16  # in one kernel
    fast = problem.accum == "fast" and by_row
    faster = fast and problem.m * problem.n * problem.k >= H200.torch_macs
    return "torch_native" if faster or (single and problem.m > H200.torch_rows) else ""


def row_counts(problem: MatmulProblem) -> list[int]:
    """Return row counts that run every kernel that problems of this power of two compile."""
    device = device_record(torch.cuda.current_device())
    size, blocks = problem.out_dtype.itemsize, problem.w_group == BLOCK
    return row_counts_of_kernels(problem.m, problem.n, problem.k, device, blocks, size)


def cut(problem: MatmulProblem) -> str:
    """Return the tile configuration of a problem in words; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    device = device_record(torch.cuda.current_device())
    blocks = problem.w_group == BLOCK
    # nothing is launched for an empty product, but it may be explained
    shape = (max(problem.m, 1), max(problem.n, 1), max(problem.k, 1))
    quantizing = None
    few = shape[0] <= IN_GEMM_ROWS and problem.x_group != TENSOR
    if few and problem.out_dtype in _QUANTIZED_DTYPES:
        quantizing = choose_quantizing(*shape, device, blocks)
    if quantizing is not None:
        return f"{quantizing}, which quantize their rows"
    return str(choose(*shape, device, blocks))


def run(
    operands: MatmulOperands, problem: MatmulProblem, config: TileConfig | None = None
) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``.

    Operands are e4m3fn codes with float32 scales; ``config`` replaces the heuristics' choice.
    """
    x, x_scale, w, w_scale, bias = operands
    assert x_scale is not None
    x, w, blocks = aligned(x), aligned(w), problem.w_group == BLOCK
    with torch.cuda.device(x.device):
        plan = _plan(x, w, problem, config)
        assert plan is not None
        x_map = _code_map(x, plan.config.tokens)
        x_scale = by_column(x_scale) if blocks else x_scale
        scale_map = _scale_map(x_scale, plan.config.tokens) if blocks else x_map
        stride = 0 if problem.x_group == TENSOR else x_scale.stride(0)
        tokens = _Tokens(x_map, scale_map, scale=x_scale, scale_stride=stride)
        return _launch(plan, x.shape[0], tokens, (w, w_scale), bias, problem)


def quantize_in_gemm(
    operands: MatmulOperands, problem: MatmulProblem, min_scale: float
) -> Tensor | None:
    """Quantize and multiply in one kernel, with the bits of a quantizer and a GEMM.

    ``x`` is bf16 or fp16 ``[M, K]`` and is quantized dynamically to ``problem.x_dtype``;
    ``min_scale`` is the least scale. Returns ``None`` if two kernels are needed.
    """
    x, _, w, w_scale, bias = operands
    if problem.x_group == TENSOR or x.dtype not in _QUANTIZED_DTYPES:
        return None
    if x.shape[0] > IN_GEMM_ROWS or x.stride(1) != 1 or x.data_ptr() % ALIGN:
        return None
    if x.shape[0] > 1 and x.stride(0) * 2 % ALIGN:
        return None
    w = aligned(w)
    with torch.cuda.device(x.device):
        plan = _plan(x, w, problem)
        if plan is None:
            return None
        # the kernel's parameters include maps of codes and of scales, which it does not read here
        w_map = _code_map(w, plan.config.weights)
        tokens = _Tokens(w_map, w_map, dense=x, min_scale=min_scale)
        return _launch(plan, x.shape[0], tokens, (w, w_scale), bias, problem)


@functools.cache
def device_record(index: int) -> Device:
    """Return the record of a CUDA device, by which the heuristics choose."""
    return hopper(torch.cuda.get_device_properties(index).multi_processor_count)


class _Plan(NamedTuple):
    """How a GEMM of one shape is launched."""

    config: TileConfig
    schedule: Schedule
    tma_store: bool


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The left operand as the kernel takes it: codes, or 16-bit values to quantize."""

    x_map: Any
    scale_map: Any
    scale: Tensor | None = None
    scale_stride: int = 0
    dense: Tensor | None = None
    min_scale: float = 0.0


def _plan(
    x: Tensor, w: Tensor, problem: MatmulProblem, config: TileConfig | None = None
) -> _Plan | None:
    shape, blocks = (x.shape[0], w.shape[0], w.shape[1]), problem.w_group == BLOCK
    facts = (device_record(x.device.index), blocks, problem.out_dtype.itemsize)
    return _plan_of(shape, *facts, x.dtype in _QUANTIZED_DTYPES, config)


@functools.lru_cache(maxsize=4096)
def _plan_of(
    shape: tuple[int, int, int],
    device: Device,
    block_scales: bool,
    out_bytes: int,
    quantize: bool,
    config: TileConfig | None,
) -> _Plan | None:
    if config is None:
        config = (choose_quantizing if quantize else choose)(*shape, device, block_scales)
    if config is None:
        return None
    m, n, _ = shape
    tma_store = config.uses_tma_store(m, n, device, block_scales, out_bytes)
    return _Plan(config, config.schedule(m, n, device), tma_store)


def _launch(
    plan: _Plan,
    m: int,
    tokens: _Tokens,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    problem: MatmulProblem,
) -> Tensor:
    config, schedule, tma_store = plan
    w, w_scale = weight[0], weight[1].contiguous()
    n, k = w.shape
    bias = None if bias is None else bias.contiguous()
    y = torch.empty(m, n, dtype=problem.out_dtype, device=w.device)
    variant = Variant(
        problem.w_group == BLOCK,
        m <= config.tokens,
        tma_store,
        problem.out_dtype,
        # without a bias the kernel of an fp32 one is launched with a null pointer
        torch.float32 if bias is None else bias.dtype,
        None if tokens.dense is None else tokens.dense.dtype,
    )
    # any map will do where threads store the result
    y_map = tokens.x_map
    if tma_store:
        y_map = cuda_launch.byte_tile_map(y.data_ptr(), m, 2 * n, 2 * n, *config.store_box)
    _kernel(config, variant, w.device.index).launch(
        schedule.grid,
        (
            _code_map(w, config.weights),
            tokens.x_map,
            tokens.scale_map,
            y_map,
            cuda_launch.pointer(tokens.scale),
            cuda_launch.pointer(w_scale),
            cuda_launch.pointer(bias),
            cuda_launch.pointer(y),
            ctypes.c_int(m),
            ctypes.c_int(n),
            ctypes.c_int(k),
            ctypes.c_int(tokens.scale_stride),
            ctypes.c_int(0 if problem.w_group == TENSOR else 1),
            ctypes.c_int(schedule.band),
            ctypes.c_uint(schedule.band_inverse),
            ctypes.c_int(schedule.full_waves),
            cuda_launch.pointer(tokens.dense),
            ctypes.c_longlong(0 if tokens.dense is None else tokens.dense.stride(0) * 2),
            ctypes.c_float(tokens.min_scale),
        ),
        overlap=_starts_early(m * n * k, w),
    )
    mark_synchronized(w)
    return y


def _starts_early(macs: int, w: Tensor) -> bool:
    """Return whether the GEMM starts before the previous kernel has ended (PDL)."""
    device = device_record(w.device.index)
    return macs < device.early_start_macs and safe_to_prefetch(w)


def _code_map(codes: Tensor, tile_rows: int) -> Any:
    pitch = row_pitch(codes)
    return cuda_launch.byte_tile_map(codes.data_ptr(), *codes.shape, pitch, tile_rows, TILE_K)


def _scale_map(scale: Tensor, tokens: int) -> Any:
    return cuda_launch.float_row_map(
        scale.data_ptr(), scale.shape[1], scale.shape[0], scale.stride(1), tokens
    )


@functools.cache
def _kernel(config: TileConfig, variant: Variant, device: int) -> cuda_launch.Kernel:
    return cuda_launch.Kernel(
        source(config, variant),
        "hopper_gemm",
        block=config.threads,
        cluster=config.cluster,
        shared_bytes=config.dynamic_smem_bytes(variant.block_scales),
        device=torch.device("cuda", device),
    )


BACKEND = MatmulBackend(
    supports=supports,
    run=run,
    quantize_in_gemm=quantize_in_gemm,
    cut=cut,
    row_counts=row_counts,
    yields_to=yields_to,
)
