"""Fine-tune a model with LoRA on an FP8 base, merge the adapter, and take it out again.

    python examples/lora_finetune.py [--steps 40]

The model is the small Llama of the repository; everything runs on the CPU. The base is frozen FP8,
so its layers take half the memory of bf16 ones. Everything else is fp32, which every CPU computes
quickly; on a GPU leave ``dtype`` out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoTokenizer

import fp8kit

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "nano"
LENGTH, BATCH = 128, 4


def main() -> None:
    """Train, merge, unmerge, and print what changed in the base."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    base = fp8kit.load(SOURCE, scheme="FP8_DYNAMIC", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = with_adapter(base, seed=0)
    model.print_trainable_parameters()

    losses = finetune(model, training_tokens(), steps, seed=0)
    for step in range(0, steps, max(1, steps // 5)):
        print(f"step {step:4d}  loss {losses[step]:.3f}")
    print(f"step {steps - 1:4d}  loss {losses[-1]:.3f}")

    model.merge_adapter()
    print(f"merged:   {changed(model, before)} tensors of the base differ")
    model.unmerge_adapter()
    print(f"unmerged: {changed(model, before)} tensors of the base differ")


def with_adapter(base: Any, seed: int) -> Any:
    """Put a LoRA adapter beside every linear layer."""
    torch.manual_seed(seed)
    return get_peft_model(base, LoraConfig(target_modules="all-linear", r=8, lora_alpha=16))


def training_tokens() -> Tensor:
    """Return the text of the repository as ``[sequences, LENGTH]`` token ids."""
    ids = AutoTokenizer.from_pretrained(SOURCE).encode((HERE / "eval.txt").read_text())
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


def finetune(model: Any, tokens: Tensor, steps: int, seed: int) -> list[float]:
    """Train the adapter on random batches; return the loss of each step."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    model.train()
    for _ in range(steps):
        batch = tokens[torch.randint(len(tokens), (BATCH,), generator=order)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def changed(model: Any, before: dict[str, Tensor]) -> int:
    """Count the tensors of the base whose bytes have changed since ``before``."""
    now = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }
    return sum(
        not torch.equal(now[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in before.items()
    )


if __name__ == "__main__":
    main()
