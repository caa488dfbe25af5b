"""Scales by column: one shape, one rule for strides, every backend."""

from __future__ import annotations

import math
import random

import pytest
import torch

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, scale_dtype, scale_shape
from fp8kit.quantizers import cpu, reference, scale_layout
from numerics import assert_bits_equal

E4M3 = torch.float8_e4m3fn
SHAPES = ((1, 300), (5, 256), (3, 7, 130), (1, 1, 512), (2, 1, 4, 128), (200,), (0, 256), (4, 0))


@pytest.mark.parametrize("group", [GROUP128, GroupShape(1, 16), MX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_are_a_multiple_of_four_apart(shape: tuple[int, ...], group: GroupShape) -> None:
    scale = scale_layout.empty_scale(torch.empty(shape), group, "column")
    rows, pitch = math.prod(shape[:-1]), -(-math.prod(shape[:-1]) // 4) * 4
    assert tuple(scale.shape) == scale_shape(shape, group)
    assert scale.dtype == scale_dtype(group)
    assert scale.stride(-1) == pitch
    if scale.numel():
        flat = scale.reshape(rows, -1) if rows > 1 else scale.view(1, -1)
        assert flat.data_ptr() == scale.data_ptr(), "rows fold without a copy"
        assert rows == 1 or flat.stride() == (1, pitch)
    # the padding of the last column is there as well: a load of four rows may touch it
    assert scale.untyped_storage().nbytes() == scale.shape[-1] * pitch * scale.element_size()


@pytest.mark.parametrize("backend", [reference, cpu], ids=lambda b: b.__name__.split(".")[-1])
@pytest.mark.parametrize("group", [GROUP128, MX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_hold_the_same_scales(
    shape: tuple[int, ...], group: GroupShape, backend: object
) -> None:
    x = torch.randn(shape)
    arguments = (x, group, E4M3, 1e-10, None, "floor" if group == MX else "exact")
    data, scale = backend.quantize(*arguments)
    data_, scale_ = backend.quantize(*arguments, "column")
    assert_bits_equal(data_, data)
    assert_bits_equal(scale_, scale)
    assert scale.is_contiguous()
    assert scale_.stride() == scale_layout.empty_scale(x, group, "column").stride()
    assert_bits_equal(
        reference.dequantize(data_, scale_, group, torch.float32),
        reference.dequantize(data, scale, group, torch.float32),
    )


@pytest.mark.parametrize("backend", [reference, cpu], ids=lambda b: b.__name__.split(".")[-1])
@pytest.mark.parametrize("k", [256, 272])
def test_codes_go_where_they_are_wanted(k: int, backend: object) -> None:
    arguments = (torch.randn(3, k), GROUP128, E4M3, 1e-10, None, "exact", "column")
    data, scale = backend.quantize(*arguments)
    memory = torch.full((3, 320), 0xAA, dtype=torch.uint8)
    wanted = memory.view(E4M3)[:, :k]
    data_, scale_ = backend.quantize(*arguments, wanted)
    assert data_ is wanted
    assert_bits_equal(data_, data)
    assert_bits_equal(scale_, scale)
    assert memory[:, k:].eq(0xAA).all()


@pytest.mark.parametrize(
    ("k", "step"),
    [(64, None), (4096, None), (4304, 4352), (96, 128), (16, 64), (100, None), (0, None)],
)
def test_rows_of_codes_start_where_they_are_loaded_fast(
    k: int, step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(7, k, dtype=torch.bfloat16)
    assert scale_layout.empty_codes(x, ROW, E4M3) is None
    for capability in ((8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(scale_layout, "capability", lambda _, found=capability: found)
        for group in (ROW, GROUP128):
            codes = scale_layout.empty_codes(x, group, E4M3)
            assert (codes is None) == (step is None or capability != (9, 0))
            if codes is not None:
                assert (codes.dtype, codes.shape, codes.stride()) == (E4M3, x.shape, (step, 1))
        assert scale_layout.empty_codes(x, TENSOR, E4M3) is None
        assert scale_layout.empty_codes(x[:1], ROW, E4M3) is None


def test_which_scales_can_be_by_column() -> None:
    assert all(map(scale_layout.has_columns, (GROUP128, MX, GroupShape(1, 64))))
    assert not any(map(scale_layout.has_columns, (TENSOR, ROW, BLOCK, GroupShape(4, 16))))


def test_layers_write_what_block_scaled_products_load() -> None:
    assert scale_layout.product_layout(GROUP128) == "column"
    assert {scale_layout.product_layout(g) for g in (TENSOR, ROW, BLOCK, MX)} == {"row"}


def test_swizzled_scales_lie_where_cublas_reads_them_and_come_back() -> None:
    chance = random.Random(0)
    for _ in range(100):
        rows, cols = chance.randrange(1, 300), chance.randrange(1, 20)
        scale = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
        flat = fp8kit.swizzle_scales(scale)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        tile = r // 128 * -(-cols // 4) + c // 4
        place = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        expected = torch.zeros(-(-rows // 128) * -(-cols // 4) * 512, dtype=torch.uint8)
        expected[place.flatten()] = scale.flatten()
        assert torch.equal(flat, expected)
        assert torch.equal(fp8kit.unswizzle_scales(flat, scale.shape), scale)


def test_swizzled_scales_keep_dtype_and_stacks_and_take_any_strides() -> None:
    scale = torch.randint(0, 255, (3, 5, 130), dtype=torch.uint8).transpose(1, 2)
    flat = fp8kit.swizzle_scales(scale)
    assert flat.shape == (3, 2 * 2 * 512)
    assert torch.equal(flat[1], fp8kit.swizzle_scales(scale[1]))
    assert torch.equal(fp8kit.unswizzle_scales(flat, scale.shape), scale)
    typed = scale.contiguous().view(torch.float8_e8m0fnu)
    assert fp8kit.swizzle_scales(typed).dtype == torch.float8_e8m0fnu
    assert fp8kit.swizzle_scales(torch.empty(0, 4, dtype=torch.uint8)).numel() == 0


def test_swizzled_scales_match_torchao() -> None:
    layout = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for rows, cols in ((1, 1), (130, 5), (256, 8), (300, 9)):
        plain = torch.randint(0, 255, (rows, cols), dtype=torch.uint8)
        blocked = layout.to_blocked(plain)
        assert torch.equal(fp8kit.swizzle_scales(plain), blocked.flatten())
        assert torch.equal(fp8kit.unswizzle_scales(blocked, (rows, cols)), plain)


def test_swizzling_refuses_what_are_no_exponents() -> None:
    with pytest.raises(TypeError, match="E8M0 bytes"):
        fp8kit.swizzle_scales(torch.ones(2, 3))
    with pytest.raises(ValueError, match="belong to a matrix"):
        fp8kit.swizzle_scales(torch.ones(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="tiles of 128 rows by 4 columns"):
        fp8kit.unswizzle_scales(torch.zeros(512, dtype=torch.uint8), (129, 3))
    for shape in ((4,), (-1, 4)):
        with pytest.raises(ValueError, match="tiles of 128 rows by 4 columns"):
            fp8kit.unswizzle_scales(torch.empty(0, dtype=torch.uint8), shape)
