"""Place experts that arrive one by one, in parts or as stacks into modules of FP8 experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from fp8kit.checkpoint.loading.merged_weights import (
    Fp8Weight,
    check_shape,
    is_one_each,
    join,
    quantized,
)
from fp8kit.checkpoint.schema.merged_names import Route
from fp8kit.checkpoint.schema.naming import named, standard_names
from fp8kit.errors import CheckpointError
from fp8kit.formats import ROW, TENSOR, QTensor
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.parameters import frozen

Value = Tensor | Fp8Weight


class StackPlacement:
    """The FP8 stacks of a model, while their experts arrive.

    A matrix is quantized, or copied, into its place in the stack as soon as its parts are there, so
    that no stack is ever assembled in high precision. Tensors of the model may be on meta;
    ``place`` gives their device. ``kept`` copies a tensor that waits, if its memory may be reused.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Callable[[Tensor], torch.device],
        kept: Callable[[Tensor], Tensor],
    ) -> None:
        self._homes = {
            named(name, stack): (name, stack)
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, ExpertTensors)
            for stack in module.stacks.names
        }
        self._place, self._kept = place, kept
        self._waiting: dict[tuple[str, int], dict[int, Value]] = {}
        self._arrived: dict[str, set[int]] = {}
        self._sources: dict[str, Route] = {}
        self._counts: dict[str, int] = {}
        self._fixed: dict[str, Tensor] = {}

    def roles(self) -> dict[str, tuple[str, str]]:
        """Map the names of whole stacks and of their scales to stack and role of the tensor."""
        found = {
            name: (home, role)
            for home in self._homes
            for role, name in standard_names(home, True).items()
        }
        exponents = {f"{home}_exponents": (home, "weight_exponents") for home in self._homes}
        return found | exponents

    def home(self, route: Route | None) -> tuple[str, str] | None:
        """Return the module and the stack that a route leads to; ``None`` if it is no FP8 one."""
        return None if route is None else self._homes.get(route.target)

    def route(self, name: str) -> Route | None:
        """Return the route of a whole stack of this name, if the model has one."""
        return Route(name, (name,)) if name in self._homes else None

    def put(self, module: ExpertTensors, route: Route, value: Value) -> set[str]:
        """Take a matrix, a part of one, or a whole stack.

        Returns the names of the tensors that are now complete. Raises ``CheckpointError`` if it
        does not fit, and ``ConversionError`` if it cannot be quantized.
        """
        name, stack = route.target, self._homes[route.target][1]
        self._materialize(module, stack)
        self._counts[name], self._sources[name] = module.expert_count, route
        if route.expert is None:
            for expert, matrix in enumerate(_matrices(module, stack, name, value)):
                self._store(module, name, expert, matrix)
        elif len(route.sources) == 1:
            self._store(module, name, route.expert, value)
        else:
            parts = self._waiting.setdefault((name, route.expert), {})
            parts[route.index] = value
            if len(parts) < len(route.sources):
                parts[route.index] = self._copied(value)
            else:
                del self._waiting[name, route.expert]
                whole = _joined(module, name, [parts[i] for i in sorted(parts)])
                self._store(module, name, route.expert, whole)
        if len(self._arrived.get(name, ())) < self._counts[name]:
            return set()
        del self._arrived[name]
        return {named(self._homes[name][0], t) for s, t in module.tensors() if s == stack}

    def absent(self) -> Iterator[tuple[str, str]]:
        """Yield each stack that is incomplete, and one of the parts that it waits for."""
        for (name, expert), parts in self._waiting.items():
            sources = self._sources[name].names(expert)
            yield name, next(s for i, s in enumerate(sources) if i not in parts)
        for name, arrived in self._arrived.items():
            expert = next(e for e in range(self._counts[name]) if e not in arrived)
            if (name, expert) not in self._waiting:
                yield name, next(iter(self._sources[name].names(expert)))

    def _store(self, module: ExpertTensors, name: str, expert: int, value: Value) -> None:
        stack = self._homes[name][1]
        shape = tuple(module.codes(stack).shape[1:])
        check_shape(f"expert {expert} of {name}", value.shape, shape)
        if isinstance(value, Fp8Weight):
            group = module.scheme.stored.weight
            whole = value if value.q.group == group else join([value], group, name)
            q = whole.q
            self._fix(module, stack, name, value.input_scale)
        else:
            place, where = module.codes(stack).device, f"Expert {expert} of {name}"
            q = quantized(value.to(place), module.scheme, where)
        module.store(stack, expert, q)
        self._arrived.setdefault(name, set()).add(expert)

    def _fix(self, module: ExpertTensors, stack: str, name: str, scale: Tensor | None) -> None:
        """Take the largest input scale of all experts, as engines do."""
        held = module.beside(stack, "input_scale")
        if held is None or scale is None:
            return
        scale = scale.to(held.device)
        before = self._fixed.get(name)
        self._fixed[name] = scale if before is None else torch.maximum(before, scale)
        with torch.no_grad():
            held.copy_(self._fixed[name])

    def _copied(self, value: Value) -> Value:
        if isinstance(value, Tensor):
            return self._kept(value)
        q = value.q
        return Fp8Weight(
            QTensor(self._kept(q.data), self._kept(q.scale), q.group), value.input_scale
        )

    def _materialize(self, module: ExpertTensors, stack: str) -> None:
        """Allocate a stack that is on meta, or on another device than ``place`` gives."""
        for own, name in module.tensors():
            held = module.get_parameter(name)
            place = self._place(held)
            if own == stack and (held.is_meta or held.device != place):
                new = torch.empty(held.shape, dtype=held.dtype, device=place)
                if not held.is_meta:
                    new.copy_(held.detach())
                setattr(module, name, frozen(new))


def _matrices(module: ExpertTensors, stack: str, name: str, value: Value) -> Iterator[Value]:
    """Cut a stack into matrices ``[N, K]``."""
    shape = tuple(module.codes(stack).shape)
    if isinstance(value, Tensor):
        turned = value.transpose(1, 2) if module.stacks.transposed else value
        check_shape(name, turned.shape, shape)
        yield from turned
        return
    check_shape(name, value.shape, shape)
    scales, group = value.q.scale, value.q.group
    if (group, module.scheme.weight) == (ROW, TENSOR) and is_one_each(scales):
        scales, group = scales[:, :1], TENSOR  # read as one per row
    for data, scale in zip(value.q.data, scales, strict=True):
        yield Fp8Weight(QTensor(data, scale, group), value.input_scale)


def _joined(module: ExpertTensors, name: str, parts: list[Value]) -> Value:
    """Concatenate gate and up of one expert along their rows."""
    activation = module.stacks.activation
    if activation is None or activation.interleaved:
        raise CheckpointError(
            f"Gates and ups of {name} come apart.",
            "In this model they alternate, or its own code divides them.",
            "Bring the stack as the model holds it.",
        )
    coded = [isinstance(part, Fp8Weight) for part in parts]
    if all(coded):
        return join(cast(list[Fp8Weight], parts), module.scheme.stored.weight, name)
    if any(coded):
        raise CheckpointError(
            f"Of one expert of {name}, gate or up is FP8 and the other is not.",
            "Both are rows of one matrix of one kind.",
            "Exclude all experts of a layer when quantizing, or none.",
        )
    return torch.cat(cast(list[Tensor], parts))
