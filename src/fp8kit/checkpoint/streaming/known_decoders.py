"""Decoder models whose tensors are known without importing their code, which takes seconds.

A checkpoint is known only if it has exactly the tensors that its config implies, in their shapes;
for any other, Transformers builds the model on the meta device.
``tests/checkpoint/streaming/test_known_decoders.py`` compares both.
"""

from __future__ import annotations

from dataclasses import replace

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.streaming.layer_selection import Facts, KnownLayer
from fp8kit.conversion.patterns import roles_by_name
from fp8kit.conversion.report import TIED, tied_to

# class -> whether q and k have norms; whether q, k and v have biases that the config omits
_KINDS = {
    "LlamaForCausalLM": (False, False),
    "MistralForCausalLM": (False, False),
    "Qwen2ForCausalLM": (False, True),
    "Qwen3ForCausalLM": (True, False),
}
_SIZES = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "vocab_size".split()
)
# entries that change the tensors of a model, or the code that reads them
_OTHERWISE = ("quantization_config", "attention_bias", "mlp_bias", "auto_map")


def facts_of_decoder(checkpoint: Checkpoint) -> Facts | None:
    """Return what Transformers would tell about a known decoder; ``None`` for any other model."""
    config = checkpoint.config
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _KINDS:
        return None
    sizes = [config.get(key) for key in _SIZES]
    tied = config.get("tie_word_embeddings", False)
    plain = not any(config.get(key) not in (None, False) for key in _OTHERWISE)
    sound = all(type(size) is int and 0 < size < 2**20 for size in sizes) and type(tied) is bool
    if not sound or not plain or config.get("model_type") != named[0][:-11].lower():
        return None
    wanted = _tensors(config, *_KINDS[named[0]])
    found = {name: info.shape for name, info in checkpoint.tensors.items()}
    head = "lm_head.weight" in found
    if found != {n: s for n, s in wanted.items() if n != "lm_head.weight" or head or not tied}:
        return None
    facts = Facts(f"the built-in table of {named[0]}")
    linears = {n.removesuffix(".weight"): s for n, s in wanted.items() if len(s) == 2}
    del linears["model.embed_tokens"]
    roles = roles_by_name(linears)
    facts.embeddings = {"model.embed_tokens"}
    for name, shape in linears.items():
        obstacle = TIED if tied and name == "lm_head" else ""
        facts.layers[name] = KnownLayer((name,), obstacle, roles.get(name, ""), shape)
    if tied:
        own = tied_to("model.embed_tokens.weight")
        facts.absent = {"lm_head": replace(facts.layers["lm_head"], obstacle=own)}
        facts.repeated = {"lm_head.weight"} if head else set()
        facts.layers = {n: x for n, x in facts.layers.items() if n != "lm_head" or head}
    return facts


def _tensors(config: JsonObject, norms: bool, biases: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a config implies."""
    hidden, inner, count, heads, keys, words = (int(config[key]) for key in _SIZES)
    head = config.get("head_dim") or hidden // heads
    wide, narrow = heads * head, keys * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (words, hidden),
    }
    for i in range(count):
        layer = f"model.layers.{i}"
        projections = {"q": (wide, hidden), "k": (narrow, hidden), "v": (narrow, hidden)}
        for part, shape in projections.items():
            found[f"{layer}.self_attn.{part}_proj.weight"] = shape
            if biases:
                found[f"{layer}.self_attn.{part}_proj.bias"] = shape[:1]
            if norms and part != "v":
                found[f"{layer}.self_attn.{part}_norm.weight"] = (head,)
        found[f"{layer}.self_attn.o_proj.weight"] = (hidden, wide)
        found |= {f"{layer}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = (hidden,)
    return found
