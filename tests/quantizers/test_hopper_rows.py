"""Hopper's quantizer of few rows: its tiling on any machine, its bits on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ahead import cuda_resources, without_nvrtc
from fp8kit.formats import ROW
from fp8kit.quantizers import hopper_rows, reference, triton
from numerics import assert_bits_equal

E4M3 = torch.float8_e4m3fn
FLOOR = 1 / (448 * 512)
PROCESSORS = 132
LENGTHS = (8, 16, 24, 136, 1000, 1032, 4096, 4104, 7168, 8192, 14336, 28672, 65536, 131072)
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)
COMPILER = pytest.mark.skipif(without_nvrtc() is not None, reason=str(without_nvrtc()))


@pytest.mark.parametrize("m", [1, 8, 16, 32])
@pytest.mark.parametrize("vectors", [1, 31, 512, 513, 1792, 3584, 4096, 8191, 16384])
def test_every_vector_has_a_thread(m: int, vectors: int) -> None:
    cut = hopper_rows.row_cut(m, vectors, PROCESSORS)
    if cut is None:
        assert vectors > 2 * 512 * 4
        return
    assert cut.threads % 32 == 0
    assert cut.threads <= 512
    assert cut.blocks in (2, 4, 8)
    assert cut.blocks * cut.threads * cut.vectors >= vectors
    # and no warp of a block is without work in each of its passes
    assert cut.blocks * (cut.threads - 32) * cut.vectors < vectors


@pytest.mark.parametrize("m", [2, 8, 16, 32])
def test_two_launches_have_room_side_by_side(m: int) -> None:
    for vectors in (512, 1792, 3584):
        cut = hopper_rows.row_cut(m, vectors, PROCESSORS)
        assert cut is not None
        assert 2 * m * cut.blocks <= PROCESSORS


def test_rows_too_long_to_hold_are_left_to_another_kernel() -> None:
    assert hopper_rows.row_cut(1, 16384, PROCESSORS) is not None
    assert hopper_rows.row_cut(1, 16385, PROCESSORS) is None
    assert hopper_rows.row_cut(32, 4096, PROCESSORS) is not None
    assert hopper_rows.row_cut(32, 4097, PROCESSORS) is None


def test_source_states_its_variant() -> None:
    cut = hopper_rows.RowCut(2, 256, 4)
    text = hopper_rows.source(32, cut)
    assert text.startswith("#define KIND 32\n#define VECTORS 4\n")


def one_source_per_variant() -> dict[str, str]:
    """Return one case per source text over all supported widths; many tilings share a text."""
    cuts = {hopper_rows.row_cut(1, vectors, PROCESSORS): None for vectors in range(1, 16385)}
    sources = {
        hopper_rows.source(kind, cut): f"{dtype} {cut.vectors}"
        for dtype, kind in hopper_rows._KINDS.items()
        for cut in cuts
        if cut is not None
    }
    return {name: source for source, name in sources.items()}


VARIANTS = one_source_per_variant() if hopper_rows.nvrtc is not None else {}


@COMPILER
@pytest.mark.parametrize("source", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_compiles_into_registers(source: str) -> None:
    # two blocks of the most threads have room on a multiprocessor
    assert cuda_resources(source)["registers"] <= 64


@COMPILER
@pytest.mark.parametrize(
    ("before", "after", "error", "said"),
    [
        ("(THREADS)", "(THREADS, 4)", AssertionError, "bytes of local memory instead of 0"),
        ("int rank;", "int rank, unused;", AssertionError, "never referenced"),
        ("int rank;", "int rnk;", RuntimeError, '"rank" is undefined'),
    ],
)
def test_what_the_compiler_says_is_found(
    before: str, after: str, error: type[Exception], said: str
) -> None:
    source = hopper_rows.source(8, hopper_rows.RowCut(2, 512, 8))
    assert before in source
    with pytest.raises(error, match=said):
        cuda_resources(source.replace(before, after))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 64),
        torch.zeros(2, 64, dtype=torch.float64),
    ],
    ids=["cpu", "float64"],
)
def test_what_it_does_not_take(x: Tensor) -> None:
    assert not hopper_rows.takes(x, PROCESSORS)


@pytest.mark.gpu
@HOPPER
def test_what_it_takes_on_a_gpu() -> None:
    base = torch.zeros(32, 8200, device="cuda", dtype=torch.bfloat16)
    assert hopper_rows.takes(base, PROCESSORS)
    assert hopper_rows.takes(base[::3, 8:], PROCESSORS)
    assert not hopper_rows.takes(base[:, 1:8193], PROCESSORS)
    assert not hopper_rows.takes(base[:, :-4], PROCESSORS)
    assert not hopper_rows.takes(base.t(), PROCESSORS)
    assert not hopper_rows.takes(base.new_zeros(32, 4096), PROCESSORS)
    assert not hopper_rows.takes(base.new_zeros(33, 8192), PROCESSORS)
    assert hopper_rows.takes(base.new_zeros(16, 14336), PROCESSORS)
    assert not hopper_rows.takes(base.new_zeros(16, 28672), PROCESSORS)


def check(x: Tensor, floor: float = FLOOR) -> None:
    """Compare every bit with the reference, in memory that held other values before."""
    cut = hopper_rows.row_cut(len(x), x.shape[1] * x.element_size() // 16, PROCESSORS)
    assert cut is not None, "longer than the kernel holds"
    expected, expected_scale = reference.quantize(x, ROW, E4M3, floor, None, "exact")
    memory = torch.full((len(x), x.shape[1] + 24), 0xAA, device="cuda", dtype=torch.uint8)
    data = memory[:, :-24]
    scale = torch.full((len(x),), torch.nan, device="cuda")
    hopper_rows.quantize_rows(x, scale, data, floor, PROCESSORS)
    assert_bits_equal(scale, expected_scale[:, 0])
    assert_bits_equal(data.view(E4M3), expected)
    assert memory[:, -24:].eq(0xAA).all()
    called, called_scale = triton.quantize(x, ROW, E4M3, floor, None, "exact")
    assert_bits_equal(called_scale, expected_scale)
    assert_bits_equal(called, expected)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("k", LENGTHS)
def test_rows_of_every_length_equal_the_reference(k: int, dtype: torch.dtype) -> None:
    taken = [m for m in (1, 7, 32) if hopper_rows.row_cut(m, k * dtype.itemsize // 16, PROCESSORS)]
    if not taken:
        pytest.skip("too long to hold")
    for m in taken:
        scales = torch.logspace(-4, 2, m, device="cuda")[:, None]
        check((torch.randn(m, k, device="cuda") * scales).to(dtype))


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_hard_values(dtype: torch.dtype) -> None:
    info, k = torch.finfo(dtype), 8192
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[-1:]])
    rows = [torch.randn(k) * 2.0**e for e in (0, -20, 10)]
    rows += [ties.repeat(k // len(ties) + 1)[:k] * s for s in (1.0, 1.1, -0.7)]
    rows += [torch.rand(k) * info.max, torch.rand(k) * info.tiny, torch.full((k,), -info.max)]
    rows += [torch.zeros(k), -torch.zeros(k), torch.full((k,), info.smallest_normal / 2)]
    for at in (0, k // 2, k - 1):
        for bad in (torch.nan, torch.inf, -torch.inf):
            row = torch.randn(k)
            row[at] = bad
            rows.append(row)
    check(torch.stack(rows).to(dtype).cuda())


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_under_many_scales(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    for largest in (3e-4, 0.011, 1.0, 1.7, 448.0, 30000.0, torch.finfo(dtype).max):
        row = every[every.abs() <= largest]
        check(row[None, : len(row) // 8 * 8])


@pytest.mark.gpu
@HOPPER
def test_rows_apart_in_memory() -> None:
    base = torch.randn(99, 5000, device="cuda", dtype=torch.bfloat16)
    check(base[::3, 8:4104])
