"""A trained model keeps its quality: perplexity against plain fake quantization.

Fake quantization rounds the same weights and activations and multiplies them densely, in a few
lines that use none of the package's matmuls or modules. Only the order of sums differs, so the two
agree closely but not in every bit; ``numerics.assert_same_loss`` derives how closely.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
import numerics
from fp8kit.formats import ROW

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEQUENCES, LENGTH, BATCH = 56, 512, 4


class FakeQuantized(nn.Module):
    """``F.linear`` on operands that were quantized and dequantized."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.weight = nn.Parameter(self.fake(linear.weight.detach(), "weight"))

    @staticmethod
    def fake(x: Tensor, role: str) -> Tensor:
        return fp8kit.dequantize(fp8kit.quantize(x, ROW, role=role), x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fake(x, "activation"), self.weight, self.bias)


def load(dtype: torch.dtype, device: torch.device) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(EXAMPLES / "nano", dtype=dtype)
    return model.eval().to(device)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "nano")
    ids = tokenizer((EXAMPLES / "eval.txt").read_text(), return_tensors="pt").input_ids[0]
    assert len(ids) >= SEQUENCES * LENGTH
    return ids[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)


def sequence_losses(model: nn.Module, tokens: Tensor, device: torch.device) -> Tensor:
    """Return the mean next-token loss of each sequence."""
    losses = []
    with torch.no_grad():
        for ids in tokens.to(device).split(BATCH):
            logits = model(ids, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            losses.append(loss.mean(1).cpu())
    return torch.cat(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perplexity_equals_fake_quantization(
    dtype: torch.dtype, tokens: Tensor, device: torch.device
) -> None:
    model, fake = load(dtype, device), load(dtype, device)
    dense = sequence_losses(model, tokens, device)
    names = [r.name for r in fp8kit.convert(model, "FP8_DYNAMIC").converted]
    assert len(names) == 28
    for name in names:
        fake.set_submodule(name, FakeQuantized(fake.get_submodule(name)))
    found = sequence_losses(model, tokens, device)
    numerics.assert_same_loss(found, sequence_losses(fake, tokens, device))
    cost = (found.mean() - dense.mean()).item()
    assert dense.mean().exp() < 9, "the embedded model is trained"
    assert cost > 1e-3, "a model that lost no quality was not quantized"
    assert cost < numerics.WHOLE_MODEL_COST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer_equals_fake_quantization_of_its_input(
    dtype: torch.dtype, tokens: Tensor, device: torch.device
) -> None:
    model = load(dtype, device)
    names = [r.name for r in fp8kit.convert(model, "FP8_DYNAMIC").converted]
    checked: list[str] = []

    def check(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            assert isinstance(layer, fp8kit.Fp8Linear)
            x = fp8kit.dequantize(fp8kit.quantize(args[0].flatten(0, 1), ROW))
            w = fp8kit.dequantize(layer.quantized_weight())
            ((_, choice),) = fp8kit.explain(layer, m=x.shape[0]).entries
            numerics.assert_matmul(y.flatten(0, 1), x, w, backend=choice.backend)
            checked.append(name)

        return hook

    for name in names:
        model.get_submodule(name).register_forward_hook(check(name))
    with torch.no_grad():
        model(tokens[:1, :128].to(device), use_cache=False)
    assert sorted(checked) == sorted(names)
