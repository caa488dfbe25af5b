"""A trained mixture of experts keeps its quality: perplexity against plain fake quantization."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
from fp8kit.formats import GROUP128, GroupShape, Scheme

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEQUENCES, LENGTH = 12, 256


def fake(x: Tensor, group: GroupShape | None, role: str = "activation") -> Tensor:
    assert group is not None
    return fp8kit.dequantize(fp8kit.quantize(x, group, role=role), torch.float32)


class FakeLinear(nn.Module):
    """``F.linear`` on operands that were quantized and dequantized."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.group, self.weight = scheme.activation, fake(linear.weight, scheme.weight, "weight")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(fake(x, self.group), self.weight).to(x.dtype)


class FakeExperts(nn.Module):
    """The experts of Qwen3-MoE in a loop, on operands that were quantized and dequantized."""

    def __init__(self, dense: Any, scheme: Scheme) -> None:
        super().__init__()
        self.group = scheme.activation
        self.up = [fake(w, scheme.weight, "weight") for w in dense.gate_up_proj]
        self.down = [fake(w, scheme.weight, "weight") for w in dense.down_proj]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rows, total = fake(x, self.group), torch.zeros(x.shape)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, slot = torch.where(ids == expert)
            gate, wide = F.linear(rows[token], up).chunk(2, -1)
            y = F.linear(fake(F.silu(gate) * wide, GROUP128), down)
            total.index_add_(0, token, y * weights[token, slot, None].float())
        return total.to(x.dtype)


def load() -> Any:
    path = EXAMPLES / "experts"
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def perplexity(model: nn.Module) -> float:
    data = torch.tensor(list((EXAMPLES / "eval.txt").read_bytes()[: SEQUENCES * LENGTH]))
    ids = data.view(SEQUENCES, LENGTH)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[:, :-1].float()
    return math.exp(F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).item())


@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK"])
def test_perplexity_is_that_of_fake_quantization(name: str, tmp_path: Path) -> None:
    model, other, scheme = load(), load(), Scheme.of(name)
    dense = perplexity(model)
    assert dense < 6, "the embedded model is trained: at random a byte would cost 256"
    report = fp8kit.convert(model, name)
    assert len(report.stacks) == 2
    with torch.no_grad():
        for record in report.linears:
            other.set_submodule(record.name, FakeLinear(other.get_submodule(record.name), scheme))
        for record in report.stacks:
            other.set_submodule(record.name, FakeExperts(other.get_submodule(record.name), scheme))
    found = perplexity(model)
    assert abs(found / perplexity(other) - 1) < 1e-3
    assert 1e-5 < abs(found / dense - 1) < 1e-2, "it was quantized, and well"
    fp8kit.save(model, tmp_path / "c", target="transformers")
    assert perplexity(fp8kit.load(tmp_path / "c")) == found
