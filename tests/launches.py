"""The Hopper GEMM without a GPU: a faked launch or driver shows which launches prefetch weights."""

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


def fake_gemm_launch(
    monkeypatch: pytest.MonkeyPatch,
    record: Device = H200,
    kernel: Callable[..., object] | None = None,
) -> list[bool]:
    """Return a list to which each launch adds whether it may prefetch the weight.

    Args:
        monkeypatch: undoes the fakes.
        record: the device that is faked.
        kernel: from configuration, variant and device, returns an object with a ``launch``.
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
    """Make each tile map the tuple of its arguments, such as an address and a shape."""
    makers = ("byte_tile_map", "float_row_map")
    _put(monkeypatch, {(gemm.cuda_launch, name): lambda *shape: shape for name in makers})


def on_driver(monkeypatch: pytest.MonkeyPatch, driver: object, stream: int = 0) -> None:
    """Make launches call a test's own driver, with GPU 1 as the current device.

    Args:
        monkeypatch: undoes the fakes.
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
        monkeypatch.setattr(home, name, value, raising=False)  # a CPU build of torch lacks some


def fake_layers(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., torch.Tensor] = gemm.run
) -> list[bool]:
    """Make dispatch choose the Hopper GEMM for every matmul; otherwise as ``fake_gemm_launch``.

    Args:
        monkeypatch: undoes the fakes.
        run: replaces the backend's own ``run``.
    """
    backend = dataclasses.replace(gemm.BACKEND, run=run)
    chosen = {(bodies, "decide"): lambda _, p, *__: Choice(p, "hopper_gemm", backend, ())}
    _put(monkeypatch, chosen)
    return fake_gemm_launch(monkeypatch)
