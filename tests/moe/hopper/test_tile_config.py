"""Tile configurations of the grouped GEMMs: their resources, and which one is chosen."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8kit.moe.hopper.tile_config import LEAST_WIDE, GroupedConfig, Products, choose
from grouped_configs import CONFIGS, label

SM_BYTES, SYSTEM_BYTES = 228 * 1024, 1024


@pytest.mark.parametrize("config", CONFIGS, ids=label)
@pytest.mark.parametrize("products", [Products.FIRST, Products.SECOND, Products.BOTH])
def test_blocks_fit_a_multiprocessor(config: GroupedConfig, products: Products) -> None:
    room = SM_BYTES // config.blocks_per_sm - SYSTEM_BYTES
    assert 3 <= config.stages(products) <= 16
    bare, grouped = (config.smem_bytes(products, groups) for groups in (False, True))
    assert bare <= grouped < room
    half = config.features(Products.SECOND) // (1 if config.narrow else 2)
    assert config.cluster(Products.FIRST) * half == 128 or not config.swap_ab


@given(st.integers(1, 200_000), st.integers(1, 1024), st.integers(0, 2), st.integers(0, 16384))
def test_what_is_chosen_is_known(
    pairs: int, experts: int, wide_tiles: int, long_features: int
) -> None:
    assert choose(pairs, experts, True, wide_tiles, long_features) in CONFIGS
    few = choose(pairs, experts, many=False)
    assert few in CONFIGS
    assert few.swap_ab


def test_more_tokens_of_an_expert_take_larger_tiles() -> None:
    sizes = [choose(128 * each, 128).tokens for each in (1, 4, 16, 64, 256)]
    assert sizes == sorted(set(sizes))


def test_short_products_are_one_kernel() -> None:
    for config in CONFIGS:
        few, short, long = (
            config.one_kernel(*of) for of in ((True, 768), (False, 768), (False, 4096))
        )
        # blocks without a counter must all be resident, which pays for few pairs
        assert few == (config.warpgroups == 1)
        assert short == (48 <= config.tokens <= 128)
        assert not long


def test_tiles_of_a_long_second_product_are_narrow_where_wide_ones_would_be_few() -> None:
    def narrow(pairs: int, experts: int, long_features: int) -> bool:
        return choose(pairs, experts, long_features=long_features).narrow

    assert narrow(256, 8, 4096)  # 128 wide tiles for the 132 SMs of an H200
    assert not narrow(256, 8, 0)
    assert not narrow(256, 128, 4096)
    assert not narrow(8 * 100, 8, 4096)  # so many tokens that loading them twice costs more
    assert not narrow(128, 8, 4096)  # few pairs, whose products are one kernel


def test_tiles_are_wide_around_whole_tiles_of_128() -> None:
    for wide_tiles in range(3):
        wide = {n for n in range(1, 1025) if choose(n, 1, wide_tiles=wide_tiles).tokens == 144}
        around = {128 * tiles + d for tiles in range(1, wide_tiles + 1) for d in range(-8, 9)}
        assert wide == around
    assert min(around) == LEAST_WIDE


@given(st.data(), st.sampled_from(CONFIGS), st.integers(1, 40))
def test_tiles_of_any_routing_have_room(data: st.DataObject, config: GroupedConfig, e: int) -> None:
    ids = data.draw(st.lists(st.integers(0, e - 1), min_size=1, max_size=400))
    taken = sum(-(-rows // config.tokens) for rows in Counter(ids).values())
    assert taken <= config.token_tiles(len(ids), e)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_a_product_has_a_block_for_each_part_of_a_tile(config: GroupedConfig) -> None:
    for product, features in ((Products.FIRST, 768), (Products.SECOND, 2048)):
        for pairs in (1, 8, 4096):
            blocks = config.blocks(pairs, 64, features, product)
            assert blocks % config.cluster(product) == 0
            assert blocks >= config.token_tiles(pairs, 64) * features / config.features(product)
