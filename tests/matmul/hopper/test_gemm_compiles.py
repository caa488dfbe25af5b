"""The Hopper GEMM compiles on any machine without compiler messages and local memory.

The figures are those of the compiler in ``constraints.txt``, which is the one that torch's own
packages for CUDA 13 bring along.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from ahead import cuda_resources, machine_code, without_nvrtc
from fp8kit.matmul.hopper.device import H200
from fp8kit.matmul.hopper.heuristics import choose, choose_quantizing
from fp8kit.matmul.hopper.tile_config import TileConfig
from tile_configs import CONFIGS, label, tile_config

sources = pytest.importorskip("fp8kit.matmul.hopper.source", reason="no cuda-bindings")
layers = pytest.importorskip("layers")

pytestmark = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (1, 16, 64, 96, 128, 256, 512, 1024, 4096)
LAYERS = [layers.SHAPES[name] for name in layers.chosen("8b,ds")]  # more take minutes
CONFIG = tile_config(64, 1, steps=4, stages=(10, 4), inflight=6, split_k=4)
ONE_TILE = sources.Variant(False, True, False, BF16)


def chosen() -> list[tuple[TileConfig, bool, bool]]:
    """Return configurations of measured layers that are not in ``CONFIGS``, and who stores."""
    found = set()
    for m, (n, k), blocks in itertools.product(ROWS, LAYERS, (False, True)):
        config = choose(m, n, k, H200, blocks)
        if config not in CONFIGS:
            found.add((config, blocks, config.uses_tma_store(m, n, H200, blocks, 2)))
    return sorted(found, key=repr)


def quantizing() -> list[tuple[TileConfig, bool]]:
    """Return chosen configurations of measured layers in which the GEMM quantizes the tokens."""
    found = {
        (config, blocks)
        for m in (1, 2, 4)
        for n, k in LAYERS
        for blocks in (False, True)
        if (config := choose_quantizing(m, n, k, H200, blocks)) is not None
    }
    return sorted(found, key=repr)


def check(source: str, config: TileConfig) -> None:
    found = cuda_resources(source)
    # the stages get the rest of the shared memory of a multiprocessor
    assert found["shared"] <= config.static_smem_bytes
    # warpgroups redistribute the registers that a launch allocates
    assert found["registers"] == config.launch_registers or not config.launch_registers


# both kinds of scales by turns
EVERY_PATH = [(config, i % 2 == 1) for i, config in enumerate(CONFIGS)]


@pytest.mark.parametrize(("config", "blocks"), EVERY_PATH, ids=label)
def test_configurations_that_take_every_path(config: TileConfig, blocks: bool) -> None:
    tma_store = config.launch.split_k == 1 and not blocks
    check(sources.source(config, sources.Variant(blocks, not tma_store, tma_store, BF16)), config)


@pytest.mark.parametrize(("config", "blocks", "tma_store"), chosen(), ids=label)
def test_configurations_of_measured_layers(
    config: TileConfig, blocks: bool, tma_store: bool
) -> None:
    check(sources.source(config, sources.Variant(blocks, False, tma_store, BF16)), config)


def test_measured_layers_are_stored_by_both() -> None:
    found = {(blocks, tma_store) for _, blocks, tma_store in chosen()}
    assert found == set(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize(("config", "blocks"), quantizing(), ids=label)
def test_configurations_that_quantize(config: TileConfig, blocks: bool) -> None:
    assert config.quantize is not None
    dtype = F16 if config.quantize.rows == 2 else BF16
    check(sources.source(config, sources.Variant(blocks, True, False, dtype, dtype, dtype)), config)


@pytest.mark.parametrize("blocks", [False, True], ids=label)
@pytest.mark.parametrize(("out", "bias"), [(F32, BF16), (F16, F16)])
@pytest.mark.parametrize(
    "config", [CONFIG, tile_config(96, 3, steps=1, stages=(5, 5), swap_ab=False)], ids=label
)
def test_dtypes(config: TileConfig, out: torch.dtype, bias: torch.dtype, blocks: bool) -> None:
    check(sources.source(config, sources.Variant(blocks, True, False, out, bias)), config)


def altered(before: str, after: str) -> str:
    source = sources.source(CONFIG, ONE_TILE)
    assert before in source
    return source.replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("wgmma_wait<1>();", ""),
        ("issue_mma(i % 2);", "if (lane < 16) issue_mma(i % 2);"),
        ("x.advance();\n    };", "x.advance();\n      partial[i][0] += 1;\n    };"),
    ],
    ids=["promoted before it is there", "divergent", "written in flight"],
)
def test_serialised_mmas_are_found(before: str, after: str) -> None:
    with pytest.raises(
        AssertionError, match=r"C75\d\d.*(are serialized|wait(_group)? is injected)"
    ):
        cuda_resources(altered(before, after))


def test_broken_ptx_is_an_error_with_the_log() -> None:
    source = altered("wgmma.commit_group", "wgmma.comit_group")
    with pytest.raises(RuntimeError, match=r"for sm_90a:\n.*Unknown modifier '.comit_group'"):
        cuda_resources(source)


def test_shared_memory_that_the_host_does_not_know_of_is_found() -> None:
    source = altered(
        "__shared__ ScalesAndBias scales;", "__shared__ ScalesAndBias scales, more[3];"
    )
    load = "scales.load_scales(output,"
    assert load in source
    source = source.replace(load, f"more[2].load_scales(output, row0, col0), {load}")
    with pytest.raises(AssertionError, match="static_smem_bytes"):
        check(source, CONFIG)


def dependent_releases(source: str) -> int:
    """Count the stages that both outcomes of a comparison of the values read release.

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


@pytest.mark.parametrize("swap_ab", [False, True])
def test_stages_are_released_when_their_scales_were_read(swap_ab: bool) -> None:
    config = tile_config(128, 2, steps=4, stages=(6 - swap_ab, 6 - swap_ab), swap_ab=swap_ab)
    source = sources.source(config, sources.Variant(True, False, False, BF16))
    assert dependent_releases(source) == config.pipeline.pipelined_steps
    before = "barrier_arrive_after(x_released, read);"
    assert before in source
    unsafe = source.replace(before, "barrier_arrive(x_released);")
    assert dependent_releases(unsafe) == 0
