"""A weight is converted to the core's form once, and again when it or its scale changes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import compat
from fp8kit.compat.known_weights import KnownWeights
from fp8kit.errors import UnsupportedError
from numerics import assert_bits_equal


def made(weight: Tensor, scale: Tensor) -> fp8kit.QTensor:
    return fp8kit.QTensor(weight.t().contiguous(), scale.reshape(1, 1), fp8kit.TENSOR)


def test_the_form_of_a_weight_is_made_once() -> None:
    known, scale = KnownWeights(), torch.ones(1)
    weight = torch.ones(8, 4).to(torch.float8_e4m3fn).t()
    q = known.of(weight, scale, made)
    assert known.of(weight, scale, made) is q
    assert q.data.data_ptr() == weight.data_ptr()
    for changed in (weight.view(torch.uint8), scale):
        changed.zero_()
        again = known.of(weight, scale, made)
        assert again is not q
        q = again
    assert known.of(weight, scale.clone(), made) is not q


def test_weights_whose_changes_are_not_counted_are_read_at_every_call() -> None:
    known, scale = KnownWeights(), torch.ones(1)
    with torch.inference_mode():
        weight = torch.ones(8, 4).to(torch.float8_e4m3fn)
    assert known.of(weight, scale, made) is not known.of(weight, scale, made)


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_a_gradient_that_the_core_refuses_is_not_lost(name: str) -> None:
    x, codes = torch.randn(2, 4, requires_grad=True), torch.ones(8, 4).to(torch.float8_e4m3fn)
    given = {"weight": nn.Parameter(codes, False), "scale": torch.ones(8)}
    given[name].requires_grad_()
    op = compat.Fp8LinearOp()
    for compute in (
        lambda: op.apply(x, given["weight"].t(), given["scale"]),
        lambda: compat.apply_fp8_linear(x, given["weight"], given["scale"]),
    ):
        with pytest.raises(UnsupportedError, match="A gradient for an FP8 weight or a scale"):
            compute().sum().backward()
        with torch.no_grad():
            assert_bits_equal(compute(), compute())


def test_other_views_of_a_weight_are_seen() -> None:
    codes = fp8kit.quantize(torch.randn(8, 8), role="weight").data
    op, x, scale = compat.Fp8LinearOp(), torch.randn(2, 8), torch.ones(8)
    weight = nn.Parameter(codes.t(), requires_grad=False)
    before = op.apply(x, weight, scale)
    for other in (weight.data.t(), weight.data[:, :4], weight.data.view(torch.float8_e5m2)):
        weight.data = other
        y = op.apply(x, weight, scale[: other.shape[1]])
        assert_bits_equal(y, compat.Fp8LinearOp().apply(x, other, scale[: other.shape[1]]))
        weight.data = codes.t()
        assert_bits_equal(op.apply(x, weight, scale), before)


def test_weights_within_transforms() -> None:
    q = fp8kit.quantize(torch.randn(8, 4), role="weight")
    op, x = compat.Fp8LinearOp(use_per_token_if_dynamic=True), torch.randn(2, 4)

    def total(x: Tensor) -> Tensor:
        return op.apply(x, q.data.t(), q.scale).sum()

    assert torch.equal(torch.func.grad(total)(x), fp8kit.dequantize(q).sum(0).expand(2, 4))
    scales = torch.stack([q.scale, 2 * q.scale])
    found = torch.vmap(lambda scale: op.apply(x, q.data.t(), scale))(scales)
    for y, scale in zip(found, scales, strict=True):
        assert_bits_equal(y, op.apply(x, q.data.t(), scale))


def test_a_weight_is_not_kept_alive() -> None:
    known, weight = KnownWeights(), torch.ones(8, 4).to(torch.float8_e4m3fn)
    known.of(weight, torch.ones(1), made)
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


def test_copies_of_a_copied_weight_follow_it() -> None:
    known, scale = KnownWeights(), torch.ones(1)
    weight = torch.ones(8, 4).to(torch.float8_e4m3fn)  # its transposed form is a copy
    before = known.of(weight, scale, made)
    weight.view(torch.uint8).zero_()
    assert not known.of(weight, scale, made).data.view(torch.uint8).any()
    assert before.data.view(torch.uint8).any()
