"""MXFP8 under the names of vLLM, against the formulas of the OCP text in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import compat
from fp8kit.compat import Mxfp8LinearBackend as Backend
from numerics import assert_bits_equal, assert_matmul, assert_scheme_error

N, K = 40, 96


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32; the scale is the least power of two under which amax fits into 448.

    ``448 = 0.875 * 2^9``, so the exponent of ``m * 2^e`` is ``e - 9``, or one more if
    ``m > 0.875``.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    mantissa, exponent = blocks.abs().amax(-1).frexp()
    exponent = exponent - 9 + (mantissa > 0.875)
    scaled = blocks * torch.exp2(-exponent.float()).unsqueeze(-1)
    return scaled.flatten(-2).to(torch.float8_e4m3fn), exponent + 127


def swizzled_by_hand(scale: Tensor) -> Tensor:
    """Swizzle scales byte by byte, as the documentation of cuBLAS says."""
    rows, cols = scale.shape
    wide = -(-cols // 4)
    out = torch.zeros(-(-rows // 128) * wide * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * wide + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    return out


def layer_of(w: Tensor, scale: Tensor) -> nn.Module:
    layer = nn.Module()
    layer.weight = nn.Parameter(w, requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)
    return layer


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 96), (160, 160)])
def test_quantize_gives_codes_and_scales_in_both_layouts(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16()
    codes, scales = compat.mxfp8_e4m3_quantize(x)
    wanted, exponents = by_hand(x)
    assert_bits_equal(codes, wanted)
    assert scales.dtype == torch.uint8
    assert torch.equal(scales.int(), exponents.int())
    same, flat = compat.mxfp8_e4m3_quantize(x, is_sf_swizzled_layout=True)
    assert_bits_equal(same, codes)
    matrices = scales.reshape(-1, *scales.shape[-2:])
    assert torch.equal(flat, torch.cat([swizzled_by_hand(m) for m in matrices]))
    assert torch.equal(fp8kit.unswizzle_scales(flat, scales.shape), scales)
    for swizzled, real in ((False, scales), (True, flat)):
        fake = compat.mxfp8_e4m3_quantize_fake(x.to("meta"), swizzled)
        assert [(f.shape, f.dtype) for f in fake] == [(t.shape, t.dtype) for t in (codes, real)]


@pytest.mark.parametrize("swizzled", [False, True])
def test_quantize_adds_zeros_until_an_alignment_divides_k(swizzled: bool) -> None:
    x = torch.randn(3, 96).bfloat16()
    found = compat.mxfp8_e4m3_quantize(x, swizzled, 128)
    padded = torch.nn.functional.pad(x, (0, 32))
    for tensor, wanted in zip(found, compat.mxfp8_e4m3_quantize(padded, swizzled), strict=True):
        assert_bits_equal(tensor, wanted)
    fake = compat.mxfp8_e4m3_quantize_fake(x.to("meta"), swizzled, 128)
    assert [f.shape for f in fake] == [t.shape for t in found]


def test_dequantize_multiplies_and_rounds_once() -> None:
    x = torch.randn(6, K)
    codes, scales = compat.mxfp8_e4m3_quantize(x)
    wanted = codes.float().unflatten(-1, (-1, 32)) * torch.exp2(scales.float() - 127)[..., None]
    for given in (scales, scales.view(torch.float8_e8m0fnu), fp8kit.swizzle_scales(scales)):
        y = compat.dequant_mxfp8_to_bf16(codes, given)
        assert torch.equal(y, wanted.flatten(-2).bfloat16())


def test_swizzle_mxfp8_scale_drops_what_lies_beyond() -> None:
    scale = torch.randint(0, 255, (N, 3), dtype=torch.uint8)
    padded = torch.nn.functional.pad(scale, (0, 2, 0, 1), value=9)
    flat = compat.swizzle_mxfp8_scale(padded, M=N, K=K)
    assert torch.equal(flat, swizzled_by_hand(scale))


@pytest.mark.parametrize("size", [(5, 64), (4, 65), (-1, 64), (4, -64)])
def test_swizzle_mxfp8_scale_refuses_too_few_scales(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"Got scales of shape \(4, 2\) for a matrix"):
        compat.swizzle_mxfp8_scale(torch.zeros(4, 2, dtype=torch.uint8), *size)
    with pytest.raises(ValueError, match=r"Got scales of shape \(8,\)"):
        compat.swizzle_mxfp8_scale(torch.zeros(8, dtype=torch.uint8), 4, 64)


@pytest.mark.parametrize("backend", list(Backend))
def test_a_linear_op_computes_by_each_backend(backend: Backend) -> None:
    w, x = torch.randn(N, K).bfloat16(), torch.randn(2, 3, K).bfloat16()
    bias = torch.randn(N).bfloat16()
    codes, scales = compat.mxfp8_e4m3_quantize(w)
    decoded = compat.dequant_mxfp8_to_bf16(codes, scales)
    layer = layer_of(codes, torch.nn.functional.pad(scales, (0, 1)))
    op = compat.Mxfp8LinearOp(backend)
    op.process_weights(layer)
    flat = backend is Backend.FLASHINFER_CUTLASS
    assert layer.weight_scale.dim() == (1 if flat else 2)
    workspace = getattr(layer, "workspace", None)
    assert (workspace is not None) == (backend is Backend.MARLIN)
    given = (layer.weight, layer.weight_scale, torch.float16, bias)
    y = op.apply(x, *given, workspace=workspace, size_n=N, size_k=K)
    assert (y.shape, y.dtype) == ((2, 3, N), torch.float16)
    rows = x.view(-1, K)
    if flat:
        rows = fp8kit.dequantize(fp8kit.quantize(rows, fp8kit.MX), torch.bfloat16)
    assert_matmul(y.view(-1, N).bfloat16(), rows, decoded, bias)
    assert torch.equal(op.apply(x, *given, out_features=N, in_features=K), y)
    with pytest.raises(TypeError, match="size_m"):
        op.apply(x, *given, size_m=1)


def test_swizzled_scales_that_change_are_read_anew() -> None:
    codes, scales = compat.mxfp8_e4m3_quantize(torch.randn(N, K))
    x = torch.randn(2, K)
    flat = compat.swizzle_mxfp8_scale(scales, N, K)
    op = compat.Mxfp8LinearOp(Backend.FLASHINFER_CUTLASS)
    y = op.apply(x, codes, flat, torch.float32)
    flat.copy_(compat.swizzle_mxfp8_scale(scales + 1, N, K))
    assert torch.equal(op.apply(x, codes, flat, torch.float32), 2 * y)
    assert_scheme_error(
        y, x @ compat.dequant_mxfp8_to_bf16(codes, scales).float().t(), "FP8_WEIGHT_ONLY"
    )


def test_the_backend_is_chosen_by_the_device_and_wrong_scales_are_told() -> None:
    chosen = compat.select_mxfp8_linear_backend()
    assert compat.Mxfp8LinearOp().backend is chosen
    if not torch.cuda.is_available():
        assert chosen is Backend.EMULATION
    assert [b.value for b in Backend] == ["emulation", "flashinfer-cutlass", "marlin"]
    assert compat.Mxfp8LinearOp("torch").backend is Backend.EMULATION
    assert compat.Mxfp8LinearOp(backend="flashinfer").backend is Backend.FLASHINFER_CUTLASS
    assert compat.Mxfp8LinearOp("marlin").backend is Backend.MARLIN
    with pytest.raises(ValueError, match=r"Mxfp8LinearBackend\.EMULATION"):
        compat.Mxfp8LinearOp("cutlass")
    codes, scales = compat.mxfp8_e4m3_quantize(torch.randn(N, K))
    op, x = compat.Mxfp8LinearOp(Backend.EMULATION), torch.randn(1, K)
    for wrong in (scales.float(), fp8kit.swizzle_scales(scales)):
        with pytest.raises(ValueError, match=r"The emulation takes torch\.uint8 of two"):
            op.apply(x, codes, wrong, torch.bfloat16)
    with pytest.raises(ValueError, match="Got a bias of shape"):
        op.apply(x, codes, scales, torch.bfloat16, bias=torch.ones(1))  # it would be spread
    facts = (compat.MXFP8_VALUE_DTYPE, compat.MXFP8_SCALE_DTYPE, compat.MXFP8_BLOCK_SIZE)
    assert facts == (torch.float8_e4m3fn, torch.uint8, 32)


def test_quantize_is_compiled_without_a_break() -> None:
    x = torch.randn(4, 64)
    compiled = torch.compile(compat.mxfp8_e4m3_quantize, backend="eager", fullgraph=True)
    for got, wanted in zip(compiled(x, True), compat.mxfp8_e4m3_quantize(x, True), strict=True):
        assert_bits_equal(got, wanted)
