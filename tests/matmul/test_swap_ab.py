"""The cut of the own kernel and its source, on any machine; the kernel itself on Hopper."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import fp8kit
from fp8kit import dispatch
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul import swap_ab_cuts, swap_ab_tile
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.runtime.weight_hazards import safe_to_prefetch
from numerics import assert_bits_equal, assert_matmul, assert_no_drift, exact_product

swap_ab = pytest.importorskip("fp8kit.matmul.swap_ab", reason="cuda-bindings is not installed")
CUTS = pytest.importorskip("cuts").CUTS
launches = pytest.importorskip("launches")

# of the last one, several rounds of whole tiles and a round that clusters split
SHAPES = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (64, 16)),
    *((34816, 2560), (3072, 768)),
)
PROCESSORS = launches.PROCESSORS


def choose(m: int, n: int, k: int, block_scales: bool = False) -> swap_ab.Tile:
    return swap_ab.choose_tile(m, n, k, PROCESSORS, block_scales)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_cut_along_k_of_few_rows_does_not_depend_on_m(n: int, k: int) -> None:
    # nor does anything that decides which tiles are split
    cuts = [(choose(m, n, k), m) for m in range(1, 65)]
    assert len({(t.split, t.groups, t.resident, t.blocks(m, n, PROCESSORS)) for t, m in cuts}) == 1


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64, 65, 96, 128, 200, 256, 500, 512, 4096])
def test_tiles_fit_the_multiprocessor(m: int, n: int, k: int, blocks: bool) -> None:
    tile = choose(m, n, k, blocks)
    assert tile.cols == 8 or tile.cols % 16 == 0
    assert not tile.token_rows or tile.cols in swap_ab_cuts._TOKEN_ROWS_COLS
    assert m <= 64 or tile.token_rows or tile.cols * -(-m // tile.cols) < m + 16 * -(-m // 128)
    assert m > 64 or m <= tile.cols < 2 * max(m, 8)
    assert 2 <= tile.start <= tile.window <= tile.stages
    used = tile.shared_bytes(blocks) + tile.static_bytes
    assert tile.needed_bytes(blocks) <= tile.shared_bytes(blocks)
    assert used <= 227 * 1024
    assert tile.resident * (used + 1024) <= 228 * 1024
    # an even spread, and no more, fits on a multiprocessor
    assert (tile.resident + 1) * (used + 1024) > 228 * 1024
    consumers = tile.registers or 65536 // -(-tile.threads // 128) // 128 // tile.resident
    products = 1 if tile.run == 1 else 2
    assert (1 + products) * tile.cols // 2 < min(consumers, 255)
    # consumers wait for registers that the block was not started with: without end
    producers, given = tile.threads - 128 * tile.groups, swap_ab_tile.PRODUCER_REGISTERS
    if tile.registers:
        taken = tile.started * tile.threads
        assert tile.registers * 128 * tile.groups + given * producers <= taken
        assert taken <= 65536 // (2 if tile.leaves_room and tile.groups == 1 else 1)
        assert tile.started % 8 == 0
    assert tile.split == 1 or 4 % tile.run == 0


@pytest.mark.parametrize(
    ("m", "n", "k", "blocks", "room"),
    [
        (96, 4096, 4096, False, True),
        (256, 4096, 7168, False, True),
        (192, 5120, 2880, True, True),
        (64, 8192, 8192, False, False),  # few tokens
        (96, 6144, 4096, False, False),  # 36 multiprocessors are idle
        (96, 4096, 4096, True, False),  # block scales, weights as rows
        (256, 8192, 8192, False, False),  # two warpgroups, long rows
        (512, 3072, 768, False, True),  # short rows
        (512, 2304, 768, True, True),
        (96, 28672, 896, False, False),  # several tiles a block
    ],
)
def test_room_for_the_next_quantizer(m: int, n: int, k: int, blocks: bool, room: bool) -> None:
    tile = choose(m, n, k, blocks)
    left = 228 * 1024 - tile.shared_bytes(blocks) - tile.static_bytes - 1024
    assert tile.leaves_room == room
    if room:
        # two programs, of 16 warps or of four, 32 registers a thread, and what the system takes
        assert left >= 2 * (1024 + 128)
        threads = 512 if tile.groups == 1 else 128
        assert tile.started * tile.threads + 2 * threads * 32 <= 65536


@pytest.mark.parametrize(
    ("cut", "tiles", "k", "blocks", "helps"),
    [
        ((128, 1, 1, 4, False), 116, 4096, False, True),
        ((128, 1, 1, 4, False), 114, 4096, False, False),  # more than an eighth is idle
        ((128, 1, 1, 4, False), 260, 4096, False, True),  # of one warpgroup, several tiles too
        ((128, 1, 2, 4, False), 64, 4096, False, True),
        ((128, 1, 1, 4, False), 130, 4096, True, False),  # block scales, weights as rows
        ((128, 1, 1, 4, True), 130, 4096, True, True),
        ((128, 2, 1, 4, True), 130, 1792, False, True),
        ((128, 2, 1, 4, True), 130, 1808, False, False),  # rows of more than a warp
        ((128, 2, 1, 4, True), 132, 1024, False, True),
        ((128, 2, 1, 4, True), 133, 1024, False, False),  # several tiles
        ((96, 2, 1, 4, True), 130, 1024, True, True),
        ((112, 2, 1, 4, True), 130, 1024, True, False),  # registers are lacking
        ((96, 3, 1, 4, True), 130, 1024, False, False),
    ],
)
def test_where_room_helps(
    cut: tuple[int, int, int, int, bool], tiles: int, k: int, blocks: bool, helps: bool
) -> None:
    neighbors = 2 if cut[2] == 1 else 1
    tile = swap_ab_cuts._deepest(swap_ab_cuts._Shape(*cut, neighbors), blocks)
    problem = (tile.tokens, tiles * tile.weights, k)
    assert swap_ab_cuts._helps_the_next(tile, problem, PROCESSORS, blocks) == helps


def test_room_is_registers_and_shared_memory() -> None:
    one, two = (swap_ab.Tile(96, g, 4, 4, 4, 4, 1, 1, leaves_room=True) for g in (1, 2))
    assert (one.started, one.registers, one.threads) == (128, 232, 256)
    assert (two.started, two.registers, two.threads) == (144, 200, 384)
    for spare, fits in ((3072, True), (3071, False)):
        needed = 227 * 1024 - one.static_bytes - spare
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(swap_ab.Tile, "needed_bytes", lambda *_, needed=needed: needed)
            assert one.fits(False) == fits
            assert dataclasses.replace(one, leaves_room=False).fits(False)


@pytest.mark.parametrize(
    ("m", "n", "k", "blocks", "cut"),
    [
        (96, 6144, 4096, True, (True, 1, 96, 1)),  # 16 % faster than weights as rows
        (128, 6144, 4096, False, (True, 1, 96, 1)),
        (128, 4096, 4096, False, (False, 1, 128, 2)),  # 5 % faster than 80 columns
        (96, 1536, 1536, True, (True, 1, 96, 3)),
    ],
)
def test_one_warpgroup_with_tokens_as_rows(
    m: int, n: int, k: int, blocks: bool, cut: tuple[bool, int, int, int]
) -> None:
    tile = choose(m, n, k, blocks)
    assert (tile.token_rows, tile.groups, tile.cols, tile.split) == cut


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 64, 65, 256, 512, 1030, 4096])
def test_every_tile_has_a_block(m: int, n: int, k: int) -> None:
    tile = choose(m, n, k)
    tiles = tile.tiles(m, n)
    blocks = tile.blocks(m, n, PROCESSORS)
    together = tile.split * tile.neighbors
    assert blocks % together == 0
    assert blocks <= PROCESSORS * tile.resident
    assert tiles <= blocks // tile.split < tiles + tile.neighbors or blocks > (
        0.9 * PROCESSORS * tile.resident
    )


@pytest.mark.parametrize("tile", CUTS, ids=repr)
@pytest.mark.parametrize(("m", "n"), [(1, 64), (300, 1000), (6500, 4096)])
def test_every_tile_is_computed_once(tile: swap_ab.Tile, m: int, n: int) -> None:
    order = tile.order(m, n, PROCESSORS)
    w_tiles, t_tiles = -(-n // tile.weights), -(-m // tile.tokens)
    places = [place(index, order, w_tiles, t_tiles) for index in range(w_tiles * t_tiles)]
    assert sorted(places) == [(w, t) for w in range(w_tiles) for t in range(t_tiles)]
    assert order.full == w_tiles * t_tiles // order.blocks
    # tokens of a band stay in the L2 cache while all weights pass
    bands = [t // order.span for _, t in places]
    assert bands == sorted(bands)
    assert order.span * tile.tokens <= max(1024, tile.tokens)


def place(tile: int, order: swap_ab_tile.Order, w_tiles: int, t_tiles: int) -> tuple[int, int]:
    """Find a tile as the kernel does, without dividing by the span."""
    if t_tiles == 1:
        return tile, 0
    band = 0
    while tile >= (band + 1) * order.span * w_tiles:
        band += 1
    inside, width = tile - band * order.span * w_tiles, t_tiles - band * order.span
    w = (inside * order.inverse) >> 32 if width >= order.span else inside // width
    return w, band * order.span + inside - w * min(width, order.span)


def test_threads_write_what_has_nothing_to_hide_behind() -> None:
    tile = choose(4096, 4096, 4096)
    assert (tile.split, tile.held) == (1, 2)
    assert tile.stores(4096, 4096, PROCESSORS, False, 2)
    assert not tile.stores(4096, 4096, PROCESSORS, False, 4)
    assert not tile.stores(4096, 4100, PROCESSORS, False, 2)
    assert tile.stores(4096, 4096, PROCESSORS, True, 2)
    wide = swap_ab.Tile(144, 2, 1, 6, 6, 6, 1, 1, True)
    assert wide.stores(4096, 4096, PROCESSORS, False, 2)
    assert not wide.stores(4096, 4096, PROCESSORS, True, 2)
    assert tile.stores(tile.tokens * 2, tile.weights * 67, PROCESSORS, False, 2)
    assert not tile.stores(tile.tokens * 2, tile.weights * 66, PROCESSORS, False, 2)
    assert not swap_ab.Tile(128, 2, 4, 6, 4, 6, 2, 1).stores(4096, 4096, PROCESSORS, False, 2)
    few = choose(64, 28672, 4096)
    assert few.tiles(64, 28672) > few.blocks(64, 28672, PROCESSORS)
    assert not few.stores(64, 28672, PROCESSORS, False, 2)


def test_neighbors_leave_no_tile_for_a_second_round() -> None:
    tile = choose(4096, 4096, 4096)
    assert tile.neighbors == 2
    for tiles in (1, 2, 129, 131, 132):
        blocks = tile.blocks(tile.tokens, tile.weights * tiles, PROCESSORS)
        assert blocks == tiles + tiles % 2


@pytest.mark.parametrize(
    ("steps", "run"),
    [(32, 8), (28, 7), (24, 8), (20, 5), (12, 6), (44, 4), (86, 8), (23, 8), (9, 3), (2, 2)],
)
def test_a_long_run_multiplies_little_in_vain(steps: int, run: int) -> None:
    assert swap_ab_cuts.long_run(128 * steps) == swap_ab_cuts.long_run(128 * steps - 112) == run


def test_a_run_is_no_longer_than_k_where_that_is_short() -> None:
    for m in (16, 128, 256, 1024, 4096):
        assert {choose(m, 960, 576, blocks).run for blocks in (False, True)} == {5}
        assert choose(m, 960, 1024).run in (4, 8)
    assert swap_ab_cuts.run_of(576, 2) == swap_ab_cuts.run_of(4096, 1) == 4
    many, few = choose(4096, 3352, 768), choose(256, 3352, 768)
    assert (many.groups, many.x_stages, many.run) == (2, many.stages, 6)
    assert few.run == 6
    for n, k in ((960, 576), (3352, 768), (4304, 1152)):
        inside = swap_ab.values_tile(4, n, k, PROCESSORS, False)
        assert -(-k // 128) <= inside.x_stages
        assert inside.run <= inside.x_stages


def test_many_rows_take_long_runs() -> None:
    assert choose(4096, 4096, 4096).run == 8
    assert choose(256, 4096, 4096).run < 8
    few, many = choose(64, 28672, 4096), choose(4096, 4096, 4096)
    assert (few.start, few.window) == (3, 3)
    assert (many.start, many.window) == (3, many.stages)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("tile", CUTS, ids=repr)
def test_every_cut_that_is_tested_can_be_launched(tile: swap_ab.Tile, blocks: bool) -> None:
    assert tile.shared_bytes(blocks) + tile.static_bytes <= 227 * 1024


@pytest.mark.parametrize("tile", CUTS, ids=repr)
def test_results_on_their_way_have_places_of_their_own(tile: swap_ab.Tile) -> None:
    columns, (lines, line_bytes) = tile.at_once, tile.box
    assert tile.cols % columns == 0
    assert line_bytes * lines == columns * 64 * 2
    assert lines <= 256 >= line_bytes
    eighths = line_bytes // 16
    permuted = eighths % 8 == 0
    line_bytes += 0 if permuted else 16
    places = {
        line * line_bytes + (eighth ^ line % 8 if permuted else eighth) * 16
        for line in range(lines)
        for eighth in range(eighths)
    }
    assert len(places) == lines * eighths
    rings = 128 * (tile.stages * tile.weights + tile.x_stages * tile.tokens)
    fragments = tile.cols // 8
    share = 1 if fragments == 1 else math.ceil(math.ceil(fragments / tile.split) / 2) * 2
    parts = (tile.split - 1) * share * 2048 * tile.groups
    results = tile.groups * tile.held * (max(places) + 16)
    assert rings + parts + results <= tile.needed_bytes(False)
    # a pattern of the swizzle begins with each part
    assert line_bytes != 128 or (rings + parts) % 1024 == lines * line_bytes % 1024 == 0
    # eight lines of a column of a matrix lie in eight groups of banks
    for eighth in range(eighths if permuted else 0):
        assert len({(eighth ^ line % 8) % 8 for line in range(8)}) == 8


def test_more_multiprocessors_are_used_when_k_is_long() -> None:
    few = choose(256, 4096, 14336)
    assert few.split > 1
    assert few.blocks(256, 4096, PROCESSORS) > PROCESSORS * 0.9


def test_a_last_round_of_few_rows_has_work_for_most() -> None:
    split_round = ((57344, 8192), (34816, 2560), (22016, 4096))
    whole_round = ((28672, 4096), (57344, 1024))
    for n, k in (*split_round, *whole_round):
        split = 2 if (n, k) in split_round else 1
        tile = choose(16, n, k)
        full, left = divmod(tile.tiles(16, n), tile.blocks(16, n, PROCESSORS))
        assert full > 0
        assert (tile.groups, tile.split) == (2, split), (n, k)
        assert split == 1 or 2 * left <= PROCESSORS


def test_all_of_a_few_tiles_run_at_once() -> None:
    for n in (17408, 21504):
        tile = choose(16, n, 4096)
        assert (tile.groups, tile.resident) == (1, 3), n
        assert tile.tiles(16, n) <= tile.blocks(16, n, PROCESSORS)
    assert choose(16, 22016, 4096).resident == 1
    assert swap_ab.values_tile(4, 22016, 4096, PROCESSORS, False) is not None


def test_tokens_are_rows_where_costs_are_the_same_and_blocks_have_several_tiles() -> None:
    assert choose(256, 57344, 8192).token_rows
    one_round = choose(256, 8192, 8192)
    assert one_round.tiles(256, 8192) < PROCESSORS
    assert not one_round.token_rows
    assert not choose(4096, 6144, 4096).token_rows
    # nor where it takes more tiles: of 192 tokens, not of 128
    assert not choose(512, 21504, 3072).token_rows


def test_source_spells_out_the_registers() -> None:
    text = swap_ab.source(swap_ab.Tile(16, 1, 4, 4, 4, 2, 2, 1), True, True, 8, 32)
    assert "m64n16k32" in text
    assert "%7}, %8, %9, add" in text
    assert not re.search(r"@[A-Z]+@", text)
    assert "#define BLOCK_SCALES 1" in text


def launched(m: int, w: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Multiply with everything below the launch faked, and say whether it may start early."""
    early = launches.fake(monkeypatch)
    x_q = fp8kit.quantize(torch.randn(m, w.shape[1]))
    groups, scale = (ROW, ROW), torch.ones(len(w), 1)
    problem = MatmulProblem.of(x_q.data, w, groups, torch.bfloat16, None, "precise", False)
    swap_ab.run(MatmulOperands(x_q.data, x_q.scale, w, scale), problem)
    return early[0]


def test_a_weight_is_read_early_once_a_call_has_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    w = codes.view(torch.float8_e4m3fn)
    assert [launched(4, w, monkeypatch) for _ in range(3)] == [False, True, True]
    codes.add_(1)
    assert [launched(4, w, monkeypatch) for _ in range(2)] == [False, True]
    assert not launched(4, copy.deepcopy(w), monkeypatch)
    assert not launched(4, w.detach(), monkeypatch)  # nothing is known of another tensor
    with torch.inference_mode():
        uncounted = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    assert [launched(4, uncounted, monkeypatch) for _ in range(3)] == [False, False, False]


def test_a_long_product_starts_when_what_is_ahead_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(swap_ab, "_LONG", 4 * 64 * 128)
    assert not launched(4, w, monkeypatch)
    assert [launched(m, w, monkeypatch) for m in (3, 4, 5)] == [True, False, False]


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_every_way_to_a_product_knows_what_was_waited_for(
    mode: Callable[[], contextlib.AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators hand on the tensor object that the caller holds, which is where it is noted."""
    early = launches.fake_layers(monkeypatch)
    w_q = fp8kit.quantize(torch.randn(64, 128), role="weight")
    with mode():
        x = torch.randn(4, 128)
        x_q = fp8kit.quantize(x)
        fp8kit.scaled_mm(x_q, w_q)
        fp8kit.scaled_mm(x_q, w_q)
        fp8kit.linear(x, w_q)
        w_q.data.copy_(torch.zeros_like(w_q.data))
        fp8kit.linear(x, w_q)
        fp8kit.scaled_mm(x_q, w_q)
    assert early == [False, True, True, False, True]


def test_a_launch_that_fails_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
    launched(4, torch.zeros_like(w), monkeypatch)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA: no kernel image")

    with monkeypatch.context() as patch:
        x_q = fp8kit.quantize(torch.randn(4, 128))
        patch.setattr(swap_ab, "_kernel", lambda *_: SimpleNamespace(launch=broken))
        groups = (ROW, ROW)
        problem = MatmulProblem.of(x_q.data, w, groups, torch.bfloat16, None, "precise", False)
        with pytest.raises(RuntimeError, match="no kernel image"):
            swap_ab.run(MatmulOperands(x_q.data, x_q.scale, w, torch.ones(64, 1)), problem)
    assert not launched(4, w, monkeypatch)


def traits(tile: swap_ab.Tile) -> tuple[object, ...]:
    """Name the paths of the source that a cut takes."""
    wide = tile.cols > 64
    return (
        wide,
        wide and tile.x_stages < tile.stages,
        tile.split > 1,
        tile.resident > 1,
        tile.token_rows,
        tile.token_rows and (128 % tile.cols > 0, tile.run > 1),
        tile.neighbors > 1,
        tile.leaves_room and tile.groups,
        tile.split == 1 and tile.held > 1 and tile.box[1] == 128,
    )


def test_what_is_chosen_is_among_the_cuts_that_are_tested() -> None:
    chosen = {
        traits(choose(m, n, k, blocks))
        for m in (1, 16, 64, 96, 128, 192, 256, 512, 700, 1024, 4096)
        for n in (576, 1024, 2112, 4096, 6144, 7168, 9216, 10240, 11008, 14336, 28672)
        for k in (512, 1536, 2048, 4096, 7168, 14336, 28672)
        for blocks in (False, True)
    }
    assert chosen <= {traits(tile) for tile in CUTS}


def test_a_choice_is_made_once() -> None:
    swap_ab.choose_tile.cache_clear()
    swap_ab_cuts._deepest.cache_clear()
    choose(300, 4096, 4096, True)
    made = swap_ab_cuts._deepest.cache_info().misses
    choose(300, 4096, 4096, True)
    choose(300, 6144, 4096, True)
    assert swap_ab_cuts._deepest.cache_info().misses == made
    assert swap_ab.choose_tile.cache_info().hits == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"m": 16385}, "at most 16384 rows"),
        ({"accum": "fast"}, None),
        ({"x_group": TENSOR, "w_group": TENSOR}, None),
        ({"batch_invariant": True}, "another kernel"),
        ({"x_group": None}, "scales"),
        ({"x_group": GROUP128, "w_group": BLOCK}, None),
        ({"out_dtype": torch.float32}, None),
        ({"out_dtype": torch.float32, "x_group": GROUP128, "w_group": BLOCK}, None),
        ({"w_dtype": torch.float8_e5m2}, "e4m3fn codes only"),
        ({"k": 4104}, "multiples of 16, got 4104"),
        ({"capability": (10, 0)}, "sm90"),
    ],
    ids=str,
)
def test_what_it_declines(
    changes: dict[str, object], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_ab.nvrtc, "missing", lambda: None)
    e4m3, hopper = torch.float8_e4m3fn, ("cuda", (9, 0), "NVIDIA H200")
    problem = MatmulProblem(
        *(1024, 4096, 4096, ROW, ROW, e4m3, e4m3, torch.bfloat16, False, "precise", False), *hopper
    )
    said = swap_ab.supports(dataclasses.replace(problem, **changes))
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("most", [1, 2, 8, 64, 128, 512, 1024, 2048, 4096])
def test_row_counts_take_every_cut_of_their_power_of_two(most: int, blocks: bool) -> None:
    for n, k in ((6144, 4096), (9216, 3072), (1792, 4096), (896, 4096)):
        counts = swap_ab_cuts.every_cut(most, n, k, PROCESSORS, blocks, 2)
        assert all(most // 2 < m <= most for m in counts)
        assert len(counts) <= 8

        def kernel(m: int, n: int = n, k: int = k) -> tuple[object, ...]:
            tile = choose(m, n, k, blocks)
            return tile, m <= tile.tokens, tile.stores(m, n, PROCESSORS, blocks, 2)

        every = {kernel(m) for m in range(most // 2 + 1, most + 1)}
        assert {kernel(m) for m in counts} == every
    assert most != 512 or len(counts) > 1


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(swap_ab.nvrtc.nvrtc, "nvrtcVersion", broken)
    swap_ab.nvrtc.missing.cache_clear()
    try:
        assert swap_ab.nvrtc.missing() == "NVRTC is not usable: libnvrtc.so not found"
    finally:
        swap_ab.nvrtc.missing.cache_clear()


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (TENSOR, ROW), (ROW, TENSOR), (GROUP128, BLOCK)])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (130, 304), (1000, 4112), (257, 14336), (1, 16)])
@pytest.mark.parametrize("m", [1, 2, 8, 9, 33, 64, 65, 100, 256, 300, 512, 1030, 4096])
def test_swap_ab_matches_the_exact_product(m: int, n: int, k: int, groups: tuple) -> None:
    x = torch.randn(m, k, device="cuda") * torch.logspace(-1, 1, m, device="cuda")[:, None]
    w = torch.randn(n, k, device="cuda") * torch.logspace(-2, 0, n, device="cuda")[:, None]
    x_q, w_q = fp8kit.quantize(x, groups[0]), fp8kit.quantize(w, groups[1], role="weight")
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
        y = fp8kit.scaled_mm(x_q, w_q, bias, out_dtype=out_dtype, backend="swap_ab")
        assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q), bias, backend="swap_ab")


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (GROUP128, BLOCK)])
@pytest.mark.parametrize("tile", CUTS, ids=repr)
def test_no_cut_is_wrong(
    tile: swap_ab.Tile, groups: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_ab, "choose_tile", lambda *_: tile)
    for n, k in ((64, 128), (4096, 2048), (5000, 144), (1000, 4112), (257, 7168), (3, 16)):
        w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), groups[1], role="weight")
        some = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        # many rounds and bands of tiles, the last one ragged
        for m in (1, 65, 300, 1031, *((6500,) if n > 4000 else ())):
            x_q = fp8kit.quantize(torch.randn(m, k, device="cuda"), groups[0])
            for bias, out in (
                (None, torch.bfloat16),
                (some, torch.bfloat16),
                (some, torch.float32),
            ):
                problem = matmul_problem(x_q, w_q, bias, out)
                operands = MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale, bias)
                y = swap_ab.run(operands, problem)
                assert_matmul(y, fp8kit.dequantize(x_q), fp8kit.dequantize(w_q), bias, "swap_ab")
                assert_bits_equal(swap_ab.run(operands, problem), y)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("groups", [(ROW, ROW), (GROUP128, BLOCK)])
@pytest.mark.parametrize("tile", CUTS, ids=repr)
def test_no_cut_drifts(tile: swap_ab.Tile, groups: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_ab, "choose_tile", lambda *_: tile)
    w_q = fp8kit.quantize(torch.rand(520, 14336, device="cuda"), groups[1], role="weight")
    x_q = fp8kit.quantize(torch.rand(tile.tokens + 1, 14336, device="cuda"), groups[0])
    problem = matmul_problem(x_q, w_q)
    y = swap_ab.run(MatmulOperands(x_q.data, x_q.scale, w_q.data, w_q.scale), problem)
    assert_no_drift(y, exact_product(fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)))


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize(
    ("m", "k", "groups"),
    [
        (1, 14336, (ROW, ROW)),
        (4, 4096, (ROW, ROW)),
        (1, 7168, (GROUP128, BLOCK)),
        (4, 1024, (GROUP128, BLOCK)),
    ],
)
def test_sums_of_tokens_quantized_inside_do_not_drift(m: int, k: int, groups: tuple) -> None:
    x = torch.rand(m, k, device="cuda", dtype=torch.bfloat16)
    w_q = fp8kit.quantize(torch.rand(4096, k, device="cuda"), groups[1], role="weight")
    x_q = fp8kit.quantize(x, groups[0])
    problem = matmul_problem(x_q, w_q)
    y = swap_ab.run_values(MatmulOperands(x, None, w_q.data, w_q.scale), problem, 1e-12)
    assert y is not None
    assert_no_drift(y, exact_product(fp8kit.dequantize(x_q), fp8kit.dequantize(w_q)))


def matmul_problem(
    x: fp8kit.QTensor,
    w: fp8kit.QTensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> MatmulProblem:
    groups = (x.group, w.group)
    return MatmulProblem.of(x.data, w.data, groups, out_dtype, bias, "precise", False)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 1024), (34816, 2560)])
def test_a_row_has_the_same_bits_at_every_m(n: int, k: int) -> None:
    x_q = fp8kit.quantize(torch.randn(64, k, device="cuda"))
    w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), role="weight")
    whole = fp8kit.scaled_mm(x_q, w_q, backend="swap_ab")
    for m in (1, 3, 8, 9, 17, 33):
        part = fp8kit.QTensor(x_q.data[:m], x_q.scale[:m], ROW)
        assert_bits_equal(fp8kit.scaled_mm(part, w_q, backend="swap_ab"), whole[:m])


@pytest.mark.gpu
@HOPPER
def test_a_weight_written_just_before_is_seen() -> None:
    layer = fp8kit.Fp8Linear.from_linear(
        torch.nn.Linear(4096, 4096, False, device="cuda", dtype=torch.bfloat16)
    )
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    others = [
        fp8kit.quantize(torch.randn(4096, 4096, device="cuda"), role="weight") for _ in range(4)
    ]
    expected = [fp8kit.linear(x, w) for w in others]
    for i in range(2000):
        w = others[i % 4]
        layer.weight_scale.data.copy_(w.scale)
        # past the counter of changes: nothing tells the layer
        layer.weight.data.view(torch.uint8).copy_(w.data.view(torch.uint8))
        assert_bits_equal(layer(x), expected[i % 4])


@pytest.mark.gpu
@HOPPER
def test_a_weight_quantized_just_before_is_seen() -> None:
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    dense = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    expected = [fp8kit.linear(x, fp8kit.quantize(w, role="weight")) for w in dense]
    torch.cuda.synchronize()
    for i in range(500):
        # the allocator gives each the memory of the one before
        w_q = fp8kit.quantize(dense[i % 4], role="weight")
        assert_bits_equal(fp8kit.linear(x, w_q), expected[i % 4])
        assert_bits_equal(fp8kit.linear(x, w_q), expected[i % 4])


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_tokens_quantized_inside_are_cut_as_others(m: int, n: int, k: int, blocks: bool) -> None:
    whole, tile = choose(m, n, k, blocks), swap_ab.values_tile(m, n, k, PROCESSORS, blocks)
    if tile is None:
        assert (1 << (m - 1).bit_length()) * k > 8192 or whole.resident > 1
        return
    cut = ("cols", "groups", "run", "split", "resident")
    assert [getattr(tile, name) for name in cut] == [getattr(whole, name) for name in cut]
    assert tile.blocks(m, n, PROCESSORS) == whole.blocks(m, n, PROCESSORS)
    used = tile.shared_bytes(blocks) + tile.static_bytes + 1024
    assert tile.resident * used <= 228 * 1024 < (tile.resident + 1) * used
    assert m <= tile.values
    assert tile.vectors * 128 * tile.groups * 8 >= tile.values * k
    tiles, steps = -(-n // tile.weights), -(-k // 128)
    split = tile.split if tiles * tile.split <= tile.blocks(m, n, PROCESSORS) else 1
    assert tile.x_stages >= -(-steps // split)


def launch_values(x: torch.Tensor, w: torch.Tensor, x_group: GroupShape) -> torch.Tensor | None:
    groups = (x_group, ROW)
    problem = MatmulProblem.of(x, w, groups, x.dtype, None, "precise", False, w.dtype)
    return swap_ab.run_values(MatmulOperands(x, None, w, torch.ones(len(w), 1)), problem, 1e-12)


def test_values_are_taken_as_they_lie_or_left_to_two_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = launches.fake(monkeypatch)
    k, w = 256, torch.zeros(64, 256, dtype=torch.float8_e4m3fn)
    wide = torch.zeros(8, k + 8, dtype=torch.bfloat16)
    for x in (wide[:1, :k], wide[:4, :k], wide[:3, :k].half()):
        y = launch_values(x, w, ROW)
        assert y is not None
        assert y.shape == (len(x), 64)
        assert y.dtype == x.dtype
    assert early == [False, True, True]
    left = {
        "too many": wide[:5, :k],
        "fp32": wide[:1, :k].float(),
        "off by two bytes": wide.view(-1)[1 : k + 1].view(1, k),
        "rows off by eight bytes": torch.zeros(2, k + 4, dtype=torch.bfloat16)[:, :k],
        "by columns": torch.zeros(k, 2, dtype=torch.bfloat16).t(),
    }
    for why, x in left.items():
        assert launch_values(x, w, ROW) is None, why
    assert launch_values(wide[:1, :k], w, TENSOR) is None
    assert len(early) == 3


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [(ROW, ROW), (ROW, TENSOR), (GROUP128, BLOCK)])
@pytest.mark.parametrize(
    ("n", "k"),
    [
        *((64, 128), (130, 304), (4096, 4096), (1000, 4112), (28672, 2048), (10240, 8192)),
        (34816, 2560),
    ],
)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_tokens_quantized_inside_give_the_same_bits(
    m: int, n: int, k: int, groups: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(m, k + 16, device="cuda", dtype=dtype)[:, :k]
    x *= torch.logspace(-3, 1, m, device="cuda", dtype=dtype)[:, None]
    x[m // 2, 5:200] = 0
    w_q = fp8kit.quantize(torch.randn(n, k, device="cuda"), groups[1], role="weight")
    bias = torch.randn(n, device="cuda", dtype=dtype)
    inside: list[bool] = []
    quantize_in_gemm = swap_ab.BACKEND.quantize_in_gemm

    def watched(*arguments: object) -> torch.Tensor | None:
        y = quantize_in_gemm(*arguments)
        inside.append(y is not None)
        return y

    monkeypatch.setattr(swap_ab.BACKEND, "quantize_in_gemm", watched)
    monkeypatch.setattr(MatmulProblem, "estimate", lambda _: None)
    dispatch.choose.cache_clear()
    for row in (None, 0.0, float("nan"), float("inf"), 60000.0, 1e-30):
        if row is not None:
            x[0] = row
        x_q = fp8kit.quantize(x, groups[0])
        expected = fp8kit.scaled_mm(x_q, w_q, bias, out_dtype=dtype, backend="swap_ab")
        assert_bits_equal(fp8kit.linear(x, w_q, bias), expected)
    dispatch.choose.cache_clear()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    fits = swap_ab.values_tile(m, n, k, processors, groups[1] == BLOCK) is not None
    assert set(inside) == {fits}
    assert len(inside) == 6 or x.is_contiguous()  # of which later calls repeat a tape
    assert fits or m * k > 4096


@pytest.mark.gpu
@HOPPER
def test_a_weight_written_right_before_its_product_is_seen() -> None:
    """No quantizer in between: a kernel of torch writes the weight, the next one reads it."""
    x_q = fp8kit.quantize(torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16))
    others = [
        fp8kit.quantize(torch.randn(4096, 4096, device="cuda"), role="weight") for _ in range(4)
    ]
    expected = [fp8kit.scaled_mm(x_q, w) for w in others]
    w_q = fp8kit.QTensor(others[0].data.clone(), others[0].scale.clone(), ROW)
    codes, zero = w_q.data.view(torch.uint8), torch.zeros((), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for i in range(2000):
        w_q.scale.copy_(others[i % 4].scale)
        # a copy of memory is no kernel, and nothing starts early behind it
        torch.bitwise_xor(others[i % 4].data.view(torch.uint8), zero, out=codes)
        for early in (False, True):
            assert safe_to_prefetch(w_q.data) == early
            assert_bits_equal(fp8kit.scaled_mm(x_q, w_q), expected[i % 4])
