"""Read the experts of a Transformers model from a checkpoint straight into FP8 stacks.

The loader of Transformers would join all experts of a layer in high precision first. Here each
expert is read, quantized and placed alone, and the loader sees a model without these stacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.dialects.by_layer import plain
from fp8kit.checkpoint.loading.expert_modules import (
    Experts,
    experts_in_checkpoint,
    stack_of,
    stored_shapes,
)
from fp8kit.checkpoint.loading.placement import Placement
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.merged_names import fit
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.layout import natural
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.experts import stacks_of
from fp8kit.conversion.model_families import STACKED
from fp8kit.errors import CheckpointError
from fp8kit.integrations.transformers_renames import with_scales
from fp8kit.integrations.transformers_trial import renamed
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.parameters import frozen

_STACKING = ("MergeModulelist", "Concatenate")  # Transformers' operations that are done here
_EXPERT = re.compile(r".*\.(?P<expert>\d+)\.\w+\.weight")


@dataclass(slots=True)
class DirectExperts:
    """The experts that do not go through the loader of Transformers.

    ``experts`` has the FP8 form of each module of experts, ``layers`` the FP8 layers that go into
    them, by their names in the model, and ``names`` the names in the model of tensors in high
    precision, by names on disk. ``rules`` of Transformers remember if they have renamed a tensor.
    """

    experts: dict[str, Experts] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    rules: list[Any] = field(default_factory=list)

    @property
    def schemes(self) -> JsonObject:
        """The scheme of each module of experts, in the form of config.json."""
        return {name: plain(experts.scheme) for name, experts in self.experts.items()}

    @property
    def tensors(self) -> set[str]:
        """Names on disk of all tensors of these experts."""
        return set(self.names).union(*(layer.tensors.values() for layer in self.layers.values()))

    def fill(
        self, model: Any, checkpoint: Checkpoint, device: torch.device | None, high: torch.dtype
    ) -> None:
        """Read the experts into a model whose stacks ``hide_stacks`` has hidden.

        Raises ``CheckpointError`` if experts are missing or do not fit, and ``ConversionError`` if
        one cannot be quantized.
        """
        for name in self.experts:
            module = model.get_submodule(name)
            module.__dict__.pop("_is_hf_initialized", None)
            for key, tensor in _HIDDEN.pop(module).items():
                module.__dict__.pop(key)
                module._parameters[key] = frozen(tensor)
        shapes = {n: tuple(t.shape) for n, t in model.state_dict(keep_vars=True).items()}
        self._check(model, checkpoint, shapes)
        placement = Placement(model, shapes, self.layers, device=device, high=high, owned=True)
        order = sorted(self.tensors, key=lambda n: (checkpoint.tensors[n].shard, natural(n)))
        for name in order:
            placement.put(self.names.get(name, name), checkpoint.read(name))
        placement.finish()
        if self.experts:
            _keep_rules(model, self.rules)

    def _check(self, model: Any, checkpoint: Checkpoint, shapes: dict[str, Any]) -> None:
        stacks = {
            named(holder, stack): shapes[named(holder, stack)]
            for holder, experts in self.experts.items()
            for stack in experts.stacks.names
        }
        dense = {ours: checkpoint.tensors[n].shape for n, ours in self.names.items()}
        coded = {
            n if len(layer.shape) == 3 else named(n, "weight"): layer.shape
            for n, layer in self.layers.items()
        }
        here = {**stored_shapes(model, self.experts, dense), **coded}
        found = fit(here, stacks)
        problems = found.problems + [f"{n}: not on disk" for n in stacks if n not in found.covered]
        if not problems:
            return
        listed = "\n  ".join(problems[:20])
        raise CheckpointError(
            f"{checkpoint.path} does not fit {type(model).__name__}:\n  {listed}\n",
            f"All experts must be there; {len(problems)} stacks are not whole.",
            "Complete it, or load with the model class that it was made from.",
        )


_HIDDEN: dict[Any, dict[str, torch.Tensor]] = {}


def take_experts(
    checkpoint: Checkpoint, model: Any, chosen: Mapping[str, Experts] | None
) -> DirectExperts:
    """Find the experts that can be read straight into FP8 stacks.

    The model is dense, on meta. ``chosen`` are those to quantize; ``None`` for an FP8 checkpoint.
    """
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    rules = with_scales(get_model_conversion_mapping(model))
    if chosen is None:
        known = names_in_model(model, checkpoint.tensors, rules)
        layers = {
            known[layer.weight]: replace(layer, name=known[layer.weight])
            for layer in checkpoint.layers.values()
            if layer.weight in known
        }
        tensors = {
            named(known[n], "weight") if n in known else n: info
            for n, info in checkpoint.tensors.items()
        }
        ours = replace(checkpoint, tensors=tensors, layers=layers)
        found = experts_in_checkpoint(model, ours, shapes)
        held = {n: x for n, x in layers.items() if _holder(n, shapes) in found}
        return DirectExperts(found, held, rules=rules)
    names = names_in_model(model, checkpoint.tensors, rules)
    taken = DirectExperts(rules=rules)
    for name, layer in names.items():
        holder = _holder(layer, shapes)
        if holder in chosen:
            taken.experts[holder] = chosen[holder]
            taken.names[name] = layer if layer in shapes else named(layer, "weight")
    return taken


def hide_stacks(model: Any, names: Mapping[str, Experts]) -> None:
    """Turn modules into FP8 experts, and hide their stacks from Transformers' loader."""
    for name, experts in names.items():
        module = model.get_submodule(name)
        experts.empty(module, module.get_parameter(experts.stacks.down).dtype)
        _HIDDEN[module] = {key: module._parameters[key] for _, key in module.tensors()}
        for key, tensor in _HIDDEN[module].items():
            module._parameters[key] = None
            # the model's code for initialization may fill this one
            module.__dict__[key] = torch.empty(tensor.shape, dtype=torch.float32, device="meta")
        module._is_hf_initialized = True  # the module has nothing to initialize


def chosen_experts(model: Any, schemes: Mapping[str, Any]) -> dict[str, Experts]:
    """Return the FP8 form of modules of experts; ``schemes`` has their names and schemes."""
    stacks = stacks_of(model, schemes)
    return {name: Experts(held, schemes[name]) for name, held in stacks.items()}


def names_in_model(model: Any, tensors: Iterable[str], rules: list[Any]) -> dict[str, str]:
    """Return the names in a model of the experts' weights on disk, by Transformers' rules.

    Maps names on disk to names of layers, ``X.experts.0.gate_proj``, or of a whole stack. Left out
    are other tensors, and weights that the rules transpose or mix. A rule that renames a tensor
    remembers it.
    """
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    found = {}
    for key, (name, converted) in renamed(model, rules, tensors).items():
        layer = name.removesuffix(".weight")
        if converted is not None:
            rule = next(c for c in converters if converted in c.source_patterns)
            layer = _of_rule(key, name, rule.source_patterns.index(converted), rule)
        elif len(shapes.get(name, ())) == 3:
            layer = name
        if layer and _holder(layer, shapes):
            found[key] = layer
    return found


def _keep_rules(model: Any, rules: list[Any]) -> None:
    """Add the rules of experts to a model, for saving: its loader keeps only those it has used."""
    held = {_patterns(rule): rule for rule in getattr(model, "_weight_conversions", None) or ()}
    used = [rule for rule in rules if rule.was_used() or _patterns(rule) in held]
    merged = {_patterns(rule): held.get(_patterns(rule), rule) for rule in used}
    model._weight_conversions = [*merged.values(), *(r for p, r in held.items() if p not in merged)]


def _patterns(rule: Any) -> tuple[str, ...]:
    return (type(rule).__name__, *rule.source_patterns, "", *rule.target_patterns)


def _of_rule(key: str, target: str, part: int, rule: Any) -> str:
    """Return the name of one expert's layer that a rule stacks; empty if it does more than that."""
    holder, _, stack = target.rpartition(".")
    match, words = _EXPERT.fullmatch(key), STACKED.get(stack, ((),))[0]
    plain = all(type(operation).__name__ in _STACKING for operation in rule.operations)
    if match is None or not plain or len(words) != len(rule.source_patterns):
        return ""
    return f"{holder}.{match['expert']}.{words[part]}"


def _holder(layer: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the module of experts that holds a layer or a whole stack; empty if there is none."""
    return stack_of(layer, shapes).rpartition(".")[0]


def is_stack(module: object, name: str) -> bool:
    """Return whether a tensor of a module is an FP8 stack of experts."""
    return isinstance(module, ExpertTensors) and name in module.stacks.names
