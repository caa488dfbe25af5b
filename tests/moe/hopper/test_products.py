"""What the products load by each transfer, beside the stages that wait for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from fp8kit.matmul.hopper.tile_config import TILE_K
from fp8kit.moe.hopper import products
from fp8kit.moe.hopper.tile_config import GroupedConfig, Products
from fp8kit.runtime import cuda_launch
from grouped_configs import CONFIGS, label


class Tile(NamedTuple):
    """The arguments of ``byte_tile_map`` but for the address."""

    rows: int
    cols: int
    pitch: int
    tile_rows: int
    tile_cols: int


@pytest.mark.parametrize("step", [1, 2], ids=["gates then ups", "interleaved"])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_two_loads_of_weights_fill_a_stage(
    config: GroupedConfig, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(address: int, *tile: int) -> Any:
        return address, Tile(*tile)

    monkeypatch.setattr(cuda_launch, "byte_tile_map", noted)
    data = torch.empty(3, 512, 256, dtype=torch.uint8)
    maps = products._weight_maps(data, step, config)
    assert [place - data.data_ptr() for place, _ in maps] == [0, 256 * (step - 1)]
    for _, tile in maps:
        assert tile == (3 * 512 // step, 256, 256 * step, config.half_rows, TILE_K)
    tokens = config.tokens * TILE_K * (2 if config.narrow else 1)
    stages = config.stages(Products.BOTH)
    ring = config.smem_bytes(Products.BOTH, False) - config._epilogue_bytes(Products.BOTH)
    assert sum(tile.tile_rows * tile.tile_cols for _, tile in maps) == ring // stages - tokens
