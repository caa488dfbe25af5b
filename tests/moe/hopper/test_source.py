"""The experts' kernels compile on any machine without compiler messages and local memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ahead import cuda_resources, without_nvrtc
from fp8kit.moe.hopper.tile_config import GroupedConfig, Products
from grouped_configs import CONFIGS, label

hopper = pytest.importorskip("fp8kit.moe.hopper.experts", reason="no cuda-bindings")
sources = pytest.importorskip("fp8kit.moe.hopper.source", reason="no cuda-bindings")
pytestmark = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYER = sources.LayerVariant(False, False, False, False, BF16, (F32, F32))
BLOCKS = LAYER._replace(weight_blocks=True)
FIRST = sources.Variant(Products.FIRST, True, False, False, True, LAYER)
GELU_STATIC = FIRST._replace(
    lists=False,
    h_groups=False,
    layer=LAYER._replace(given_scale=True, gelu=True, limited=True, bias_dtypes=(F16, F16)),
)
GATHERING = FIRST._replace(lists=False, gathers=True)
FIRST_BLOCKS = FIRST._replace(x_groups=True, layer=BLOCKS._replace(bias_dtypes=(BF16, F32)))
WITH_BIAS = LAYER._replace(bias_dtypes=(F32, BF16))
SECOND = FIRST._replace(products=Products.SECOND, lists=False, layer=WITH_BIAS)
SECOND_BLOCKS = SECOND._replace(layer=WITH_BIAS._replace(weight_blocks=True, dtype=F16))
BOTH = FIRST._replace(products=Products.BOTH)
BOTH_BLOCKS = FIRST_BLOCKS._replace(
    products=Products.BOTH, layer=BLOCKS._replace(bias_dtypes=(BF16, F16))
)
BOTH_STATIC = GELU_STATIC._replace(products=Products.BOTH, lists=True)
VARIANTS = (GELU_STATIC, FIRST, FIRST_BLOCKS, SECOND, SECOND_BLOCKS)
GATHERS = (GATHERING, FIRST_BLOCKS._replace(lists=False, gathers=True))
IN_ONE_KERNEL = (BOTH, BOTH_BLOCKS, BOTH_STATIC)


def variants(config: GroupedConfig) -> Iterator[Any]:
    if config.narrow:
        yield from (SECOND, SECOND_BLOCKS)
    else:
        yield from VARIANTS
        yield from GATHERS
    if config.one_kernel(few_pairs=True, intermediate=16):
        yield from IN_ONE_KERNEL
    if config.one_kernel(few_pairs=False, intermediate=16):
        yield from (each._replace(products=Products.BOTH) for each in (GELU_STATIC, *GATHERS))


@pytest.mark.parametrize(
    ("config", "variant"),
    [
        pytest.param(config, variant, id=f"{label(config)}-{number}")
        for config in CONFIGS
        for number, variant in enumerate(variants(config))
    ],
)
def test_products_compile(config: GroupedConfig, variant: Any) -> None:
    # with 144 tokens, warps that gather leave consumers two registers too few, of each tile alone
    stack = 8 if variant.gathers and config.tokens == 144 else 0
    found = cuda_resources(sources.grouped_source(config, variant), stack=stack)
    total = found["shared"] + config.smem_bytes(variant.products, variant.token_groups)
    assert total <= 228 * 1024 // config.blocks_per_sm
    assert found["registers"] * config.threads(variant.gathers) * config.blocks_per_sm <= 65536


SIZES = [(256, 1, 1, True, False, 1), (256, 1, 0, True, False, 4), (256, 1, 0, True, True, 4)]
SIZES.append((1024, 8, 2, False, False, 1))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("scales", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_before_the_products_compiles(
    size: tuple[Any, ...], scales: int, dtype: torch.dtype
) -> None:
    cuda_resources(sources.pairs_source(sources.PairsVariant(*size, scales, 16, dtype)))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("few_pairs", [False, True])
@pytest.mark.parametrize("hidden", [16, 256, 720, 4096])
def test_the_kernel_behind_the_products_compiles(
    hidden: int, few_pairs: bool, dtype: torch.dtype
) -> None:
    threads, at_once, blocks = hopper.combine_sizes(hidden // 8, few_pairs)
    found = cuda_resources(sources.combine_source(threads, at_once, blocks, dtype))
    assert found["registers"] * threads * blocks <= 65536
    assert few_pairs or threads * blocks >= 1024  # half of an SM, or more
