"""Every tile configuration that is chosen for the grouped GEMMs of experts on Hopper."""

from __future__ import annotations

from fp8kit.moe.hopper.tile_config import GroupedConfig

CONFIGS = [
    GroupedConfig(tokens=8, warpgroups=1, blocks_per_sm=2, narrow=True),
    *(GroupedConfig(tokens=n, warpgroups=1, blocks_per_sm=2) for n in (8, 16, 32)),
    *(GroupedConfig(tokens=n, warpgroups=2, blocks_per_sm=1) for n in (48, 64, 80, 128, 144)),
    *(GroupedConfig(tokens=n, warpgroups=1, blocks_per_sm=2, narrow=True) for n in (16, 32)),
    *(GroupedConfig(tokens=n, warpgroups=2, blocks_per_sm=1, narrow=True) for n in (48, 64, 80)),
]


def label(value: object) -> str:
    """Name a configuration by its tokens."""
    if not isinstance(value, GroupedConfig):
        return str(value)
    return f"{value.tokens}{' narrow' if value.narrow else ''}"
