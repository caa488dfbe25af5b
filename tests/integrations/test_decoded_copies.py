"""Writes into what an FP8 cache layer has decoded, which would be lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from numerics import assert_bits_equal

pytest.importorskip("transformers")
from fp8kit.integrations.kv_cache_layers import Fp8Layer

WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.__setitem__((slice(None), -1), 0.0),
    "item of a part": lambda x: x[0].__setitem__(0, 0.0),
    "view": lambda x: x.transpose(1, 2)[1:].zero_(),
    "split": lambda x: x.split(1)[1].mul_(2),
    "move to where it is": lambda x: x.to(x.dtype).add_(1),
    "out": lambda x: torch.add(torch.ones_like(x), 1, out=x),
    "many": lambda x: torch._foreach_add_([x], 1),
    "compiled": torch.compile(lambda x: x.add_(1), backend="aot_eager"),
}


def layer() -> tuple[Any, Tensor]:
    made, x = Fp8Layer(None), torch.randn(2, 2, 3, 64)
    made.update(x, x)
    return made, x


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@torch.no_grad()
def test_writes_are_refused_at_the_next_use(write: str, name: str, held: bool) -> None:
    made, x = layer()
    before = getattr(made, name).clone()
    written = getattr(made, name)
    WRITES[write](written)
    if not held:
        del written
    with pytest.raises(UnsupportedError, match=rf"written into {name}.*`layer\.{name} = changed`"):
        made.update(x, x)
    assert_bits_equal(getattr(made, name), before)
    made.update(x, x)
    assert made.get_seq_length() == 6


def test_reading_finds_writes_too() -> None:
    made, _ = layer()
    made.keys.zero_()
    with pytest.raises(UnsupportedError, match="cache has not changed"):
        _ = made.keys
    assert made.keys.any()


def test_what_is_assigned_may_have_been_written() -> None:
    made, x = layer()
    changed = made.keys
    changed[:, :, 0] = 0
    made.keys = changed
    made.update(x, x)
    assert not made.keys[:, :, 0].any()
    assert made.keys[:, :, 1:].all()


def test_reads_are_plain_and_leave_nothing() -> None:
    made, x = layer()
    read = made.keys
    assert type(read) is Tensor
    read.clone().zero_()
    (read + 1).zero_()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), copy.copy(made)):
        read_too = twin.keys
        read_too.zero_()
        made.update(x, x)
