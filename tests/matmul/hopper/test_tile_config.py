"""A tile configuration fits an SM, and its schedule computes every output once."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator

import pytest

from fp8kit.matmul.hopper.device import H200, hopper
from fp8kit.matmul.hopper.tile_config import PRODUCER_REGISTERS, TILE_K, TileConfig, round_up
from tile_configs import CONFIGS, label, tile_config

SMEM = 228 * 1024  # of an SM
SYSTEM = 1024  # of each block
REGISTERS = 65536


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_tested_configuration_can_be_launched(config: TileConfig, blocks: bool) -> None:
    assert config.dynamic_smem_bytes(blocks) + config.static_smem_bytes <= SMEM - SYSTEM


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_registers_are_handed_on_within_a_block(config: TileConfig) -> None:
    consumers = 128 * config.layout.warpgroups
    assert config.threads == consumers + config.producer_threads
    if not config.launch_registers:
        assert config.consumer_registers == 0
        return
    # setmaxnreg takes multiples of 8, and waits without end for registers that are not there
    assert config.launch_registers % 8 == config.consumer_registers % 8 == 0
    launched = config.launch_registers * config.threads
    assert launched <= REGISTERS
    taken = config.consumer_registers * consumers
    assert taken + PRODUCER_REGISTERS * config.producer_threads <= launched
    assert config.consumer_registers <= 255


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize(
    ("m", "n", "k", "sm_count"),
    [(1, 64, 16, 132), (300, 1000, 4112, 78), (6500, 4096, 640, 132)],
)
def test_every_output_is_computed_once(
    config: TileConfig, m: int, n: int, k: int, sm_count: int
) -> None:
    steps = -(-k // TILE_K)
    done: Counter[tuple[int, int, int]] = Counter()
    for n0, t0, first, count in work(config, m, n, k, sm_count):
        # steps beyond K load zeros
        done.update((n0, t0, step) for step in range(first, min(first + count, steps)))
        assert count % config.pipeline.pipelined_steps == 0
    places = ((n0, t0) for n0 in range(0, n, config.weights) for t0 in range(0, m, config.tokens))
    assert done == Counter((*place, step) for place in places for step in range(steps))


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_tokens_of_a_band_stay_in_the_cache(config: TileConfig) -> None:
    m, n = 6500, 4096
    schedule = config.schedule(m, n, H200)
    assert schedule.band * config.tokens <= max(H200.band_tokens, config.tokens)
    w_tiles, t_tiles = -(-n // config.weights), -(-m // config.tokens)
    order = [place(i, schedule, w_tiles, t_tiles) for i in range(w_tiles * t_tiles)]
    bands = [t // schedule.band for _, t in order]
    assert bands == sorted(bands)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize(("m", "n"), [(1, 64), (300, 1000), (6500, 4096)])
def test_the_grid_has_whole_clusters_and_no_idle_ones(config: TileConfig, m: int, n: int) -> None:
    grid, tiles = config.grid(m, n, H200), config.tiles(m, n)
    assert grid % config.cluster == 0
    assert 0 < grid <= H200.sm_count * config.launch.blocks_per_sm
    neighbors = config.cluster // config.launch.split_k
    assert grid // config.launch.split_k < tiles + neighbors


def work(
    config: TileConfig, m: int, n: int, k: int, sm_count: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield place, first K step and K steps of all tiles of all blocks, as ``scheduler.cuh``."""
    device, split = hopper(sm_count), config.launch.split_k
    schedule = config.schedule(m, n, device)
    w_tiles, t_tiles, steps = -(-n // config.weights), -(-m // config.tokens), -(-k // TILE_K)
    tail = w_tiles * t_tiles - schedule.full_waves * schedule.grid
    tail_splits = split > 1 and 0 < tail <= schedule.grid // split
    for block in range(schedule.grid):
        for wave in range(schedule.full_waves + (tail > 0)):
            splits = tail_splits and wave == schedule.full_waves
            tile = wave * schedule.grid + (block // split if splits else block)
            if tile >= w_tiles * t_tiles:
                break
            w, t = place(tile, schedule, w_tiles, t_tiles)
            part = round_up(-(-steps // split), 4) if splits else steps
            first = block % split * part if splits else 0
            pipelined = config.pipeline.pipelined_steps
            count = round_up(max(0, min(part, steps - first)), pipelined)
            yield w * config.weights, t * config.tokens, first, count


def place(tile: int, schedule: tuple[int, ...], w_tiles: int, t_tiles: int) -> tuple[int, int]:
    """Return the weight and token tile by another way than the kernel's division by the band."""
    if t_tiles == 1:
        return tile, 0
    _, band_tiles, inverse, _ = schedule
    band = 0
    while tile >= (band + 1) * band_tiles * w_tiles:
        band += 1
    inside, width = tile - band * band_tiles * w_tiles, t_tiles - band * band_tiles
    w = (inside * inverse) >> 32 if width >= band_tiles else inside // width
    return w, band * band_tiles + inside - w * min(width, band_tiles)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_the_epilogue_has_a_place_for_each_result(config: TileConfig) -> None:
    columns, (lines, line_bytes) = config.epilogue_cols, config.store_box
    assert config.layout.mma_n % columns == 0
    assert line_bytes * lines == columns * 64 * 2
    assert lines <= 256 >= line_bytes  # limits of a TMA box
    vectors = line_bytes // 16
    swizzled = vectors % 8 == 0
    line_bytes += 0 if swizzled else 16
    places = {
        line * line_bytes + (vector ^ line % 8 if swizzled else vector) * 16
        for line in range(lines)
        for vector in range(vectors)
    }
    assert len(places) == lines * vectors
    pipeline, split = config.pipeline, config.launch.split_k
    ring = pipeline.weight_stages * config.weights + pipeline.token_stages * config.tokens
    fragments = config.layout.mma_n // 8
    owned = 1 if fragments == 1 else math.ceil(math.ceil(fragments / split) / 2) * 2
    partials = (split - 1) * owned * 2048 * config.layout.warpgroups
    buffers = config.layout.warpgroups * config.epilogue.buffers * (max(places) + 16)
    assert 128 * ring + partials + buffers <= config.needed_smem_bytes(False)
    # a pattern of the swizzle begins with each buffer
    if line_bytes == 128:
        assert (128 * ring + partials) % 1024 == lines * line_bytes % 1024 == 0
    # eight lines of a column of a matrix lie in eight groups of banks
    for vector in range(vectors if swizzled else 0):
        assert len({(vector ^ line % 8) % 8 for line in range(8)}) == 8


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_tma_stores_whole_16_bit_lines_of_several_tiles(config: TileConfig) -> None:
    for m, n, size, blocks in (
        *((4096, 4096, 2, False), (4096, 4096, 2, True), (4096, 4096, 4, False)),
        *((4096, 4100, 2, False), (64, 65536, 2, False), (65, 64, 2, False)),
    ):
        stores = config.uses_tma_store(m, n, H200, blocks, size)
        possible = size == 2 and n % 8 == 0 and config.launch.split_k == 1
        hides = m > 64 and config.tiles(m, n) > config.grid(m, n, H200)
        assert stores <= (possible and hides)
        assert stores or blocks or not (possible and hides)


def test_a_configuration_is_frozen_and_spelled_out() -> None:
    config = tile_config(64, 1, steps=4, stages=(10, 4), split_k=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.launch = dataclasses.replace(config.launch, split_k=1)
    with pytest.raises(TypeError):
        TileConfig(config.layout, config.pipeline)
    assert str(config) == (
        "tiles of 64 rows by 64 weights, 10 stages, K in 4 parts where tiles are few"
    )
    assert {config: 1}[tile_config(64, 1, steps=4, stages=(10, 4), split_k=4)] == 1
