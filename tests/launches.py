"""The own kernel with everything below its launch faked: what is left tells what starts early."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fp8kit.formats import GroupShape
from fp8kit.matmul.hopper import gemm
from fp8kit.matmul.problem import MatmulProblem

PROCESSORS = 132


def fake(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Give a list that grows with each launch: whether it may read the weight early."""
    early: list[bool] = []
    kernel = SimpleNamespace(launch=lambda *_, overlap: early.append(overlap))
    monkeypatch.setattr(gemm, "_kernel", lambda *_: kernel)
    monkeypatch.setattr(gemm, "_processors", lambda _: PROCESSORS)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for described in ("byte_tile_map", "float_row_map"):
        monkeypatch.setattr(gemm.cuda_driver, described, lambda *shape: shape)
    return early


def fake_layers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let every product of the package be the own kernel; otherwise as ``fake``."""

    def multiply(
        x: Tensor,
        x_scale: Tensor | None,
        w: Tensor,
        w_scale: Tensor,
        bias: Tensor | None,
        problem: MatmulProblem,
        _: str | None = None,
    ) -> Tensor:
        groups: tuple[GroupShape | None, GroupShape] = (problem.x_group, problem.w_group)
        return gemm.run(x, x_scale, w, w_scale, bias, groups, problem)

    monkeypatch.setattr("fp8kit.ops.multiply", multiply)
    return fake(monkeypatch)
