"""The decision for each linear layer and module of experts, and its size afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8kit.conversion.eligibility import Eligibility, bypassed
from fp8kit.conversion.experts import names_to_match, recognize
from fp8kit.conversion.patterns import exclusion, merged_siblings, roles_by_name, size_obstacle
from fp8kit.conversion.report import ALREADY, Record
from fp8kit.conversion.roles import layer_roles
from fp8kit.formats import BLOCK, Scheme
from fp8kit.modules.dense import as_linear, is_linear
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.library_experts import held_tensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import empty_tensors, held_bytes

_STATIC = "static input scales of experts come from a checkpoint, not from calibration"


@dataclass(frozen=True, slots=True)
class Rules:
    """What every decision depends on; ``include`` and ``exclude`` are as in ``plan``."""

    obstacles: Eligibility
    scheme: Scheme
    include: Sequence[str] | None
    exclude: Sequence[str] | None

    def linear(
        self, module: nn.Module, names: Sequence[str], role: str, merged: bool = False
    ) -> Record:
        """Decide about a linear layer.

        ``role`` is set if the defaults keep layers of that role. ``merged`` is true if engines run
        the layer as one matrix with a layer that becomes FP8.
        """
        record = _record(module, names, tuple(as_linear(module).weight.shape))
        record.reason = exclusion(names, self.include, self.exclude, role)
        if not record.reason:
            record.reason = self.obstacles.of(names, self._wanted(names), merged)
            record.warning = bool(record.reason) and not isinstance(module, Fp8Linear)
        if not record.reason:
            record.action = "convert"
            record.bytes_after = _converted_bytes(as_linear(module), self.scheme)
        return record

    def experts(self, module: nn.Module, names: Sequence[str], stacks: ExpertStacks) -> Record:
        """Decide about a module of experts."""
        record = _record(module, names, tuple(module.get_parameter(stacks.up).shape))
        record.experts = record.shape[0]
        if not isinstance(module, ExpertTensors):
            matched, roles = names_to_match(names, module, stacks), roles_by_name(names)
            role = next((roles[n] for n in names if n in roles), "")
            record.reason = exclusion(matched, self.include, self.exclude, role)
        if not record.reason:
            record.reason = self.obstacles.of_experts(names, stacks, self._wanted(names))
            if not record.reason and self.scheme.static:
                record.reason = _STATIC
            record.warning = bool(record.reason) and record.reason != ALREADY
        if not record.reason:
            record.action = "convert"
            held = held_tensors(module, stacks, self.scheme)
            record.bytes_after = sum(t.nbytes for t in held.values())
        return record

    def _wanted(self, names: Sequence[str]) -> bool:
        return not set(self.include or ()).isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The modules of a model that may become FP8.

    ``names`` has all qualified names of every module, in model order. ``unknown`` has the modules
    with stacks of experts that are not recognised, with the reason.
    """

    names: Mapping[nn.Module, list[str]]
    stacks: Mapping[nn.Module, ExpertStacks]
    unknown: Mapping[nn.Module, str]

    @classmethod
    def of(cls, model: nn.Module) -> Candidates:
        """Find the candidates of a model."""
        names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            names[module].append(name)
        tried: dict[Any, Any] = {}
        found = {m: recognize(m, tried) for m in names if not is_linear(m)}
        stacks = {m: s for m, s in found.items() if isinstance(s, ExpertStacks)}
        return cls(names, stacks, {m: s for m, s in found.items() if isinstance(s, str)})

    def named(self) -> dict[str, nn.Module]:
        """Return the names that patterns may match, of linear layers and experts, with modules."""
        linears = {n: m for m, names in self.names.items() if is_linear(m) for n in names}
        return linears | {
            n: m for m, s in self.stacks.items() for n in names_to_match(self.names[m], m, s)
        }

    def decide(self, model: nn.Module, rules: Rules) -> list[Record]:
        """Return a record of each candidate, and of other modules' large matrices."""
        records, roles = list[Record](), layer_roles(model)
        for module, names in self.names.items():
            if is_linear(module):
                role = next((roles[n] for n in names if n in roles), "")
                records.append(rules.linear(module, names, role))
            elif module in self.stacks:
                records.append(rules.experts(module, names, self.stacks[module]))
            else:
                records += bypassed(module, names[0], self.unknown.get(module, ""))
        if rules.scheme.stored.weight == BLOCK:  # engines cannot merge layers within a block
            return records
        fp8 = {name for r in records if r.action == "convert" for name in (r.name, *r.aliases)}
        return [
            rules.linear(model.get_submodule(r.name), (r.name, *r.aliases), "", merged=True)
            if r.reason == size_obstacle(r.shape) and not fp8.isdisjoint(merged_siblings(r.name))
            else r
            for r in records
        ]


def _record(module: nn.Module, names: Sequence[str], shape: tuple[int, ...]) -> Record:
    size = held_bytes(module.parameters(recurse=False))
    kind, aliases = type(module).__name__, tuple(names[1:])
    return Record(
        names[0], kind, shape, "skip", bytes_before=size, bytes_after=size, aliases=aliases
    )


def _converted_bytes(linear: nn.Linear, scheme: Scheme) -> int:
    held = empty_tensors(tuple(linear.weight.shape), scheme, "meta")
    bias = 0 if linear.bias is None else linear.bias.nbytes
    return held_bytes(held.values()) + bias + (4 if scheme.static else 0)
