"""Train LoRA on an FP8 base and on the same bf16 weights, and compare the losses; on a CPU.

    python benchmarks/lora.py benchmarks/results/lora.json

The base is the small model in examples. Each seed gives one adapter and one order of batches, used
on both bases. Compare the difference between the bases with the spread over seeds, its noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

import fp8kit
from streaming import processor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from lora_finetune import SOURCE, finetune, training_tokens, with_adapter  # noqa: E402

STEPS, SEEDS, LAST = 200, 3, 50


def base(kind: str) -> Any:
    """Return the model with fp32 activations; its weights hold bf16 values, or are FP8."""
    if kind == "fp8":
        return fp8kit.load(SOURCE, scheme="FP8_DYNAMIC", dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)


def main() -> None:
    """Measure, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    tokens, losses = training_tokens(), {}
    for kind in ("bf16", "fp8"):
        for seed in range(SEEDS):
            run = finetune(with_adapter(base(kind), seed), tokens, STEPS, seed)
            losses[f"{kind} {seed}"] = [round(loss, 4) for loss in run]
            print(kind, seed, run[0], run[-1], flush=True)
    last = {name: statistics.mean(run[-LAST:]) for name, run in losses.items()}
    dense = [last[f"bf16 {seed}"] for seed in range(SEEDS)]
    differences = [last[f"fp8 {seed}"] - last[f"bf16 {seed}"] for seed in range(SEEDS)]
    result = {
        "device": f"{processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": STEPS,
        "mean_loss_of_the_last": LAST,
        "bf16": [round(loss, 4) for loss in dense],
        "fp8_minus_bf16": [round(d, 4) for d in differences],
        "spread_over_seeds": round(statistics.stdev(dense), 4),
        "losses": losses,
    }
    file.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
