"""Stacks of experts that no engine could read expert by expert are written whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
import tiny_experts
from fp8kit.checkpoint.expert_splitting import split_experts
from fp8kit.modules.expert_stacks import ExpertStacks

E, H = 2, 256


class Experts(nn.Module):
    """SwiGLU experts with any names; gates come before ups, or alternate with them."""

    def __init__(self, up: str, down: str, inner: int, alternate: bool) -> None:
        super().__init__()
        self.names, self.alternate = (up, down), alternate
        self.register_parameter(up, nn.Parameter(torch.randn(E, 2 * inner, H) / 16))
        self.register_parameter(down, nn.Parameter(torch.randn(E, H, inner) / 16))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        up, down = (self.get_parameter(name) for name in self.names)
        y = torch.zeros_like(x)
        for expert in range(E):
            rows, places = torch.where(ids == expert)
            h = x[rows] @ up[expert].T
            gate, other = (h[:, ::2], h[:, 1::2]) if self.alternate else h.chunk(2, 1)
            out = (F.silu(gate) * other) @ down[expert].T
            y.index_add_(0, rows, out * weights[rows, places, None])
        return y


def described(module: Experts) -> ExpertStacks:
    activation = fp8kit.moe.Activation("silu", interleaved=module.alternate)
    return ExpertStacks(*module.names, activation)


@pytest.mark.parametrize(
    ("up", "down", "inner", "alternate", "scheme", "apart"),
    [
        ("gate_up_proj", "down_proj", 256, False, "FP8_DYNAMIC", True),
        ("gate_up_proj", "down_proj", 256, False, "FP8_BLOCK", True),
        ("gate_up_proj", "w2", 256, False, "FP8_DYNAMIC", False),
        ("up_proj", "down_proj", 256, False, "FP8_DYNAMIC", False),
        ("gate_up_proj", "down_proj", 256, True, "FP8_DYNAMIC", False),
        ("gate_up_proj", "down_proj", 192, False, "FP8_BLOCK", False),
    ],
    ids=["rows", "blocks", "another name", "gates in up_proj", "alternating", "cut blocks"],
)
def test_stacks_that_are_taken_apart(
    up: str, down: str, inner: int, alternate: bool, scheme: str, apart: bool, tmp_path: Path
) -> None:
    fp8kit.register_experts(Experts, described)
    model = nn.ModuleDict({"experts": Experts(up, down, inner, alternate).bfloat16()})
    fp8kit.convert(model, scheme)
    layers, whole = split_experts(model)
    singles = {f"experts.{e}.{p}_proj" for e in range(E) for p in ("gate", "up", "down")}
    assert layers.keys() == (singles if apart else set())
    assert sorted(whole) == ([] if apart else sorted((f"experts.{up}", f"experts.{down}")))
    if not apart:
        with pytest.warns(UserWarning, match="stacks of codes.* other names than gate_up_proj"):
            fp8kit.save(model, tmp_path / "fp8")


def test_blocks_may_be_cut_where_there_is_no_gate() -> None:
    model = tiny_experts.tiny("NemotronH", moe_intermediate_size=192)
    fp8kit.convert(model, "FP8_BLOCK")
    layers, whole = split_experts(model)
    assert {name.rpartition(".")[2] for name in layers} == {"up_proj", "down_proj"}
    assert whole == []
