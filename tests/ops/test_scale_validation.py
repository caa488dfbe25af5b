"""Values of scales are checked only where that causes no wait for a device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8kit
from fp8kit.formats import MX, ROW, TENSOR
from fp8kit.modules.linear import Fp8Linear
from fp8kit.ops.scale_validation import check_input_scale, check_static_scale

X = torch.randn(3, 64)
ONE = torch.ones(1, 1)
UNGATED = fp8kit.moe.Activation(gated=False)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_an_input_scale_is_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=f"input_scale of {value:.4g}"):
        check_input_scale(value * ONE, X.shape, X.device)
    weight = fp8kit.quantize(torch.randn(64, 64), TENSOR, role="weight")
    with pytest.raises(ValueError, match=f"input_scale of {value:.4g}"):
        Fp8Linear.from_quantized(weight, scheme="FP8", input_scale=value * ONE)


NESTED, SPARSE = torch.nested.nested_tensor([ONE[0]], layout=torch.jagged), ONE.to_sparse()


@pytest.mark.parametrize("other", [NESTED, SPARSE], ids=["nested", "sparse"])
def test_what_lies_beside_codes_is_one_dense_tensor(other: Tensor) -> None:
    w = fp8kit.quantize(torch.randn(64, 64), TENSOR, role="weight")
    stack = fp8kit.quantize(torch.randn(1, 64, 64), role="weight")
    ids = torch.zeros(3, 1, dtype=torch.int64)
    calls: tuple[Callable[[], object], ...] = (
        lambda: fp8kit.QTensor(w.data, other, TENSOR),
        lambda: fp8kit.quantize(X, TENSOR, scale=other),
        lambda: fp8kit.quantize(X, scale_ub=other),
        lambda: fp8kit.linear(X, w, bias=other),
        lambda: fp8kit.linear(X, w, input_scale=other),
        lambda: fp8kit.join_scales(w.data, other, (64,)),
        lambda: fp8kit.moe.experts(X, stack, stack, ids, other, activation=UNGATED),
        lambda: fp8kit.moe.experts(
            X, stack, stack, ids, ids.float(), activation=UNGATED, expert_map=other
        ),
        lambda: fp8kit.grouped_scaled_mm(fp8kit.quantize(X), stack, other),
    )
    for call in calls:
        with pytest.raises(TypeError, match="It must be one dense tensor"):
            call()


def test_the_smallest_of_many_static_scales_is_named() -> None:
    scale = torch.tensor([[1.0], [-2.0], [0.0]])
    with pytest.raises(ValueError, match=r"static scale of -2\."):
        fp8kit.quantize(X, ROW, scale=scale)


def test_scales_that_quantize_gives_are_taken_back() -> None:
    x = X.clone()
    x[1, 3] = math.nan
    scale = fp8kit.quantize(x, ROW).scale
    assert scale[1].isnan()
    assert fp8kit.quantize(x, ROW, scale=scale).data[1].float().isnan().all()
    smallest = torch.zeros(3, 2, dtype=torch.uint8)  # 2^-127 as an E8M0 byte
    assert fp8kit.quantize(X, MX, scale=smallest).data.float().isfinite().all()


def test_values_that_are_not_there_are_not_read() -> None:
    nothing = torch.empty(1, 1, device="meta")
    check_input_scale(nothing, X.shape, nothing.device, wait=True)
    with FakeTensorMode():
        x, scale = torch.empty(3, 64), torch.empty(1, 1)
        check_static_scale(scale, x, TENSOR)
        check_input_scale(scale, x.shape, x.device, wait=True)


def test_a_compiled_call_does_not_break_its_graph() -> None:
    weight = fp8kit.quantize(torch.randn(64, 64), TENSOR, role="weight")

    def call(x: Tensor, scale: Tensor) -> Tensor:
        y = fp8kit.linear(x, weight, input_scale=scale)
        return y + fp8kit.dequantize(fp8kit.quantize(x, TENSOR, scale=scale))

    expected, scale = call(X, 0.01 * ONE), 0.01 * ONE
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, scale), expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_call_on_a_gpu_does_not_wait_for_a_scale() -> None:
    x, zero = X.cuda(), 0 * ONE.cuda()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        check_static_scale(zero, x, TENSOR)
        check_input_scale(zero, x.shape, x.device)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    with pytest.raises(ValueError, match="input_scale of 0"):
        check_input_scale(zero, x.shape, x.device, wait=True)
