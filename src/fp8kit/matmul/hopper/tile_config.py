"""A tile configuration of the Hopper GEMM: what ``gemm.cu`` is compiled and launched with.

Sizes and conditions repeat those of ``config.cuh``, which gets a configuration as macros; the head
of ``gemm.cu`` lists the macros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fp8kit.matmul.hopper.device import Device

TILE_K = 128
PRODUCER_REGISTERS = 24
FEW_ROWS = 64  # up to which the bits of a row do not depend on M
MAX_PIPELINED_COLS = 128  # MMA columns for which a thread has registers in every configuration
_REGISTERS = 65536  # of an SM
_SMEM = 228 * 1024  # of an SM, in bytes
_SYSTEM_SMEM = 1024  # of each block


class Schedule(NamedTuple):
    """The tile order: a ``band`` of token tiles meets all weights, then the next band does.

    ``grid`` is the number of blocks. ``band_inverse`` is ``2**32 / band``, rounded up: exact for
    dividends times ``band`` below ``2**32``. In ``full_waves`` every block has a whole tile.
    """

    grid: int
    band: int
    band_inverse: int
    full_waves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The shape of a tile and which operand is which.

    It has ``mma_n`` columns, 8 or a multiple of 16, and 64 rows for each consumer warpgroup of a
    block. With ``swap_ab`` weights are the rows and tokens the columns.
    """

    mma_n: int
    warpgroups: int
    swap_ab: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The stages in shared memory, and the loads in flight.

    Stages are tiles of 128 along K; with in-GEMM quantization ``token_stages`` hold all tokens that
    a block multiplies. Of ``pipelined_steps`` each is promoted while the MMA of the next runs; 1
    saves the registers of a second partial sum. At most ``warmup_inflight`` weight loads are in
    flight until the first tokens arrive, then ``max_inflight``.
    """

    weight_stages: int
    token_stages: int
    pipelined_steps: int
    max_inflight: int
    warmup_inflight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """How a tile is stored: shared memory has ``buffers`` parts of a warpgroup's tile at once."""

    buffers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Clusters and occupancy: ``split_k`` blocks of a cluster split K of a tile.

    No more than ``blocks_per_sm`` blocks may fit on an SM: those that start while the quantizer
    still runs would crowd on the SMs that it has left. With ``cluster_sync_every`` two blocks with
    consecutive tiles form a cluster and synchronize after so many K steps, so that L2 serves their
    loads of the same codes together; 0 means no such cluster.
    """

    split_k: int = 1
    blocks_per_sm: int = 1
    cluster_sync_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InGemmQuantization:
    """How each block quantizes its tokens, ``rows`` rounded up to a power of two.

    A thread quantizes ``vectors`` of 16 bytes.
    """

    rows: int
    vectors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """A configuration of the Hopper GEMM.

    Tokens come as codes unless ``quantize`` is given.
    """

    layout: Layout
    pipeline: Pipeline
    epilogue: Epilogue = Epilogue()
    launch: Launch = Launch()
    quantize: InGemmQuantization | None = None

    def __str__(self) -> str:
        size = f"tiles of {self.tokens} rows by {self.weights} weights"
        split = self.launch.split_k
        parts = f", K in {split} parts where tiles are few" if split > 1 else ""
        return f"{size}, {self.pipeline.weight_stages} stages{parts}"

    @property
    def mma_m(self) -> int:
        """Rows of a tile."""
        return 64 * self.layout.warpgroups

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.layout.mma_n if self.layout.swap_ab else self.mma_m

    @property
    def weights(self) -> int:
        """Weight rows of a tile."""
        return self.mma_m if self.layout.swap_ab else self.layout.mma_n

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return 2 if self.launch.cluster_sync_every else self.launch.split_k

    @property
    def launch_registers(self) -> int:
        """Registers of a thread at launch, if consumers take some of the producer's, else 0."""
        warpgroups = self.layout.warpgroups
        sums = 2 if self.pipeline.pipelined_steps == 1 else 3
        needed = sums * self.layout.mma_n // 2 + 56
        evenly = _REGISTERS // round_up(128 * warpgroups + 64, 128)
        if self.launch.blocks_per_sm > 1 or needed <= evenly:
            return 0
        return _REGISTERS // (128 * (warpgroups + 1)) // 8 * 8

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread after it took the producer's; 0 if it takes none."""
        warpgroups, launched = self.layout.warpgroups, self.launch_registers
        given = launched * (warpgroups + 1) - PRODUCER_REGISTERS
        return given // warpgroups // 8 * 8 if launched else 0

    @property
    def producer_threads(self) -> int:
        """Threads of the producer warps; a whole warpgroup if it gives registers away."""
        return 128 if self.launch_registers else 64

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.layout.warpgroups + self.producer_threads

    @property
    def epilogue_cols(self) -> int:
        """Columns of a tile that are stored at once."""
        mma_n = self.layout.mma_n
        return next((p for p in (64, 48, 80) if mma_n > 80 and not mma_n % p), mma_n)

    @property
    def store_box(self) -> tuple[int, int]:
        """Tokens that are stored at once, and the bytes of each along N."""
        return (self.epilogue_cols, 128) if self.layout.swap_ab else (64, 2 * self.epilogue_cols)

    def dynamic_smem_bytes(self, block_scales: bool) -> int:
        """Return the bytes of dynamic shared memory: those needed, or more, to limit occupancy."""
        return max(self.needed_smem_bytes(block_scales), _SMEM // (self.launch.blocks_per_sm + 1))

    def needed_smem_bytes(self, block_scales: bool) -> int:
        """Return the bytes of all stages, their scales, peers' partial sums and the epilogue."""
        pipeline, split = self.pipeline, self.launch.split_k
        scales = round_up(self.tokens, 32) * 4 if block_scales else 0
        ring = pipeline.weight_stages * self.weights * TILE_K
        ring += pipeline.token_stages * self.tokens * TILE_K
        ring += round_up(pipeline.token_stages * scales, 1024)
        fragments = self.layout.mma_n // 8
        owned = 1 if fragments == 1 else round_up(round_up(fragments, split) // split, 2)
        partials = (split - 1) * owned * 2048 * self.layout.warpgroups
        lines, line = self.store_box
        padding = 16 if line % 128 else 0
        buffer = lines * (line + padding)
        return ring + partials + self.layout.warpgroups * self.epilogue.buffers * buffer

    @property
    def static_smem_bytes(self) -> int:
        """Static shared memory, padded so that swizzled tiles follow: barriers, scales, biases."""
        layout, pipeline = self.layout, self.pipeline
        token_barriers = 1 if self.quantize else pipeline.token_stages
        barriers = 2 * (pipeline.weight_stages + token_barriers) + 2
        biases = 64 if layout.swap_ab else layout.mma_n
        floats = layout.warpgroups * (layout.mma_n + biases + 4) + self.mma_m
        return round_up(8 * barriers + 4 * floats, 1024)

    def fits(self, block_scales: bool) -> bool:
        """Return whether an SM has shared memory for ``blocks_per_sm`` blocks."""
        needed = self.needed_smem_bytes(block_scales) + self.static_smem_bytes
        return needed <= _SMEM // self.launch.blocks_per_sm - _SYSTEM_SMEM

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles of an ``[m, n]`` result."""
        return -(-n // self.weights) * -(-m // self.tokens)

    def schedule(self, m: int, n: int, device: Device) -> Schedule:
        """Return the tile order of an ``[m, n]`` result, as the kernel takes it."""
        grid = self.grid(m, n, device)
        band = min(device.band_tokens // self.tokens, -(-m // self.tokens))
        assert band > 1 or m <= self.tokens  # the inverse of 1 exceeds 32 bits, and is not read
        inverse = -(-(1 << 32) // band) % (1 << 32)
        return Schedule(grid, band, inverse, self.tiles(m, n) // grid)

    def grid(self, m: int, n: int, device: Device) -> int:
        """Return the number of blocks to launch: as many as there is room and work for."""
        neighbors = self.cluster // self.launch.split_k
        room = device.clusters[self.cluster - 1] * self.launch.blocks_per_sm
        return min(-(-self.tiles(m, n) // neighbors), room) * self.cluster

    def uses_tma_store(
        self, m: int, n: int, device: Device, block_scales: bool, out_bytes: int
    ) -> bool:
        """Return whether TMA stores the result.

        TMA takes longer than the threads would, but they go on to the next tile meanwhile: it is
        for blocks with several tiles. Rows of the result must be multiples of 16 bytes. With block
        scales, tiles of 144 and 160 columns were 1 to 4 % slower with it.
        """
        several = self.tiles(m, n) > self.grid(m, n, device)
        storable = out_bytes == 2 and n % 8 == 0 and self.launch.split_k == 1
        wide = block_scales and self.layout.mma_n > MAX_PIPELINED_COLS
        return several and m > FEW_ROWS and storable and not wide


def round_up(count: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple
