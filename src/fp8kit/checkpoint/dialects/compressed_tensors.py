"""compressed-tensors: ``float-quantized`` and ``mxfp8-quantized``, as llm-compressor writes them.

What is written is the union of what vLLM (``format``, ``type``) and Transformers
(``quantization_status``, ``lm_head`` in ``ignore``) need to load it; entries that
``QuantizationArgs`` does not know are errors in both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source, Spec
from fp8kit.conversion.model_families import JOINED, OF_DELTA_NET
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, Scheme

_ARGS: JsonObject = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: dict[GroupShape, JsonObject] = {
    TENSOR: {"strategy": "tensor"},
    ROW: {"strategy": "channel"},
    BLOCK: {"strategy": "block", "block_structure": [128, 128]},
    MX: {"strategy": "group", "group_size": 32},
}
_ACTIVATIONS: dict[tuple[GroupShape, bool], JsonObject] = {
    (TENSOR, True): {"strategy": "tensor", "dynamic": False},
    (TENSOR, False): {"strategy": "tensor", "dynamic": True},
    (ROW, False): {"strategy": "token", "dynamic": True},
    (GROUP128, False): {"strategy": "group", "group_size": 128, "dynamic": True},
    (MX, False): {"strategy": "group", "group_size": 32, "dynamic": True},
}
# readers recognize MX by these entries, and read its scales as bytes
_MX_BYTES: JsonObject = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_FLOAT, _MX = "float-quantized", "mxfp8-quantized"
_FORMATS = (_FLOAT, "naive-quantized", _MX, "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_NVFP4: JsonObject = {"strategy": "tensor_group", "group_size": 16, "num_bits": 4}
# these describe how the values were found; reading the values does not need them
_HISTORY = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")

# merged layers, and their parts on disk
_MERGED_PARTS = {name: JOINED[name][0] for name in ("gate_up_proj", "qkv_proj")} | OF_DELTA_NET
_EXPERTS = re.compile(r"(?P<experts>(?:.*\.)?experts)(?:\.\d+\..+)?")
_OUTER = re.compile(r"^(model\.|language_model\.)+")


def _detect(source: Source) -> bool:
    others = source.has("_weight_qdata", ".qscale_weight", ".scale_weight")
    return source.method == "compressed-tensors" and not others


def _parse(source: Source) -> Announcement:
    found = source.quantization
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not (groups or found.get("kv_cache_scheme")):
        raise base.invalid("config_groups", groups, "an object with at least one group")
    ignore = base.strings(found, "ignore")
    attention = [name for name, group in groups.items() if _is_attention(name, group)]
    read = [
        (_targets(name, group), _group(name, group, found))
        for name, group in groups.items()
        if name not in attention
    ]
    if not read and groups:
        raise base.invalid("config_groups", groups, "an object with a group of linear layers")
    sparsity = base.objects(found, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise base.invalid("sparsity_config", sparsity, "absent or dense")
    cache = "The config quantizes the KV cache; only fp8kit.Fp8Cache uses its scales."
    quantized = "The config quantizes attention; its scales are not used."
    said = {cache: groups and found.get("kv_cache_scheme"), quantized: attention}
    unread = tuple(sentence for sentence, reason in said.items() if reason)

    # in the order in which the library tries them, which is not that of the groups
    pairs = ((target, group) for targets, group in read for target in targets)
    known = dict(sorted(pairs, key=itemgetter(0)))
    classes = [target for target in known if target.isidentifier()]

    def format_of(layer: str) -> Format:
        for name in _names_of(layer, source.config):
            patterns = (group for target, group in known.items() if _is_pattern_of(target, name))
            if found := known.get(name) or next(patterns, None):
                return found
        kind = "Embedding" if base.is_embedding(layer) else "Linear"
        if classes:
            return known[next(c for c in (kind, "Linear", "Module", *classes) if c in known)]
        if len({*known.values()}) > 1:
            wanted = f"groups one of which is for {layer}, which is FP8"
            raise base.invalid("config_groups with targets", [*known], wanted)
        return next(iter(known.values()), Format())

    return Announcement(format_of, ignore, unread)


def _is_attention(name: str, group: Any) -> bool:
    """Return whether a group quantizes the inputs of attention modules, which have no weights."""
    targets = _targets(name, group)
    return (
        bool(targets)
        and not group.get("weights")
        and all(target.endswith("Attention") or "attn" in target for target in targets)
    )


def _names_of(layer: str, config: JsonObject) -> tuple[str, ...]:
    """Return the name of a layer in its file, then others that it may have in Transformers' model.

    Groups use names of the model in memory; models of several parts are saved under other names.
    """
    if "text_config" not in config:
        return (layer,)
    tail = _OUTER.sub("", layer)
    if tail.startswith("layers."):
        outer = ("model.language_model.", "language_model.model.", "model.")
        return (layer, *(prefix + tail for prefix in outer))
    tail = tail.replace(".vision_model.", ".", 1)
    return layer, tail, f"model.{tail}"


def _is_pattern_of(target: str, layer: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], layer) is not None


def _targets(name: str, group: Any) -> tuple[str, ...]:
    if not isinstance(group, dict):
        raise base.invalid(f"config_groups.{name}", group, "an object")
    targets = base.strings(group, "targets")
    for target in targets:
        try:
            re.compile(target[3:] if target.startswith("re:") else "")
        except re.error as error:
            key = f"config_groups.{name}.targets"
            raise base.invalid(key, target, "names or regular expressions") from error
    return targets


def _group(name: str, group: JsonObject, found: JsonObject) -> Format:
    layout = group.get("format") or found.get("format") or _FLOAT
    if layout not in (*_FORMATS, "mixed-precision"):
        raise base.invalid("format", layout, " or ".join(_FORMATS), base.OTHER_FORMAT)
    if group.get("output_activations") is not None:
        key = f"config_groups.{name}.output_activations"
        raise base.invalid(key, group["output_activations"], "null")
    weights = _args(name, group, "weights")
    inputs = _args(name, group, "input_activations")
    if isinstance(weights.get("block_structure"), str):  # written so by early exporters
        sides = weights["block_structure"].split("x")
        weights["block_structure"] = [int(n) for n in sides if n.isdecimal() and len(n) < 6]
    if weights == {**_ARGS, **_WEIGHTS[MX], "num_bits": 4, "dynamic": False}:
        return Format(MX, MX)  # FP4 values are FP8 values
    if weights == {**_ARGS, **_NVFP4, "dynamic": False}:
        return Format()  # its tensors tell what it became when it was read
    known = _WEIGHTS | _of_any_size(f"config_groups.{name}.weights", weights)
    same = (g for g, w in known.items() if {**_ARGS, **w, "dynamic": False} == weights)
    weight = next(same, None)
    if weight is not None and not inputs:
        return Format(weight, weight_only=True)
    groups = _of_any_size(f"config_groups.{name}.input_activations", inputs)
    dynamic = {(g, False): {**x, "dynamic": True} for g, x in groups.items() if g.rows == 1}
    for (activation, static), x in (_ACTIVATIONS | dynamic).items():
        if weight is not None and {**_ARGS, **x} == inputs:
            return Format(weight, activation, static)
    raise CheckpointError(
        f"Config group {name} has weights {weights} and input_activations {inputs or None}.",
        "This version reads 8-bit symmetric floats: weights by tensor, channel, block or group, "
        "activations static by tensor, or dynamic.",
        base.OTHER_FORMAT,
    )


def _of_any_size(key: str, args: JsonObject) -> dict[GroupShape, JsonObject]:
    """Return the granularity of blocks or groups with what says it, whatever their sides are."""
    blocks = args.get("strategy") == "block"
    if blocks and (shape := base.block_shape(args, "block_structure")):
        return {shape: {"strategy": "block", "block_structure": [shape.rows, shape.cols]}}
    if args.get("strategy") != "group":
        return {}
    size = args.get("group_size")
    if type(size) is not int or not 0 < size <= 2**20:
        raise base.invalid(f"{key}.group_size", size, "a positive integer")
    return {GroupShape(1, size): {"strategy": "group", "group_size": size}}


def _args(name: str, group: JsonObject, key: str) -> JsonObject:
    args = group.get(key)
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise base.invalid(f"config_groups.{name}.{key}", args, "an object or null")
    known = {k: v for k, v in args.items() if v is not None and k not in _HISTORY}
    return {"symmetric": True, "dynamic": False, **known}


def _render(spec: Spec) -> JsonObject:
    schemes: dict[Scheme, list[str]] = {spec.scheme: ["Linear"]}
    for layer, scheme in sorted(spec.others.items()):
        schemes.setdefault(scheme, []).append(layer)
    # SGLang's Mixtral looks its layers up without the prefix "model."
    bare = any(".block_sparse_moe." in name for name in (*spec.ignore, *spec.others))
    # SGLang looks a merged layer up by its own name before it applies the group of Linear
    merged = {s: base.with_merged(names, _MERGED_PARTS) for s, names in schemes.items()}
    named = {s: sorted(_asked_for(names, bare)) for s, names in merged.items()}
    layouts = [_MX if s.weight == MX else _FLOAT for s in schemes]
    mixed = len(set(layouts)) > 1
    groups = {
        f"group_{i}": {
            **_rendered(scheme),
            "targets": targets,
            **({"format": layout} if mixed else {}),
        }
        for i, ((scheme, targets), layout) in enumerate(zip(named.items(), layouts, strict=True))
    }
    cache = {**_ARGS, "strategy": spec.kv_scales, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if mixed else layouts[0],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(_asked_for(base.listed(spec.ignore), bare) - spec.others.keys()),
        "kv_cache_scheme": cache if spec.kv_scales else None,
    }


def _asked_for(names: set[str], bare: bool) -> set[str]:
    """Add the names that vLLM and SGLang look up for experts, and ``bare`` ones without "model.".

    For experts they look up three layers of the first one, by these names whatever the model calls
    them, and never a stack. Models of vLLM rename listed names as they rename weights, but not
    patterns: names serve models that move their layers, the pattern those that rename projections.
    """
    homes = {m["experts"] for name in names if (m := _EXPERTS.fullmatch(name))}
    if bare:
        homes |= {home.removeprefix("model.") for home in homes}
        names = names | {n.removeprefix("model.") for n in names if not _EXPERTS.fullmatch(n)}
    names = names | {f"{h}.0.{part}_proj" for h in homes for part in ("gate", "up", "down")}
    return names | {f"re:{re.escape(h)}\\..*" for h in homes}


def _rendered(scheme: Scheme) -> Mapping[str, Any]:
    weights = _WEIGHTS.get(scheme.weight)
    none = scheme.activation is None
    inputs = {} if none else _ACTIVATIONS.get((scheme.activation or ROW, scheme.static))
    if weights is None or inputs is None or scheme.ue8m0 or scheme.dtype != torch.float8_e4m3fn:
        raise CheckpointError(
            f"Scheme {scheme} has {scheme.weight} weights and {scheme.activation} activations"
            f"{', powers of two as scales' if scheme.ue8m0 else ''}.",
            "compressed-tensors cannot hold it.",
            "Convert with FP8_DYNAMIC, FP8_TENSOR, FP8, FP8_BLOCK, MXFP8 or FP8_WEIGHT_ONLY.",
        )
    extra = _MX_BYTES if scheme.weight == MX else {}
    return {
        "weights": {**_ARGS, **weights, **extra, "dynamic": False},
        "input_activations": {**_ARGS, **inputs, **extra} if inputs else None,
    }


COMPRESSED_TENSORS = Dialect("compressed-tensors", _detect, _parse, _render)
