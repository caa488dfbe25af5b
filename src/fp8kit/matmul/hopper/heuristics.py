"""Choose the tile configuration of the Hopper GEMM for a problem; this needs no GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from fp8kit.matmul.hopper.cost_model import Shape, microseconds
from fp8kit.matmul.hopper.device import Costs, Device
from fp8kit.matmul.hopper.tile_config import (
    FEW_ROWS,
    MAX_PIPELINED_COLS,
    TILE_K,
    Epilogue,
    InGemmQuantization,
    Launch,
    Layout,
    Pipeline,
    TileConfig,
    round_up,
)

_MANY_ROWS = 256
_LARGE_ROWS = 1024
_STEPS, _MAX_STEPS = 4, 8  # K steps that are pipelined: usual number, maximum
_DRAIN = 0.2  # part of a step that nothing overlaps when the pipeline drains
_UNSWAPPED_COLS = (80, 96, 128, 144, 160)  # weights of a tile whose MMA rows are tokens
_MAX_VECTORS = {False: 8, True: 4}  # of 16 bytes that a thread quantizes, by block scales
_MAX_STAGES = 24
_FEW_STAGES = 4  # of tokens, where these arrive soon after they are requested


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, device: Device, block_scales: bool) -> TileConfig:
    """Return the tile configuration of a GEMM.

    Up to 64 rows the weights alone matter, and split-K depends on N and K only, as it decides the
    order of the sum. Above, the choice is the fastest by ``microseconds``. ``block_scales`` means
    1x128 by 128x128 scales.
    """
    if m <= FEW_ROWS:
        return _choose_few_rows(max(8, 1 << (m - 1).bit_length()), n, k, device, block_scales)
    found = estimates((m, n, k), device, block_scales)
    best = min(found, key=found.__getitem__)
    if m > _LARGE_ROWS:
        return best
    # of equal estimates: blocks with several tiles are faster with tokens as MMA rows
    equal = (
        c
        for c, us in found.items()
        if us == found[best] and not c.layout.swap_ab and c.launch.split_k == 1
    )
    return next((c for c in equal if device.sm_count < c.tiles(m, n) <= best.tiles(m, n)), best)


@functools.lru_cache(maxsize=4096)
def choose_quantizing(
    m: int, n: int, k: int, device: Device, block_scales: bool
) -> TileConfig | None:
    """Return the configuration of a GEMM that quantizes its tokens, tiled as ``choose`` does.

    ``None`` if registers or shared memory do not hold the tokens.
    """
    config, rows = choose(m, n, k, device, block_scales), 1 << (m - 1).bit_length()
    vectors = 1 << (-(-k // 8 // (128 * config.layout.warpgroups // rows)) - 1).bit_length()
    if vectors > _MAX_VECTORS[block_scales]:
        return None
    steps, grid = -(-k // TILE_K), config.grid(m, n, device)
    inflight = config.pipeline.max_inflight
    if config.launch.blocks_per_sm == 1:
        inflight = -(-device.quantize_inflight_bytes // (grid * config.weights * TILE_K))
    if config.tiles(m, n) <= grid // config.launch.split_k:
        steps = -(-steps // config.launch.split_k)
    # with half the stages the GEMM loses more than the saved kernel takes
    stages = config.pipeline.weight_stages
    for weight_stages in range(stages, stages // 2, -1):
        pipeline = replace(
            config.pipeline,
            weight_stages=weight_stages,
            token_stages=round_up(steps, _STEPS),  # no pipelined group multiplies more
        )
        quantize = InGemmQuantization(rows=rows, vectors=vectors)
        candidate = replace(config, pipeline=pipeline, quantize=quantize)
        candidate = with_inflight(candidate, min(inflight, weight_stages), device)
        if candidate.fits(block_scales):
            return candidate
    return None


def row_counts(
    m: int, n: int, k: int, device: Device, block_scales: bool, out_bytes: int
) -> list[int]:
    """Return row counts in ``(m / 2, m]`` that together use every kernel that any of these uses.

    ``m`` is a power of two, and ``out_bytes`` is the size of an element of the result.
    """
    found: dict[object, int] = {}
    for rows in range(m, m // 2, -min(16, m)):  # a tile has a multiple of 16 tokens, or all
        config = choose(rows, n, k, device, block_scales)
        tma_store = config.uses_tma_store(rows, n, device, block_scales, out_bytes)
        found.setdefault((config, rows <= config.tokens, tma_store), rows)
    return sorted(found.values())


def estimates(
    problem: Shape, device: Device, block_scales: bool, costs: Costs | None = None
) -> dict[TileConfig, float]:
    """Return ``microseconds`` of every configuration that is considered above 64 rows."""
    return {
        config: microseconds(config, problem, device, block_scales, costs)
        for config in candidates(problem, device, block_scales)
    }


def candidates(problem: Shape, device: Device, block_scales: bool) -> list[TileConfig]:
    """Return the configurations that are considered above 64 rows."""
    m, _, k = problem
    # tokens per tile, if tiles divide them evenly
    even = -(-m // (16 * -(-m // MAX_PIPELINED_COLS))) * 16
    many = m > _MANY_ROWS
    sides = [(True, even), *((False, cols) for cols in _UNSWAPPED_COLS)]
    outlines = [
        _Outline(
            Layout(mma_n=cols, warpgroups=warpgroups, swap_ab=swap_ab),
            split,
            steps,
            shares_weights=split == 1,
            equal_stages=many and steps != _STEPS,
        )
        for swap_ab, cols in sides
        for warpgroups in (1, 2, 3)
        for split in (1, 2, 3, 4)
        for steps in (pipelined_steps(k, split),)
        # with more columns a thread lacks registers
        if cols <= MAX_PIPELINED_COLS or (warpgroups == 2 and split == 1)
    ]
    if many:
        outlines += [
            _Outline(
                Layout(mma_n=cols, warpgroups=2, swap_ab=swap_ab),
                1,
                most_pipelined_steps(k),
                shares_weights=True,
                equal_stages=True,
            )
            for swap_ab, cols in ((False, MAX_PIPELINED_COLS), (True, even))
        ]
    return [_with_most_stages(outline, device, block_scales) for outline in outlines]


def most_pipelined_steps(k: int) -> int:
    """Return how many K steps are pipelined where there are many waves.

    More steps drain the pipeline less often, but waste more steps beyond K.
    """
    steps, counts = -(-k // TILE_K), range(_MAX_STEPS, 1, -1)
    return min(counts, key=lambda count: round_up(steps, count) * (1 + _DRAIN / count))


def pipelined_steps(k: int, split: int) -> int:
    """Return how many K steps are pipelined: four, or ``most_pipelined_steps`` if these waste less.

    Parts of K, one for each block that splits it, are multiples of four steps.
    """
    steps, most = -(-k // TILE_K), most_pipelined_steps(k)
    fewer = split == 1 and round_up(steps, most) < round_up(steps, _STEPS)
    return most if fewer else _STEPS


def with_inflight(config: TileConfig, max_inflight: int, device: Device) -> TileConfig:
    """Return the configuration with so many weight loads in flight, and a warmup to match."""
    per_stage = config.weights * TILE_K * config.launch.blocks_per_sm
    warmup = max(2, device.warmup_bytes // per_stage)
    pipeline = replace(
        config.pipeline,
        max_inflight=max_inflight,
        warmup_inflight=min(max_inflight, device.warmup_stages, warmup),
    )
    return replace(config, pipeline=pipeline)


def _choose_few_rows(mma_n: int, n: int, k: int, device: Device, block_scales: bool) -> TileConfig:
    warpgroups, split, blocks_per_sm = _few_rows_launch(n, k, device)
    outline = _Outline(
        Layout(mma_n=mma_n, warpgroups=warpgroups),
        split,
        pipelined_steps(k, split),
        blocks_per_sm=blocks_per_sm,
    )
    config = _with_most_stages(outline, device, block_scales)
    # blocks that leave SMs idle keep the memory busy with one load more each
    few_blocks = 5 * config.grid(mma_n, n, device) < 4 * device.sm_count * blocks_per_sm
    long = -(-k // TILE_K) >= 24 * split
    inflight = config.pipeline.warmup_inflight + (few_blocks and long)
    return with_inflight(config, min(config.pipeline.max_inflight, inflight), device)


def _few_rows_launch(n: int, k: int, device: Device) -> tuple[int, int, int]:
    """Return warpgroups, blocks that split K, and blocks per SM."""
    # On an H200 within 2 % of the best of 1700 configurations in the mean, over 38 layers at 16 and
    # 64 rows and 23 of them at one row; every row count of a layer splits K alike.
    tiles, pairs, steps = -(-n // 64), -(-n // 128), -(-k // TILE_K)
    fill, room = tiles / device.sm_count, (0, *device.clusters)
    if steps >= 64 and 2 * room[4] < 3 * pairs <= 3 * room[4]:
        return 2, 4, 1
    if 0.36 < fill and tiles <= 2 * room[3] and steps >= 24:
        return 2, 3, 1
    if fill <= 0.5:
        return 1, max(s for s in (1, 2, 3, 4) if s == 1 or (steps >= 8 * s and tiles <= room[s])), 1
    if fill <= 1:
        return (2, 2, 1) if steps >= 24 else (1, 1, 1)
    if fill <= 1.25:
        return (1, 2, 3) if steps >= 24 else (1, 1, 2)
    if device.sm_count < pairs < 1.3 * device.sm_count and tiles <= 3 * device.sm_count:
        return 1, 1, 3
    # clusters of two share the tiles of a last wave that is too small for all blocks
    return 2, 2 if steps >= 20 and 0 < pairs % device.sm_count <= room[2] else 1, 1


class _Outline(NamedTuple):
    """A configuration without the depth of its pipeline."""

    layout: Layout
    split_k: int
    pipelined_steps: int  # at most: registers may allow one only
    blocks_per_sm: int = 1
    shares_weights: bool = False  # a cluster of two blocks loads the same weights
    equal_stages: bool = False  # as many stages for tokens as for weights


@functools.cache
def _with_most_stages(outline: _Outline, device: Device, block_scales: bool) -> TileConfig:
    """Return the outline with as many stages, then epilogue buffers, as there is room for."""
    layout = outline.layout
    one = layout.warpgroups == 3 or outline.blocks_per_sm > 1 or layout.mma_n > MAX_PIPELINED_COLS
    launch = Launch(
        split_k=outline.split_k,
        blocks_per_sm=outline.blocks_per_sm,
        cluster_sync_every=device.cluster_sync_every if outline.shares_weights else 0,
    )
    few = (layout.mma_n if layout.swap_ab else 64 * layout.warpgroups) <= FEW_ROWS
    # tokens arrive soon after they are requested, but weights must arrive before the tokens do
    shallow = few or (layout.warpgroups == 2 and layout.swap_ab and not outline.equal_stages)
    for stages in range(_MAX_STAGES, 1, -1):
        pipeline = Pipeline(
            weight_stages=stages,
            token_stages=min(stages, _FEW_STAGES) if shallow else stages,
            pipelined_steps=1 if one else outline.pipelined_steps,
            max_inflight=stages,
            warmup_inflight=stages,
        )
        config = TileConfig(layout=layout, pipeline=pipeline, launch=launch)
        for buffers in range(layout.mma_n // config.epilogue_cols, 0, -1):
            candidate = replace(config, epilogue=Epilogue(buffers=buffers))
            if candidate.fits(block_scales):
                inflight = min(stages, device.warmup_stages) if few else stages
                return with_inflight(candidate, inflight, device)
    raise AssertionError(f"no pipeline fits {layout}")
