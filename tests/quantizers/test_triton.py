"""The Triton quantizers: bit-equal to the reference, whatever the values, strides and tiles.

The same tests run under Triton's interpreter on a CPU (tiny shapes) and compiled on a GPU. Two
enumerations at the end check, in exact arithmetic, the claims that the kernels' division rests on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8kit import formats
from fp8kit.errors import UnsupportedError
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.quantizers import reference
from fp8kit.quantizers.problem import DequantizeProblem, QuantizeProblem
from numerics import assert_bits_equal

triton = pytest.importorskip("fp8kit.quantizers.triton")
from fp8kit.quantizers.triton_groups import GroupTile, group_tile  # noqa: E402
from fp8kit.quantizers.triton_numerics import INTERPRETED  # noqa: E402
from fp8kit.quantizers.triton_rows import RowTile, row_tile  # noqa: E402
from fp8kit.quantizers.triton_tensor import TensorTile, tensor_tile  # noqa: E402

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
    """Give rows that hold what goes wrong: every scale, ties, zeros of both signs, NaN, infinity."""
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
    # one NaN would hide all else in a scale that rows share
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


@pytest.mark.parametrize("group", [TENSOR, ROW, GROUP128, GroupShape(2, 32)], ids=str)
@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.7, 1e4, math.inf, math.nan])
def test_bounds(group: GroupShape, bound: float, device: torch.device) -> None:
    x = torch.randn(4, 160)
    x[1, 3], x[2, 5], x[3, 7] = torch.inf, torch.nan, 3e38
    for part in x.to(device).split(1 if group == TENSOR else 4):
        check(part, group, bound=bound)


def strided(device: torch.device) -> dict[str, Tensor]:
    """Give tensors whose elements are not where a contiguous tensor has them."""
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


@pytest.mark.parametrize("name", strided(torch.device("cpu")))
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_strides(group: GroupShape, name: str, device: torch.device) -> None:
    x = strided(device)[name]
    check(x[None] if x.dim() == 1 and group.rows > 1 else x, group)


SHAPES = ((1, 1), (1, 17), (3, 131), (2, 1030), (5, 64), (9, 257), (130, 33), (1, 8200))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_shapes(group: GroupShape, shape: tuple[int, int], device: torch.device) -> None:
    check(torch.randn(shape, device=device, dtype=torch.bfloat16), group)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32)], ids=str)
def test_no_elements(group: GroupShape, shape: tuple[int, ...], device: torch.device) -> None:
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


@pytest.mark.parametrize("kind", ["tiny", "ordinary", "huge", "odd"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_static_scales(group: GroupShape, kind: str, device: torch.device) -> None:
    for dtype in CODES:
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


@pytest.mark.parametrize("group", [TENSOR, ROW, BLOCK], ids=str)
def test_column_major_scales_need_groups_along_a_row(group: GroupShape) -> None:
    with pytest.raises(ValueError, match="scale_layout='column'"):
        triton.quantize(torch.ones(2, 2), group, E4M3, 1e-6, None, "exact", "column")
    with pytest.raises(ValueError, match="scale_layout='diagonal'"):
        triton.quantize(torch.ones(2, 2), GROUP128, E4M3, 1e-6, None, "exact", "diagonal")


def swizzled(scale: Tensor) -> Tensor:
    """Lay ``[M, blocks]`` out in 128x4 tiles: byte ``16 * (r % 32) + 4 * (r // 32) + c``."""
    m, blocks = scale.shape
    padded = scale.new_zeros(-(-m // 128) * 128, -(-blocks // 4) * 4)
    padded[:m, :blocks] = scale
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@pytest.mark.parametrize("shape", [(1, 32), (5, 100), (130, 160), (2, 33, 256)], ids=str)
@pytest.mark.parametrize("rounding", ["floor", "up"])
def test_swizzled_mx_scales(
    shape: tuple[int, ...], rounding: str, device: torch.device
) -> None:
    x = torch.randn(shape, device=device)
    data, scale = triton.quantize_mx_swizzled(x, E4M3, rounding)
    expected_data, expected_scale = reference.quantize(x, MX, E4M3, 0.0, None, rounding)
    assert_bits_equal(data, expected_data)
    assert_bits_equal(scale, swizzled(expected_scale.flatten(0, -2)))


ROW_TILES = (
    RowTile(1, 512, 1, 1, 1),
    RowTile(4, 512, 1, 1, 2),
    RowTile(1, 128, 4, 1, 1),
    RowTile(2, 64, 7, 1, 1),
    RowTile(1, 128, 0, 1, 1),
    RowTile(1, 512, 0, 4, 2),
    RowTile(2, 64, 0, 8, 1),
)


@pytest.mark.parametrize("tile", ROW_TILES, ids=str)
def test_no_row_tile_changes_the_result(
    tile: RowTile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "row_tile", lambda *_: tile)
    x = hard_rows(torch.bfloat16, 401, device)
    check(x, ROW)
    scale = torch.rand(len(x), 1, device=device)
    data = triton.quantize_static(x, scale, ROW, E4M3)
    assert_bits_equal(data, reference.quantize_static(x, scale, ROW, E4M3))


@pytest.mark.parametrize("tile", [(1, 1, 1), (2, 4, 1), (8, 2, 4), (128, 1, 4)], ids=str)
@pytest.mark.parametrize("group", [GroupShape(1, 16), MX], ids=str)
def test_no_group_tile_changes_the_result(
    tile: tuple[int, int, int],
    group: GroupShape,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "group_tile", lambda *_: GroupTile(*tile))
    x = hard_rows(torch.bfloat16, 150, device)
    check(x, group)
    if group == MX:
        expected = reference.quantize(x, MX, E4M3, 0.0, None, "floor")[1]
        assert_bits_equal(triton.quantize_mx_swizzled(x, E4M3)[1], swizzled(expected))


@pytest.mark.parametrize("tile", [(64, 1, 1, 1), (256, 3, 5, 2), (1024, 17, 2, 1)], ids=str)
def test_no_tensor_tile_changes_the_result(
    tile: tuple[int, int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "tensor_tile", lambda *_: TensorTile(*tile))
    x = torch.randn(9, 517, device=device)
    check(x, TENSOR)
    check(x.t(), TENSOR)
    data = triton.quantize_static(x, torch.full((1, 1), 0.01, device=device), TENSOR, E4M3)
    assert data.float().abs().max() > 200
