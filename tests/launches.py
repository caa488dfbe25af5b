"""The Hopper GEMM with everything below its launch faked: what is left tells what starts early."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8kit.dispatch.backends import Choice
from fp8kit.matmul.hopper import gemm
from fp8kit.matmul.hopper.device import H200, Device
from fp8kit.ops import bodies


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
    }
    _put(monkeypatch, fakes)
    fake_maps(monkeypatch)
    return early


def fake_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each tile map be what it is made from: an address, and a shape."""
    makers = ("byte_tile_map", "float_row_map")
    _put(monkeypatch, {(gemm.cuda_launch, name): lambda *shape: shape for name in makers})


def on_driver(monkeypatch: pytest.MonkeyPatch, driver: object, stream: int = 0) -> None:
    """Let launches reach a driver that a test wrote, on GPU 1.

    Args:
        monkeypatch: what takes the fakes back.
        driver: has the functions of ``cuda.bindings.driver``.
        stream: handle of torch's current stream.
    """
    fakes = {
        (gemm.cuda_launch, "driver"): driver,
        (torch.cuda, "current_device"): lambda: 1,
        (torch._C, "_cuda_getCurrentRawStream"): lambda _: stream,
    }
    _put(monkeypatch, fakes)


def _put(monkeypatch: pytest.MonkeyPatch, fakes: Mapping[tuple[Any, str], object]) -> None:
    for (home, name), value in fakes.items():
        monkeypatch.setattr(home, name, value, raising=False)  # torch for CPUs lacks some


def fake_layers(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., torch.Tensor] = gemm.run
) -> list[bool]:
    """Let every matmul of the package be the Hopper GEMM; otherwise as ``fake``.

    Args:
        monkeypatch: what takes the fakes back.
        run: what runs instead of the backend's own function.
    """
    backend = dataclasses.replace(gemm.BACKEND, run=run)
    chosen = {(bodies, "decide"): lambda _, p, *__: Choice(p, "hopper_gemm", backend, ())}
    _put(monkeypatch, chosen)
    return fake(monkeypatch)
