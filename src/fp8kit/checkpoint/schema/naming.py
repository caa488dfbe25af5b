"""What a tensor is, by its name: a weight, one of its scales, or a scale of the KV cache.

Exporters use a dozen names for four things. All of them are read in every dialect; which name
belongs to which dialect matters only when writing.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fp8kit.checkpoint.dialects import Kinds, comfyui
from fp8kit.conversion.model_families import MIXTRAL_PARTS
from fp8kit.formats import FP8_FORMATS

CODES = (*FP8_FORMATS, torch.float8_e5m2fnuz)
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv", "scale_weight", "qscale_weight", "scale")
_INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act", "scale_input")
_OURS = dict.fromkeys(_WEIGHT_SCALES, "weight_scale") | dict.fromkeys(_INPUT_SCALES, "input_scale")
# other parameters have these names too: they mean a scale only beside an FP8 weight
_AMBIGUOUS = ("scale",)
# llm-compressor writes zeros in FP8 beside the scales of symmetric attention
_ZEROS = ("q_zero_point", "k_zero_point", "v_zero_point")
MARKERS = (comfyui.MARKER, comfyui.ENTRY, *_ZEROS)
_TORCHAO = re.compile(r"(?P<layer>.*\.)?_(?P<kind>\w+?)_(?P<part>qdata|scale|act_quant_scale)")
_STACK_SCALES = {
    "_scale": "scale",
    "_scale_inv": "scale",
    "_weight_scale": "scale",
    "_weight_scale_inv": "scale",
    "_input_scale": "input_scale",
    "_activation_scale": "input_scale",
}
# each gives the attention module, and k or v (both if empty), or q where attention itself is
# quantized
_KV_SCALES = (
    re.compile(r"(?P<module>.*\.)?(?:[qkv]|qkv|qkqkv)_proj\.(?P<kv>[qkv])_scale"),
    re.compile(r"(?P<module>.*\.)?(?P<kv>[qkv])_proj\.output_scale"),
    re.compile(r"(?P<module>.*\.)?(?P<kv>[kv])_fake_quantizer\.qscale_act"),
    re.compile(r"(?P<module>.*\.self_attn\.)attn\.(?P<kv>[qkv])_scale"),
    re.compile(r"(?P<module>.*\.)?(?P<kv>[kv])_cache\.scale"),
    re.compile(r"(?P<module>.*\.)?(?P<kv>)kv_scale"),
    re.compile(r"(?P<module>.*\.)?(?P<kv>[qkv])_scale"),
)
_EXPERTS = re.compile(r"(?P<experts>(?:.*\.)?experts)(?:\.|$)")
# models whose experts engines know as block_sparse_moe.experts.0.w1; exporters that walk the
# modules of Transformers write mlp.experts.0.gate_proj
_MIXTRAL_LIKE = ("mixtral", "phimoe", "minimax", "minimax_m2")
_MIXTRAL = re.compile(
    r"(?P<block>.*\blayers\.\d+\.)(?:mlp|block_sparse_moe)\."
    r"(?P<rest>(?P<experts>experts\.(?:\d+\.)?)(?P<part>\w+)(?P<kind>.*)"
    r"|(?P<router>gate|router)\..*)"
)
# Step 3.5 keeps its stacks of experts beside the router; vLLM and SGLang make a module of them
_STEP = re.compile(r"(?P<block>(?:.*\.)?)moe\.(?:gate|up|down)_proj\.weight")
# GraniteMoE keeps its stacks of experts beside the router, in modules of these names
_BARE_STACKS = ("input_linear", "output_linear")


@dataclass(slots=True)
class Parts:
    """The tensors of one layer, as names on disk; a sound layer has one of each at most.

    ``weight`` is empty if the codes are missing; the codes of a ``stack`` are a parameter of their
    own, such as ``experts.gate_up_proj``.
    """

    weight: str = ""
    scales: list[str] = field(default_factory=list)
    input_scales: list[str] = field(default_factory=list)
    stack: bool = False


@dataclass(slots=True)
class Names:
    """Every tensor of a checkpoint, sorted by what it is.

    ``kv_scales`` maps our names, ``X.k_scale``, ``X.v_scale`` or ``X.q_scale``, to those on disk;
    ``plain`` tensors have nothing to do with FP8, ``stray`` ones are FP8 and no weight of a layer.
    ``outputs`` are scales of the outputs of FP8 layers, which Quark writes and nothing reads.
    """

    layers: dict[str, Parts] = field(default_factory=dict)
    kv_scales: dict[str, list[str]] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    stray: list[str] = field(default_factory=list)


def named(layer: str, kind: str) -> str:
    """Name a tensor of a layer; the layer that is the whole model has no name."""
    return f"{layer}.{kind}" if layer else kind


def layer_and_kind(name: str, held: Container[str]) -> tuple[str, str]:
    """Split the name of a tensor into its layer, or stack of experts, and our name of its kind.

    Scales may have their name in any dialect, unless ``held``, the names of a model, has it too.
    """
    layer, _, kind = name.rpartition(".")
    if name in held or kind in _AMBIGUOUS:
        return layer, kind
    if kind in _OURS:
        return layer, _OURS[kind]
    for ending, role in _STACK_SCALES.items():
        if name.endswith(ending) and (stack := name.removesuffix(ending)) in held:
            return stack, _OURS[role]
    return layer, kind


def experts_of(name: str) -> str:
    """Return the module of experts, as engines name it, of a layer or tensor; empty if none."""
    found = _EXPERTS.match(name)
    if found:
        return found["experts"]
    parent, _, last = name.removesuffix(".weight").rpartition(".")
    return named(parent, "experts") if last in _BARE_STACKS else ""


def engine_name(name: str, model_type: str) -> str:
    """Return the name by which engines and Transformers load a tensor or layer.

    Only experts and routers of Mixtral and similar models have another name.
    """
    found = _MIXTRAL.fullmatch(name) if model_type in _MIXTRAL_LIKE else None
    if found is None:
        return name
    rest = found["rest"]
    if found["router"]:
        rest = f"gate.{rest.partition('.')[2]}"
    elif found["experts"] != "experts.":  # a stack keeps its name, which says how it is divided
        part = MIXTRAL_PARTS.get(found["part"], found["part"])
        rest = f"{found['experts']}{part}{found['kind']}"
    return f"{found['block']}block_sparse_moe.{rest}"


def dense_stacks(dense: Mapping[str, tuple[int, ...]], coded: Iterable[str]) -> set[str]:
    """Name the modules of experts whose stacks are in high precision."""
    found = set()
    for name, shape in dense.items():
        if len(shape) == 3 and (step := _STEP.fullmatch(name)):
            found |= {f"{step['block']}{home}.experts" for home in ("moe", "mlp")}
        inside = name.removeprefix(f"{experts_of(name)}.")
        if len(shape) == 3 or (inside != name and len(shape) == 2 and not inside[:1].isdigit()):
            found.add(experts_of(name))
    return found - {experts_of(n) for n in coded} - {""}


def sort_names(kinds: Kinds) -> Names:
    """Sort the tensors of a quantized checkpoint by what they are."""
    found = Names()
    for name, (dtype, shape) in sorted(kinds.items()):
        if dtype in CODES:
            _add_codes(found, name, len(shape))
    for name, (dtype, _) in sorted(kinds.items()):
        if dtype in CODES:
            continue
        if not (_add_scale(found, name, kinds) or _add_cache(found, name)):
            layer, _, kind = name.rpartition(".")
            if kind not in MARKERS:
                output = kind == "output_scale" and layer in found.layers
                (found.outputs if output else found.plain).append(name)
    return found


def _add_codes(found: Names, name: str, dims: int) -> None:
    layer, _, kind = name.rpartition(".")
    subclass = _TORCHAO.fullmatch(name)
    stack = kind != "weight"
    if subclass and subclass["part"] == "qdata":
        layer, stack = (subclass["layer"] or "").rstrip("."), subclass["kind"] != "weight"
        layer = named(layer, subclass["kind"]) if stack else layer
    elif stack and dims == 3:
        layer = name
    elif stack:
        found.stray += [] if kind in MARKERS else [name]
        return
    if layer in found.layers:
        found.stray.append(name)
    else:
        found.layers[layer] = Parts(name, stack=stack)


def _add_scale(found: Names, name: str, kinds: Kinds) -> bool:
    """Record a scale under its layer, even without FP8 codes, which is reported as damage later."""
    subclass = _TORCHAO.fullmatch(name)
    if subclass and subclass["part"] != "qdata":
        layer = (subclass["layer"] or "").rstrip(".")
        if subclass["kind"] != "weight":
            layer = named(layer, subclass["kind"])
        if subclass["kind"] == "weight" or layer in found.layers:
            parts = found.layers.setdefault(layer, Parts())
            (parts.scales if subclass["part"] == "scale" else parts.input_scales).append(name)
            return True
    for ending, role in _STACK_SCALES.items():
        stack = found.layers.get(name.removesuffix(ending)) if name.endswith(ending) else None
        if stack is not None and stack.stack:
            (stack.scales if role == "scale" else stack.input_scales).append(name)
            return True
    layer, _, kind = name.rpartition(".")
    if kind in _AMBIGUOUS and layer in kinds:
        layer = layer.removesuffix(".weight")
    is_quantizer = kind == "qscale_act" and layer.endswith("_fake_quantizer")
    if kind in (*_WEIGHT_SCALES, *_INPUT_SCALES) and not is_quantizer:
        exponents = kinds[name][0] == torch.float8_e8m0fnu  # a scale, whatever it belongs to
        if kind in _AMBIGUOUS and layer not in found.layers and not exponents:
            return False
        parts = found.layers.setdefault(layer, Parts())
        (parts.scales if kind in _WEIGHT_SCALES else parts.input_scales).append(name)
        return True
    return False


def _add_cache(found: Names, name: str) -> bool:
    for pattern in _KV_SCALES:
        match = pattern.fullmatch(name)
        if match:
            module = match["module"] or ""
            for kv in match["kv"] or "kv":
                found.kv_scales.setdefault(f"{module}{kv}_scale", []).append(name)
            return True
    return False


def cache_strategy(shapes: Iterable[tuple[int, ...]]) -> str:
    """Return the granularity of the scales of a KV cache, in the word of compressed-tensors.

    That is ``"attn_head"`` if one has a number per head, else ``"tensor"``; empty without scales.
    """
    found = {"attn_head" if len(shape) == 3 else "tensor" for shape in shapes}
    return min(found, default="")


def standard_names(layer: str, stack: bool) -> Mapping[str, str]:
    """Return our names of the tensors of a layer; scales of a stack are named after its codes."""
    kinds = ("weight", "weight_scale", "input_scale")
    if stack:
        return dict(zip(kinds, (layer, f"{layer}_scale", f"{layer}_input_scale"), strict=True))
    return {kind: named(layer, kind) for kind in kinds}
