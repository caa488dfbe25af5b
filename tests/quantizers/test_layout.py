"""Scales by column: one shape, one rule for strides, every backend."""

from __future__ import annotations

import math

import pytest
import torch

from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, scale_dtype, scale_shape
from fp8kit.quantizers import cpu, layout, reference
from numerics import assert_bits_equal

E4M3 = torch.float8_e4m3fn
SHAPES = ((1, 300), (5, 256), (3, 7, 130), (1, 1, 512), (2, 1, 4, 128), (200,), (0, 256), (4, 0))


@pytest.mark.parametrize("group", [GROUP128, GroupShape(1, 16), MX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_are_a_multiple_of_four_apart(shape: tuple[int, ...], group: GroupShape) -> None:
    scale = layout.empty_scale(torch.empty(shape), group, "column")
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
    assert scale_.stride() == layout.empty_scale(x, group, "column").stride()
    assert_bits_equal(
        reference.dequantize(data_, scale_, group, torch.float32),
        reference.dequantize(data, scale, group, torch.float32),
    )


def test_which_scales_can_be_by_column() -> None:
    assert all(map(layout.has_columns, (GROUP128, MX, GroupShape(1, 64))))
    assert not any(map(layout.has_columns, (TENSOR, ROW, BLOCK, GroupShape(4, 16))))


def test_layers_write_what_block_scaled_products_load() -> None:
    assert layout.product_layout(GROUP128) == "column"
    assert {layout.product_layout(g) for g in (TENSOR, ROW, BLOCK, MX)} == {"row"}
