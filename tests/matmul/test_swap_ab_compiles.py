"""The own product compiled for Hopper on any machine: no word of the compiler, no local memory.

The figures are those of the compiler in ``constraints.txt``, which is the one that torch's own
packages for CUDA 13 bring along.
"""

from __future__ import annotations

import pytest

from ahead import cuda_resources, without_nvrtc

swap_ab = pytest.importorskip("fp8kit.matmul.swap_ab", reason="cuda-bindings is not installed")
CUTS = pytest.importorskip("cuts").CUTS
layers = pytest.importorskip("layers")

pytestmark = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))

Case = tuple[swap_ab.Tile, bool]  # and whether it has block scales
PROCESSORS = 132
F32, F16, BF16 = 32, 16, 8
LAYERS = [layers.SHAPES[name] for name in layers.chosen("8b,ds")]  # more take minutes
CUT = swap_ab.Tile(64, 1, 4, 10, 4, 6, 4, 1)


def chosen() -> list[Case]:
    """Give the cuts of measured layers that are not among ``CUTS``."""
    found = {
        (swap_ab.choose_tile(m, n, k, PROCESSORS, blocks), blocks)
        for m in (1, 16, 64, 96, 128, 256, 512, 1024, 4096)
        for n, k in LAYERS
        for blocks in (False, True)
    }
    return sorted((case for case in found if case[0] not in CUTS), key=str)


def quantizing() -> list[Case]:
    """Give the cuts of measured layers whose tokens are quantized by the product."""
    found = {
        (swap_ab.values_tile(m, n, k, PROCESSORS, blocks), blocks)
        for m in (1, 2, 4)
        for n, k in LAYERS
        for blocks in (False, True)
    }
    return sorted((case for case in found if case[0] is not None), key=str)


def check(source: str, tile: swap_ab.Tile, blocks: bool) -> None:
    found = cuda_resources(source)
    # the rings are given what this leaves of a multiprocessor
    assert found["shared"] <= tile.static_bytes


def named(value: object) -> str:
    return {True: "block", False: "row"}[value] if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("blocks", [False, True], ids=named)
@pytest.mark.parametrize("tile", CUTS, ids=named)
def test_cuts_that_take_every_path(tile: swap_ab.Tile, blocks: bool) -> None:
    stored = tile.split == 1 and not blocks
    check(swap_ab.source(tile, blocks, not stored, BF16, F32, 0, stored), tile, blocks)


@pytest.mark.parametrize(("tile", "blocks"), chosen(), ids=named)
def test_cuts_of_measured_layers(tile: swap_ab.Tile, blocks: bool) -> None:
    check(swap_ab.source(tile, blocks, False, BF16, F32), tile, blocks)


@pytest.mark.parametrize(("tile", "blocks"), quantizing(), ids=named)
def test_cuts_that_quantize(tile: swap_ab.Tile, blocks: bool) -> None:
    values = F16 if tile.values == 2 else BF16
    check(swap_ab.source(tile, blocks, True, values, values, values), tile, blocks)


@pytest.mark.parametrize("blocks", [False, True], ids=named)
@pytest.mark.parametrize(("out", "bias"), [(F32, BF16), (F16, F16)])
@pytest.mark.parametrize("tile", [CUT, swap_ab.Tile(96, 3, 1, 5, 5, 5, 1, 1, True)], ids=named)
def test_dtypes(tile: swap_ab.Tile, out: int, bias: int, blocks: bool) -> None:
    check(swap_ab.source(tile, blocks, True, out, bias), tile, blocks)


def altered(before: str, after: str) -> str:
    source = swap_ab.source(CUT, False, True, BF16, F32)
    assert before in source
    return source.replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("wait_products<1>();", ""),
        ("multiply_tile(i % 2);", "if (lane < 16) multiply_tile(i % 2);"),
        ("x.advance();\n    };", "x.advance();\n      product[i][0] += 1;\n    };"),
    ],
    ids=["added before it is there", "divergent", "written in flight"],
)
def test_serialised_products_are_found(before: str, after: str) -> None:
    with pytest.raises(AssertionError, match=r"C75\d\d.*(are serialized|wait is injected)"):
        cuda_resources(altered(before, after))


def test_broken_ptx_is_an_error_with_the_log() -> None:
    source = altered("wgmma.commit_group", "wgmma.comit_group")
    with pytest.raises(RuntimeError, match=r"for sm_90a:\n.*Unknown modifier '.comit_group'"):
        cuda_resources(source)


def test_shared_memory_that_the_host_does_not_know_of_is_found() -> None:
    source = altered("__shared__ Scales scales;", "__shared__ Scales scales, more[3];")
    source = source.replace("scales.fetch(p,", "more[2].fetch(p, row0, col0), scales.fetch(p,")
    with pytest.raises(AssertionError, match="static_bytes"):
        check(source, CUT, False)
