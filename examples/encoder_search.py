"""Search texts by meaning with an encoder in FP8, and compare its ranking with bf16.

    python examples/encoder_search.py [MODEL] [--query TEXT] [--texts FILE]

MODEL is a directory with an encoder of Transformers and its tokenizer, such as a BERT for
embeddings. The default is a tiny encoder with random weights, which finds texts that share words.
Each line of FILE is a text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BertConfig

import fp8kit

NANO = Path(__file__).resolve().parent / "nano"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXTS = (
    "def read(path): return open(path).read()",
    "class Point: x = 0; y = 0",
    "import torch; print(torch.ones(3))",
    "for i in range(10): print(i)",
    "raise ValueError('the path is missing')",
)


def main() -> None:
    """Embed the texts with both models and print both rankings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--query", default="open(path) and read it")
    parser.add_argument("--texts", type=Path)
    given = parser.parse_args()
    texts = given.texts.read_text().splitlines() if given.texts else list(TEXTS)

    tokenizer = AutoTokenizer.from_pretrained(given.model or NANO)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    dense = load(given.model, len(tokenizer))
    found = search(dense, tokenizer, given.query, texts)
    before = sum(p.nbytes for p in dense.parameters())

    print(fp8kit.convert(dense).summary())
    after = sum(p.nbytes for p in dense.parameters())
    print(f"weights: {before / 2**20:.1f} MiB in bf16, {after / 2**20:.1f} MiB in FP8")
    close = search(dense, tokenizer, given.query, texts)
    print(f"largest change of a similarity: {(close - found).abs().max():.4f}")
    for name, similarity in (("bf16", found), ("FP8", close)):
        best = int(similarity.argmax())
        print(f"{name}: {similarity[best]:.3f}  {texts[best]}")


def load(folder: str | None, words: int) -> Any:
    """Load an encoder in bf16, or make one of random weights."""
    if folder is not None:
        return AutoModel.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return AutoModel.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()


def search(model: Any, tokenizer: Any, query: str, texts: list[str]) -> Tensor:
    """Return the cosine similarity of each text to a query."""
    batch = tokenizer([query, *texts], padding=True, truncation=True, return_tensors="pt")
    mask = batch["attention_mask"].to(DEVICE)
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"].to(DEVICE), attention_mask=mask)
    kept = mask[..., None].float()
    means = (states.last_hidden_state.float() * kept).sum(1) / kept.sum(1)
    return F.cosine_similarity(means[:1], means[1:]).cpu()


if __name__ == "__main__":
    main()
