"""The own kernel with everything below its launch faked: what is left tells what starts early."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fp8kit.dispatch import Choice
from fp8kit.matmul import swap_ab

PROCESSORS = 132


def fake(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give a list that grows with each launch: whether it may read the weight early."""
    early: list[bool] = []
    kernel = SimpleNamespace(launch=lambda *_, overlap: early.append(overlap))
    monkeypatch.setattr(swap_ab, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(swap_ab, "_processors", lambda _: PROCESSORS)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for described in ("byte_tile_map", "float_row_map"):
        monkeypatch.setattr(swap_ab.cuda_driver, described, lambda *shape: shape)
    return early


def fake_layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let every product of the package be the own kernel; otherwise as ``fake``."""

    monkeypatch.setattr(
        "fp8kit.ops.bodies.decide",
        lambda _, problem, *__: Choice(problem, "swap_ab", swap_ab.BACKEND, ()),
    )
    return fake(monkeypatch)
