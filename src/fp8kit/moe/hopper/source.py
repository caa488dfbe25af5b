"""The sources of the kernels of the experts on Hopper: their macros, then their parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fp8kit.matmul.hopper.source import wgmma
from fp8kit.moe.hopper.tile_config import FEW_PAIRS, GroupedConfig, Products
from fp8kit.runtime import nvrtc

_BEFORE = (
    "quantizers/encode.cuh",
    "moe/hopper/config.cuh",
    "matmul/hopper/barriers.cuh",
    "matmul/hopper/ptx.cuh",
    "matmul/hopper/pipeline.cuh",
    "moe/hopper/routes.cuh",
    "moe/hopper/tiles.cuh",
    "moe/hopper/scheduler.cuh",
    "moe/hopper/activation.cuh",
    "moe/hopper/epilogue.cuh",
)
# fields that are macros of the same names, in capitals
_OF_CONFIG = (
    "swap_ab mma_n warpgroups epilogue_tokens blocks_per_sm band pipelined_steps narrow".split()
)
_OF_VARIANT = "lists gathers x_groups h_groups".split()
KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}  # dtype tags of the kernels


class LayerVariant(NamedTuple):
    """What the kernels of a layer's products are compiled for, whatever the number of tokens.

    ``given_scale``: the first product's result has a static scale. ``gelu``: GELU by tanh replaces
    SiLU. ``dtype`` is that of the second product's result; a missing bias counts as float32.
    """

    weight_blocks: bool
    given_scale: bool
    gelu: bool
    limited: bool
    dtype: torch.dtype
    bias_dtypes: tuple[torch.dtype, torch.dtype]

    def macros(self) -> dict[str, int]:
        """Return the macros of the kernels."""
        return {
            **_named(self, ("weight_blocks", "given_scale", "gelu", "limited")),
            "BIAS_KIND_13": KINDS[self.bias_dtypes[0]],
            "BIAS_KIND_2": KINDS[self.bias_dtypes[1]],
            "KIND": KINDS[self.dtype],
        }


class Variant(NamedTuple):
    """What a grouped GEMM is compiled for besides its tile configuration.

    With ``lists`` it sorts few pairs itself; with ``gathers`` its first product gathers the rows of
    pairs from tokens. ``x_groups`` and ``h_groups``: the rows that the first and the second product
    multiply have a scale per 128 of K.
    """

    products: Products
    lists: bool
    gathers: bool
    x_groups: bool
    h_groups: bool
    layer: LayerVariant

    @property
    def token_groups(self) -> bool:
        """Whether a stage has scales of tokens."""
        groups = {Products.FIRST: self.x_groups, Products.SECOND: self.h_groups}
        return any(groups[product] for product in groups if product in self.products)


class PairsVariant(NamedTuple):
    """What the kernel that sorts pairs and quantizes tokens is compiled for.

    ``sorts`` is 1 for few pairs, 2 for many, which the blocks of a ``cluster`` sort together, 0 if
    they are sorted already. With ``quantizes`` each block quantizes a token, of which a thread
    holds ``vectors`` of 16 bytes; ``gathered`` codes are written once, not to the rows of pairs.
    ``scales`` is 0 for one scale per row, 1 for one per 1x128 group, 2 for a given one.
    """

    threads: int
    cluster: int
    sorts: int
    quantizes: bool
    gathered: bool
    vectors: int
    scales: int
    tile_tokens: int
    dtype: torch.dtype


class DotProductsVariant(NamedTuple):
    """What dot products are compiled for; ``dot_products.cuh`` says what fields mean."""

    one_token: bool
    hidden: int
    inner: int
    pairs: int
    rows: int
    cluster: int
    gate_warps: int
    down_warps: int
    warps_of_pair: int
    vectors: int
    scales: int
    layer: LayerVariant


def _named(facts: object, names: Iterable[str]) -> dict[str, int]:
    """Return attributes as macros of the same names, in capitals."""
    return {name.upper(): int(getattr(facts, name)) for name in names}


def grouped_source(config: GroupedConfig, variant: Variant) -> str:
    """Return the CUDA source of a grouped GEMM."""
    macros: dict[str, int | str] = {
        **_named(config, _OF_CONFIG),
        **_named(variant, _OF_VARIANT),
        "STAGES": config.stages(variant.products),
        "SMEM_BYTES": config.smem_bytes(variant.products, variant.token_groups),
        "CLUSTER": config.cluster(variant.products),
        "FIRST": int(Products.FIRST in variant.products),
        "SECOND": int(Products.SECOND in variant.products),
        "FEW_PAIRS": FEW_PAIRS,
        **variant.layer.macros(),
        **wgmma(config.mma_n),
    }
    epilogue = f"moe/hopper/{'columns' if config.swap_ab else 'rows'}_epilogue.cuh"
    return nvrtc.joined(macros, *_BEFORE, epilogue, "moe/hopper/grouped_gemm.cu")


def pairs_source(variant: PairsVariant) -> str:
    """Return the CUDA source that sorts pairs, quantizes tokens, or does both."""
    own = (name for name in variant._fields if name != "dtype")
    macros: dict[str, int | str] = {
        **_named(variant, own),
        "FEW_PAIRS": FEW_PAIRS,
        "KIND": KINDS[variant.dtype],
    }
    return nvrtc.joined(
        macros,
        "quantizers/encode.cuh",
        "moe/hopper/routes.cuh",
        "moe/hopper/tiles.cuh",
        "moe/hopper/token.cuh",
        "moe/hopper/pairs.cu",
    )


def dot_products_source(variant: DotProductsVariant, kernel: str) -> str:
    """Return the CUDA source of ``gates_and_ups`` or ``downs``."""
    own = (name for name in variant._fields if name != "layer")
    macros: dict[str, int | str] = {**_named(variant, own), **variant.layer.macros()}
    return nvrtc.joined(
        macros,
        "quantizers/encode.cuh",
        "matmul/hopper/barriers.cuh",
        "moe/hopper/routes.cuh",
        "moe/hopper/token.cuh",
        "moe/hopper/activation.cuh",
        "moe/hopper/dot_products.cuh",
        f"moe/hopper/{kernel}.cu",
    )


def combine_source(threads: int, at_once: int, blocks_per_sm: int, dtype: torch.dtype) -> str:
    """Return the CUDA source that adds the rows of each token."""
    macros: dict[str, int | str] = {
        "THREADS": threads,
        "AT_ONCE": at_once,
        "BLOCKS_PER_SM": blocks_per_sm,
        "KIND": KINDS[dtype],
    }
    return nvrtc.joined(macros, "quantizers/encode.cuh", "moe/hopper/combine.cu")
