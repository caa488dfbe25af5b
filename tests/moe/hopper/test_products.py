"""The bytes that the GEMMs load by each transfer, and the stages that wait for them."""

from __future__ import annotations

import pytest
import torch

import launches
from fp8kit.matmul.hopper.tile_config import TILE_K
from fp8kit.moe.hopper import products
from fp8kit.moe.hopper.tile_config import GroupedConfig
from grouped_configs import CONFIGS, label


@pytest.mark.parametrize("step", [1, 2], ids=["gates then ups", "interleaved"])
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_two_loads_of_weights_fill_a_stage(
    config: GroupedConfig, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.fake_maps(monkeypatch)
    data = torch.empty(3, 512, 256, dtype=torch.uint8)
    first, second = products.weight_maps(data, step, config)
    assert (first[0], second[0]) == (data.data_ptr(), data.data_ptr() + 256 * (step - 1))
    assert first[1:] == second[1:] == (3 * 512 // step, 256, 256 * step, *first[4:])
    rows, bytes_of_row = first[4:]
    tokens = config.tokens * TILE_K * (2 if config.narrow else 1)
    assert 2 * rows * bytes_of_row + tokens == config.stage_bytes(token_groups=False)
