"""Bytes on disk are decoded to the right codes and scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8kit.checkpoint.dialects import scheme_of
from fp8kit.checkpoint.schema.decoding import (
    check_codes,
    decode_cache_scale,
    decode_input_scale,
    decode_scale,
    decode_weight,
)
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, SCHEMES, Scheme, scale_shape
from numerics import assert_bits_equal

E4, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
UE8M0 = scheme_of(BLOCK, GROUP128, ue8m0=True)


def layer(scheme: Scheme | str, *shape: int, **more: object) -> Layer:
    return Layer("a", Scheme.of(scheme), shape, "a.weight", "a.scale", "a.input", **more)  # type: ignore[arg-type]


def scale_of(found: Layer, raw: Tensor, codes: Tensor | None = None) -> Tensor:
    def weight() -> Tensor:
        assert codes is not None, "only e4m3fnuz needs to look at the codes"
        return codes

    scale = decode_scale(found, raw, weight, "f: a.scale")
    assert tuple(scale.shape) == scale_shape(found.shape, found.group)
    assert scale.is_contiguous()
    return scale


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_scale_is_read_as_one_by_one_in_fp32(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    raw = torch.full(shape, 0.3, dtype=dtype)
    assert_bits_equal(scale_of(layer("FP8", 4, 8), raw), raw.float().reshape(1, 1))


def test_rows_and_blocks() -> None:
    raw = torch.rand(6) + 0.1
    assert_bits_equal(scale_of(layer("FP8_DYNAMIC", 6, 8), raw), raw.view(6, 1))
    assert_bits_equal(scale_of(layer("FP8_BLOCK", 300, 200), raw.view(3, 1, 2, 1)), raw.view(3, 2))


def test_every_exponent_byte_is_a_power_of_two() -> None:
    every = torch.arange(255, dtype=torch.uint8).view(1, 255)
    found = scale_of(layer(UE8M0, 128, 255 * 128), every.view(torch.float8_e8m0fnu))
    assert found.flatten().tolist() == [2.0 ** (b - 127) for b in range(255)]
    as_bytes = layer("MXFP8", 1, 255 * 32)
    assert_bits_equal(scale_of(as_bytes, every), every)
    assert_bits_equal(scale_of(as_bytes, every.view(torch.float8_e8m0fnu)), every)


def test_parts_of_a_fused_matrix_keep_their_scales() -> None:
    found = layer("FP8_DYNAMIC", 8, 4, widths=(4, 2, 2))
    scale = scale_of(found, torch.tensor([1.0, 2.0, 3.0]))
    assert scale.flatten().tolist() == [1, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("raw", "rows"),
    [
        (torch.tensor(3.0), [[3, 3, 3, 3], [3, 3, 3, 3]]),
        (torch.tensor([[[3.0]]]), [[3, 3, 3, 3], [3, 3, 3, 3]]),
        (torch.tensor([1.0, 2.0]), [[1, 1, 1, 1], [2, 2, 2, 2]]),
        (torch.tensor([[[1.0]], [[2.0]]]), [[1, 1, 1, 1], [2, 2, 2, 2]]),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [[1, 1, 2, 2], [3, 3, 4, 4]]),
    ],
)
def test_scales_of_experts_spread_over_rows(raw: Tensor, rows: list[list[int]]) -> None:
    assert scale_of(layer("FP8_TENSOR", 2, 4, 8), raw).squeeze(-1).tolist() == rows


def test_transposed_stacks() -> None:
    found = layer("FP8_DYNAMIC", 2, 6, 4, transposed=True)
    raw = torch.arange(48, dtype=torch.uint8).view(2, 4, 6).view(E4)
    codes = decode_weight(found, raw, "f: a.weight")
    assert codes.shape == (2, 6, 4)
    assert codes[1, 5, 2].view(torch.uint8) == raw[1, 2, 5].view(torch.uint8)
    scale = torch.rand(2, 1, 6) + 0.1
    assert_bits_equal(scale_of(found, scale), scale.view(2, 6, 1))


def test_fnuz_codes_mean_half() -> None:
    found = layer("FP8_DYNAMIC", 253, 1, codes=FNUZ)
    every = torch.tensor([b for b in range(256) if b & 127 != 127 and b != 128], dtype=torch.uint8)
    raw = every.view(-1, 1).view(FNUZ)
    codes = decode_weight(found, raw, "f: a.weight")
    scale = scale_of(found, torch.full((253, 1), 0.7), raw)
    assert_bits_equal(codes.float() * scale, raw.float() * torch.tensor(0.7))


def test_fnuz_codes_of_240_are_cast() -> None:
    found = layer("FP8_DYNAMIC", 2, 3, codes=FNUZ)
    raw = torch.tensor([[240.0, 0.5, 2**-10], [-240.0, 1.0, 3 * 2**-10]]).to(FNUZ)
    codes = decode_weight(found, raw, "f: a.weight")
    scale = scale_of(found, torch.full((2, 1), 0.7), raw)
    assert scale.flatten().tolist() == [torch.tensor(0.7).item()] * 2
    exact = raw.float()
    assert_bits_equal(codes.float()[:, :2], exact[:, :2])
    # the smallest step of e4m3fn is twice that of e4m3fnuz
    assert ((codes.float() - exact).abs() <= 2**-10).all()


def test_fnuz_nan_is_damage() -> None:
    found = layer("FP8_DYNAMIC", 1, 2, codes=FNUZ)
    raw = torch.tensor([[1.0, float("nan")]]).to(FNUZ)
    with pytest.raises(CheckpointError, match=r"f: a\.weight holds NaN"):
        decode_weight(found, raw, "f: a.weight")


def test_fnuz_exponents_and_other_scales_are_halved() -> None:
    raw = torch.ones(1, 64).to(FNUZ)
    found = layer("MXFP8", 1, 64, codes=FNUZ)
    scale = scale_of(found, torch.tensor([[127, 254]], dtype=torch.uint8), raw)
    assert scale.tolist() == [[126, 253]]
    with pytest.raises(CheckpointError, match="holds NaN"):
        scale_of(found, torch.tensor([[127, 0]], dtype=torch.uint8), raw)
    one = torch.tensor(0.5)
    assert decode_input_scale(layer("FP8", 1, 64, codes=FNUZ), one, "f").item() == 0.25
    assert decode_cache_scale(one, True, "f").tolist() == [0.25]


def test_input_scales() -> None:
    several = torch.tensor([0.5, 2.0, 1.0])
    assert decode_input_scale(layer("FP8", 8, 4), several, "f").tolist() == [[2.0]]
    stack = layer("FP8", 3, 8, 4)
    assert decode_input_scale(stack, several, "f").tolist() == [[0.5], [2.0], [1.0]]
    pairs = torch.tensor([[0.5, 1.0], [3.0, 2.0], [1.0, 1.0]])
    assert decode_input_scale(stack, pairs, "f").tolist() == [[1.0], [3.0], [1.0]]
    assert decode_input_scale(stack, torch.tensor(0.5), "f").tolist() == [[0.5]]


def test_cache_scales() -> None:
    assert decode_cache_scale(torch.tensor([[0.5]]), False, "f").tolist() == [0.5]
    heads = torch.full((4, 1, 1), 0.5)
    assert_bits_equal(decode_cache_scale(heads, False, "f"), heads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0, -1.0])
def test_scales_are_finite_and_positive(bad: float) -> None:
    raw = torch.tensor(bad)
    message = r"f: a\.scale holds NaN, infinite, zero or negative values\. Scales are finite"
    with pytest.raises(CheckpointError, match=message):
        scale_of(layer("FP8", 4, 8), raw)
    with pytest.raises(CheckpointError, match=r"f: b holds NaN, infinite"):
        decode_input_scale(layer("FP8", 4, 8), raw, "f: b")
    with pytest.raises(CheckpointError, match=r"f: c holds NaN, infinite"):
        decode_cache_scale(raw, False, "f: c")


def test_exponents_of_nan_are_damage() -> None:
    raw = torch.tensor([[127, 255]], dtype=torch.uint8)
    for stored in (raw, raw.view(torch.float8_e8m0fnu)):
        with pytest.raises(CheckpointError, match=r"f: a\.scale holds NaN\. Scales are finite"):
            scale_of(layer("MXFP8", 1, 64), stored)
    with pytest.raises(CheckpointError, match=r"holds NaN, infinite"):
        scale_of(layer(UE8M0, 1, 256), raw.view(torch.float8_e8m0fnu))


def test_codes_of_nan_are_damage() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(E4)
    check_codes(codes, "f: a.weight")
    for byte in (0x7F, 0xFF):
        with pytest.raises(CheckpointError, match=r"f: a\.weight holds NaN"):
            check_codes(torch.tensor([1, byte], dtype=torch.uint8).view(E4), "f: a.weight")


def test_stacks_of_rows_have_no_scale_per_tensor() -> None:
    assert str(layer("FP8_TENSOR", 2, 4, 8).group) == "row"
    assert str(layer("FP8_TENSOR", 4, 8).group) == "tensor"
    assert layer("FP8_BLOCK", 2, 4, 8).group == SCHEMES["FP8_BLOCK"].weight
