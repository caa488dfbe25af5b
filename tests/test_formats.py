from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch

import fp8kit
from fp8kit import formats
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape, Scheme


@pytest.mark.parametrize(
    ("shape", "group", "expected"),
    [
        ((5, 300), TENSOR, (1, 1)),
        ((2, 5, 300), TENSOR, (1, 1)),
        ((7,), TENSOR, (1, 1)),
        ((5, 300), ROW, (5, 1)),
        ((2, 5, 300), ROW, (2, 5, 1)),
        ((300,), ROW, (1,)),
        ((5, 300), GROUP128, (5, 3)),
        ((5, 256), GROUP128, (5, 2)),
        ((5, 257), GROUP128, (5, 3)),
        ((300, 512), BLOCK, (3, 4)),
        ((129, 1), BLOCK, (2, 1)),
        ((4, 300, 512), BLOCK, (4, 3, 4)),
        ((5, 33), MX, (5, 2)),
        ((0, 300), GROUP128, (0, 3)),
        ((5, 0), GROUP128, (5, 0)),
        ((5, 0), ROW, (5, 1)),
        ((5, 9), GroupShape(2, -1), (3, 1)),
        ((5, 9), GroupShape(2, 4), (3, 3)),
    ],
)
def test_scale_shape(shape: tuple[int, ...], group: GroupShape, expected: tuple[int, ...]) -> None:
    assert formats.scale_shape(shape, group) == expected


@pytest.mark.parametrize(("rows", "cols"), [(-1, 1), (0, 1), (1, 0), (-1, 128), (1, -2), (-2, -1)])
def test_group_shape_refuses_what_has_no_meaning(rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match=rf"Got GroupShape\(rows={rows}, cols={cols}\)"):
        GroupShape(rows, cols)


@pytest.mark.parametrize(
    ("rows", "cols"), [("1", 128), (1, 128.0), (None, None), (torch.ones(2), 1)]
)
def test_groups_are_counted_in_integers(rows: Any, cols: Any) -> None:
    with pytest.raises(TypeError, match="Rows and columns per scale are integers"):
        GroupShape(rows, cols)


@pytest.mark.parametrize("shape", [None, 3, torch.ones(2, 2), ("a", 2), (2.0, 4), {2, 4}])
def test_a_shape_is_a_list_of_integers(shape: Any) -> None:
    for function in (formats.scale_shape, formats.stack_scale_shape):
        with pytest.raises(TypeError, match=r"as a shape\. It must be a tuple or list of integers"):
            function(shape, ROW)
    exponents = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"as a shape\. It must be a tuple or list of integers"):
        fp8kit.unswizzle_scales(exponents, shape)


def test_shapes_of_any_size_are_taken_while_a_graph_is_made() -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def call(x: torch.Tensor) -> tuple[int, ...]:
        return formats.scale_shape(x.shape, GROUP128)

    for rows in (3, 5):
        assert call(torch.ones(rows, 300)) == (rows, 3)


def test_groups_have_names() -> None:
    named = [str(g) for g in (TENSOR, ROW, GROUP128, BLOCK, MX, GroupShape(2, 4))]
    assert named == ["tensor", "row", "1x128", "128x128", "mx", "2x4"]


def test_groups_are_frozen_and_hashable() -> None:
    assert {GroupShape(1, 128): 1}[GROUP128] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.rows = 2  # type: ignore[misc]


@pytest.mark.parametrize("dtype", list(formats.FP8_FORMATS))
def test_format_facts_agree_with_torch(dtype: torch.dtype) -> None:
    fmt = formats.fp8_format(dtype)
    largest = torch.finfo(dtype).max
    # fnuz reaches 240, of which only 224 is used
    assert fmt.max == (224.0 if dtype == torch.float8_e4m3fnuz else largest)
    assert torch.tensor(fmt.max).to(dtype).float().item() == fmt.max
    assert torch.tensor([fmt.nan_code], dtype=torch.uint8).view(dtype).float().isnan().all()
    assert fmt.max_exponent == math.floor(math.log2(fmt.max))


def test_min_scale_is_coarse_only_for_activation_rows() -> None:
    e4m3 = torch.float8_e4m3fn
    assert formats.min_scale(ROW, e4m3, "activation") == 1 / (448 * 512)
    for group in (ROW, TENSOR, GROUP128, BLOCK):
        assert formats.min_scale(group, e4m3, "weight") == 1e-10 / 448
    for group in (TENSOR, GROUP128, BLOCK):
        assert formats.min_scale(group, e4m3, "activation") == 1e-10 / 448
    assert formats.min_scale(ROW, torch.float8_e5m2, "activation") == 1 / (57344 * 512)


def test_granularities_of_the_schemes() -> None:
    facts = {s.name: (s.weight, s.activation, s.static) for s in SCHEMES.values()}
    assert facts == {
        "FP8": (TENSOR, TENSOR, True),
        "FP8_DYNAMIC": (ROW, ROW, False),
        "FP8_TENSOR": (TENSOR, ROW, False),
        "FP8_BLOCK": (BLOCK, GROUP128, False),
        "MXFP8": (MX, MX, False),
        "FP8_WEIGHT_ONLY": (ROW, None, False),
    }
    assert list(SCHEMES) == [s.name for s in SCHEMES.values()]
    assert all(s.dtype == torch.float8_e4m3fn and not s.ue8m0 for s in SCHEMES.values())


def test_scheme_of_resolves_names_and_passes_schemes() -> None:
    own = Scheme("mine", ROW, GROUP128, ue8m0=True)
    assert Scheme.of(own) is own
    assert Scheme.of("FP8_BLOCK") is SCHEMES["FP8_BLOCK"]
    assert str(own) == "mine"


def test_qtensor_knows_its_shape_and_moves(device: torch.device) -> None:
    q = fp8kit.quantize(torch.randn(4, 256, device=device), GROUP128)
    assert q.shape == (4, 256)
    assert q.device.type == device.type
    moved = q.to("cpu")
    assert moved.data.device.type == moved.scale.device.type == "cpu"
    assert moved.group == GROUP128
    assert torch.equal(moved.scale, q.scale.cpu())


@pytest.mark.parametrize("group", [TENSOR, ROW, GROUP128, BLOCK, MX], ids=str)
def test_qtensor_refuses_a_squeezed_scale(group: GroupShape) -> None:
    data = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    scale = torch.ones(formats.scale_shape(data.shape, group), dtype=formats.scale_dtype(group))
    assert formats.QTensor(data, scale, group).scale is scale
    with pytest.raises(ValueError, match="Got a scale of shape"):
        formats.QTensor(data, scale.flatten(), group)


def test_a_scheme_of_an_earlier_pickle_loads() -> None:
    new = Scheme.of("FP8_BLOCK")
    old = Scheme.__new__(Scheme)
    old.__setstate__(new.__getstate__()[:-1])
    assert old == new
    assert pickle.loads(pickle.dumps(Scheme.of("MXFP8_ROW"))) == Scheme.of("MXFP8_ROW")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("group", [ROW, MX], ids=str)
def test_a_qtensor_is_pickled_by_every_protocol(group: GroupShape, protocol: int) -> None:
    q = fp8kit.quantize(torch.randn(4, 256), group)
    found = pickle.loads(pickle.dumps(q, protocol))
    assert (found.data.dtype, found.group) == (q.data.dtype, group)
    assert torch.equal(fp8kit.dequantize(found), fp8kit.dequantize(q))


def test_copies_of_a_qtensor_and_its_earlier_pickles() -> None:
    q = fp8kit.quantize(torch.randn(4, 256))
    assert copy.copy(q).data.data_ptr() == q.data.data_ptr()
    assert copy.deepcopy(q).data.data_ptr() != q.data.data_ptr()
    old = formats.QTensor.__new__(formats.QTensor)
    old.__setstate__([q.data, q.scale, q.group])
    assert (old.data, old.scale, old.group) == (q.data, q.scale, q.group)
