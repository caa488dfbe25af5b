"""A cut of a problem for the own kernel on Hopper: what it takes, and how its tiles follow.

Sizes and conditions repeat those of ``gemm.cu``, which reads a cut as constants.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

TILE_K = 128
PRODUCER_REGISTERS = 24
FEW_ROWS = 64
MOST_COLS = 128  # for which a thread has registers in every cut that leaves no room
_SHARED_PER_PROCESSOR = 228 * 1024
_MEETING = 4  # more often it takes its time, less often blocks drift apart
_SYSTEM_BYTES = 1024  # of each block
_STARTED_WITH_ROOM = {1: 128, 2: 144}  # registers of a thread by warpgroups that multiply
_ROOM_BYTES = 3072  # for programs of the next quantizer, with what the system takes of each
_SPAN = 1024  # tokens whose codes stay in the L2 cache while weights pass
_AHEAD, TILES_AHEAD = 48 * 1024, 4  # weights on their way to a multiprocessor: bytes, tiles


class Order(NamedTuple):
    """How tiles follow one another: all weights for some tokens, then for the next ones.

    Args:
        blocks: blocks to launch.
        span: token tiles that weights pass at a time.
        inverse: ``2**32 / span``, rounded up: exact for dividends times ``span`` below ``2**32``.
        full: rounds in which every block has a tile of its own.
    """

    blocks: int
    span: int
    inverse: int
    full: int


@dataclass(frozen=True, slots=True)
class Tile:
    """How one problem is cut.

    Args:
        cols: columns of a tile: 8 or a multiple of 16.
        groups: consumer warpgroups of a block, 64 rows of the tile each.
        run: products along K of which each is added while the next is computed; 1 saves the
            registers of a second one.
        stages: weight tiles of 128 along K in shared memory.
        x_stages: token tiles likewise.
        window: weight tiles that are requested and have not arrived, at most.
        split: blocks of a cluster that split K.
        resident: blocks per multiprocessor if they are spread evenly. No more may fit: blocks that
            start while the quantizer still runs would crowd where it is not.
        token_rows: tokens are the rows and weights the columns, instead of the other way round.
        values: rows of 16-bit values, up to a power of two, that each block quantizes and keeps:
            all that it multiplies, in place of a ring; 0 if tokens come as codes.
        vectors: of 16 bytes, that a thread then holds.
        held: parts of a tile's results that are in shared memory together, on their way out.
        neighbors: blocks on neighboring multiprocessors, as a cluster of those that do not split.
            Their tiles follow one another, so they often ask the cache for the same codes together.
        leaves_room: registers and shared memory are left for programs of the quantizer behind, so
            that they wait on every multiprocessor when the product ends: half of the registers
            beside one warpgroup, a sixth beside two.
    """

    cols: int
    groups: int
    run: int
    stages: int
    x_stages: int
    window: int
    split: int
    resident: int
    token_rows: bool = False
    values: int = 0
    vectors: int = 1
    held: int = 1
    neighbors: int = 1
    leaves_room: bool = False

    def __str__(self) -> str:
        parts = f", K in {self.split} parts where tiles are few" if self.split > 1 else ""
        return f"tiles of {self.tokens} rows by {self.weights} weights, {self.stages} stages{parts}"

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.rows if self.token_rows else self.cols

    @property
    def weights(self) -> int:
        """Weight rows of a tile."""
        return self.cols if self.token_rows else self.rows

    @property
    def started(self) -> int:
        """Registers a thread is started with, if consumers take some of the producer's, else 0."""
        if self.leaves_room:
            return _STARTED_WITH_ROOM[self.groups]
        accumulators = (2 if self.run == 1 else 3) * self.cols // 2
        if self.resident > 1 or accumulators + 56 <= 65536 // round_up(128 * self.groups + 64, 128):
            return 0
        return 65536 // (128 * (self.groups + 1)) // 8 * 8

    @property
    def registers(self) -> int:
        """Registers that a consumer thread then has, else 0."""
        given = self.started * (self.groups + 1) - PRODUCER_REGISTERS
        return given // self.groups // 8 * 8 if self.started else 0

    @property
    def threads(self) -> int:
        """Threads of a block; a whole warpgroup produces if it is to give registers away."""
        return 128 * self.groups + (128 if self.started else 64)

    @property
    def start(self) -> int:
        """As ``window``, until the first tokens are here."""
        ahead = max(2, _AHEAD // (self.weights * TILE_K * self.resident))
        return min(self.window, TILES_AHEAD, ahead)

    def shared_bytes(self, block_scales: bool) -> int:
        """Dynamic shared memory: what the block needs, or what keeps other products out."""
        return max(self.needed_bytes(block_scales), _SHARED_PER_PROCESSOR // (self.resident + 1))

    def needed_bytes(self, block_scales: bool) -> int:
        """The rings with their scales, parts of peers, and results on their way out."""
        scales = round_up(self.tokens, 32) * 4 if block_scales else 0
        ring = self.stages * self.weights * TILE_K
        ring += self.x_stages * self.tokens * TILE_K + round_up(self.x_stages * scales, 1024)
        fragments = self.cols // 8
        share = 1 if fragments == 1 else round_up(round_up(fragments, self.split) // self.split, 2)
        parts = (self.split - 1) * share * 2048 * self.groups
        lines, line = self.box
        padding = 16 if line % 128 else 0
        return ring + parts + self.groups * self.held * lines * (line + padding)

    @property
    def meeting(self) -> int:
        """Steps after which neighbors wait for one another before they load on; 0 if never."""
        return _MEETING if self.neighbors > 1 else 0

    @property
    def at_once(self) -> int:
        """Columns of one part of a tile's results."""
        return next((p for p in (64, 48, 80) if self.cols > 80 and not self.cols % p), self.cols)

    @property
    def box(self) -> tuple[int, int]:
        """Tokens of that part, and bytes of each along N."""
        return (64, 2 * self.at_once) if self.token_rows else (self.at_once, 128)

    @property
    def static_bytes(self) -> int:
        """Static shared memory, padded so that swizzled tiles follow: barriers, a tile's scales."""
        barriers = 2 * (self.stages + (1 if self.values else self.x_stages)) + 2
        floats = self.groups * (self.cols + (self.cols if self.token_rows else 64) + 4) + self.rows
        return round_up(8 * barriers + 4 * floats, 1024)

    def fits(self, block_scales: bool) -> bool:
        """Whether as many blocks as are to be resident have room in a multiprocessor."""
        needed = self.needed_bytes(block_scales) + self.static_bytes
        room = _ROOM_BYTES if self.leaves_room else 0
        return needed + room <= _SHARED_PER_PROCESSOR // self.resident - _SYSTEM_BYTES

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a product."""
        return -(-n // self.weights) * -(-m // self.tokens)

    def order(self, m: int, n: int, processors: int) -> Order:
        """How the tiles of a product follow one another, as the kernel is told."""
        blocks = self.blocks(m, n, processors)
        span = min(_SPAN // self.tokens, -(-m // self.tokens))
        assert span > 1 or m <= self.tokens  # the reciprocal of 1 has no 32 bits, and is not read
        return Order(blocks, span, -(-(1 << 32) // span) % (1 << 32), self.tiles(m, n) // blocks)

    def blocks(self, m: int, n: int, processors: int) -> int:
        """Blocks to launch: as many as there is room for and work."""
        clusters = clusters_at_once(processors)[self.split * self.neighbors] * self.resident
        return min(-(-self.tiles(m, n) // self.neighbors), clusters) * self.split * self.neighbors

    def stores(self, m: int, n: int, processors: int, block_scales: bool, size: int) -> bool:
        """Whether the tensor memory accelerator writes the results.

        It takes longer than the threads, and lets them multiply meanwhile: that is for blocks with
        several tiles. Rows of results have to be multiples of 16 bytes. With block scales tiles of
        144 and 160 columns took 1 to 4 % longer.

        Args:
            m: rows of the result.
            n: its columns.
            processors: multiprocessors of the GPU.
            block_scales: scales per 1x128 and 128x128 elements.
            size: bytes of a result.
        """
        several = self.tiles(m, n) > self.blocks(m, n, processors)
        fitting = size == 2 and n % 8 == 0 and self.split == 1
        return several and m > FEW_ROWS and fitting and not (block_scales and self.cols > MOST_COLS)


def round_up(count: int, multiple: int) -> int:
    """Give the next multiple."""
    return -(-count // multiple) * multiple


@functools.cache
def clusters_at_once(processors: int) -> dict[int, int]:
    """Give how many clusters run at once, by the blocks of each."""
    # those of 3 and 4 do not fill the processing clusters of 16 and 18 multiprocessors
    found = {
        1: processors,
        2: processors // 2,
        3: processors * 39 // 132,
        4: processors * 30 // 132,
    }
    return {split: max(1, room) for split, room in found.items()}
