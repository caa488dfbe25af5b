"""The kernels of the experts compiled on any machine: no word of the compiler, no local memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from ahead import cuda_resources, without_nvrtc
from fp8kit.moe.hopper.tile_config import GroupedConfig, Products
from grouped_configs import CONFIGS, label

sources = pytest.importorskip("fp8kit.moe.hopper.source", reason="no cuda-bindings")
pytestmark = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STATIC_BYTES = 12 * 1024  # that dynamic shared memory leaves beside it
FIRST = sources.Variant(
    Products.FIRST, True, False, False, True, False, False, False, False, BF16, (F32, F32)
)
GELU_STATIC = FIRST._replace(
    lists=False, h_groups=False, given_scale=True, gelu=True, limited=True, bias_dtypes=(F16, F16)
)
GATHERING = FIRST._replace(lists=False, gathers=True)
FIRST_BLOCKS = FIRST._replace(x_groups=True, weight_blocks=True, bias_dtypes=(BF16, F32))
SECOND = FIRST._replace(products=Products.SECOND, lists=False, bias_dtypes=(F32, BF16))
SECOND_BLOCKS = SECOND._replace(weight_blocks=True, dtype=F16)
BOTH = FIRST._replace(products=Products.BOTH)
BOTH_BLOCKS = FIRST_BLOCKS._replace(products=Products.BOTH, bias_dtypes=(BF16, F16))
BOTH_STATIC = GELU_STATIC._replace(products=Products.BOTH, lists=True)
VARIANTS = (GELU_STATIC, FIRST, FIRST_BLOCKS, SECOND, SECOND_BLOCKS)
GATHERS = (GATHERING, FIRST_BLOCKS._replace(lists=False, gathers=True))
IN_ONE_KERNEL = (BOTH, BOTH_BLOCKS, BOTH_STATIC)


@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_products_compile(config: GroupedConfig) -> None:
    in_one = IN_ONE_KERNEL if config.one_kernel else ()
    gathering = GATHERS if config.warpgroups == 2 and config.swap_ab else ()
    for variant in in_one if config.narrow else (*VARIANTS, *in_one, *gathering):
        found = cuda_resources(sources.grouped_source(config, variant))
        total = found["shared"] + config.smem_bytes(variant.products, variant.token_groups)
        assert total <= 228 * 1024 // config.blocks_per_sm
        assert found["registers"] * config.threads * config.blocks_per_sm <= 65536


def test_the_kernels_around_the_products_compile() -> None:
    sizes = [(256, 1, 1, True, False, 1), (256, 1, 0, True, False, 4), (256, 1, 0, True, True, 4)]
    sizes.append((1024, 8, 2, False, False, 1))
    for size, scales, dtype in itertools.product(sizes, (0, 1, 2), (BF16, F16)):
        cuda_resources(sources.pairs_source(sources.PairsVariant(*size, scales, 16, dtype)))
    for dtype in (BF16, F16):
        cuda_resources(sources.combine_source(256, 8, dtype))
