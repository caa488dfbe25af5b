"""Estimate the time of a Hopper GEMM, to compare its tile configurations above 64 rows."""

from __future__ import annotations

from fp8kit.matmul.hopper.device import Costs, Device
from fp8kit.matmul.hopper.tile_config import MAX_PIPELINED_COLS, TILE_K, TileConfig, round_up

Shape = tuple[int, int, int]  # M, N, K
_SHORT_SUM = 1280  # up to this K the epilogue takes as long as the main loop


def microseconds(
    config: TileConfig,
    problem: Shape,
    device: Device,
    block_scales: bool,
    costs: Costs | None = None,
) -> float:
    """Estimate the time of a GEMM ``(M, N, K)``, to compare its configurations."""
    (m, n, k), costs = problem, costs or device.costs
    layout, pipeline, split = config.layout, config.pipeline, config.launch.split_k
    tiles, clusters = config.tiles(m, n), device.clusters[split - 1]
    full, tail = divmod(tiles, clusters * split)
    steps = round_up(-(-k // TILE_K), pipeline.pipelined_steps)
    part, reduction, blocks = steps, 0.0, min(tiles, device.sm_count)
    if split > 1 and 0 < tail <= clusters:
        part, reduction = round_up(-(-steps // split), 4), costs.reduction[split - 2]
        blocks = min(tiles * split, device.sm_count)
    area = layout.warpgroups * layout.mma_n / MAX_PIPELINED_COLS
    step = costs.steps[layout.warpgroups - 1] + costs.area * area
    if pipeline.pipelined_steps > 1:
        step += costs.drain * (1 / pipeline.pipelined_steps - 1 / 4)  # ``steps`` has that of four
    elif layout.warpgroups < 3:
        step += costs.exposed
    narrow, other = costs.crowded
    if pipeline.weight_stages < 4:
        step *= narrow
    elif not layout.swap_ab and layout.warpgroups == 1:
        step *= narrow if layout.mma_n <= 80 else other
    if block_scales:
        # a thread needs two scales of tokens as MMA rows, or two for every eight columns
        wide = layout.mma_n / MAX_PIPELINED_COLS if layout.swap_ab else 1
        step *= 1 + (costs.block_weights if layout.swap_ab else costs.block_tokens) * wide
    # the MMAs, or the transfer of their operands from L2
    step = max(step, (config.mma_m + layout.mma_n) * TILE_K * blocks / costs.cache)
    epilogue = costs.epilogue * area
    three = layout.warpgroups == 3 and not layout.swap_ab and layout.mma_n == MAX_PIPELINED_COLS
    if block_scales and three and k <= _SHORT_SUM:
        epilogue *= costs.hidden
    compute = full * (steps * step + epilogue) + (tail > 0) * (part * step + epilogue + reduction)
    return max(compute, n * k / costs.memory)
