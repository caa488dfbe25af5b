"""For the evaluation of a Transformers language model: its dense original, batches of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8kit.errors import CheckpointError


def load_dense(source: Path, device: str) -> Any:
    """Load a language model in the dtype of its checkpoint, without network access."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    return model.to(device)


def text_batches(
    source: Path, text: Path, tokens: int, length: int, device: str
) -> list[dict[str, Tensor]]:
    """Cut a text into sequences, by the tokenizer of a checkpoint.

    A batch is one sequence, ``input_ids`` int64 ``[1, length]``; the last may be shorter. They have
    at most ``tokens`` tokens in all. Raises ``CheckpointError`` if there is no tokenizer, or the
    text is no UTF-8 or gives fewer than two tokens.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:  # whose text is about a network, or other libraries
        raise _without_tokenizer(f"{source} holds no tokenizer.") from error
    words = _read(text)
    ids = tokenizer(words, verbose=False)["input_ids"][:tokens]
    if words.strip() and not ids:  # without tokenizer files Transformers makes an empty tokenizer
        raise _without_tokenizer(f"The tokenizer of {source} makes no tokens of {text}.")
    pieces = [torch.tensor(ids[i : i + length]) for i in range(0, len(ids), length)]
    batches = [{"input_ids": p[None].to(device)} for p in pieces if len(p) > 1]
    if not batches:
        raise CheckpointError(
            f"{text} holds {len(ids)} tokens.",
            "Next tokens are compared, so two are the least.",
            "Name a longer text, a few thousand words of what the model is for.",
        )
    return batches


def _without_tokenizer(found: str) -> CheckpointError:
    return CheckpointError(
        found,
        "The text is read by the tokenizer beside the weights.",
        "Add it there, or call fp8kit.evaluate(model, dense, batches) with tokens.",
    )


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{text} is no UTF-8: {error.reason} at byte {error.start}.",
            "The text is read by the model's tokenizer.",
            "Name a text file, or convert this one to UTF-8.",
        ) from error
