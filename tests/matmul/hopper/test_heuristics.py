"""Properties of the chosen configurations. Which one is fastest is a matter of benchmarks."""

from __future__ import annotations

import itertools

import pytest

from fp8kit.matmul.hopper import heuristics
from fp8kit.matmul.hopper.cost_model import microseconds
from fp8kit.matmul.hopper.device import H200, hopper
from fp8kit.matmul.hopper.heuristics import choose, choose_quantizing
from fp8kit.matmul.hopper.tile_config import TileConfig, round_up
from tile_configs import CONFIGS

# the last but one has several full waves, and one that clusters split along K
SHAPES = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (64, 16)),
    *((34816, 2560), (3072, 768)),
)
ROWS = (1, 8, 9, 33, 64, 65, 96, 128, 200, 256, 500, 512, 4096, 16384)
SMEM, SYSTEM = 228 * 1024, 1024


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_is_chosen_fits_a_multiprocessor(n: int, k: int, blocks: bool) -> None:
    for device, m in itertools.product((H200, hopper(78)), ROWS):
        config = choose(m, n, k, device, blocks)
        layout, pipeline, launch = config.layout, config.pipeline, config.launch
        assert layout.mma_n == 8 or layout.mma_n % 16 == 0
        assert 2 <= pipeline.warmup_inflight <= pipeline.max_inflight <= pipeline.weight_stages
        assert launch.split_k == 1 or 4 % pipeline.pipelined_steps == 0
        used = config.dynamic_smem_bytes(blocks) + config.static_smem_bytes
        assert config.needed_smem_bytes(blocks) <= config.dynamic_smem_bytes(blocks)
        assert used <= SMEM - SYSTEM
        # the requested occupancy, and no higher one
        assert launch.blocks_per_sm * (used + SYSTEM) <= SMEM
        assert (launch.blocks_per_sm + 1) * (used + SYSTEM) > SMEM
        threads = round_up(config.threads, 128)
        registers = config.consumer_registers or 65536 // threads // launch.blocks_per_sm
        sums = 2 if pipeline.pipelined_steps == 1 else 3
        assert sums * layout.mma_n // 2 < min(registers, 255)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_up_to_64_rows_the_order_of_the_sum_does_not_depend_on_m(n: int, k: int) -> None:
    for blocks in (False, True):
        chosen = [(choose(m, n, k, H200, blocks), m) for m in range(1, 65)]
        assert all(m <= config.tokens < 2 * max(m, 8) for config, m in chosen)
        # nor does anything that decides which tiles are split
        orders = {
            (c.launch.split_k, c.weights, c.launch.blocks_per_sm, c.grid(m, n, H200))
            for c, m in chosen
        }
        assert len(orders) == 1


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_tiles_waste_less_than_16_tokens_each(n: int, k: int, blocks: bool) -> None:
    for m in (m for m in ROWS if m > 64):
        config = choose(m, n, k, H200, blocks)
        if config.layout.swap_ab:
            assert config.tokens * -(-m // config.tokens) < m + 16 * -(-m // 128)


@pytest.mark.parametrize("blocks", [False, True])
def test_many_rows_take_the_least_estimate(blocks: bool) -> None:
    for m, (n, k) in itertools.product((65, 256, 1000, 4096), SHAPES):
        found = heuristics.estimates((m, n, k), H200, blocks)
        assert all(us > 0 for us in found.values())
        assert found[choose(m, n, k, H200, blocks)] == min(found.values())


def test_the_choice_is_deterministic() -> None:
    problems = list(itertools.product(ROWS, SHAPES, (False, True)))
    orders = []
    for order in (problems, problems[::-1]):
        choose.cache_clear()
        # cached values must not depend on the order of calls
        heuristics._with_most_stages.cache_clear()
        orders.append({p: choose(p[0], *p[1], H200, p[2]) for p in order})
    assert orders[0] == orders[1]


def test_estimates_grow_with_the_work() -> None:
    for config, blocks in itertools.product(CONFIGS, (False, True)):
        times = [
            microseconds(config, problem, H200, blocks)
            for problem in ((256, 4096, 4096), (512, 8192, 4096), (1024, 16384, 8192))
        ]
        assert times == sorted(set(times))


@pytest.mark.parametrize("k", [16, 576, 768, 1152, 2560, 4096, 4112, 14336, 28672])
def test_pipelined_steps_waste_no_more_than_a_group(k: int) -> None:
    steps = -(-k // 128)
    most = heuristics.most_pipelined_steps(k)
    assert 2 <= most <= 8
    assert round_up(steps, most) < steps + most
    assert heuristics.most_pipelined_steps(k - k % 128 + 16) in range(2, 9)
    for split in (1, 2, 3, 4):
        count = heuristics.pipelined_steps(k, split)
        assert split == 1 or 4 % count == 0
        assert round_up(steps, count) <= round_up(steps, 4)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (22016, 4096), (960, 576), (4304, 1152)])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_a_gemm_that_quantizes_is_tiled_as_others(m: int, n: int, k: int, blocks: bool) -> None:
    whole, config = choose(m, n, k, H200, blocks), choose_quantizing(m, n, k, H200, blocks)
    if config is None:
        rows = 1 << (m - 1).bit_length()
        assert rows * k > (4096 if blocks else 8192) or whole.launch.blocks_per_sm > 1
        return
    assert config.layout == whole.layout
    assert config.launch == whole.launch
    assert config.pipeline.pipelined_steps == whole.pipeline.pipelined_steps
    assert config.schedule(m, n, H200) == whole.schedule(m, n, H200)
    used = config.dynamic_smem_bytes(blocks) + config.static_smem_bytes + SYSTEM
    assert config.launch.blocks_per_sm * used <= SMEM < (config.launch.blocks_per_sm + 1) * used
    # threads hold all values, and stages all codes that a block multiplies
    quantize = config.quantize
    assert quantize is not None
    assert m <= quantize.rows
    threads = 128 * config.layout.warpgroups
    assert quantize.vectors * threads * 8 >= quantize.rows * k
    split, steps = config.launch.split_k, -(-k // 128)
    splits = config.tiles(m, n) * split <= config.grid(m, n, H200)
    assert config.pipeline.token_stages >= -(-steps // (split if splits else 1))


def test_most_few_token_layers_are_quantized_in_the_gemm() -> None:
    layers = [(m, n, k) for m in (1, 2, 4) for n, k in ((4096, 4096), (28672, 1024), (960, 576))]
    assert all(choose_quantizing(*layer, H200, False) for layer in layers)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("most", [1, 2, 8, 64, 128, 512, 1024, 2048, 4096])
def test_row_counts_take_every_kernel_of_their_power_of_two(most: int, blocks: bool) -> None:
    for n, k in ((6144, 4096), (9216, 3072), (1792, 4096), (896, 4096)):
        counts = heuristics.row_counts(most, n, k, H200, blocks, 2)
        assert all(most // 2 < m <= most for m in counts)
        assert len(counts) <= 8

        def kernel(m: int, n: int = n, k: int = k) -> tuple[object, ...]:
            config = choose(m, n, k, H200, blocks)
            return config, m <= config.tokens, config.uses_tma_store(m, n, H200, blocks, 2)

        some = range(most // 2 + 1, most + 1, 1 + most // 512)  # all take seconds
        assert {kernel(m) for m in some} <= {kernel(m) for m in counts}


def paths(config: TileConfig) -> tuple[object, ...]:
    """Return the paths of the source that a configuration takes."""
    layout, pipeline, launch = config.layout, config.pipeline, config.launch
    wide, steps = layout.mma_n > 64, pipeline.pipelined_steps
    return (
        wide,
        wide and pipeline.token_stages < pipeline.weight_stages,
        launch.split_k > 1,
        launch.blocks_per_sm > 1,
        layout.swap_ab,
        not layout.swap_ab and (128 % layout.mma_n > 0, steps > 1),
        launch.cluster_sync_every > 0,
        launch.split_k == 1 and config.epilogue.buffers > 1 and config.store_box[1] == 128,
    )


def test_what_is_chosen_takes_paths_that_are_tested() -> None:
    chosen = {
        paths(choose(m, n, k, H200, blocks))
        for m in (1, 16, 64, 96, 128, 192, 256, 512, 700, 1024, 4096)
        for n in (576, 1024, 2112, 4096, 6144, 7168, 9216, 10240, 11008, 14336, 28672)
        for k in (512, 1536, 2048, 4096, 7168, 14336, 28672)
        for blocks in (False, True)
    }
    assert chosen <= {paths(config) for config in CONFIGS}
