"""Train the small mixture of experts that comes with the repository.

    python examples/train_experts.py examples/experts [STEPS]

A Qwen3-MoE of 0.7 million parameters learns the bytes of Python's standard library, on the CPU, in
some minutes. With it, tests and the demo measure the cost of FP8 experts in a trained model.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

STEPS, BATCH, LENGTH = 1400, 8, 256
WARM_UP, PEAK, SEED = 100, 3e-3, 0


def config() -> Qwen3MoeConfig:
    """Return the config of a model of two layers, with two of six experts per token."""
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def text() -> torch.Tensor:
    """Return the bytes of the standard library's modules, one after the other."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))]
    kept = [p for p in files if "site-packages" not in p.parts and "test" not in p.parts]
    return torch.frombuffer(bytearray(b"\0".join(p.read_bytes() for p in kept)), dtype=torch.uint8)


def main(destination: Path, steps: int = STEPS) -> None:
    """Train, and save in bfloat16 with a note on how the model was trained."""
    torch.manual_seed(SEED)
    model, data = Qwen3MoeForCausalLM(config()), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    start, seen = time.perf_counter(), 0.0
    for step in range(steps):
        rate = min((step + 1) / WARM_UP, (steps - step) / max(steps - WARM_UP, 1))
        for group in optimizer.param_groups:
            group["lr"] = PEAK * rate
        at = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
        ids = torch.stack([data[i : i + LENGTH + 1] for i in at]).long()
        out = model(ids[:, :-1], use_cache=False)
        loss = F.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        balance = sum(_balance(logits) for logits in out.router_logits)
        optimizer.zero_grad(set_to_none=True)
        (loss + 0.01 * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"{step} {seen:.3f} {time.perf_counter() - start:.0f} s", flush=True)
    model.config.output_router_logits = False
    model.bfloat16().save_pretrained(destination)
    note = {"steps": steps, "batch": BATCH, "length": LENGTH, "loss": round(seen, 3)}
    (destination / "training.json").write_text(json.dumps(note, indent=2) + "\n")


def _balance(logits: torch.Tensor) -> torch.Tensor:
    """Return E times the sum of the share of tokens and the mean probability of each expert."""
    probabilities = logits.float().softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, logits.topk(2).indices, 1.0)
    return logits.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
