"""The own product compiled for Hopper on any machine: no word of the compiler, no local memory.

The figures are those of the compiler in ``constraints.txt``, which is the one that torch's own
packages for CUDA 13 bring along.
"""

from __future__ import annotations

import itertools
import re

import pytest

from ahead import cuda_resources, machine_code, without_nvrtc

gemm = pytest.importorskip("fp8kit.matmul.hopper.gemm", reason="cuda-bindings is not installed")
CUTS = pytest.importorskip("cuts").CUTS
layers = pytest.importorskip("layers")

pytestmark = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))

Case = tuple[gemm.Tile, bool]  # and whether it has block scales
PROCESSORS = 132
F32, F16, BF16 = 32, 16, 8
ROWS = (1, 16, 64, 96, 128, 256, 512, 1024, 4096)
LAYERS = [layers.SHAPES[name] for name in layers.chosen("8b,ds")]  # more take minutes
CUT = gemm.Tile(64, 1, 4, 10, 4, 6, 4, 1)


def chosen() -> list[tuple[gemm.Tile, bool, bool]]:
    """Give the cuts of measured layers that are not among ``CUTS``, and who writes results."""
    found = set()
    for m, (n, k), blocks in itertools.product(ROWS, LAYERS, (False, True)):
        tile = gemm.choose_tile(m, n, k, PROCESSORS, blocks)
        if tile not in CUTS:
            found.add((tile, blocks, tile.stores(m, n, PROCESSORS, blocks, 2)))
    return sorted(found, key=str)


def quantizing() -> list[Case]:
    """Give the cuts of measured layers whose tokens are quantized by the product."""
    found = {
        (gemm.values_tile(m, n, k, PROCESSORS, blocks), blocks)
        for m in (1, 2, 4)
        for n, k in LAYERS
        for blocks in (False, True)
    }
    return sorted((case for case in found if case[0] is not None), key=str)


def check(source: str, tile: gemm.Tile, blocks: bool) -> None:
    found = cuda_resources(source)
    # the rings are given what this leaves of a multiprocessor
    assert found["shared"] <= tile.static_bytes
    # what a block is started with is what its warpgroups share
    assert found["registers"] == tile.started or not tile.started


def named(value: object) -> str:
    return {True: "block", False: "row"}[value] if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("blocks", [False, True], ids=named)
@pytest.mark.parametrize("tile", CUTS, ids=named)
def test_cuts_that_take_every_path(tile: gemm.Tile, blocks: bool) -> None:
    stored = tile.split == 1 and not blocks
    source = gemm.source(tile, blocks, not stored, BF16, F32, 0, stored)
    if blocks and tile.leaves_room and tile.groups == 2 and tile.cols == 128:
        with pytest.raises(AssertionError, match="local memory"):  # so they are never chosen
            check(source, tile, blocks)
    else:
        check(source, tile, blocks)


@pytest.mark.parametrize(("tile", "blocks", "stored"), chosen(), ids=named)
def test_cuts_of_measured_layers(tile: gemm.Tile, blocks: bool, stored: bool) -> None:
    check(gemm.source(tile, blocks, False, BF16, F32, 0, stored), tile, blocks)


def test_measured_layers_are_stored_by_both() -> None:
    found = {(blocks, stored) for _, blocks, stored in chosen()}
    assert found == set(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize(("tile", "blocks"), quantizing(), ids=named)
def test_cuts_that_quantize(tile: gemm.Tile, blocks: bool) -> None:
    values = F16 if tile.values == 2 else BF16
    check(gemm.source(tile, blocks, True, values, values, values), tile, blocks)


@pytest.mark.parametrize("blocks", [False, True], ids=named)
@pytest.mark.parametrize(("out", "bias"), [(F32, BF16), (F16, F16)])
@pytest.mark.parametrize("tile", [CUT, gemm.Tile(96, 3, 1, 5, 5, 5, 1, 1, True)], ids=named)
def test_dtypes(tile: gemm.Tile, out: int, bias: int, blocks: bool) -> None:
    check(gemm.source(tile, blocks, True, out, bias), tile, blocks)


def altered(before: str, after: str) -> str:
    source = gemm.source(CUT, False, True, BF16, F32)
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


def dependent_releases(source: str) -> int:
    """Count the slots that are handed back under both outcomes of a comparison of what was read.

    Raises:
        AssertionError: if the comparison does not come after the reads.
    """
    code = machine_code(source)
    found = 0
    for at, line in enumerate(code[:-1]):
        first = re.match(r"@(!?)(U?P\d) SYNCS.ARRIVE\S+ RZ, (\[\S+\])", line)
        if not first:
            continue
        no, predicate, slot = first.groups()
        other = f"@{'' if no else '!'}{predicate} SYNCS.ARRIVE"
        if not (code[at + 1].startswith(other) and slot in code[at + 1]):
            continue
        product = max(i for i in range(at) if "WARPGROUP.DEPBAR" in code[i])
        step = code[product:at]
        compared = [i for i, c in enumerate(step) if re.match(r"ISETP.* -0x1", c)]
        reads = [i for i, c in enumerate(step) if re.match(r"LDS", c)]
        assert compared
        assert reads
        assert reads[-1] < compared[-1]
        found += 1
    return found


@pytest.mark.parametrize(
    "tile",
    [gemm.Tile(128, 2, 4, 6, 6, 6, 1, 1, True), gemm.Tile(128, 2, 4, 5, 5, 5, 1, 1)],
    ids=["token rows", "weight rows"],
)
def test_slots_are_handed_back_when_their_scales_were_read(tile: gemm.Tile) -> None:
    source = gemm.source(tile, True, False, BF16, F32)
    assert dependent_releases(source) == tile.run
    before = "release_read(x_slot, read);"
    assert before in source
    unsafe = source.replace(before, "release(x_slot);")
    assert dependent_releases(unsafe) == 0
