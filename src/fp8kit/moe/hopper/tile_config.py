"""A tile configuration of the grouped GEMMs, and its choice, which needs no GPU."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

from fp8kit.matmul.hopper.tile_config import TILE_K, round_up

HALF = 64  # weight rows of a consumer warpgroup, in each half of a tile
FEW_PAIRS = 128  # up to so many pairs, each block sorts all for itself
PAIRS_OF_BLOCK = 2048  # up to so many pairs, one block sorts all
SORT_THREADS, THREADS = 1024, 256  # of a block that sorts many pairs; that quantizes or adds rows
SORT_CLUSTER = 8  # blocks that together sort more pairs than that
VECTOR = 8  # values in 16 bytes
MOST_EXPERTS = SORT_THREADS  # each is placed by a thread of its own
GROUP = 128  # features that one scale of the intermediate covers
SMEM = 227 * 1024  # of an SM, in bytes, less what the system takes for one block
_SYSTEM_SMEM = 1024  # of each further block
_MOST_STAGES = 16
_BAND_TOKENS = 1024  # tokens whose codes stay in L2 while all weights of an expert are read
_NARROW_PAIRS = 4  # up to so many pairs, wide tiles of the second product would leave SMs idle
_MOST_NARROW = 80  # tokens of a narrow tile; more would outweigh the weights of a stage
_FEW_TILES = 264  # per block of an SM; fewer may leave most SMs idle in the last round
_MANY = 128  # in a tile of so many tokens, tokens are the MMA's rows
_WIDE = 144  # the most columns of the MMA whose sums and one partial sum fit the registers
SHORT = 2048  # the longest I of products that are short
_WIDE_REACH = 8  # tokens around a multiple of _MANY, where half of the experts need one more tile
LEAST_WIDE = _MANY - _WIDE_REACH  # tokens of an expert from which on tiles of _WIDE are chosen
# (tokens of an expert on average, at most; tokens of a tile): most experts need one tile at most
_TOKENS = ((3.0, 8), (10.0, 16), (20.0, 32), (36.0, 48), (56.0, 64), (72.0, 80))


class Products(enum.IntFlag):
    """The products of a layer that one kernel computes: gates and ups, downs, or both."""

    FIRST = 1
    SECOND = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConfig:
    """A configuration of both grouped GEMMs, for tiles of 8, 16, 32, 48, 64, 80, 128 or 144 tokens.

    A block has 1 or 2 ``warpgroups`` of consumers, each with 64 rows of both halves of a tile.
    ``narrow`` tiles of the second product have one half of weight rows, and twice as much of K.
    """

    tokens: int
    warpgroups: int
    blocks_per_sm: int
    narrow: bool = False

    @property
    def swap_ab(self) -> bool:
        """Whether tokens are the MMA's columns."""
        return self.tokens != _MANY

    @property
    def half_rows(self) -> int:
        """Weight rows of each half of a stage, which one TMA load brings."""
        return HALF * self.warpgroups

    @property
    def mma_n(self) -> int:
        """Columns of the MMA: tokens, or a half of the weights."""
        return self.tokens if self.swap_ab else GROUP

    @property
    def pipelined_steps(self) -> int:
        """K steps whose promotions overlap the next MMA."""
        return 2 if self.tokens < _MANY else 1

    @property
    def epilogue_tokens(self) -> int:
        """Tokens whose codes a warpgroup moves to global memory at once; they divide a tile."""
        if self.tokens > HALF and self.swap_ab:
            return 48 if self.tokens == _WIDE else 16
        return min(self.tokens, HALF)

    @property
    def copies_rows(self) -> bool:
        """Whether MMAs leave time to gather the rows of pairs from tokens."""
        return self.tokens < _MANY

    @property
    def takes_turns(self) -> bool:
        """Whether each block knows its tiles beforehand, and takes none from a counter."""
        return self.warpgroups == 1

    def one_kernel(self, few_pairs: bool, intermediate: int) -> bool:
        """Return whether one kernel computes both products, so that no SM idles between them.

        With tiles of few tokens that pays for few pairs alone. Elsewhere it pays where products are
        short; 144 tokens leave too few registers.
        """
        if self.takes_turns:
            return few_pairs
        return not few_pairs and intermediate <= SHORT and self.tokens <= _MANY

    @property
    def band(self) -> int:
        """Tiles of tokens that meet all weights of an expert before the next tiles do."""
        return _BAND_TOKENS // self.tokens

    def threads(self, gathers: bool) -> int:
        """Return the threads of a block, whose first product gathers tokens or not."""
        return 128 * self.warpgroups + (128 if self.warpgroups == 2 or gathers else 64)

    def cluster(self, products: Products) -> int:
        """Return the blocks of a cluster, which in the first product share a group's features."""
        return 2 // self.warpgroups if Products.FIRST in products else 1

    def features(self, product: Products) -> int:
        """Return the features of a tile of a product; in the first one, of a cluster."""
        halves = 1 if self.narrow else 2
        return GROUP if product == Products.FIRST else halves * self.half_rows

    def stages(self, products: Products) -> int:
        """Return how many stages shared memory holds, with scales of groups or without."""
        tokens, warpgroups = self.tokens, self.warpgroups
        facts = 8 * warpgroups * tokens + 1024
        if Products.FIRST in products:
            facts += 4 * tokens * (4 * warpgroups + 4) + 24 * FEW_PAIRS
        spare = self._epilogue_bytes(products) + facts
        room = SMEM // self.blocks_per_sm - _SYSTEM_SMEM * (self.blocks_per_sm - 1) - spare
        return min(room // self.stage_bytes(token_groups=True), _MOST_STAGES)

    def smem_bytes(self, products: Products, token_groups: bool) -> int:
        """Return the dynamic shared memory of a block."""
        stages = self.stages(products) * self.stage_bytes(token_groups)
        return stages + self._epilogue_bytes(products)

    def stage_bytes(self, token_groups: bool) -> int:
        """Return the bytes of a stage: two halves of weight rows, tokens and their scales."""
        scales = round_up(4 * self.tokens, 128) if token_groups else 0
        tokens = (self.tokens * TILE_K + scales) * (2 if self.narrow else 1)
        return 2 * self.half_rows * TILE_K + tokens

    def _epilogue_bytes(self, products: Products) -> int:
        # padded lines: of 64 codes, with tokens as rows 128; of 64 numbers
        of_codes = self.epilogue_tokens * ((HALF if self.swap_ab else GROUP) + 16)
        of_numbers = min(self.tokens, 16) * (2 if self.swap_ab else 4) * (2 * HALF + 16)
        sizes = {Products.FIRST: of_codes, Products.SECOND: of_numbers}
        return self.warpgroups * max(sizes[each] for each in sizes if each in products)

    def token_tiles(self, pairs: int, experts: int) -> int:
        """Return the most tiles of tokens that any distribution of pairs can need."""
        used = min(pairs, experts)
        return (pairs - used) // self.tokens + used

    def blocks(self, pairs: int, experts: int, features: int, product: Products) -> int:
        """Return how many blocks a product has work for."""
        tiles = self.token_tiles(pairs, experts) * -(-features // self.features(product))
        return tiles * self.cluster(product)


@functools.lru_cache(maxsize=1024)
def choose(
    pairs: int, experts: int, many: bool = True, wide_tiles: int = 0, long_features: int = 0
) -> GroupedConfig:
    """Return the configuration for a number of pairs.

    Only with ``many`` may a tile have so many tokens that they are the MMA's rows. Tiles of 144
    tokens are chosen for experts of up to ``wide_tiles`` tiles. ``long_features``: features of the
    second product if its K is so long that one more tile than SMs costs a whole round.
    """
    each = pairs / experts
    tokens = next((n for most, n in _TOKENS if each <= most), _MANY if many else _MANY // 2)
    if any(abs(each - n * _MANY) <= _WIDE_REACH for n in range(1, wide_tiles + 1)):
        tokens = _WIDE
    warpgroups, blocks = (1, 2) if tokens <= 32 else (2, 1)
    tiles = experts * -(-long_features // (2 * HALF * warpgroups)) if pairs > FEW_PAIRS else 0
    few = 0 < tiles < _FEW_TILES * blocks and tokens <= _MOST_NARROW
    narrow = few or pairs <= _NARROW_PAIRS
    return GroupedConfig(tokens=tokens, warpgroups=warpgroups, blocks_per_sm=blocks, narrow=narrow)
