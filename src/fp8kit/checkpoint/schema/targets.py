"""The programs that load a checkpoint: the dialect for each, and what each cannot load.

The rules were read in vLLM 0.33, SGLang 0.5.23 and Transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from fp8kit.checkpoint.dialects import AUTOFP8, COMPRESSED_TENSORS, Dialect, Spec
from fp8kit.checkpoint.dialects import MXFP8_INVERSE as MXFP8
from fp8kit.checkpoint.dialects import TRANSFORMERS_FP8 as FP8
from fp8kit.conversion.model_families import MERGED_BY_ENGINES
from fp8kit.conversion.patterns import merged_siblings
from fp8kit.errors import CheckpointError, check_choice, some_of
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, Scheme

TARGETS: tuple[str, ...] = ("vllm", "sglang", "transformers")
ENGINES = ("vllm", "sglang")
# granularity of the weight -> the dialect of each target; any other is compressed-tensors, from
# which Transformers loads no blocks or MX into experts, and SGLang no MX at all
_DIALECTS: dict[GroupShape, dict[str, Dialect]] = {
    BLOCK: dict.fromkeys(TARGETS, FP8),
    MX: {"vllm": COMPRESSED_TENSORS, "sglang": MXFP8, "transformers": MXFP8},
}
# models of SGLang whose loader takes weight_scale_inv for weight_scale, and leaves blocks unscaled;
# some are parts of models whose config is the part's (LLaVA, Phi-4-multimodal) or contains it
_RENAMED = "llama llama4_text mistral ministral3 phi3 internlm3 llava llava_llama phi4mm".split()
# (weight, activations) that engines load in compressed-tensors: for linear layers, or experts too
_LOADED = {
    (TENSOR, TENSOR): "experts",
    (ROW, ROW): "experts",
    (BLOCK, GROUP128): "experts",
    (MX, MX): "experts",
    (TENSOR, ROW): "linear",
    (ROW, TENSOR): "linear",
    (TENSOR, None): "linear",
    (ROW, None): "linear",
}
_NO_INVERSE = "its class of this model reads no weight_scale_inv"
NO_CONFIG: Mapping[str, Any] = {}
_EMBEDDING = re.compile(
    r"(.*\.)?(embed(_tokens|_positions)?|((word|token|tok|position|token_type)_)?embeddings?|wte|wpe)"
)
_STATE_SPACE = re.compile(r"(^|\.)(mixer|mamba\w*)$")
# a layer that marks a kind of state-space mixer -> its layers for which vLLM has no FP8: those of
# MambaMixer (Mamba, FalconMamba, Jamba) get no quant_config, Plamo2 reorders in_proj by heads;
# MambaMixer2 (Mamba2, Bamba, NemotronH, Falcon-H1, Granite) loads FP8
_DENSE_MIXERS = {"x_proj": ("in_proj", "x_proj", "dt_proj", "out_proj"), "bcdt_proj": ("in_proj",)}
# query, key and value one after the other (Bailing, ChatGLM, GLM-4V); elsewhere head by head
_QKV_IN_ORDER = re.compile(
    r"(^|\.)(model\.layers\.\d+\.attention|encoder\.layers\.\d+\.self_attention)$"
)
# dialects that a target does not read
_UNREADABLE = {
    ("autofp8", "transformers"): "it expects weight_scale_inv where vLLM has weight_scale",
    ("mxfp8", "vllm"): "it expects weight_scale where this dialect has weight_scale_inv",
    ("mxfp8-weight-scale", "transformers"): "it expects weight_scale_inv",
}


_LLAMA4 = ("llama4", "llama4_text")


def loads_stacks_alone(model_type: str, dialect: Dialect) -> bool:
    """Return whether Transformers loads a model's experts only as stacks with K first.

    Those of Llama 4 it loads one by one if the dialect is compressed-tensors.
    """
    return model_type in ("gpt_oss", *_LLAMA4) and not _parts_stacks(model_type, dialect)


def check_dense_stacks(
    names: Iterable[str], model_type: str, target: str, dialect: Dialect
) -> None:
    """Refuse stacks of experts in high precision that Transformers would not find."""
    stacks = sorted(names)
    if stacks and target == "transformers" and _parts_stacks(model_type, dialect):
        raise CheckpointError(
            f"{some_of(stacks)} stay in high precision.",
            f"In {dialect.name}, Transformers takes the experts of Llama 4 one by one: it "
            "would draw these stacks at random.",
            "Use FP8_BLOCK, in whose dialect they stay whole, or let fp8kit quantize make them "
            "FP8.",
        )


def _parts_stacks(model_type: str, dialect: Dialect) -> bool:
    return model_type in _LLAMA4 and dialect.name == "compressed-tensors"


def dialect_for(target: str, scheme: Scheme, config: Mapping[str, Any] = NO_CONFIG) -> Dialect:
    """Choose the dialect in which a scheme is written for a target and the config of a model.

    Raises ``ValueError`` for an unknown target, and ``CheckpointError`` if the target cannot load
    the scheme, with the reason and an alternative.
    """
    check_choice("target", target, TARGETS, "Pass the program that will load the checkpoint.")
    reason, alternative = _refusal(target, scheme)
    renamed = _renames_scales(target, config)
    if renamed and scheme.weight == MX:
        reason = _NO_INVERSE
        alternative = "FP8_DYNAMIC, or pass scheme='FP8_DYNAMIC'"
    if reason:
        raise CheckpointError(
            f"Got scheme {scheme} for target {target}.",
            f"It cannot load there: {reason}.",
            f"Convert the model with {alternative}.",
        )
    dialect = _DIALECTS.get(scheme.weight, {}).get(target, COMPRESSED_TENSORS)
    dialect = COMPRESSED_TENSORS if renamed or scheme.activation is None else dialect
    dialect.render(Spec(scheme))
    return dialect


def _renames_scales(target: str, config: Mapping[str, Any]) -> bool:
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    return target == "sglang" and any(part.get("model_type") in _RENAMED for part in parts)


def main_scheme(counts: Mapping[Scheme, int]) -> Scheme:
    """Return the scheme to announce for linear layers in general; ``counts`` has layers by scheme.

    Blocks come first, because SGLang reads the block size only there.
    """
    return max(counts, key=lambda scheme: (scheme.weight == BLOCK, counts[scheme]))


def _refusal(target: str, scheme: Scheme) -> tuple[str, str]:
    if scheme.dtype != torch.float8_e4m3fn:
        remedy = "the default dtype; codes of e4m3fnuz go back by fp8kit.recode(model, dtype)"
        return f"weights are float8_e4m3fn, not {scheme.dtype}", remedy
    if (scheme.weight, scheme.activation) not in _LOADED:
        if scheme.weight in (BLOCK, MX) and target == "vllm" and scheme.activation is None:
            return "", ""
        known = {BLOCK: "FP8_BLOCK", MX: "MXFP8"}.get(scheme.weight, "FP8_DYNAMIC")
        return f"it has no {scheme.weight} weights with {_described(scheme)}", known
    if scheme.ue8m0 and scheme.weight != BLOCK:
        return "powers of two as scales exist for blocks only", "FP8_DYNAMIC"
    return "", ""


def _described(scheme: Scheme) -> str:
    if scheme.activation is None:
        return "activations in 16 bit"
    return f"{'static' if scheme.static else 'dynamic'} {scheme.activation} activations"


def check_layers(
    target: str,
    scheme: Scheme,
    quantized: Mapping[str, tuple[int, int]],
    dense: Iterable[str],
    *,
    dialect: Dialect | None = None,
    others: Mapping[str, Scheme] | None = None,
    config: Mapping[str, Any] = NO_CONFIG,
) -> None:
    """Refuse ``quantized`` layers ``(N, K)`` of a scheme that the target could not load.

    ``others`` have other schemes. Raises ``CheckpointError`` for sides that blocks do not divide, a
    quantized output head, and layers that engines merge and that do not all have one scheme.
    """
    dense = list(dense)
    names = {*quantized, *dense, *(others or ())}
    misfits = {
        n: r for n, shape in quantized.items() if (r := misfit(target, scheme, n, shape, names))
    }
    if misfits:
        name, reason = next(iter(misfits.items()))
        other = "" if scheme.weight == ROW or is_embedding(name) else ", or use FP8_DYNAMIC"
        shapes = quantized.items()
        takers = [t for t in TARGETS if not any(misfit(t, scheme, n, s, names) for n, s in shapes)]
        other = f", or save for target={takers[-1]!r}" if takers else other
        raise CheckpointError(
            f"{len(misfits)} layers do not load in {target}, e.g. {name}.",
            f"{reason}.",
            f"Exclude these layers when converting{other}. Of a checkpoint, convert_checkpoint "
            "writes them in high precision with unfit='dequantize'.",
        )
    dialect = dialect or dialect_for(target, scheme, config)
    _check_dialect(target, scheme, dialect, any(".experts." in n for n in quantized), config)
    heads = output_heads(quantized)
    if heads and dialect is not COMPRESSED_TENSORS:
        raise CheckpointError(
            f"{heads[0]} is FP8.",
            f"{target} reads the output head of dialect {dialect.name} in high precision.",
            "Exclude it when converting, or use FP8_DYNAMIC.",
        )
    if target in ENGINES:
        left = {**dict.fromkeys(dense, "not"), **{n: str(s) for n, s in (others or {}).items()}}
        _check_merged(target, quantized, left)
        _check_experts(target, scheme, quantized, left, dialect)


def _check_dialect(
    target: str, scheme: Scheme, dialect: Dialect, experts: bool, config: Mapping[str, Any]
) -> None:
    reason = _UNREADABLE.get((dialect.name, target), "")
    if dialect in (FP8, MXFP8) and scheme.weight != TENSOR and _renames_scales(target, config):
        reason = _NO_INVERSE
    if dialect is COMPRESSED_TENSORS and scheme.weight == MX and target == "sglang":
        reason = "it has no MX in this dialect"
    if dialect is COMPRESSED_TENSORS and scheme.weight in (BLOCK, MX) and experts:
        if target == "transformers":
            reason = f"it does not merge experts of {scheme.weight} weights in this dialect"
    if reason:
        raise CheckpointError(
            f"Got {scheme} in dialect {dialect.name} for target {target}.",
            f"It cannot load there: {reason}.",
            f"Write dialect {dialect_for(target, scheme, config).name}.",
        )


def check_cache(dialect: Dialect, kv_scales: str) -> None:
    """Refuse scales of the KV cache per head in a dialect from which engines cannot load them."""
    if kv_scales == "attn_head" and dialect is not COMPRESSED_TENSORS:
        raise CheckpointError(
            f"The KV cache has scales per head, to write as {dialect.name}.",
            "Engines load them from compressed-tensors only.",
            f"Write dialect {COMPRESSED_TENSORS.name}.",
        )


def is_embedding(name: str) -> bool:
    """Return whether a layer of this name is a table that is looked up, not a linear layer."""
    return _EMBEDDING.fullmatch(name) is not None


def output_heads(names: Iterable[str]) -> list[str]:
    """List the output heads among layers: a config has to name them if they are quantized."""
    return [n for n in names if n.rpartition(".")[2] == "lm_head"]


def misfit(
    target: str, scheme: Scheme, name: str, shape: tuple[int, int], names: Collection[str] = ()
) -> str:
    """Return why the target cannot load a layer of this name and shape; empty if it can.

    ``names`` of all linear layers tell one kind of Mamba mixer from another.
    """
    rows, cols = shape
    parent, _, last = name.rpartition(".")
    if is_embedding(name):
        return f"{target} reads embeddings in high precision"
    if target == "vllm" and _is_dense_mixer(parent, last, names):
        return f"{target} loads {last} of this kind of Mamba mixer dense only"
    if target in ENGINES and scheme.weight == BLOCK and last == "query_key_value":
        if rows % 128 or not _QKV_IN_ORDER.search(parent):
            return f"{target} cuts query_key_value by heads, across the edges of 128x128 blocks"
    if scheme.weight == MX and cols % 32:
        return f"MX groups have 32 columns; it has {cols}"
    if scheme.weight != BLOCK or (rows % 128 == 0 and cols % 128 == 0):
        return ""
    if target == "transformers":
        return f"{target} loads 128x128 blocks without ragged edges only; it is {rows}x{cols}"
    if cols % 128:
        return f"{target} needs 128 to divide the columns of 128x128 blocks; it has {cols}"
    group = MERGED_BY_ENGINES.get(last, ())
    if group and not (target == "vllm" and last == group[-1]):
        merged = ", ".join(group)
        return f"{target} merges {merged} and needs 128 to divide their rows; it has {rows}"
    return ""


def _is_dense_mixer(parent: str, last: str, names: Collection[str]) -> bool:
    if not _STATE_SPACE.search(parent):
        return False
    return any(f"{parent}.{mark}" in names and last in d for mark, d in _DENSE_MIXERS.items())


def _check_merged(
    target: str, quantized: Mapping[str, tuple[int, int]], left: Mapping[str, str]
) -> None:
    for name in quantized:
        for other in merged_siblings(name):
            if other in left:
                group = MERGED_BY_ENGINES[name.rpartition(".")[2]]
                patterns = [f"*.{sibling}" for sibling in group]
                raise CheckpointError(
                    f"{name} is FP8 and {other} is {left[other]}.",
                    f"{target} merges {', '.join(group)} into one layer of one kind.",
                    f"Include or exclude them together, as exclude={patterns} does, or save "
                    "for target='transformers'; fp8kit.plan gives the reason of each layer.",
                )


def _check_experts(
    target: str,
    scheme: Scheme,
    quantized: Mapping[str, tuple[int, int]],
    left: Mapping[str, str],
    dialect: Dialect,
) -> None:
    experts = [n for n in quantized if ".experts." in f".{n}"]
    modules = {n.rpartition("experts.")[0] for n in experts}
    for name in sorted(left):
        if ".experts." in f".{name}" and name.rpartition("experts.")[0] in modules:
            raise CheckpointError(
                f"{experts[0]} is FP8 and {name} is {left[name]}.",
                f"{target} stacks all experts of a layer into one of one kind.",
                "Include or exclude all experts of a layer together, or save for "
                "target='transformers'; fp8kit.plan gives the reason of each layer.",
            )
    kind = _LOADED.get((scheme.weight, scheme.activation))
    if experts and kind != "experts" and dialect is not AUTOFP8:
        raise CheckpointError(
            f"{experts[0]} and {len(experts) - 1} more experts are {scheme}.",
            f"{target} has no experts of {scheme.weight} weights with {_described(scheme)} in "
            f"{dialect.name}.",
            "Convert the model with FP8_DYNAMIC, or exclude the experts.",
        )
