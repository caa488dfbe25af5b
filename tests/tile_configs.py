"""Tile configurations of the Hopper GEMM that together take every path of its source."""

from __future__ import annotations

from typing import Any

from fp8kit.matmul.hopper.device import H200
from fp8kit.matmul.hopper.heuristics import with_inflight
from fp8kit.matmul.hopper.tile_config import Epilogue, Launch, Layout, Pipeline, TileConfig


def tile_config(
    mma_n: int,
    warpgroups: int,
    *,
    steps: int,
    stages: tuple[int, int],
    inflight: int = 0,
    swap_ab: bool = True,
    buffers: int = 1,
    **launch: Any,
) -> TileConfig:
    """Return a tile configuration whose warmup is that of the heuristics.

    Args:
        mma_n: as in ``Layout``.
        warpgroups: as in ``Layout``.
        steps: K steps that are pipelined.
        stages: of weights and of tokens.
        inflight: weight loads in flight; 0: as many as stages.
        swap_ab: as in ``Layout``.
        buffers: as in ``Epilogue``.
        launch: as in ``Launch``.
    """
    config = TileConfig(
        layout=Layout(mma_n=mma_n, warpgroups=warpgroups, swap_ab=swap_ab),
        pipeline=Pipeline(
            weight_stages=stages[0],
            token_stages=stages[1],
            pipelined_steps=steps,
            max_inflight=1,
            warmup_inflight=1,
        ),
        epilogue=Epilogue(buffers=buffers),
        launch=Launch(**launch),
    )
    return with_inflight(config, inflight or stages[0], H200)


CONFIGS = [
    tile_config(16, 1, steps=4, stages=(24, 4), inflight=6),
    tile_config(8, 1, steps=1, stages=(12, 4), inflight=3, blocks_per_sm=3),
    tile_config(8, 2, steps=4, stages=(9, 4), inflight=2, split_k=4),
    tile_config(16, 3, steps=2, stages=(6, 4), split_k=2),
    tile_config(16, 1, steps=4, stages=(20, 4), inflight=5, split_k=3),
    tile_config(48, 2, steps=1, stages=(5, 4), inflight=3, split_k=3),
    tile_config(64, 1, steps=4, stages=(10, 4), inflight=6, split_k=4),
    tile_config(80, 2, steps=2, stages=(5, 5)),
    tile_config(112, 3, steps=1, stages=(3, 3), split_k=2),
    tile_config(128, 1, steps=2, stages=(6, 6), split_k=4),
    tile_config(128, 2, steps=4, stages=(4, 4), split_k=3),
    tile_config(128, 2, steps=8, stages=(6, 6), cluster_sync_every=4),
    tile_config(128, 3, steps=1, stages=(4, 4)),
    tile_config(96, 2, steps=4, stages=(10, 4), cluster_sync_every=4),
    tile_config(128, 2, steps=4, stages=(8, 4)),
    tile_config(128, 2, steps=4, stages=(6, 4), split_k=2),
    tile_config(64, 1, steps=1, stages=(3, 3), split_k=2, blocks_per_sm=3),
    tile_config(128, 1, steps=4, stages=(6, 6), split_k=3, swap_ab=False),
    tile_config(128, 2, steps=4, stages=(6, 6), swap_ab=False),
    tile_config(128, 3, steps=1, stages=(3, 3), split_k=2, swap_ab=False),
    tile_config(80, 2, steps=4, stages=(7, 7), swap_ab=False, cluster_sync_every=4),
    tile_config(96, 1, steps=4, stages=(9, 9), split_k=3, swap_ab=False),
    tile_config(112, 2, steps=4, stages=(6, 6), swap_ab=False),
    tile_config(96, 3, steps=1, stages=(5, 5), swap_ab=False, cluster_sync_every=4),
    tile_config(80, 3, steps=1, stages=(4, 4), split_k=2, swap_ab=False),
    tile_config(128, 3, steps=1, stages=(4, 4), swap_ab=False, buffers=2, cluster_sync_every=4),
    tile_config(128, 1, steps=4, stages=(8, 4), inflight=6, swap_ab=False),
    tile_config(128, 1, steps=4, stages=(7, 4), inflight=6, split_k=2, swap_ab=False),
    tile_config(
        128, 1, steps=4, stages=(9, 4), inflight=6, swap_ab=False, buffers=2, cluster_sync_every=4
    ),
    tile_config(80, 1, steps=4, stages=(12, 4), inflight=6, swap_ab=False, cluster_sync_every=4),
    tile_config(80, 1, steps=4, stages=(16, 4), inflight=6, split_k=2, swap_ab=False),
    tile_config(144, 2, steps=1, stages=(6, 6), swap_ab=False),
    tile_config(160, 2, steps=1, stages=(5, 5), swap_ab=False),
    tile_config(128, 2, steps=8, stages=(6, 6), swap_ab=False, cluster_sync_every=4),
    tile_config(128, 2, steps=8, stages=(5, 5), swap_ab=False, buffers=2, cluster_sync_every=4),
    tile_config(112, 2, steps=8, stages=(6, 6)),
    tile_config(128, 2, steps=5, stages=(5, 5), buffers=2, cluster_sync_every=4),
    tile_config(128, 2, steps=7, stages=(6, 6), swap_ab=False, cluster_sync_every=4),
    tile_config(96, 2, steps=3, stages=(6, 6), cluster_sync_every=4),
    tile_config(112, 2, steps=4, stages=(6, 4)),
    tile_config(128, 2, steps=8, stages=(5, 5), buffers=2, cluster_sync_every=4),
    tile_config(128, 3, steps=1, stages=(4, 4), buffers=2),
    tile_config(144, 2, steps=1, stages=(5, 5), swap_ab=False, buffers=2, cluster_sync_every=4),
    tile_config(96, 2, steps=4, stages=(6, 6), swap_ab=False, buffers=2),
]


def label(value: object) -> str:
    """Return a short test id for a parameter: a configuration, block scales, or any other value."""
    if isinstance(value, bool):
        return "block" if value else "row"
    if not isinstance(value, TileConfig):
        return str(value)
    layout, pipeline, launch = value.layout, value.pipeline, value.launch
    words = [
        f"{layout.mma_n}x{layout.warpgroups}",
        "swap" if layout.swap_ab else "noswap",
        f"steps{pipeline.pipelined_steps}",
        f"stages{pipeline.weight_stages}+{pipeline.token_stages}",
        f"split{launch.split_k}" if launch.split_k > 1 else "",
        f"occupancy{launch.blocks_per_sm}" if launch.blocks_per_sm > 1 else "",
        f"buffers{value.epilogue.buffers}" if value.epilogue.buffers > 1 else "",
        "cluster" if launch.cluster_sync_every else "",
        f"quantize{value.quantize.rows}" if value.quantize else "",
    ]
    return "-".join(filter(None, words))
