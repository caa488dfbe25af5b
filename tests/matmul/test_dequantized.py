"""The backend that dequantizes its operands for a dense matmul."""

from __future__ import annotations

import pytest
import torch

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, GroupShape
from fp8kit.matmul.dequantized import multiplies_bf16, scaled
from fp8kit.quantizers import reference
from numerics import assert_bits_equal


@pytest.mark.parametrize("group", [BLOCK, GROUP128, MX, GroupShape(4, 32)], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (4, 5)])
def test_scaled_operands_have_the_bits_of_the_reference(
    group: GroupShape, shape: tuple[int, int]
) -> None:
    q = fp8kit.quantize(torch.randn(shape) * 10, group, role="weight")
    for dtype in (torch.bfloat16, torch.float32):
        expected = reference.dequantize(q.data, q.scale, group, dtype)
        assert_bits_equal(scaled(q.data, q.scale, group, dtype), expected)


@pytest.mark.parametrize("scheme", ["FP8_WEIGHT_ONLY", "MXFP8_WEIGHT_ONLY"])
def test_codes_that_were_cast_in_a_graph_are_refused(scheme: str) -> None:
    layer, x = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(64, 64), scheme), torch.randn(2, 64)
    graph = torch.export.export(layer, (x,)).module().bfloat16()
    with pytest.raises(TypeError, match="bfloat16 as the dtype of FP8 codes"):
        graph(x.bfloat16())


@pytest.mark.parametrize("groups", [(ROW, ROW), (GROUP128, BLOCK)], ids=str)
def test_a_cpu_that_emulates_bf16_rounds_once(groups: tuple[GroupShape, GroupShape]) -> None:
    if multiplies_bf16("cpu"):
        pytest.skip("this CPU multiplies bf16")
    x = fp8kit.quantize(torch.randn(5, 384).bfloat16(), groups[0])
    w = fp8kit.quantize(torch.randn(256, 384).bfloat16(), groups[1], role="weight")
    y = fp8kit.scaled_mm(x, w, out_dtype=torch.bfloat16, backend="dequantized")
    exact = fp8kit.dequantize(x, torch.float32) @ fp8kit.dequantize(w, torch.float32).t()
    once = (exact - exact.bfloat16()).abs().mean()
    assert (exact - y).abs().mean() < 1.01 * once
