"""The source of one kernel of the Hopper GEMM: its macros, then the parts of ``gemm.cu``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8kit.matmul.hopper.tile_config import PRODUCER_REGISTERS, TileConfig
from fp8kit.runtime import nvrtc

SOURCES = (
    "quantizers/encode.cuh",
    "matmul/hopper/config.cuh",
    "matmul/hopper/barriers.cuh",
    "matmul/hopper/ptx.cuh",
    "matmul/hopper/pipeline.cuh",
    "matmul/hopper/scheduler.cuh",
    "matmul/hopper/epilogue.cuh",
    "matmul/hopper/quantize.cuh",
    "matmul/hopper/gemm.cu",
)
_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}  # dtype tags of the kernel


class Variant(NamedTuple):
    """What a kernel is compiled for besides its tile configuration.

    With ``block_scales`` scales are 1x128 by 128x128, else per row or tensor. With
    ``one_token_tile`` every weight is read once. Without ``tma_store`` threads store the result;
    without ``x_dtype`` tokens are codes already.
    """

    block_scales: bool
    one_token_tile: bool
    tma_store: bool
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    x_dtype: torch.dtype | None = None


def wgmma(columns: int) -> dict[str, int | str]:
    """Return the macros of the FP8 MMA of 64 rows and ``columns`` columns, as inline PTX."""
    accumulators = range(columns // 2)
    operands = ", ".join(f"%{i}" for i in accumulators)
    a, b, add = (f"%{len(accumulators) + i}" for i in range(3))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    return {
        "WGMMA": f'"{instruction} {{{operands}}}, {a}, {b}, add, 1, 1;"',
        "WGMMA_ADD": f'"{add}"',
        "WGMMA_REGISTERS": ", ".join(f'"+f"(d[{i}])' for i in accumulators),
    }


def macros(config: TileConfig, variant: Variant) -> dict[str, int | str]:
    """Return the macros that ``gemm.cu`` is compiled with; its head says what they mean."""
    layout, pipeline, launch = config.layout, config.pipeline, config.launch
    return {
        "MMA_N": layout.mma_n,
        "WARPGROUPS": layout.warpgroups,
        "SWAP_AB": int(layout.swap_ab),
        "WEIGHT_STAGES": pipeline.weight_stages,
        "TOKEN_STAGES": pipeline.token_stages,
        "PIPELINED_STEPS": pipeline.pipelined_steps,
        "MAX_INFLIGHT": pipeline.max_inflight,
        "WARMUP_INFLIGHT": pipeline.warmup_inflight,
        "EPILOGUE_COLS": config.epilogue_cols,
        "EPILOGUE_BUFFERS": config.epilogue.buffers,
        "SPLIT_K": launch.split_k,
        "BLOCKS_PER_SM": launch.blocks_per_sm,
        # where each weight is read once, the blocks of a cluster have different ones
        "CLUSTER_SYNC_EVERY": 0 if variant.one_token_tile else launch.cluster_sync_every,
        "PRODUCER_THREADS": config.producer_threads,
        "LAUNCH_REGISTERS": config.launch_registers,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
        "QUANTIZE_ROWS": config.quantize.rows if config.quantize else 0,
        "QUANTIZE_VECTORS": config.quantize.vectors if config.quantize else 1,
        "BLOCK_SCALES": int(variant.block_scales),
        "ONE_TOKEN_TILE": int(variant.one_token_tile),
        "TMA_STORE": int(variant.tma_store),
        "OUT_KIND": _KINDS[variant.out_dtype],
        "BIAS_KIND": _KINDS[variant.bias_dtype or torch.float32],
        "KIND": _KINDS[variant.x_dtype] if variant.x_dtype else 0,
        **wgmma(layout.mma_n),
    }


def source(config: TileConfig, variant: Variant) -> str:
    """Return the CUDA source of one kernel."""
    return nvrtc.joined(macros(config, variant), *SOURCES)
