"""Collect the tensors of a module as they are written to disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.checkpoint.cache_scales import held_cache_scales
from fp8kit.checkpoint.dialects import Dialect, JsonObject
from fp8kit.checkpoint.dialects.base import TEXT_PARTS
from fp8kit.checkpoint.expert_splitting import ExpertLayer, own_names, split_experts, tensors_of
from fp8kit.checkpoint.schema.naming import MARKERS, dense_stacks, named, sort_names
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import E4M3FN, FP8_FORMATS, TENSOR, Scheme
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.mx_forms import stored_weight

AS_CONV1D = (
    "held as [K, N] by Conv1D of Transformers, as which no engine loads FP8; fp8kit.convert takes "
    "it once the model is loaded"
)
_WRAPPED = ".base_layer"  # where PEFT puts a layer that has an adapter
_CONFIG_MIXIN = ("diffusers.configuration_utils", "ConfigMixin")
_QUANTIZATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Exported:
    """The content of a model's checkpoint, under the names there; a tied tensor appears once.

    ``dense`` names linear layers in high precision, both as in the model and as in the checkpoint;
    ``config`` has no quantization config; ``whole_stacks`` names FP8 stacks that are not split.
    """

    tensors: dict[str, Tensor]
    dense: list[str]
    config: JsonObject = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    experts: dict[str, ExpertLayer] = field(default_factory=dict)
    whole_stacks: list[str] = field(default_factory=list)


def export_module(model: nn.Module) -> Exported:
    """Export any module under the names of its ``state_dict``; one of diffusers with its config."""
    layers, whole_stacks = split_experts(model)
    taken_apart = own_names(model, whole_stacks)
    tensors = {n: t for n, t in untied(model, set()).items() if n not in taken_apart}
    tensors |= tensors_of(layers) | held_cache_scales(model)
    dense, config = unquantized(model, tensors), _config_of(model)
    return Exported(tensors, dense, config, experts=layers, whole_stacks=whole_stacks)


def _config_of(model: Any) -> JsonObject:
    """Return what diffusers builds the model from; empty for one of another library."""
    classes = type(model).__mro__
    known = any((c.__module__, c.__name__) == _CONFIG_MIXIN for c in classes)
    config: JsonObject = json.loads(model.to_json_string()) if known else {}
    return config


def untied(model: nn.Module, last: set[str]) -> dict[str, Tensor]:
    """Return the ``state_dict`` with each Parameter once, under its first name.

    A name in ``last`` is kept only if its tensor has no other. Raises ``CheckpointError`` if a
    tensor has no data here: on meta, or sharded over devices.
    """
    state = model.state_dict(keep_vars=True)
    refuse_changed(model, state)
    odd = {n: kind for n, t in state.items() if (kind := _unheld(t))}
    if odd:
        name = next(iter(odd))
        raise CheckpointError(
            f"{name} in the state_dict is {odd[name]}.",
            "safetensors files hold plain tensors only.",
            "Keep such state outside of the state_dict (get_extra_state, or a buffer with "
            "persistent=False), or as plain tensors. Of layers that another library quantized, "
            "save the dense weights, and quantize them again once they are loaded.",
        )
    absent = [n for n, t in state.items() if t.is_meta or is_distributed(t)]
    if absent:
        raise CheckpointError(
            f"{', '.join(absent[:5])} {'is' if len(absent) == 1 else 'are'} on the meta device"
            " or sharded over several.",
            "Saving needs the values of all tensors in this process.",
            "Load the weights first, or gather them. Of a model that accelerate offloads, call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first.",
        )
    owner: dict[int, str] = {}
    for name in sorted(state, key=lambda n: n in last):
        owner.setdefault(id(state[name]), name)
    return as_stored(model, {n: t.detach() for n, t in state.items() if owner[id(t)] == n})


def as_stored(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a ``state_dict`` with rebased weights turned back into MX weights, on the CPU.

    Codes of another encoding stay: no file holds them, and the check of a target names the way out.
    """
    found = dict(state)
    for name, layer in model.named_modules():
        if not isinstance(layer, Fp8Linear | ExpertTensors):
            continue
        if not layer.scheme.rebased or layer.scheme.dtype != E4M3FN.dtype:
            continue
        if isinstance(layer, Fp8Linear):
            if found.pop(named(name, "weight_exponents"), None) is not None:
                q = stored_weight(layer).to("cpu")
                found[named(name, "weight")], found[named(name, "weight_scale")] = q.data, q.scale
        else:
            for stack in layer.stacks.names:
                if found.pop(named(name, f"{stack}_exponents"), None) is not None:
                    q = layer.stored(stack).to("cpu")
                    found |= {named(name, stack): q.data, named(name, f"{stack}_scale"): q.scale}
    return found


def refuse_changed(model: nn.Module, state: Mapping[str, object]) -> None:
    """Refuse a model whose hooks change its ``state_dict``, which readers of files do not undo.

    ``state`` is that of ``keep_vars=True``. Hooks may rename tensors, so that nobody could tell
    which layer a file means, or change values. Casts and copies are no changes.
    """
    own: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    own |= model.named_parameters(remove_duplicate=False)
    odd = [n for n in state if n not in own and not n.endswith("_extra_state")]
    other = [n for n, t in state.items() if n in own and not is_copy(t, own[n])]
    if odd or other:
        said = "are no tensors of it" if odd else "have other values than its tensors"
        raise CheckpointError(
            f"{some_of(odd or other)} in the state_dict of {type(model).__name__} {said}.",
            "A checkpoint names each tensor after the module that holds it, and has its values.",
            "Remove the hooks that change them, or use torch.save(model.state_dict()) and fill "
            "a converted model by its load_state_dict.",
        )


def is_copy(tensor: object, own: Tensor) -> bool:
    """Return whether a value is a tensor itself, a copy or a cast of it, or no tensor at all."""
    if tensor is own or not isinstance(tensor, Tensor):
        return True
    if tensor.shape != own.shape:
        return False
    return tensor.is_meta or own.is_meta or torch.equal(tensor, own.to(tensor))


def refuse_reserved(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a model whose own tensors have names that every reader takes for scales."""
    found = sort_names({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()})
    own = [p for p in found.layers.values() if not p.weight]
    names = {*found.outputs, *(n for p in own for n in (*p.scales, *p.input_scales))}
    held = held_cache_scales(model)
    for scale, on_disk in found.kv_scales.items():
        # a tensor of one number under the standard name is loaded back under that name
        names |= {n for n in on_disk if n != scale or tuple(tensors[n].shape) != (1,)} - held.keys()
    names |= {n for n in tensors if n.rpartition(".")[2] in MARKERS}
    if names:
        raise CheckpointError(
            f"{type(model).__name__} has {some_of(sorted(names))} of its own.",
            "In FP8 checkpoints these are names of scales, and readers take them for scales.",
            "Rename them in the model.",
        )


def unquantized(model: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """List what a config must ignore: dense linear layers, and what engines run as linear layers.

    The latter are two-dimensional weights of other modules, such as routers and single experts, and
    stacks of experts; embeddings are not among them.
    """
    embedded = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    found = set(dense_linears(model))
    for name, t in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and t.dim() == 2 and t.dtype not in FP8_FORMATS:
            found |= {layer} - ({layer} if t.data_ptr() in embedded else set())
    return sorted(found | unquantized_stacks(tensors))


def unquantized_stacks(tensors: Mapping[str, Tensor]) -> set[str]:
    """Name the modules of experts with high-precision stacks, as the checkpoint names them."""
    dense = {n: tuple(t.shape) for n, t in tensors.items() if t.dtype not in FP8_FORMATS}
    return dense_stacks(dense, tensors.keys() - dense.keys())


def dense_linears(model: nn.Module) -> list[str]:
    """List the names of the linear layers that are not FP8."""
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [n for n, m in linears if not isinstance(m, Fp8Linear)]


def refuse_adapters(layers: Iterable[str], remedy: str) -> None:
    """Refuse to save layers of these names if PEFT has put adapters around them."""
    wrapped = [n.removesuffix(_WRAPPED) for n in layers if n.endswith(_WRAPPED)]
    if wrapped:
        raise CheckpointError(
            f"Adapters are attached to {some_of(wrapped)}.",
            "A checkpoint of the base model has the base layers alone.",
            remedy,
        )


def refuse_transposed(layers: Mapping[str, Fp8Linear]) -> None:
    """Refuse layers made of ``Conv1D``: checkpoints hold [K, N], which no target reads as FP8."""
    names = [name for name, layer in layers.items() if layer.transposed]
    if names:
        raise CheckpointError(
            f"{some_of(names)} come from Conv1D of Transformers, which holds [K, N].",
            "Transformers loads FP8 weights into nn.Linear only, and vLLM's GPT-2 transposes "
            "what it loads without its scales.",
            "Keep the state_dict (torch.save, load_state_dict into a converted model), or save "
            "the dense model and convert it after loading.",
        )


def on_disk(name: str, tensor: Tensor, dialect: Dialect, scheme: Scheme) -> tuple[str, Tensor]:
    """Return a tensor under the name and in the shape that a dialect writes.

    The scheme distinguishes a per-tensor scale from that of a single block or row, of equal shape.
    """
    layer, _, kind = name.rpartition(".")
    per_tensor = kind == "input_scale" or (kind == "weight_scale" and scheme.weight == TENSOR)
    if per_tensor and tuple(tensor.shape) == (1, 1):
        tensor = tensor.reshape(dialect.tensor_scale)
    return named(layer, dialect.suffixes.get(kind, kind)), tensor


def with_quantization(
    config: JsonObject, quantization: JsonObject, dtype: torch.dtype, heads: Sequence[str] = ()
) -> JsonObject:
    """Return a ``config.json`` with this dtype, and this quantization config in place of any other.

    That of a model of diffusers gets no dtype: its class could not be built from it. If output
    ``heads`` are FP8, it unties them from embeddings: engines would skip the codes.
    """
    untied = {"tie_word_embeddings": False} if heads else {}
    merged = {k: v for k, v in config.items() if k not in (*_QUANTIZATION, "torch_dtype")} | untied
    for part in TEXT_PARTS:
        if isinstance(text := merged.get(part), dict):
            merged[part] = {k: v for k, v in text.items() if k not in _QUANTIZATION} | untied
    if "_class_name" not in merged:  # diffusers passes what it does not know to the class
        merged["dtype"] = str(dtype).removeprefix("torch.")
    return {**merged, "quantization_config": quantization}


def _unheld(held: object) -> str:
    """Describe a value that no safetensors file can hold; empty if a file can."""
    if not isinstance(held, Tensor):
        return f"{type(held).__name__}, not a tensor"
    if is_traceable_wrapper_subclass(held) and not is_distributed(held):
        return f"{type(held).__name__}, made of other tensors"
    return "" if held.layout == torch.strided else f"a tensor of layout {held.layout}"


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``, of which each process holds a part."""
    # by name: importing torch.distributed.tensor takes longer than everything else here together
    return any(c.__name__ == "DTensor" for c in type(tensor).__mro__)
