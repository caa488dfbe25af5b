"""The sizes of ``edges.py`` contain every edge with its neighbours; a sample is a subset."""

from __future__ import annotations

import itertools

import pytest
import torch

import edges


def test_a_choice_changes_where_its_value_does() -> None:
    assert edges.changes(lambda k: -(-k // 100), 350) == [101, 201, 301]
    assert edges.changes(lambda k: k > 64, 128, step=8) == [72]


def test_sizes_around_an_edge_are_odd_and_even_and_positive() -> None:
    assert edges.around([4, 12], 15) == list(range(1, 16))
    assert edges.around([64], 200, step=16) == [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176]


def test_a_sample_is_repeatable_and_everything_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(edges.SWEEP_VARIABLE, raising=False)
    sizes = list(range(100))
    few = edges.sampled(sizes, 9, "rows")
    assert len(set(few)) == 9
    assert few == edges.sampled(sizes, 9, "rows") != edges.sampled(sizes, 9, "columns")
    monkeypatch.setenv(edges.SWEEP_VARIABLE, "all")
    assert edges.sampled(sizes, 9, "rows") == sizes


def test_a_sample_keeps_the_order_of_what_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(edges.SWEEP_VARIABLE, raising=False)
    dtypes = [torch.float32, torch.float16, torch.bfloat16] * 9
    cases = [(7, dtype, turn) for turn, dtype in enumerate(dtypes)]
    few = edges.sampled(cases, 12, "norms")
    assert len(few) == 12
    assert few == [case for case in cases if case in few]


def test_dealing_loses_nothing() -> None:
    assert sorted(itertools.chain(*edges.dealt(list(range(10)), 3))) == list(range(10))
