"""Quantize a real trained model, save it, load it back, and compare it with the original.

    python examples/demo.py

The model is the repository's Llama of 4.2 million parameters, trained on open-source text. The demo
also converts the small mixture of experts that train_experts.py made. Everything runs on the CPU,
in the models' own bfloat16.
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

import fp8kit

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "nano"
DESTINATION = HERE.parent / ".demo" / "nano-fp8"
SEQUENCES, LENGTH = 48, 512
PROMPT = "import torch\n\ndef "


def main() -> None:
    """Run the comparison and print it."""
    torch.manual_seed(0)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    dense = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.bfloat16).eval()

    heading("1. What would be converted: fp8kit.plan(model)")
    print(fp8kit.plan(dense))

    heading("2. Quantize while loading, save, and load again")
    shutil.rmtree(DESTINATION, ignore_errors=True)
    start = time.perf_counter()
    fp8kit.save(fp8kit.load(SOURCE, scheme="FP8_DYNAMIC"), DESTINATION, source=SOURCE)
    print(f"quantized and saved in {time.perf_counter() - start:.1f} s to {DESTINATION}")
    quantized = fp8kit.load(DESTINATION)
    print(fp8kit.explain(quantized, m=1))

    heading(f"3. Perplexity on {SEQUENCES} x {LENGTH} tokens, and memory")
    tokens = evaluation_tokens(tokenizer)
    before, after = perplexity(dense, tokens), perplexity(quantized, tokens)
    rows = [
        ("", "bf16", "FP8_DYNAMIC", "change"),
        ("perplexity", f"{before:.4f}", f"{after:.4f}", f"{after / before - 1:+.2%}"),
        ("on disk", mib(disk(SOURCE)), mib(disk(DESTINATION)), ""),
        ("in memory", mib(memory(dense)), mib(memory(quantized)), ""),
    ]
    width = [max(len(r[i]) for r in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, width, strict=True)))
    print("(the embedding, a quarter of this small model, stays in bf16)")
    print(experts_line())

    heading("4. The same prompt, 40 tokens from each")
    for name, model in (("bf16", dense), ("FP8", quantized)):
        print(f"--- {name}\n{generate(model, tokenizer)}")

    heading("What to run next")
    print(
        f".venv/bin/fp8kit inspect {DESTINATION.relative_to(HERE.parent)}\n"
        "make test\n"
        "and in Python: fp8kit.convert(your_model); print(fp8kit.explain(your_model, m=1))"
    )


def heading(text: str) -> None:
    """Print a section title."""
    print(f"\n{text}\n{'=' * len(text)}")


def evaluation_tokens(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return the held-out text as ``[SEQUENCES, LENGTH + 1]`` token ids."""
    ids = tokenizer.encode((HERE / "eval.txt").read_text())
    return torch.tensor(ids[: SEQUENCES * (LENGTH + 1)]).view(-1, LENGTH + 1)


def experts_line() -> str:
    """Return a line that compares a byte-level mixture of experts before and after conversion."""
    model = AutoModelForCausalLM.from_pretrained(HERE / "experts", dtype=torch.bfloat16).eval()
    data = torch.tensor(list((HERE / "eval.txt").read_bytes()[: 16 * (LENGTH + 1)]))
    tokens = data.view(-1, LENGTH + 1)
    before = perplexity(model, tokens)
    report = fp8kit.convert(model)
    after = perplexity(model, tokens)
    return (
        f"experts: {len(report.stacks)} layers of {report.stacks[0].experts}, "
        f"perplexity of a byte {before:.4f} -> {after:.4f} ({after / before - 1:+.2%})"
    )


@torch.no_grad()
def perplexity(model: nn.Module, tokens: torch.Tensor) -> float:
    """Compute exp(mean cross entropy) of the next token."""
    total = 0.0
    for batch in tokens.split(8):
        logits = model(input_ids=batch[:, :-1]).logits.float()
        total += F.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).item()
    return math.exp(total / tokens[:, 1:].numel())


def generate(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> str:
    """Continue the prompt greedily by 40 tokens."""
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(out[0]))


def disk(folder: Path) -> int:
    """Sum the bytes of the safetensors files of a folder."""
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def memory(model: nn.Module) -> int:
    """Sum the bytes of the parameters and buffers of a model."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def mib(size: int) -> str:
    """Format bytes as MiB."""
    return f"{size / 2**20:.2f} MiB"


if __name__ == "__main__":
    main()
