"""Trial runs change neither the caller's module nor its random seeds and default dtype."""

from __future__ import annotations

import functools
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8kit.modules.trials import CopyError, contents, isolated_copy, on_trial


class Busy(nn.Linear):
    """Keeps counts in every way that a module can."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("amax", torch.zeros(()))
        self.seen: list[Tensor] = []
        self.own = [self.weight]
        self.inner = nn.BatchNorm1d(4)
        self.act = self.activated

    def activated(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.amax.copy_(x.abs().max())
        return super().forward(self.inner(self.act(x)))

    @functools.cached_property
    def kept(self) -> int:
        return len(self.seen)


def test_a_copy_owns_what_its_code_changes() -> None:
    module = Busy()
    module.register_forward_hook(lambda *_: pytest.fail("a hook is no part of a class"))
    before, state = contents(module), {n: t.clone() for n, t in module.state_dict().items()}
    fresh = nn.Parameter(torch.ones(4, 4))
    twin = isolated_copy(module, _parameters={"weight": fresh, "bias": None})
    assert twin.own[0] is twin.weight is fresh
    twin(torch.randn(3, 4))
    assert len(twin.seen) == 1
    assert twin.act.__self__ is twin
    assert not module.seen
    assert contents(module) == before != contents(twin)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_what_a_module_holds_tells_two_apart() -> None:
    module = Busy()
    before = contents(module)
    assert module.kept == 0  # cached on the instance
    assert contents(module) == before
    module.seen.append(torch.zeros(2))
    assert contents(module) != before
    module.seen.clear()
    module.inner.running_mean.data += 1
    assert contents(module)["inner"] != before["inner"]


@pytest.mark.parametrize("value", [threading.Lock(), nn.Linear(2**12, 2**11), torch.ones(2) * 2])
def test_what_cannot_be_copied_is_said(value: Any) -> None:
    module = Busy()
    module.more = [value.requires_grad_().exp() if isinstance(value, Tensor) else value]
    with pytest.raises(CopyError, match=r"cannot be copied to be tried: \w"):
        isolated_copy(module)
    module.more = None
    assert isinstance(isolated_copy(module), Busy)


def test_seeds_and_defaults_stay_those_of_the_caller() -> None:
    state, other = torch.get_rng_state(), random.getstate()
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float16)
    torch.set_num_threads(3)
    try:
        with torch.device("meta"), torch.autocast("cpu"), on_trial():
            y = torch.rand(2, 2) @ torch.rand(2, 2)
            random.random()
            assert (y.dtype, y.device.type) == (torch.float32, "cpu")
            assert torch.get_num_threads() == 1
        assert torch.get_default_dtype() == torch.float16
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == other


def test_threads_that_start_meanwhile_keep_their_number() -> None:
    threads, found, alone = torch.get_num_threads(), [], threading.Lock()

    def tried() -> None:
        found.append(torch.get_num_threads())
        with on_trial():
            found.append(torch.get_num_threads())
            assert alone.acquire(blocking=False)
            time.sleep(0.05)
            alone.release()
        found.append(torch.get_num_threads())

    torch.set_num_threads(3)
    others = [threading.Thread(target=tried) for _ in range(4)]
    try:
        for other in others:
            other.start()
            time.sleep(0.02)
        for other in others:
            other.join()
        assert sorted(found) == [1] * 4 + [3] * 8
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
