"""Which cut the own kernel on Hopper takes for a problem; any machine can ask."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8kit.matmul.hopper.tile_config import (
    FEW_ROWS,
    MOST_COLS,
    TILE_K,
    TILES_AHEAD,
    Tile,
    clusters_at_once,
    round_up,
)

_MANY_ROWS = 256
_LARGE_ROWS = 1024
_SPARE = 8  # of how many multiprocessors one may be idle while the others leave room
_SHORT_SUM = 1280  # up to this K the write of a tile takes as long as its products
_SHORT = 1792  # values of a row in 16 bits that a warp quantizes
_RUN, _LONGEST_RUN = 4, 8
_END = 0.2  # of a run of products: the part of a step that nothing overlaps
_TOKEN_ROWS_COLS = (80, 96, 128, 144, 160)  # weights of a tile whose rows are tokens
# side, columns, warpgroups, split: 13 % slower than another cut in 16 layers whose choice it was
_OVERRATED = (True, 80, 2, 3)
_IN_FLIGHT = 6 * 10**6  # bytes of weights on their way to all multiprocessors
_MOST_VECTORS = {False: 8, True: 4}  # of 16 bytes that a thread quantizes, by block scales


@functools.lru_cache(maxsize=4096)
def choose_tile(m: int, n: int, k: int, processors: int, block_scales: bool) -> Tile:
    """Cut a problem so that every multiprocessor has work.

    Up to 64 rows the weights alone matter, and the cut along K depends on N and K only: it decides
    the order of the sum. Above, the cut is the fastest by ``microseconds``.

    Args:
        m: rows of ``x``.
        n: rows of ``w``.
        k: columns of both.
        processors: multiprocessors of the GPU.
        block_scales: scales per 1x128 and 128x128 elements.
    """
    if m <= FEW_ROWS:
        return _few_rows(max(8, 1 << (m - 1).bit_length()), n, k, processors, block_scales)
    found = estimates((m, n, k), processors, block_scales)
    best = min(found, key=found.__getitem__)
    if m > _LARGE_ROWS:
        return best
    # costs are the same for either side; with several tiles a block is faster with tokens as rows
    equal = (t for t in found if found[t] == found[best] and t.token_rows and t.split == 1)
    return next((t for t in equal if processors < t.tiles(m, n) <= best.tiles(m, n)), best)


def cuts(problem: tuple[int, int, int], processors: int, block_scales: bool) -> list[Tile]:
    """Give the cuts that are considered for more than 64 rows.

    Args:
        problem: ``(M, N, K)``.
        processors: as in ``choose_tile``.
        block_scales: as in ``choose_tile``.
    """
    m, _, k = problem
    even = -(-m // (16 * -(-m // MOST_COLS))) * 16  # tokens of a tile, if all have as many
    many = m > _MANY_ROWS
    sides = [(False, even), *((True, cols) for cols in _TOKEN_ROWS_COLS)]
    shapes = [
        (_Shape(cols, groups, split, run, token_rows, 2 if split == 1 else 1), many and run != _RUN)
        for token_rows, cols in sides
        for groups in (1, 2, 3)
        for split in (1, 2, 3, 4)
        for run in (run_of(k, split),)
        if cols <= MOST_COLS or (groups == 2 and split == 1)  # registers for more are not there
        if (token_rows, cols, groups, split) != _OVERRATED
    ]
    if many:
        shapes += [
            (_Shape(cols, 2, 1, long_run(k), token_rows, 2), True)
            for token_rows, cols in ((True, MOST_COLS), (False, even))
        ]
    found = []
    for shape, alike in shapes:
        tile = _deepest(shape, block_scales, alike)
        if _helps_the_next(tile, problem, processors, block_scales):
            tile = _deepest(shape, block_scales, alike, True)
        found.append(tile)
    return found


def _helps_the_next(
    tile: Tile, problem: tuple[int, int, int], processors: int, block_scales: bool
) -> bool:
    """Say whether room beside blocks makes the next layer's quantizer faster.

    Programs that find no room wait for the first multiprocessors that get free and go there by
    fours, or by dozens if rows are short. Where an eighth of all multiprocessors is idle anyway,
    that is as fast; weights as rows took 2 to 5 % longer with block scales. Beside two warpgroups
    only programs of short rows fit, and blocks with several tiles are slowed down. What K the next
    layer has is not known here: it is taken to be like this one's.
    """
    m, n, k = problem
    if tile.groups > 2 or (block_scales and not tile.token_rows):
        return False
    if tile.groups == 2:
        # with block scales 128 columns lack registers, and more were not measured
        wide = block_scales and tile.cols > 96
        if k > _SHORT or wide or tile.tiles(m, n) > processors:
            return False
    idle = processors - tile.blocks(m, n, processors)
    return _SPARE * idle <= processors


def long_run(k: int) -> int:
    """Give how many products a run has where there are many rounds of tiles.

    Longer runs end less often, but what a run has beyond K is multiplied in vain.

    Args:
        k: columns of both operands.
    """
    steps = -(-k // TILE_K)
    return min(range(_LONGEST_RUN, 1, -1), key=lambda run: round_up(steps, run) * (1 + _END / run))


def run_of(k: int, split: int) -> int:
    """Give how many products a run has: four, or as a long one if that multiplies less in vain.

    Args:
        k: columns of both operands.
        split: blocks that split it; their parts are multiples of four.
    """
    steps, long = -(-k // TILE_K), long_run(k)
    less = split == 1 and round_up(steps, long) < round_up(steps, _RUN)
    return long if less else _RUN


def every_cut(m: int, n: int, k: int, processors: int, block_scales: bool, size: int) -> list[int]:
    """Give row counts in ``(m / 2, m]`` that between them take every kernel that these take.

    Args:
        m: a power of two.
        n: as in ``choose_tile``, and so are the others.
        k: see there.
        processors: see there.
        block_scales: see there.
        size: bytes of a result.
    """
    found: dict[object, int] = {}
    for rows in range(m, m // 2, -min(16, m)):  # a tile is a multiple of 16 tokens, or holds all
        tile = choose_tile(rows, n, k, processors, block_scales)
        stored = tile.stores(rows, n, processors, block_scales, size)
        found.setdefault((tile, rows <= tile.tokens, stored), rows)
    return sorted(found.values())


def _few_rows(cols: int, n: int, k: int, processors: int, block_scales: bool) -> Tile:
    groups, split, resident = _few_rows_cut(n, k, processors)
    shape = _Shape(cols, groups, split, run_of(k, split), resident=resident)
    tile = _deepest(shape, block_scales)
    # blocks that leave multiprocessors idle keep the memory busy with one tile more each
    few_blocks = 5 * tile.blocks(cols, n, processors) < 4 * processors * resident
    lasting = -(-k // TILE_K) >= 24 * split
    return replace(tile, window=min(tile.window, tile.start + (few_blocks and lasting)))


def _few_rows_cut(n: int, k: int, processors: int) -> tuple[int, int, int]:
    """Give warpgroups, blocks that split K, and blocks per multiprocessor."""
    # in the mean within 2 % of the best of 1700 cuts of 38 layers, measured on an H200 at 16 and 64
    # rows, 23 of the layers at one row, too; all of a layer split alike
    tiles, pairs, steps = -(-n // 64), -(-n // 128), -(-k // TILE_K)
    fill, room = tiles / processors, clusters_at_once(processors)
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
    if processors < pairs < 1.3 * processors and tiles <= 3 * processors:
        return 1, 1, 3
    # a last round that is too small for all blocks is shared: clusters of two split its tiles
    return 2, 2 if steps >= 20 and 0 < pairs % processors <= room[2] else 1, 1


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a product take, in microseconds on an H200.

    ``benchmarks/tiles.py`` measures cuts and fits these. They are of 1231 cuts of 116 products at
    96 to 4096 rows, and of 22 whole layers in two cuts each, where what they prefer takes 0.5 %
    longer than the best cut in the mean. That is all they were fitted for: none is a measurement
    of its part alone. In 481 whole layers it is 1.3 %, noise included; only ``crowded`` has seen
    those, and ``hidden`` 60 others.

    Args:
        steps: a step of 128 along K, by warpgroups.
        area: of a step for every 64 x 128 results.
        alone: of a step whose sum nothing overlaps.
        crowded: factors on a step where one warpgroup has the tokens as rows, of up to 80 columns
            and of more; the first is also that of a short ring.
        block_tokens: what block scales add to a step, as a part of it, tokens as rows.
        block_weights: likewise, weights as rows and 128 columns.
        sums: of a split K, by blocks from two on.
        write: scaling and writing 64 x 128 results.
        hidden: factor on that where three warpgroups have tokens as rows with block scales and K is
            short: one multiplies while another writes.
        drain: of the end of a run of products.
        cache: bytes from the L2 cache, of all multiprocessors together.
        memory: bytes of weights that are read.
    """

    steps: tuple[float, float, float] = (0.159, 0.225, 0.296)
    area: float = 0.107
    alone: float = 0.13
    crowded: tuple[float, float] = (1.19, 1.12)
    block_tokens: float = 0.39
    block_weights: float = 0.75
    sums: tuple[float, float, float] = (3.62, 2.39, 4.62)
    write: float = 1.2
    hidden: float = 0.8
    drain: float = 0.0863
    cache: float = 14.1e6
    memory: float = 10.5e6


_COSTS = Costs()


def microseconds(
    tile: Tile,
    problem: tuple[int, int, int],
    processors: int,
    block_scales: bool,
    costs: Costs = _COSTS,
) -> float:
    """Estimate the time of a product, to compare cuts of it.

    Args:
        tile: the cut.
        problem: ``(M, N, K)``.
        processors: multiprocessors of the GPU.
        block_scales: as in ``choose_tile``.
        costs: of the parts.
    """
    m, n, k = problem
    tiles = tile.tiles(m, n)
    clusters = clusters_at_once(processors)[tile.split]
    full, left = divmod(tiles, clusters * tile.split)
    steps = round_up(-(-k // TILE_K), tile.run)
    part, sums, blocks = steps, 0.0, min(tiles, processors)
    if tile.split > 1 and 0 < left <= clusters:
        part, sums = round_up(-(-steps // tile.split), 4), costs.sums[tile.split - 2]
        blocks = min(tiles * tile.split, processors)
    area = tile.groups * tile.cols / MOST_COLS
    step = costs.steps[tile.groups - 1] + costs.area * area
    if tile.run > 1:
        step += costs.drain * (1 / tile.run - 1 / 4)  # that of runs of four is in its steps
    elif tile.groups < 3:
        step += costs.alone
    narrow, other = costs.crowded
    if tile.stages < 4:
        step *= narrow
    elif tile.token_rows and tile.groups == 1:
        step *= narrow if tile.cols <= 80 else other
    if block_scales:
        # a thread needs two scales of tokens for a row of them, or for every eight columns
        wide = 1 if tile.token_rows else tile.cols / MOST_COLS
        step *= 1 + (costs.block_tokens if tile.token_rows else costs.block_weights) * wide
    # the multiplication, or the way of its operands from the L2 cache
    step = max(step, (tile.rows + tile.cols) * TILE_K * blocks / costs.cache)
    write = costs.write * area
    wide = tile.groups == 3 and tile.token_rows and tile.cols == MOST_COLS
    if block_scales and wide and k <= _SHORT_SUM:
        write *= costs.hidden
    multiply = full * (steps * step + write) + (left > 0) * (part * step + write + sums)
    return max(multiply, n * k / costs.memory)


def estimates(
    problem: tuple[int, int, int], processors: int, block_scales: bool, costs: Costs = _COSTS
) -> dict[Tile, float]:
    """Give ``microseconds`` of every cut that is considered.

    Args:
        problem: ``(M, N, K)``.
        processors: multiprocessors of the GPU.
        block_scales: as in ``choose_tile``.
        costs: of the parts.
    """
    return {
        tile: microseconds(tile, problem, processors, block_scales, costs)
        for tile in cuts(problem, processors, block_scales)
    }


class _Shape(NamedTuple):
    """A cut without its rings, as ``Tile`` has it; registers may only allow runs of one product."""

    cols: int
    groups: int
    split: int
    run: int
    token_rows: bool = False
    neighbors: int = 1
    resident: int = 1


@functools.cache
def _deepest(
    shape: _Shape, block_scales: bool, alike: bool = False, leaves_room: bool = False
) -> Tile:
    """Give as many stages as there is room for, if ``alike`` as many for tokens as for weights."""
    cols, groups, split, run, token_rows, neighbors, resident = shape
    run = 1 if groups == 3 or resident > 1 or cols > MOST_COLS else run
    few = (64 * groups if token_rows else cols) <= FEW_ROWS
    # tokens come soon after they are asked for, weights are to be here before the tokens are
    shallow = few or (groups == 2 and not token_rows and not alike)
    for stages in range(24, 1, -1):
        x_stages = min(stages, 4) if shallow else stages
        ahead = min(stages, TILES_AHEAD) if few else stages
        tile = Tile(cols, groups, run, stages, x_stages, ahead, split, resident, token_rows)
        tile = replace(tile, neighbors=neighbors, leaves_room=leaves_room)
        for held in range(cols // tile.at_once, 0, -1):
            if (cut := replace(tile, held=held)).fits(block_scales):
                return cut
    raise AssertionError(f"no ring fits beside {cols} columns")


@functools.lru_cache(maxsize=4096)
def values_tile(m: int, n: int, k: int, processors: int, block_scales: bool) -> Tile | None:
    """Cut a problem whose tokens are quantized in the kernel, as ``choose_tile`` cuts it.

    Returns:
        The cut; ``None`` if the tokens are too many to be held.
    """
    tile, rows = choose_tile(m, n, k, processors, block_scales), 1 << (m - 1).bit_length()
    vectors = 1 << (-(-k // 8 // (128 * tile.groups // rows)) - 1).bit_length()
    if vectors > _MOST_VECTORS[block_scales]:
        return None
    steps, blocks = -(-k // TILE_K), tile.blocks(m, n, processors)
    window = tile.window
    if tile.resident == 1:
        window = -(-_IN_FLIGHT // (blocks * tile.weights * TILE_K))
    if tile.tiles(m, n) <= blocks // tile.split:
        steps = -(-steps // tile.split)
    held = round_up(steps, _RUN)  # no run multiplies more
    # a ring of half the depth costs more than a kernel less saves
    for stages in range(tile.stages, tile.stages // 2, -1):
        cut = replace(tile, stages=stages, x_stages=held, window=min(window, stages))
        cut = replace(cut, values=rows, vectors=vectors)
        if cut.fits(block_scales):
            return cut
    return None
