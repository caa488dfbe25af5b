"""A weight may be prefetched only after a launch has synchronized with its last write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fp8kit.runtime.weight_hazards import (
    UNCOUNTED,
    invalidate,
    join,
    mark_synchronized,
    safe_to_prefetch,
    version,
)


def counted() -> Tensor:
    return nn.Parameter(torch.zeros(4), requires_grad=False)


def in_inference_mode(function: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode():
        return function()


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    tensor.data = data
    return tensor


@pytest.mark.parametrize(
    "uncounted",
    [
        lambda: in_inference_mode(counted),
        lambda: with_data(in_inference_mode(counted), torch.zeros(4)),
        lambda: with_data(counted(), in_inference_mode(lambda: torch.zeros(4))),
    ],
    ids=["inference", "inference-given-normal", "normal-given-inference"],
)
def test_what_torch_does_not_count_is_never_safe(uncounted: Callable[[], Tensor]) -> None:
    weight = uncounted()
    assert version(weight) == UNCOUNTED
    mark_synchronized(weight)
    assert not safe_to_prefetch(weight)


def test_a_weight_is_safe_to_prefetch_until_it_changes() -> None:
    weight = counted()
    assert not safe_to_prefetch(weight)
    for change in (
        lambda: weight.add_(1),
        lambda: torch.autograd.graph.increment_version(weight),
        lambda: with_data(weight, torch.zeros(4)),
        lambda: invalidate(weight),
    ):
        mark_synchronized(weight)
        assert safe_to_prefetch(weight)
        with torch.no_grad():
            change()
        assert not safe_to_prefetch(weight)


def test_a_tensor_at_the_same_address_is_another_weight() -> None:
    weight = counted()
    mark_synchronized(weight)
    twin = nn.Parameter(weight.data, requires_grad=False)
    assert (twin.data_ptr(), version(twin)) == (weight.data_ptr(), version(weight))
    assert not safe_to_prefetch(twin)


def test_a_joined_weight_is_safe_if_all_of_its_parts_are() -> None:
    parts = [counted(), counted()]
    whole = join(torch.zeros(8), parts)
    mark_synchronized(parts[0])
    assert not safe_to_prefetch(whole)
    mark_synchronized(whole)
    assert safe_to_prefetch(whole)
    assert all(map(safe_to_prefetch, parts))
    with torch.no_grad():
        parts[1].add_(1)
    assert not safe_to_prefetch(join(torch.zeros(8), parts))
    assert safe_to_prefetch(parts[0])
