"""The Hopper GEMM with everything below its launch faked: what is left tells what starts early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fp8kit.dispatch.backends import Choice
from fp8kit.matmul.hopper import gemm
from fp8kit.matmul.hopper.device import H200, Device


def fake(
    monkeypatch: pytest.MonkeyPatch,
    record: Device = H200,
    kernel: Callable[..., object] | None = None,
) -> list[bool]:
    """Return a list that grows with each launch: whether it may read the weight early.

    Args:
        monkeypatch: what takes the fakes back.
        record: the device that is faked.
        kernel: given configuration, variant and device, returns what has a ``launch``.
    """
    early: list[bool] = []
    plain = SimpleNamespace(launch=lambda *_, overlap: early.append(overlap))
    fakes = {
        (gemm, "_kernel"): kernel or (lambda *_: plain),
        (gemm, "device_record"): lambda _: record,
        (torch.cuda, "device"): lambda _: contextlib.nullcontext(),
        (gemm.cuda_launch, "byte_tile_map"): lambda *shape: shape,
        (gemm.cuda_launch, "float_row_map"): lambda *shape: shape,
    }
    for (home, name), value in fakes.items():
        monkeypatch.setattr(home, name, value)
    return early


def fake_layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let every matmul of the package be the Hopper GEMM; otherwise as ``fake``."""

    monkeypatch.setattr(
        "fp8kit.ops.bodies.decide",
        lambda _, problem, *__: Choice(problem, "hopper_gemm", gemm.BACKEND, ()),
    )
    return fake(monkeypatch)
