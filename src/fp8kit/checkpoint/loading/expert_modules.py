"""Which modules of experts become FP8 while a checkpoint loads, and what they then hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.checkpoint.loading.merged_weights import holds, is_one_each, joined_scheme, other_scheme
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.merged_names import Shapes, find
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.experts import recognize
from fp8kit.formats import ROW, TENSOR, GroupShape, Scheme
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.library_experts import empty_experts, held_tensors


@dataclass(frozen=True, slots=True)
class Experts:
    """The FP8 form that a module of experts gets."""

    stacks: ExpertStacks
    scheme: Scheme

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Return what the module will hold, on meta."""
        return held_tensors(module, self.stacks, self.scheme)

    def empty(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Turn the module into an FP8 one on meta, in place."""
        empty_experts(module, self.stacks, self.scheme, dtype)


def experts_in_checkpoint(
    model: nn.Module, checkpoint: Checkpoint, shapes: Shapes
) -> dict[str, Experts]:
    """Find the modules of experts whose stacks a checkpoint holds in FP8, all of one scheme.

    Returns what dense modules become, by name; stacks of other modules are decoded. Raises
    ``CheckpointError`` if the model has FP8 experts there, of another scheme.
    """
    parts: dict[str, dict[str, list[Layer]]] = defaultdict(lambda: defaultdict(list))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, layer in checkpoint.layers.items():
        holder, _, stack = stack_of(name, shapes).rpartition(".")
        if holder in modules:
            parts[holder][stack].append(layer)
    weights = {n.removesuffix(".weight") for n in checkpoint.tensors if n.endswith(".weight")}
    dense = {stack_of(name, shapes) for name in weights - checkpoint.layers.keys()} - {""}
    found, tried = {}, dict[Any, Any]()
    for holder, stacks in parts.items():
        module = modules[holder]
        held = recognize(module, tried)
        if not isinstance(held, ExpertStacks) or not stacks.keys() >= set(held.names):
            continue
        some = not dense.isdisjoint(named(holder, stack) for stack in held.names)
        if some and not isinstance(module, ExpertTensors):
            continue  # what the checkpoint keeps in high precision would be quantized
        layers = [layer for name in held.names for layer in stacks[name]]
        group = module.scheme.weight if isinstance(module, ExpertTensors) else ROW
        scheme = scheme_of(layers, checkpoint, group)
        if scheme is None:
            continue
        if not isinstance(module, ExpertTensors):
            found[holder] = Experts(held, scheme)
        else:
            held_scheme = module.scheme.stored
            same = held_scheme.weight, held_scheme.activation
            if not checkpoint.names_schemes and holds(held_scheme, scheme):
                continue
            if same != (scheme.weight, scheme.activation) and held_scheme != joined_scheme(scheme):
                raise other_scheme(holder, scheme, str(module.scheme))
    return found


def stack_of(name: str, shapes: Shapes) -> str:
    """Name the stack of the model that a layer, or a whole stack, goes into; empty if none."""
    if len(shapes.get(name, ())) == 3:
        return name
    route = find(name, "weight", shapes)
    return route.target if route is not None and route.expert is not None else ""


def scheme_of(layers: Sequence[Layer], checkpoint: Checkpoint, group: GroupShape) -> Scheme | None:
    """Return the one scheme of experts; ``None`` if they have several.

    A stack joins gate and up of an expert. If in each expert both have the same one scale, their
    matrix keeps it; otherwise every row of the stack keeps the scale it had. In whole stacks it
    keeps it if the model's ``group`` is ``TENSOR``.
    """
    schemes = {layer.scheme for layer in layers}
    if len(schemes) != 1:
        return None
    scheme = schemes.pop()
    if scheme.weight != TENSOR:
        return scheme
    if any(len(layer.shape) == 3 for layer in layers):
        whole = group == TENSOR and all(len(layer.shape) == 3 for layer in layers)
        one = whole and all(is_one_each(checkpoint.read(layer.scale)) for layer in layers)
        return scheme if one else joined_scheme(scheme)
    scales: dict[str, set[float]] = defaultdict(set)
    for layer in layers:
        holder, _, last = layer.name.rpartition(".")
        if last not in ("down_proj", "w2"):
            scales[holder].add(checkpoint.read(layer.scale).item())
    equal = all(len(values) == 1 for values in scales.values())
    return scheme if equal else joined_scheme(scheme)


def by_every_name(model: nn.Module, experts: Mapping[str, Experts]) -> dict[str, Experts]:
    """Return what modules become, by every name of a module that has several names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {modules[name]: found for name, found in experts.items()}
    return {name: kinds[module] for name, module in modules.items() if module in kinds}


def stacks_by_name(model: nn.Module, experts: Mapping[str, Experts]) -> dict[str, ExpertStacks]:
    """Return the stacks of modules of experts that are FP8 or become FP8, by every name."""
    every = model.named_modules(remove_duplicate=False)
    found = {n: m.stacks for n, m in every if isinstance(m, ExpertTensors)}
    return found | {n: e.stacks for n, e in by_every_name(model, experts).items()}


def stored_shapes(model: nn.Module, experts: Mapping[str, Experts], shapes: Shapes) -> Shapes:
    """Return the shapes of a checkpoint's dense stacks as the model will hold their codes."""
    found = dict(shapes)
    for name, stacks in stacks_by_name(model, experts).items():
        for stack in stacks.names:
            shape = found.get(named(name, stack), ())
            if stacks.transposed and len(shape) == 3:
                found[named(name, stack)] = (shape[0], shape[2], shape[1])
    return found
