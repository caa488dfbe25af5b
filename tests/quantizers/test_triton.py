"""The Triton quantizers: bit-equal to the reference, whatever the values, strides and tiles.

The same tests run under Triton's interpreter on a CPU (tiny shapes) and compiled on a GPU. Two
enumerations at the end check, in exact arithmetic, the claims that the kernels' division rests on.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8kit import formats
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.quantizers import reference
from fp8kit.quantizers.problem import QuantizeProblem
from grids import diagonal, pairwise
from numerics import assert_bits_equal

triton = pytest.importorskip("fp8kit.quantizers.triton")
from fp8kit.quantizers import triton_tensor  # noqa: E402
from fp8kit.quantizers.triton_encode import INTERPRETED, ScaleRule  # noqa: E402
from fp8kit.quantizers.triton_groups import GroupTile, group_tile, quantize_groups  # noqa: E402
from fp8kit.quantizers.triton_rows import RowTile, quantize_rows, row_tile  # noqa: E402
from fp8kit.quantizers.triton_tensor import (  # noqa: E402
    TensorTile,
    quantize_tensor,
    tensor_tile,
)
from fp8kit.runtime.triton_overlap import _LEAST  # noqa: E402

# numpy, which the interpreter computes with, warns of the infinities that these tests provoke
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

E4M3, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
CODES = (E4M3, FNUZ, E5M2)
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (TENSOR, ROW, GROUP128, GroupShape(1, 16), GroupShape(4, 32), BLOCK, MX)
FLOORS = (1 / (448 * 512), 1e-10 / 448, 1e-30, 0.0)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """Leave the CPU out where kernels are compiled: only the interpreter runs there."""
    if device.type == "cpu" and not INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernels are compiled for it")
    return device


@pytest.fixture(autouse=True)
def no_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep few rows, which another kernel takes on Hopper (see ``test_hopper_rows``)."""
    monkeypatch.setattr(triton.hopper_rows, "takes", lambda *_: False)


def roundings(group: GroupShape) -> tuple[str, str]:
    return ("floor", "up") if group == MX else ("exact", "up")


def check(
    x: Tensor,
    group: GroupShape,
    dtype: torch.dtype = E4M3,
    floor: float = FLOORS[0],
    bound: float | None = None,
    rounding: str | None = None,
) -> None:
    """Quantize with the kernels and with the reference and compare every bit."""
    scale_ub = None if bound is None else torch.tensor(bound, device=x.device)
    arguments = (x, group, dtype, floor, scale_ub, rounding or roundings(group)[0])
    data, scale = triton.quantize(*arguments)
    expected_data, expected_scale = reference.quantize(*arguments)
    assert data.is_contiguous()
    assert scale.is_contiguous()
    assert_bits_equal(scale, expected_scale)
    assert_bits_equal(data, expected_data)


def hard_rows(dtype: torch.dtype, k: int, device: torch.device) -> Tensor:
    """Return rows of difficult values: any magnitude, ties, zeros of both signs, NaN, infinity."""
    info = torch.finfo(dtype)
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    ties = torch.cat([(codes[1:] + codes[:-1]) / 2, codes[-1:]])
    rows = [torch.randn(k) * 2.0**e for e in (0, -20, 10)]
    rows += [ties.repeat(k // len(ties) + 1)[:k] * s for s in (1.0, 1.1, -0.7)]
    rows += [torch.rand(k) * info.max, torch.rand(k) * info.tiny, torch.full((k,), -info.max)]
    rows += [torch.zeros(k), -torch.zeros(k), torch.full((k,), info.smallest_normal / 2)]
    x = torch.stack(rows).to(dtype)
    for bad in (torch.nan, torch.inf, -torch.inf):
        row = torch.randn(1, k).to(dtype)
        row[0, k // 2] = bad
        x = torch.cat([x, row])
    return x.to(device)


@pytest.mark.parametrize("inputs", INPUTS, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_hard_values(group: GroupShape, inputs: torch.dtype, device: torch.device) -> None:
    x = hard_rows(inputs, 131, device)
    # in a scale that rows share, one NaN would hide all other values
    parts = x.split(1) if group == TENSOR else (x[:9], x[9:]) if group.rows > 1 else (x,)
    for part in parts:
        for dtype in CODES if part is parts[0] or device.type == "cuda" else (E4M3,):
            check(part, group, dtype)


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("group", [ROW, GROUP128, TENSOR], ids=str)
def test_floors_and_roundings(group: GroupShape, floor: float, device: torch.device) -> None:
    for x in hard_rows(torch.float32, 96, device).split(3):
        for rounding in roundings(group):
            check(x, group, floor=floor, rounding=rounding)


@pytest.mark.parametrize("group", [MX, GroupShape(1, 16)], ids=str)
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_powers_of_two(group: GroupShape, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.ldexp(torch.rand(64, 32) + 0.5, torch.arange(-150, 127, 4.37)[:64, None].int())
    for rounding in roundings(group):
        check(x.to(device), group, dtype, 2.0**-60, rounding=rounding)


@pytest.mark.parametrize(
    ("group", "bound"),
    diagonal(
        [TENSOR, ROW, GROUP128, GroupShape(2, 32)],
        [0.0, 1e-3, 0.7, 1e4, math.inf, math.nan],
        turns=2,
    ),
    ids=str,
)
def test_bounds(group: GroupShape, bound: float, device: torch.device) -> None:
    x = torch.randn(4, 160)
    x[1, 3], x[2, 5], x[3, 7] = torch.inf, torch.nan, 3e38
    for part in x.to(device).split(1 if group == TENSOR else 4):
        check(part, group, bound=bound)


def strided(device: torch.device) -> dict[str, Tensor]:
    """Return tensors that are not contiguous."""
    base = torch.randn(6, 40, 72, device=device).to(torch.bfloat16)
    return {
        "transposed": base[0].t(),
        "sliced": base[1, 3:37:3, 5:71:2],
        "one row repeated": base[0, :1].expand(5, -1),
        "one column repeated": base[0, :, :1].expand(-1, 33),
        "one value": base[0, :1, :1].expand(3, 33),
        "a vector": base[0, 0],
        "rows that no stride folds": base[:2, ::9].transpose(0, 1),
        "4-D": base[:, :4].reshape(2, 3, 4, 72).permute(1, 0, 2, 3),
        "4-D, K not innermost": base[:2, :33, :6].reshape(2, 33, 2, 3).permute(2, 0, 3, 1),
    }


@pytest.mark.parametrize(
    ("group", "name"), diagonal(GROUPS, strided(torch.device("cpu")), turns=2), ids=str
)
def test_strides(group: GroupShape, name: str, device: torch.device) -> None:
    x = strided(device)[name]
    check(x[None] if x.dim() == 1 and group.rows > 1 else x, group)


SHAPES = ((1, 1), (1, 17), (3, 131), (2, 1030), (5, 64), (9, 257), (130, 33), (1, 2300))


@pytest.mark.parametrize(("group", "shape"), diagonal(GROUPS, SHAPES, turns=3), ids=str)
def test_shapes(group: GroupShape, shape: tuple[int, int], device: torch.device) -> None:
    check(torch.randn(shape, device=device, dtype=torch.bfloat16), group)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32)], ids=str)
def test_tensors_without_elements(
    group: GroupShape, shape: tuple[int, ...], device: torch.device
) -> None:
    x = torch.empty(shape, device=device)
    check(x, group)
    scale = reference.quantize(x, group, E4M3, 1e-6, None, roundings(group)[0])[1]
    assert triton.quantize_static(x, scale, group, E4M3).shape == x.shape


def static_scales(kind: str, shape: tuple[int, ...], group: GroupShape) -> Tensor:
    if group == MX:
        bytes_of = {"tiny": (0, 3), "ordinary": (110, 140), "huge": (250, 256)}
        return torch.randint(*bytes_of.get(kind, (0, 256)), shape).to(torch.uint8)
    if kind == "odd":
        odd = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -2.5, 2.0**-64, 2.0**64, 1e-45])
        return odd[torch.arange(math.prod(shape)) % len(odd)].reshape(shape)
    center = {"tiny": 2.0**-140, "ordinary": 1.0, "huge": 2.0**125}[kind]
    return (torch.rand(shape) + 0.01) * center


@pytest.mark.parametrize(
    ("group", "kind", "dtype"),
    pairwise(GROUPS, ["tiny", "ordinary", "huge", "odd"], CODES),
    ids=str,
)
def test_static_scales(
    group: GroupShape, kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = hard_rows(torch.float32, 131, device)
    scale = static_scales(kind, formats.scale_shape(x.shape, group), group).to(device)
    data = triton.quantize_static(x, scale, group, dtype)
    assert_bits_equal(data, reference.quantize_static(x, scale, group, dtype))


@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-64, 0.37, 2.0**64, 3e38, math.inf, math.nan])
def test_one_static_scale(value: float, device: torch.device) -> None:
    x = hard_rows(torch.float32, 64, device)
    scale = torch.full((1, 1), value, device=device)
    data = triton.quantize_static(x, scale, TENSOR, E4M3)
    assert_bits_equal(data, reference.quantize_static(x, scale, TENSOR, E4M3))


@pytest.mark.parametrize("group", [GROUP128, GroupShape(1, 16), MX], ids=str)
@pytest.mark.parametrize("shape", [(1, 300), (5, 256), (3, 7, 130)], ids=str)
def test_column_major_scales(
    group: GroupShape, shape: tuple[int, ...], device: torch.device
) -> None:
    x = torch.randn(shape, device=device)
    arguments = (group, E4M3, 1e-10, None, roundings(group)[0])
    data, scale = triton.quantize(x, *arguments, "column")
    expected = reference.quantize(x, *arguments)
    assert_bits_equal(data, expected[0])
    assert_bits_equal(scale, expected[1])
    m, groups = math.prod(shape[:-1]), scale.shape[-1]
    assert scale.stride(-1) == -(-m // 4) * 4
    assert scale.stride(-2) == 1
    assert scale.untyped_storage().nbytes() == groups * -(-m // 4) * 4 * scale.element_size()
    assert_bits_equal(triton.quantize_static(x, scale, group, E4M3), expected[0])


ROW_TILES = (
    RowTile(1, 512, 1, 1, 1),
    RowTile(4, 512, 1, 1, 2),
    RowTile(1, 128, 4, 1, 1),
    RowTile(2, 64, 7, 1, 1),
    RowTile(1, 128, 0, 1, 1),
    RowTile(1, 512, 0, 4, 2),
    RowTile(2, 64, 0, 8, 1),
)


def cut_rows(x: Tensor, scale: Tensor, tile: RowTile, static: bool) -> Tensor:
    """Quantize rows in a tile; scales are read if static, else written."""
    recipe = ScaleRule(FLOORS[0], static, "ieee" if static else "corrected", 448.0)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    quantize_rows(x, scale, None, codes, recipe, tile)
    return codes.view(E4M3)


@pytest.mark.parametrize("tile", ROW_TILES, ids=str)
def test_no_row_tile_changes_the_result(tile: RowTile, device: torch.device) -> None:
    x = hard_rows(torch.bfloat16, 401, device)
    if device.type == "cpu":
        x = x[[0, 3, 6, 9, 11, 12, 14]]  # a row of each kind, more than any tile has
    expected, expected_scale = reference.quantize(x, ROW, E4M3, FLOORS[0], None, "exact")
    scale = torch.empty(len(x), device=device)
    assert_bits_equal(cut_rows(x, scale, tile, static=False), expected)
    assert_bits_equal(scale[:, None], expected_scale)
    scale = torch.rand(len(x), device=device)
    data = cut_rows(x, scale, tile._replace(held=0), static=True)
    assert_bits_equal(data, reference.quantize_static(x, scale[:, None], ROW, E4M3))


@pytest.mark.parametrize(
    ("tile", "group"),
    diagonal([(4, 1, 1, 1), (2, 4, 2, 1), (8, 2, 3, 4), (128, 1, 4, 4)], [GroupShape(1, 16), MX]),
    ids=str,
)
def test_no_group_tile_changes_the_result(
    tile: tuple[int, int, int, int], group: GroupShape, device: torch.device
) -> None:
    x = hard_rows(torch.bfloat16, 150, device)
    if device.type == "cpu":
        x = x[[0, 3, 6, 9, 10, 11, 12, 13, 14]]  # one more than most tiles have
    rounding, division = ("floor", "mx floor") if group == MX else ("exact", "corrected")
    floor = 0.0 if group == MX else FLOORS[0]
    expected, expected_scale = reference.quantize(x, group, E4M3, floor, None, rounding)
    recipe = ScaleRule(floor, False, division, 448.0)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    scale = torch.empty_like(expected_scale)
    quantize_groups(x, scale, None, codes, group.cols, recipe, GroupTile(*tile))
    assert_bits_equal(codes.view(E4M3), expected)
    assert_bits_equal(scale, expected_scale)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("group", [ROW, GROUP128, GroupShape(1, 16)], ids=str)
def test_rows_of_codes_may_have_gaps(group: GroupShape, layout: str, device: torch.device) -> None:
    if group == ROW and layout == "column":
        pytest.skip("a scale per row has one layout")
    x = hard_rows(torch.bfloat16, 401, device)
    memory = torch.full((len(x), 448), 0xAA, dtype=torch.uint8, device=device)
    wanted = memory.view(E4M3)[:, :401]
    arguments = (x, group, E4M3, FLOORS[0], None, "exact", layout)
    data, scale = triton.quantize(*arguments, wanted)
    assert data is wanted
    expected, expected_scale = reference.quantize(*arguments)
    assert_bits_equal(data, expected)
    assert_bits_equal(scale, expected_scale)
    assert memory[:, 401:].eq(0xAA).all()


TENSOR_TILES = [(64, 1, 1, 1, 1), (64, 4, 3, 5, 2), (256, 1, 3, 5, 2), (256, 4, 17, 2, 1)]


def check_cut(x: Tensor, tile: TensorTile) -> None:
    """Quantize a tensor in a tile, and compare every bit."""
    expected, expected_scale = reference.quantize(x, TENSOR, E4M3, FLOORS[0], None, "exact")
    scale = torch.empty_like(expected_scale)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    recipe = ScaleRule(FLOORS[0], False, "corrected", 448.0)
    quantize_tensor(x, scale, None, codes, recipe, tile)
    assert_bits_equal(scale, expected_scale)
    assert_bits_equal(codes.view(E4M3), expected)


@pytest.mark.parametrize("tile", TENSOR_TILES, ids=str)
def test_no_tensor_tile_changes_the_result(
    tile: tuple[int, int, int, int, int], device: torch.device
) -> None:
    x = torch.randn(7, 259, device=device)
    check_cut(x, TensorTile(*tile))
    check_cut(x.t(), TensorTile(*tile))
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    scale = torch.full((1, 1), 0.01, device=device)
    recipe = ScaleRule(0.0, True, "ieee", 448.0)
    quantize_tensor(x, scale, None, codes, recipe, TensorTile(*tile))
    assert_bits_equal(codes.view(E4M3), reference.quantize_static(x, scale, TENSOR, E4M3))


@pytest.mark.parametrize("kept", [0, 1500, 5000, 10**9])
def test_what_stays_in_the_cache_does_not_change_the_result(
    kept: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bytes; those of a GPU are more than an interpreter gets through
    monkeypatch.setattr(triton_tensor, "_KEPT", kept)
    x = torch.randn(259, 9, device=device).t()
    for largest in (0, -1):  # in the part that is to leave, and in the one that is to stay
        x[largest, largest] = 1000.0
        check_cut(x, TensorTile(64, 4, 3, 5, 2))
        x[largest, largest] = 0.0


SHORT_KS = (1, 16, 17, 64, 512, 576, 896, 1024)
KS = (*SHORT_KS, 1025, 4096, 4097, 5120, 7168, 14336, 28672, 53248, 200_000)
MS = (1, 2, 16, 64, 66, 67, 300, 528, 529, 4096, 10**7)


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_row_tiles_hold_a_row_and_fit_a_program(k: int, itemsize: int) -> None:
    for m in MS:
        tile = row_tile(m, k, itemsize, 132)
        assert tile.cols & (tile.cols - 1) == 0
        assert tile.rows & (tile.rows - 1) == 0
        assert 1 <= tile.warps <= 32
        assert tile.held * tile.cols >= k or tile.held == 0
        # what is held must leave half of a thread's 128 registers free
        assert tile.held * tile.cols * tile.rows * itemsize <= 256 * 32 * tile.warps
        assert tile.cols % tile.slices == 0
        assert tile.slices == 1 or (tile.held == 0 and tile.rows == 1)
        assert m > 66 or tile.slices * m <= 2 * 132


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_group_and_tensor_tiles_fit_a_program(k: int, itemsize: int) -> None:
    for m in MS:
        for group in (16, 32, 128, 1024):
            for column in (False, True):
                part = group_tile(m, k, group, itemsize, column, 132)
                assert part.rows & (part.rows - 1) == 0
                assert part.groups & (part.groups - 1) == 0
                assert part.rows * part.groups * group <= max(8192 // itemsize, group)
                assert part.rows * part.groups * group * itemsize <= max(
                    512 * part.warps, group * itemsize
                )
                assert part.rows <= 128 or group < 32
                # of the groups that are computed, at most an eighth lie beyond the row
                count, span = math.ceil(k / group), part.groups * part.held
                assert math.ceil(count / span) * span <= count * 8 / 7
        cut = tensor_tile(m * k, itemsize, 132)
        assert cut.block * cut.held * itemsize <= 64 * 32 * cut.warps
        assert cut.partials <= cut.programs
        assert cut.programs <= 8 * 132
        assert cut.partials <= 1024


def problem(
    group: GroupShape = ROW,
    in_dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] | None = (9, 0),
) -> QuantizeProblem:
    return QuantizeProblem(group, in_dtype, E4M3, "cuda", capability)


def test_groups_and_devices_that_triton_supports(request: pytest.FixtureRequest) -> None:
    for group in (*GROUPS, GroupShape(1, 1)):
        assert triton.supports(problem(group)) is None
    assert "several whole rows" in triton.supports(problem(GroupShape(2, -1)))
    assert "not powers of two" in triton.supports(problem(GroupShape(1, 100)))
    assert "more than" in triton.supports(problem(GroupShape(256, 256)))
    assert "float64 input" in triton.supports(problem(in_dtype=torch.float64))
    request.getfixturevalue("triton_compiles")
    assert triton.supports(problem(capability=(8, 6))) == "needs an NVIDIA GPU from sm89"
    assert triton.supports(problem(capability=(8, 9))) is None
    elsewhere = QuantizeProblem(ROW, torch.bfloat16, E4M3, "cpu", None)
    assert triton.supports(elsewhere) == "needs an NVIDIA GPU from sm89"


# M: one row, a decode batch, both sides of where programs stop sharing rows, prefill
LARGE = [(m, k) for k in (4096, 5120, 14336, 28672, 4099) for m in (1, 16, 66, 67, 1000)]
LARGE += [(16384, 4096), (4096, 28672), (8192, 1024), (5001, 257), (3, 100_003), (70_000, 64)]


def spread(m: int, k: int) -> Tensor:
    """Return random rows whose magnitudes span eight decades."""
    return torch.randn(m, k, device="cuda") * torch.logspace(-6, 2, m, device="cuda")[:, None]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_real_shapes(group: GroupShape, shape: tuple[int, int]) -> None:
    check(spread(*shape).bfloat16(), group)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_real_shapes_in_every_variant(group: GroupShape) -> None:
    x = spread(1000, 4096)
    for inputs in INPUTS:
        for rounding in roundings(group):
            check(x.to(inputs), group, E4M3, 1e-6 / 448, rounding=rounding)
    for dtype in (FNUZ, E5M2):
        check(x.bfloat16(), group, dtype)
    check(x.bfloat16(), group, bound=1.5)
    scale = static_scales("ordinary", formats.scale_shape(x.shape, group), group).cuda()
    for inputs in INPUTS:
        data = triton.quantize_static(x.to(inputs), scale, group, E4M3)
        assert_bits_equal(data, reference.quantize_static(x.to(inputs), scale, group, E4M3))


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_16_bit_number(group: GroupShape) -> None:
    for inputs in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(inputs)
        for x in (every[None], every[every.isfinite()][None], every[:, None].expand(-1, 3)):
            check(x, group, bound=None if x.shape[0] > 1 else 100.0)
            check(x, group)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [TENSOR, ROW, GROUP128, BLOCK, MX], ids=str)
def test_more_than_2_to_the_31_elements(group: GroupShape) -> None:
    m, k = 2**19 + 129, 4096
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = 1000.0
    data, scale = triton.quantize(x, group, E4M3, FLOORS[0], None, roundings(group)[0])
    if group == TENSOR:
        assert scale.item() == (torch.tensor(1000.0) / torch.tensor(448.0)).item()
    for start in (0, 2**18, m - 129):
        # the reference takes eight times the memory, so it sees blocks of rows
        rows = slice(start, min(start + 128, m) if start < m - 129 else m)
        part = scale if group == TENSOR else scales_of(scale, group, rows)
        assert_bits_equal(data[rows], reference.quantize_static(x[rows], part, group, E4M3))
        if group != TENSOR:
            expected = reference.quantize(
                x[rows], group, E4M3, FLOORS[0], None, roundings(group)[0]
            )
            assert_bits_equal(part, expected[1])


def scales_of(scale: Tensor, group: GroupShape, rows: slice) -> Tensor:
    """Return the scales of a range of rows that starts at a block."""
    height = group.rows
    return scale[rows.start // height : -(-rows.stop // height)]


@pytest.mark.gpu
@pytest.mark.parametrize("group", [TENSOR, ROW, GROUP128, MX], ids=str)
def test_offsets_past_2_to_the_31(group: GroupShape) -> None:
    base = torch.randn(2**16 + 40, 2**15 + 8, device="cuda", dtype=torch.bfloat16)
    sparse = base[:: 2**13, :: 2**9]
    assert (len(sparse) - 1) * sparse.stride(0) > 2**31
    check(sparse, group)
    check(sparse.t(), group)
    check(base.view(-1)[None, -(2**31) - 77 :: 2**18], group)


@pytest.mark.gpu
def test_one_row_of_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(1, 2**31 + 40, device="cuda", dtype=torch.bfloat16)
    x[0, -1] = -1000.0
    data, scale = triton.quantize(x, ROW, E4M3, FLOORS[0], None, "exact")
    assert scale.item() == (torch.tensor(1000.0) / torch.tensor(448.0)).item()
    for part in (slice(0, 4096), slice(2**31 - 2048, 2**31 + 40)):
        expected = reference.quantize_static(x[:, part], scale, ROW, E4M3)
        assert_bits_equal(data[:, part], expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_capture_and_no_synchronization(group: GroupShape) -> None:
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    arguments = (group, E4M3, FLOORS[0], None, roundings(group)[0])
    triton.quantize(x, *arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.quantize(x, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, scale = triton.quantize(x, *arguments)
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    expected_data, expected_scale = reference.quantize(x, *arguments)
    assert_bits_equal(scale, expected_scale)
    assert_bits_equal(data, expected_data)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_inputs_that_are_prefetched(group: GroupShape) -> None:
    # rows that begin and end inside a vector, the last of them where the allocation ends
    m, k = 4099, 4100
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    assert x.numel() * 2 > _LEAST.value
    expected = reference.quantize(x, group, E4M3, FLOORS[0], None, roundings(group)[0])
    for _ in range(20):
        written = torch.full_like(x, torch.nan)
        triton.quantize(written, group, E4M3, FLOORS[0], None, roundings(group)[0])
        written.copy_(x)  # while programs of the next kernel already fetch it
        data, scale = triton.quantize(written, group, E4M3, FLOORS[0], None, roundings(group)[0])
    assert_bits_equal(scale, expected[1])
    assert_bits_equal(data, expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_back_to_back_launches_see_each_other(group: GroupShape) -> None:
    # kernels of one stream overlap: each must still wait for what the one ahead of it writes
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    arguments = (group, E4M3, FLOORS[0], None, roundings(group)[0])
    expected = reference.quantize(x, *arguments)
    for _ in range(200):
        copy = torch.full_like(x, torch.nan)
        copy.copy_(x)
        data, scale = triton.quantize(copy, *arguments)
        copy.zero_()
        again = triton.quantize_static(x, scale, group, E4M3)
    assert_bits_equal(scale, expected[1])
    assert_bits_equal(data, expected[0])
    assert_bits_equal(again, expected[0])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_device_that_is_not_current(group: GroupShape) -> None:
    with torch.cuda.device(0):
        check(torch.randn(40, 300, device="cuda:1"), group)
        assert torch.cuda.current_device() == 0


def wobble(bits: int) -> Fraction:
    """Bound a quotient's error before its last rounding, in units of the last place.

    That of the pair of reciprocals; the corrected quotient's is a quarter of it.
    """
    return Fraction(1, 2 ** (bits - 5))


def fp32(value: Fraction) -> Fraction:
    """Round to 24 bits, nearest even; the exponent is unbounded, as it is for safe scales."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - 23)
    return round(value / step) * step


def rough(x: Fraction, y: Fraction) -> Fraction:
    """Return the quotient by a multiplication with the rounded reciprocal."""
    return fp32(x * fp32(1 / y))


def corrected(x: Fraction, y: Fraction) -> Fraction:
    """Do what the kernels do, with exact products before each rounding."""
    q = rough(x, y)
    return fp32(q - fp32(q * y - x) * fp32(1 / y))


def paired(x: Fraction, y: Fraction, near: Fraction, up: int = 1) -> Fraction:
    """Do what the kernels do for 16-bit data, given what the hardware takes for ``1 / y``."""
    ulp = Fraction(1, 2**47)
    r = near - ulp
    rest = fp32(fp32(1 - r * y) * fp32(near + up * ulp))
    return fp32(x * r + fp32(x * rest))


def reciprocals(y: Fraction) -> list[Fraction]:
    """Return the floats within an ulp of the reciprocal of an integer of 24 bits."""
    ulp = Fraction(1, 2**47)
    near = (fp32(fp32(1 / y) + n * ulp) for n in (-1, 0, 1))
    return [value for value in near if abs(value - 1 / y) <= ulp]


def middles(bits: int) -> Iterator[tuple[int, int]]:
    """Give ``Q, u`` for all ``Q / 2^u``, in ulp, halfway from a tie of codes to the next float."""
    for tie in range(1, 32, 2):
        unit = tie << (bits - tie.bit_length())
        yield 2 * unit + 1, 1
        # the floats under a power of two are twice as dense
        yield (4 * unit - 1, 2) if tie == 1 else (2 * unit - 1, 1)


def near_ties(bits: int = 24) -> Iterator[tuple[Fraction, Fraction]]:
    """Return all significands ``x`` and ``y`` whose quotient is hard to round and matters.

    It matters if one of the two floats around it is a tie between two codes, an odd number of at
    most five bits. It is hard to round if it lies within ``wobble`` of the middle of the two. With
    the middle ``Q / 2^u`` and the quotient ``X * 2^c / Y``, both in units of the last place, that
    says ``X * 2^(c + u) = Q * Y + k`` for a small ``k``. ``Q`` is odd, so each ``k`` leaves one
    ``Y`` modulo ``2^(c + u)``, which is no less than the range of ``Y``.
    """
    significands = range(2 ** (bits - 1), 2**bits)
    for middle, u in middles(bits):
        most = math.ceil(wobble(bits) * 2 ** (bits + u))
        for k, c in itertools.product(range(-most, most + 1), (bits - 1, bits)):
            modulus = 2 ** (c + u)
            y = -k * pow(middle, -1, modulus) % modulus
            x = (middle * y + k) // modulus
            if x in significands and y in significands:
                yield Fraction(x * 2**c), Fraction(y)


def test_the_enumeration_of_near_ties_is_complete() -> None:
    # so few bits that every pair can be tried
    bits = 8
    found = set(near_ties(bits))
    limits = sorted(Fraction(q, 2**u) for q, u in middles(bits))
    for x, y in itertools.product(range(128, 256), repeat=2):
        # scaled into the binade of the middles, whose lower end includes the float below it
        for c in (bits - 1, bits):
            if x * 2**c < 127 * y or x * 2**c > 256 * y:
                continue
            quotient = Fraction(x * 2**c, y)
            above = bisect.bisect(limits, quotient)
            if any(
                abs(quotient - near) <= wobble(bits)
                for near in limits[max(above - 1, 0) : above + 1]
            ):
                assert (Fraction(x * 2**c), Fraction(y)) in found


def test_quotients_of_every_near_tie() -> None:
    found = list(near_ties())
    assert len(found) > 1000
    assert [xy for xy in found if corrected(*xy) != fp32(xy[0] / xy[1])] == []


def test_quotients_of_every_near_tie_of_16_bit_numbers() -> None:
    found = [(x, y) for x, y in near_ties() if significant_bits(x) <= 11]
    assert [(significant_bits(x), int(y)) for x, y in found] == [(1, 2**24 - 1)]
    for x, y in found:
        for near in reciprocals(y):
            assert paired(x, y, near) == fp32(x / y)
            assert paired(x, y, near, up=-1) != fp32(x / y)


def test_the_error_of_a_pair_of_reciprocals() -> None:
    # of the sum of the parts, in ulp of the quotient; its last product adds 2^-22
    generator = random.Random(0)
    significands = [
        2**23,
        2**23 + 1,
        2**24 - 1,
        *(generator.randrange(2**23, 2**24) for _ in range(2000)),
    ]
    worst = Fraction(0)
    for y in map(Fraction, significands):
        for near in reciprocals(y):
            r = near - Fraction(1, 2**47)
            rest = fp32(fp32(1 - r * y) * (near + Fraction(1, 2**47)))
            assert min(r, rest) > 0
            worst = max(worst, abs((r + rest) * y - 1))
    assert Fraction(1, 2**46) < worst < wobble(24) / 2**24 - Fraction(1, 2**46)


def significant_bits(x: Fraction) -> int:
    """Return the length of an integer without its trailing zeros."""
    value = int(x)
    return (value // (value & -value)).bit_length()


def test_quotients_by_the_largest_scales() -> None:
    # the second part of their reciprocals is subnormal; only maxima of bf16, of 8 bits, reach them
    limits = [Fraction(q, 2**u) for q, u in middles(24)]
    close = lost = 0
    for amax, exponent in itertools.product(range(128, 256), (80, 110, 118, 119, 120)):
        scale = fp32(Fraction(amax * 2**exponent, 448))
        mantissa = scale / Fraction(2) ** (math.floor(math.log2(scale)) - 23)
        for near in (value * mantissa / scale for value in reciprocals(mantissa)):
            ulp = Fraction(1, 2**47) * mantissa / scale
            exact = fp32(1 - (near - ulp) * scale) * (near + ulp)
            rest = fp32(round(exact * 2**149) / Fraction(2**149))
            lost += rest != fp32(exact)
            for limit in limits:
                middle = limit * scale
                unit = Fraction(2) ** (math.floor(math.log2(middle)) - 7)
                for x in (math.floor(middle / unit) * unit, math.ceil(middle / unit) * unit):
                    if abs(x / middle - 1) * limit > 4:
                        continue  # not near a tie
                    assert fp32(x * (near - ulp) + fp32(x * rest)) == fp32(x / scale)
                    close += 1
    assert close > 1000
    assert lost > 500


def test_the_enumeration_of_near_ties_can_fail() -> None:
    found = list(near_ties())
    assert sum(rough(*xy) != fp32(xy[0] / xy[1]) for xy in found) > len(found) / 4
    for x, y in found:
        distance = abs(x / y - fp32(x / y))
        assert Fraction(1, 2) - 2 * wobble(24) < distance <= Fraction(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quotients_of_all_significands(device: torch.device, dtype: torch.dtype) -> None:
    bits = 8 if dtype == torch.bfloat16 else 11
    step = 1 if device.type == "cuda" else 2 ** (bits - 4)
    amax = torch.arange(2 ** (bits - 1), 2**bits, step, device=device)[:, None].double()
    x = torch.arange(2 ** (bits - 1), 2**bits, device=device).double() / 2**bits
    quotients = torch.cat([x * 2.0**-n for n in range(1 if bits == 11 else 20)])
    for exponent in (-30, 0, 40, 80, 110, 120) if bits == 8 else (-14, 0, 5):
        rows = torch.cat([amax, amax * 0 + quotients * 2 ** (bits - 1)], 1) * 2.0**exponent
        check(rows.to(dtype), ROW)


@pytest.mark.parametrize(
    ("value", "dtype"),
    diagonal(
        [1 - 2**-24, 2.0**-9 * (1 - 2**-24), 1.0, 0.3, 3.1e-5, 2.0**64, 2.0**-64, 1e-30],
        [torch.bfloat16, torch.float16],
    ),
)
def test_every_16_bit_number_by_static_scales(
    device: torch.device, value: float, dtype: torch.dtype
) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)[None]
    scale = torch.full((1, 1), value, device=device)
    data = triton.quantize_static(x, scale, TENSOR, E4M3)
    assert_bits_equal(data, reference.quantize_static(x, scale, TENSOR, E4M3))


def test_near_ties_in_the_kernels(device: torch.device) -> None:
    found = list(near_ties())[:: 1 if device.type == "cuda" else 40]
    x = torch.tensor([float(x) for x, _ in found], dtype=torch.float64)
    y = torch.tensor([float(y) for _, y in found]).float()
    x = torch.ldexp(x.float(), torch.randint(-45, -14, x.shape))
    for group, columns in ((ROW, 4), (GroupShape(1, 4), 4)):
        # the largest element makes the scale of its row: y, or a neighbour of it
        rows = torch.stack([x, -x, torch.zeros_like(x), 448 * y], 1).to(device)
        assert rows.shape[1] == columns
        check(rows, group)
        scale = y[:, None].contiguous().to(device)
        data = triton.quantize_static(rows, scale, group, E4M3)
        assert_bits_equal(data, reference.quantize_static(rows, scale, group, E4M3))
    if device.type == "cuda":
        for value, row in zip(y, x, strict=True):
            one = value.reshape(1, 1).to(device)
            data = triton.quantize_static(row.reshape(1, 1).to(device), one, TENSOR, E4M3)
            assert_bits_equal(
                data.cpu(), reference.quantize_static(row.reshape(1, 1), one.cpu(), TENSOR, E4M3)
            )


def test_division_by_the_maximum() -> None:
    # the three maxima differ by powers of two, so one significand stands for all
    assert {math.frexp(formats.fp8_format(dtype).max)[0] for dtype in CODES} == {0.875}
    y, r = 1.75, float(np.float32(1 / 1.75))
    assert Fraction(r) == fp32(Fraction(4, 7))
    for start in range(2**23, 2**24, 2**20):
        x = np.arange(start, start + 2**20, dtype=np.float64)
        q = single(x * r)
        # each product and difference below is exact in float64, as the assertions show
        error = single(q * y - x)
        correction = error * r
        assert (np.abs(error) < 2**6).all()
        assert (error % 2**-6 == 0).all()
        exact = q - correction
        assert (q - exact == correction).all()
        assert np.array_equal(single(exact), single(x / y))


def single(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float32).astype(np.float64)
