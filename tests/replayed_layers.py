"""Tiny Llamas with attentions of a given class, whose layers tell when they are not replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import fp8kit
from fp8kit.modules.fused_producers import FusedGatedMlp, FusedNorm
from tiny_experts import SIZES

CALLS = 4  # the first two compute and record; then a layer is replayed


class HeardNorm(FusedNorm):
    """Tells of each call that does not replay the norm."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        told.add(id(self))
        return super().__call__(*args, **kwargs)


class HeardMlp(FusedGatedMlp):
    """Tells of each call that does not replay the feed-forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        told.add(id(self))
        return super().__call__(*args, **kwargs)

    def of_codes(self, *args: Any) -> Any:
        told.add(id(self))
        return super().of_codes(*args)


told: set[int] = set()


def tiny(kind: Any = LlamaForCausalLM, config: Any = LlamaConfig) -> Any:
    torch.manual_seed(0)
    return kind(config(**SIZES)).bfloat16().eval()


def of_attention(kind: type[LlamaAttention], fuse: str = "all") -> Any:
    """Return a converted model with attentions of a class, whose layers tell if not replayed."""
    model = tiny()
    for layer in model.model.layers:
        own = kind(model.config, layer.self_attn.layer_idx).bfloat16().eval()
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    fp8kit.convert(model, fuse=fuse)
    for layer in model.model.layers if fuse == "all" else []:
        layer.input_layernorm.__class__, layer.mlp.__class__ = HeardNorm, HeardMlp
    return model


@torch.no_grad()
def run(model: Any, tokens: int = 1, **options: Any) -> Tensor:
    logits: Tensor = model(
        input_ids=torch.arange(1, 1 + tokens)[None], use_cache=False, **options
    ).logits
    return logits


def is_replayed(model: Any, **options: Any) -> bool:
    """Return whether the layers of the next call are replayed; some or none is an error."""
    told.clear()
    run(model, **options)
    assert len(told) in (0, 2 * len(model.model.layers))
    return not told
