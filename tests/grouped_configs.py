"""The tile configurations of the grouped GEMMs that are chosen."""

from __future__ import annotations

from fp8kit.moe.hopper.tile_config import GroupedConfig

CONFIGS = [
    *(GroupedConfig(tokens=n, warpgroups=1, blocks_per_sm=2) for n in (8, 16, 32)),
    *(GroupedConfig(tokens=n, warpgroups=2, blocks_per_sm=1) for n in (64, 128)),
]


def label(value: object) -> str:
    """Name a configuration by its tokens."""
    return f"{value.tokens}" if isinstance(value, GroupedConfig) else str(value)
