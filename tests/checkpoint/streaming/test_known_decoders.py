"""The table of known decoders agrees with Transformers' own code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint_samples import edit_json
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.streaming.known_decoders import facts_of_decoder
from fp8kit.formats import Scheme
from fp8kit.integrations.transformers_facts import facts

DYNAMIC = Scheme.of("FP8_DYNAMIC")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 96}


def made(place: Path, kind: str, **options: Any) -> Path:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **heads, **options)
    getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().save_pretrained(place)
    return place


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_known_decoders_are_those_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    checkpoint = open_checkpoint(made(tmp_path / "c", kind, tie_word_embeddings=tied))
    wanted = facts(checkpoint, DYNAMIC)
    table = f"the built-in table of {kind}ForCausalLM"
    assert facts_of_decoder(checkpoint) == replace(wanted, source=table)


def test_a_tied_head_on_disk_is_repeated(tmp_path: Path) -> None:
    path = made(tmp_path / "c", "Llama", tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    known = facts_of_decoder(checkpoint)
    assert known is not None
    assert replace(known, source="") == replace(facts(checkpoint, DYNAMIC), source="")


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["LlamaModel"]},
        {"architectures": None},
        {"model_type": "mllama"},
        {"attention_bias": True},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 10**9},
        {"hidden_size": "128"},
        {"intermediate_size": 64},
        {"auto_map": {"AutoModel": "x.Y"}},
    ],
    ids=str,
)
def test_what_differs_is_asked_of_transformers(tmp_path: Path, change: dict[str, Any]) -> None:
    path = made(tmp_path / "c", "Llama")
    assert facts_of_decoder(open_checkpoint(path)) is not None
    edit_json(path / "config.json", **change)
    assert facts_of_decoder(open_checkpoint(path)) is None


def test_one_more_or_one_less_tensor_is_asked_of_transformers(tmp_path: Path) -> None:
    path = made(tmp_path / "c", "Llama")
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"more.weight": torch.ones(2, 2)}, path / "model.safetensors")
    assert facts_of_decoder(open_checkpoint(path)) is None
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    assert facts_of_decoder(open_checkpoint(path)) is None
