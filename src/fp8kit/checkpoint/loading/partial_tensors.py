"""Tensors of which only some parts have arrived: rows, or single experts of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8kit.checkpoint.loading.merged_weights import Fp8Weight, check_shape
from fp8kit.checkpoint.schema.merged_names import Route, Shapes


@dataclass(slots=True)
class Partial:
    """A tensor that is incomplete.

    ``total`` counts the rows of one of its ``experts`` matrices, ``rows`` those of each part that
    has arrived, by expert and index. Rows of a weight to be quantized are gathered in ``dense``,
    FP8 parts in ``codes`` by index. Parts in ``between`` wait until all on one side have arrived.
    """

    route: Route
    experts: int
    total: int
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    dense: Tensor | None = None
    codes: dict[int, Fp8Weight] = field(default_factory=dict)
    between: list[tuple[Route, Tensor]] = field(default_factory=list)

    def fill(
        self, whole: Tensor, route: Route, part: Tensor, kept: Callable[[Tensor], Tensor]
    ) -> None:
        """Copy a part into its rows of a matrix; ``kept`` copies one whose rows are not known."""
        waiting, self.between = [*self.between, (route, part)], []
        for source, rows in waiting:
            first = self._first_row(source)
            if first is None:
                self.between.append((source, kept(rows)))
            else:
                with torch.inference_mode(whole.is_inference()), torch.no_grad():
                    whole[first : first + rows.shape[0]].copy_(rows)

    def rows_of(self, expert: int) -> int:
        """Count the rows of one matrix that have arrived."""
        return sum(self.rows.get((expert, i), 0) for i in range(len(self.route.sources)))

    def _first_row(self, route: Route) -> int | None:
        """Return the first row of a part; ``None`` until all parts on one side are known."""
        sizes = [self.rows.get((route.expert or 0, i)) for i in range(len(route.sources))]
        before, rest = sizes[: route.index], sizes[route.index :]
        if None not in before:
            return sum(n for n in before if n is not None)
        if None not in rest:
            return self.total - sum(n for n in rest if n is not None)
        return None


class Partials:
    """All incomplete tensors, by name; ``shapes`` are those of the model's tensors."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._held: dict[str, Partial] = {}

    def begin(self, route: Route, name: str, part: torch.Size, matrix: tuple[int, ...]) -> Partial:
        """Record a part that has arrived; refuse one that does not fit.

        ``matrix`` is the shape of the tensor, or of one of its experts.
        """
        if part[0] > matrix[0] or part[1:] != matrix[1:]:
            check_shape(route.sources[route.index], part, matrix)
        experts = 1 if route.expert is None else self._shapes[name][0]
        partial = self._held.setdefault(name, Partial(route, experts, matrix[0]))
        partial.rows[route.expert or 0, route.index] = part[0]
        rows = partial.rows_of(route.expert or 0)
        if rows > matrix[0]:
            check_shape(", ".join(route.sources), (rows,), (matrix[0],))
        return partial

    def end(self, name: str) -> bool:
        """Return whether all parts have arrived; if so, check the rows and forget the tensor."""
        partial = self._held[name]
        if len(partial.rows) < partial.experts * len(partial.route.sources):
            return False
        del self._held[name]
        for expert in range(partial.experts):
            sources = ", ".join(partial.route.sources)
            check_shape(sources, (partial.rows_of(expert),), (partial.total,))
        return True

    def absent(self) -> Iterator[tuple[str, str]]:
        """Yield each incomplete tensor, and the first part that it waits for."""
        for name, partial in self._held.items():
            yield (
                name,
                next(
                    source
                    for expert in range(partial.experts)
                    for index, source in enumerate(partial.route.names(expert))
                    if (expert, index) not in partial.rows
                ),
            )
