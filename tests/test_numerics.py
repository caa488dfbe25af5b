"""The checks of ``numerics.py`` can fail."""

from __future__ import annotations

import pytest
import torch

from numerics import (
    SCHEME_ERROR,
    assert_bits_equal,
    assert_fast_sums,
    assert_matmul,
    assert_no_drift,
    assert_same_loss,
    assert_scheme_error,
    assert_trains_alike,
    exact_product,
)


def test_poisoned_memory_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert torch.empty(1000, dtype=dtype).float().isnan().all()


def test_matmul_bound_notices_one_wrong_row() -> None:
    x, w = torch.randn(64, 256), torch.randn(512, 256)
    y = exact_product(x, w).bfloat16()
    assert_matmul(y, x, w)
    y[17] = y[16]
    with pytest.raises(AssertionError, match=r"rows \[17\]"):
        assert_matmul(y, x, w)


def test_matmul_bound_notices_two_percent() -> None:
    x, w = torch.randn(8, 256), torch.randn(64, 256)
    with pytest.raises(AssertionError, match="over the bound"):
        assert_matmul((exact_product(x, w) * 1.02).bfloat16(), x, w)


def test_matmul_bound_notices_nan_and_a_missing_bias() -> None:
    x, w = torch.randn(8, 256), torch.randn(64, 256)
    with pytest.raises(AssertionError, match="over the bound"):
        assert_matmul(exact_product(x, w).bfloat16(), x, w, torch.randn(64))
    with pytest.raises(AssertionError, match="over the bound"):
        assert_matmul(torch.full((8, 64), torch.nan), x, w)


def test_drift_notices_a_truncated_sum() -> None:
    exact = torch.rand(8, 64) + 1
    assert_no_drift(exact * 0.9994, exact)
    with pytest.raises(AssertionError, match=r"biased by -0\.20%"):
        assert_no_drift(exact * 0.998, exact)


def test_fast_sums_may_be_short_and_not_wrong() -> None:
    exact = torch.randn(3, 500, dtype=torch.float64)
    assert_fast_sums(exact * 1.005, exact)
    exact_but_one = exact.clone()
    exact_but_one[1] *= 1.02
    with pytest.raises(AssertionError, match="a row is off by 2"):
        assert_fast_sums(exact_but_one, exact)


@pytest.mark.parametrize("scheme", SCHEME_ERROR)
def test_scheme_error_notices_a_dense_result(scheme: str) -> None:
    x, w = torch.randn(32, 256), torch.randn(64, 256)
    dense = exact_product(x, w)
    with pytest.raises(AssertionError, match="outside"):
        assert_scheme_error(dense.bfloat16(), dense, scheme)
    with pytest.raises(AssertionError, match="outside"):
        assert_scheme_error(dense + dense.std() * torch.randn(32, 64) * 0.1, dense, scheme)


def test_bits_differ_for_signed_zero_and_agree_for_nan() -> None:
    assert_bits_equal(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    with pytest.raises(AssertionError):
        assert_bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_loss_check_notices_a_difference_and_a_useless_comparison() -> None:
    losses = torch.randn(64) + 2
    noise = torch.randn(64) * 1e-3
    noise -= noise.mean()
    assert_same_loss(losses + noise, losses)
    with pytest.raises(AssertionError, match=r"\+0\.100%, standard error"):
        assert_same_loss(losses + noise + 1e-3, losses)
    with pytest.raises(AssertionError, match="the standard error is"):
        assert_same_loss(losses + noise * 100, losses)


def test_trainings_that_differ_or_do_not_train_are_noticed() -> None:
    losses = [3.0 - 0.1 * step for step in range(9)]
    assert_trains_alike([loss * 1.005 for loss in losses], losses)
    with pytest.raises(AssertionError, match=r"\+1\.5"):
        assert_trains_alike([loss * 1.015 for loss in losses], losses)
    with pytest.raises(AssertionError):
        assert_trains_alike([sum(losses) / 9] * 9, losses)
