"""The record of a Hopper GPU: its sizes, and the constants measured on one, in one place.

Every threshold that was measured on one GPU is here, so that the choice of a tile configuration
reads as rules. The constants are those of an H200; another Hopper GPU has its own number of SMs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the parts of a GEMM cost on an H200, in microseconds, for ``cost_model``.

    ``benchmarks/tiles.py`` measures tile configurations and fits these. They are fitted to 1231
    configurations of 116 GEMMs of 96 to 4096 rows, and to 22 whole layers in two configurations
    each, where the choice is 0.5 % slower than the best in the mean. No constant measures its part
    alone. In 481 whole layers the mean is 1.3 %, noise included; only ``crowded`` was fitted to
    those, and ``hidden`` to 60 others.

    Args:
        steps: a K step of 128, by consumer warpgroups.
        area: added to each step for every 64x128 results of a tile.
        exposed: a promotion that no MMA overlaps.
        crowded: factors on a step of one warpgroup with tokens as MMA rows, of up to 80 columns and
            of more; the first is also that of fewer than four stages.
        block_tokens: what block scales add to a step, as a part of it, with tokens as MMA rows.
        block_weights: the same with weights as MMA rows and 128 columns.
        reduction: the reduction of split-K, by its blocks, from two on.
        epilogue: the epilogue of 64x128 results.
        hidden: factor on the epilogue of three warpgroups with tokens as MMA rows, block scales and
            a short K: one runs MMAs while another runs its epilogue.
        drain: draining the pipeline after a group of pipelined steps.
        cache: bytes per microsecond that L2 delivers to all SMs.
        memory: bytes of weights per microsecond that memory delivers.
    """

    steps: tuple[float, float, float] = (0.159, 0.225, 0.296)
    area: float = 0.107
    exposed: float = 0.13
    crowded: tuple[float, float] = (1.19, 1.12)
    block_tokens: float = 0.39
    block_weights: float = 0.75
    reduction: tuple[float, float, float] = (3.62, 2.39, 4.62)
    epilogue: float = 1.2
    hidden: float = 0.8
    drain: float = 0.0863
    cache: float = 14.1e6
    memory: float = 10.5e6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """What the choice of a tile configuration depends on; compared by identity.

    Args:
        sm_count: streaming multiprocessors.
        clusters: clusters of 1, 2, 3 and 4 blocks that run at once, one block per SM.
        costs: the costs of the parts of a GEMM.
        warmup_bytes: bytes of weights in flight per SM until the first tokens arrive.
        warmup_stages: the most stages of weights in flight until then.
        quantize_inflight_bytes: bytes of weights in flight to all SMs while the GEMM quantizes its
            tokens.
        cluster_sync_every: K steps after which blocks that share weights synchronize. More often
            costs time; less often, they drift apart.
        band_tokens: tokens whose codes stay in L2 while all weights are read.
        early_start_macs: multiply-adds from which a GEMM starts only after the previous kernel has
            ended. Blocks that start early run where there is room, not next to those that read the
            same tiles, which costs long GEMMs up to 6 %.
        torch_rows: rows from which torch's kernel for one scale per tensor is faster.
        torch_macs: multiply-adds from which torch's fast accumulation is faster.
    """

    sm_count: int
    clusters: tuple[int, int, int, int]
    costs: Costs = field(default_factory=Costs)
    warmup_bytes: int = 48 * 1024
    warmup_stages: int = 4
    quantize_inflight_bytes: int = 6 * 10**6
    cluster_sync_every: int = 4
    band_tokens: int = 1024
    early_start_macs: int = 2**37
    torch_rows: int = 512
    torch_macs: int = 2**35


@functools.cache
def hopper(sm_count: int) -> Device:
    """Return the record of a Hopper GPU; H100 SXM and H200 have 132 multiprocessors."""
    # clusters of 3 and 4 leave SMs of the GPCs idle, which have 16 and 18 SMs on an H200
    two, three, four = sm_count // 2, sm_count * 39 // 132, sm_count * 30 // 132
    clusters = (sm_count, max(1, two), max(1, three), max(1, four))
    return Device(sm_count=sm_count, clusters=clusters)


H200 = hopper(132)
