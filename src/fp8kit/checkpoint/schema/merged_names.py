"""Map a checkpoint's layers to a model that joins, stacks or splits them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp8kit.checkpoint.schema.naming import named
from fp8kit.conversion.model_families import JOINED, STACKED

SCALES = ("weight_scale", "input_scale")
_EXPERT = re.compile(r"(?P<holder>.+)\.(?P<expert>\d{1,6})\.(?P<layer>\w+)")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Fit:
    """How the tensors of a checkpoint fit a model.

    ``covered`` names tensors of the model that the checkpoint fills, at least in part, ``unused``
    those of the checkpoint for which the model has no place; ``problems`` are one text each.
    """

    covered: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def compare(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Record a difference of shapes."""
        if found != wanted:
            shapes = f"{list(found)} on disk, {list(wanted)} in the model"
            self.problems.append(f"{name}: {shapes}")


@dataclass(frozen=True, slots=True)
class Route:
    """Which rows of which tensors of the model a layer of the checkpoint fills.

    ``target`` is a layer of the model, or a stack in which matrix ``expert`` is filled. Its rows
    come from the layers ``sources`` in this order; this source is the one at ``index``. A joined
    source that is divided among the layers ``split`` has no target.
    """

    target: str
    sources: tuple[str, ...]
    index: int = 0
    expert: int | None = None
    split: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether one source fills the whole target."""
        return len(self.sources) == 1 and self.expert is None

    def tensor(self, kind: str) -> str:
        """Name the tensor of the model that a source's ``weight`` or ``bias`` goes into."""
        if self.expert is None:
            return named(self.target, kind)
        return self.target if kind == "weight" else f"{self.target}_{kind}"

    def names(self, expert: int) -> tuple[str, ...]:
        """Name the sources of one matrix of a stack, or of the target if it is no stack."""
        if self.expert is None:
            return self.sources
        parts = (source.rpartition(".") for source in self.sources)
        return tuple(f"{holder.rpartition('.')[0]}.{expert}.{last}" for holder, _, last in parts)


def find(layer: str, kind: str, wanted: Shapes) -> Route | None:
    """Find the place in a model of a layer's ``weight``, ``bias`` or other tensor, or ``None``."""
    kind = "weight" if kind in SCALES and named(layer, kind) not in wanted else kind
    if named(layer, kind) in wanted:
        return Route(layer, (layer,))
    parent, _, last = layer.rpartition(".")
    for joined, options in JOINED.items():
        target = named(parent, joined)
        for option in options:
            names = tuple(named(parent, part) for part in option)
            if last in option and len(wanted.get(named(target, kind), ())) in (1, 2):
                return Route(target, names, option.index(last))
            if last == joined and all(named(name, kind) in wanted for name in names):
                return Route("", (layer,), split=names)
    return _stacked(layer, kind, wanted)


def fit(found: Shapes, wanted: Shapes, scales: Mapping[str, str] | None = None) -> Fit:
    """Compare the names and shapes of a checkpoint with those of a model.

    ``scales`` maps scales in the checkpoint to their weights, with whose shapes theirs have been
    compared already.
    """
    result = Fit()
    parts: dict[str, dict[str, int]] = defaultdict(dict)
    routes: dict[str, Route] = {}
    for name, shape in found.items():
        scale_of = (scales or {}).get(name)
        layer, _, kind = (scale_of or name).rpartition(".")
        route = find(layer, kind, wanted)
        if route is None:
            result.unused.append(name)
            continue
        targets = [named(t, kind) for t in route.split] or [route.tensor(kind)]
        if scale_of is not None:  # the scales of a layer are there if its weight is
            suffix = name.rpartition(".")[2]
            result.covered.update(named(t, suffix) for t in route.split or (route.target,))
            continue
        result.covered.update(targets)
        if route.split:
            rows = sum(wanted[t][0] for t in targets)
            result.compare(name, shape, (rows, *wanted[targets[0]][1:]))
        elif route.whole:
            result.compare(name, shape, wanted[targets[0]])
        else:
            matrix = wanted[targets[0]][0 if route.expert is None else 1 :]
            result.compare(name, shape, (shape[0] if shape else 0, *matrix[1:]))
            parts[targets[0]][layer] = shape[0] if shape else 0
            routes[targets[0]] = route
    for target, rows_by_source in parts.items():
        _check_parts(result, target, routes[target], rows_by_source, wanted[target])
    return result


def _check_parts(
    result: Fit, target: str, route: Route, rows: Mapping[str, int], shape: tuple[int, ...]
) -> None:
    experts, total = (1, shape[0]) if route.expert is None else shape[:2]
    for expert in range(experts):
        names = route.names(expert)
        absent = [name for name in names if name not in rows]
        if absent:
            result.problems.append(f"{target}: {' and '.join(absent)} not on disk")
        elif sum(rows[name] for name in names) != total:
            here = " + ".join(f"{rows[name]} ({name})" for name in names)
            result.problems.append(f"{target}: {here} rows on disk, {total} in the model")


def _stacked(layer: str, kind: str, wanted: Shapes) -> Route | None:
    found = _EXPERT.fullmatch(layer)
    if found is None:
        return None
    holder, expert = found["holder"], int(found["expert"])
    for stack, options in STACKED.items():
        for option in options:
            if found["layer"] in option:
                sources = tuple(f"{holder}.{expert}.{part}" for part in option)
                index = option.index(found["layer"])
                route = Route(named(holder, stack), sources, index, expert)
                shape = wanted.get(route.tensor(kind), ())
                if len(shape) == (3 if kind == "weight" else 2) and expert < shape[0]:
                    return route
    return None
