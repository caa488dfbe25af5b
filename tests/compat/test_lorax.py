"""LoRAX' layer against its formula in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from engine_formulas import decoded, quantized, with_scale
from fp8kit import compat
from numerics import assert_bits_equal, assert_matmul, assert_scheme_error

M, N, K = 6, 24, 32


@pytest.fixture
def x() -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(0)).half()


@pytest.mark.parametrize("n", [N, K])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_apply_fp8_linear_takes_both_orientations(
    x: Tensor, n: int, view: bool, per_channel: bool
) -> None:
    w = torch.randn(n, K, generator=torch.Generator().manual_seed(1))
    (a, s), (b, t) = quantized(x), quantized(w, per_row=per_channel)
    bias = torch.randn(n).half()
    y = compat.apply_fp8_linear(x, b.t() if view else b, t.reshape(-1), None, None, bias)
    assert y.dtype == torch.float16
    assert_matmul(y, decoded(a, s), decoded(b, t), bias)


def test_apply_fp8_linear_static_ignores_the_bound_and_dynamic_honours_it(x: Tensor) -> None:
    w = torch.randn(N, K)
    b, t = quantized(w)
    bound = torch.tensor([0.5])
    step = torch.tensor([[0.03125]])
    y = compat.apply_fp8_linear(x, b, t, torch.tensor(0.03125), bound)
    assert_matmul(y, decoded(with_scale(x, step), step), decoded(b, t))
    a, s = quantized(x, bound=0.5)
    y = compat.apply_fp8_linear(x, qweight=b, weight_scale=t, input_scale_ub=bound)
    assert_matmul(y, decoded(a, s), decoded(b, t))
    with pytest.raises(ValueError, match="The weight is \\[N, K\\]"):
        compat.apply_fp8_linear(x[:, :7], b, t)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_fp8_linear_computes_and_shows_what_it_holds(
    x: Tensor, static: bool, per_channel: bool
) -> None:
    w, bias = torch.randn(N, K), torch.randn(N).half()
    b, t = quantized(w, per_row=per_channel)
    step = torch.tensor([[0.03125]])
    given = torch.tensor([0.03125]).bfloat16() if static else None
    layer = compat.Fp8Linear(b, bias, t.flatten(), given)
    a, s = (with_scale(x, step), step) if static else quantized(x)
    assert_matmul(layer(x), decoded(a, s), decoded(b, t), bias)
    assert layer(x.view(2, 3, K)).shape == (2, 3, N)
    assert layer.dtype == b.dtype
    for shown in (layer.weight, layer.qweight):
        assert_bits_equal(shown.t(), b)
        assert shown.data_ptr() == b.data_ptr()
    assert torch.equal(layer.weight_scale, t.reshape(1, -1))
    assert layer.qbias is not None
    assert torch.equal(layer.qbias, bias)
    assert (layer.input_scale is not None) == static


def test_fp8_linear_is_in_state_dict_and_survives_casts(x: Tensor) -> None:
    b, t = quantized(torch.randn(N, K))
    layer = compat.Fp8Linear(b, None, t, None)
    y = layer(x)
    twin = compat.Fp8Linear(torch.zeros_like(b), None, torch.ones_like(t), None).half()
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), y)


def test_get_linear_makes_the_layer_of_a_quantization(x: Tensor) -> None:
    w = torch.randn(N, K).half()
    bias = torch.randn(N).half()
    dense = compat.get_linear(w, bias, None)
    assert torch.equal(dense(x), nn.functional.linear(x, w, bias))
    assert not any(p.requires_grad for p in dense.parameters())
    for word in ("fp8", "fp8-kv"):
        layer = compat.get_linear(w.t(), bias, word, fan_in_fan_out=True)
        assert isinstance(layer, compat.Fp8Linear)
        assert_scheme_error(layer(x) - bias, x @ w.t(), "FP8_DYNAMIC")
    q = fp8kit.quantize(w, fp8kit.TENSOR, role="weight")
    given = compat.get_linear(q.data, None, "fp8", weight_scale=q.scale, input_scale=None)
    assert_scheme_error(given(x), x @ w.t(), "FP8_TENSOR")
    with pytest.raises(NotImplementedError, match="'fp8-kv'"):
        compat.get_linear(w, None, "awq")
    with pytest.raises(ValueError, match="Codes mean nothing without their scale"):
        compat.get_linear(q.data, None, "fp8")
