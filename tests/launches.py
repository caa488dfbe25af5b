"""The Hopper GEMM with everything below its launch faked: what is left tells what starts early."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fp8kit.dispatch.backends import Choice
from fp8kit.matmul.hopper import gemm
from fp8kit.matmul.hopper.device import H200


def fake(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each launch: whether it may read the weight early."""
    early: list[bool] = []
    kernel = SimpleNamespace(launch=lambda *_, overlap: early.append(overlap))
    monkeypatch.setattr(gemm, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(gemm, "device_record", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for described in ("byte_tile_map", "float_row_map"):
        monkeypatch.setattr(gemm.cuda_launch, described, lambda *shape: shape)
    return early


def fake_layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let every matmul of the package be the Hopper GEMM; otherwise as ``fake``."""

    monkeypatch.setattr(
        "fp8kit.ops.bodies.decide",
        lambda _, problem, *__: Choice(problem, "hopper_gemm", gemm.BACKEND, ()),
    )
    return fake(monkeypatch)
