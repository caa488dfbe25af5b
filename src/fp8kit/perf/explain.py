"""Return which backend computes a layer, how long it should take, and why the others do not."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fp8kit.dispatch.backends import Choice, choose
from fp8kit.errors import teach
from fp8kit.matmul.problem import BACKENDS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear

_SHOWN = 3  # notes of layers that share an entry


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choice made for each distinct matmul of a model.

    Args:
        entries: pairs of layer names and the choice they share.
        notes: of layers with an MXFP8 weight by name: in which form they compute.
    """

    entries: tuple[tuple[tuple[str, ...], Choice], ...]
    notes: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> list[dict[str, object]]:
        """Return everything as plain data for JSON."""
        return [
            {
                "layers": list(names),
                "problem": str(choice.problem),
                "backend": choice.backend,
                "configuration": choice.configuration,
                "cut": choice.cut(),
                "us": choice.us,
                "bf16_us": choice.dense_us,
                "measured_m": choice.measured_m,
                "declined": dict(choice.declined),
                "notes": {n: self.notes[n] for n in names if n in self.notes},
            }
            for names, choice in self.entries
        ]

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join((_listed(names), str(choice), *self._told(names)))
            for names, choice in self.entries
        )

    def _told(self, names: Sequence[str]) -> list[str]:
        notes = [f"  {n}: {self.notes[n]}" for n in names if n in self.notes]
        more = len(notes) - _SHOWN
        return notes[:_SHOWN] + ([f"  and {more} more layers like it"] if more > 0 else [])


def explain(layer_or_model: nn.Module, m: int = 16) -> Explanation:
    """Tell which backend each FP8 layer uses for ``m`` rows, its expected time, and why no other.

    Choices and times are of powers of two, to which ``m`` is rounded up, as are the tiles named.
    The time is that of the layer alone with cold weights, from the measured table of the device;
    joined siblings and fused producers are faster.

    Args:
        layer_or_model: an ``Fp8Linear``, or a module that holds some.
        m: number of rows (tokens) of the input.

    Returns:
        An ``Explanation``: ``print`` it; layers with the same problem share an entry.

    Raises:
        TypeError: if ``m`` is not one integer.
        ValueError: if there is no FP8 layer, or ``m`` is negative.

    Example:
        >>> print(fp8kit.explain(model, m=1))
    """
    if not isinstance(m, numbers.Integral):
        raise TypeError(
            teach(
                f"Got m={m!r}.",
                "It is one row count, an integer.",
                "Call fp8kit.explain(model, m=16) once for each row count.",
            )
        )
    if m < 0:
        raise ValueError(
            teach(f"Got m={m}.", "A row count is not negative.", "Pass the number of tokens.")
        )
    layers = [(n, mod) for n, mod in layer_or_model.named_modules() if isinstance(mod, Fp8Linear)]
    if not layers:
        raise ValueError(
            teach(
                f"{type(layer_or_model).__name__} holds no Fp8Linear.",
                "There is a choice to explain only for FP8 layers.",
                "Call fp8kit.convert(model) first.",
            )
        )
    names: dict[Choice, list[str]] = {}
    for name, layer in layers:
        names.setdefault(choose(BACKENDS, layer.problem(m)), []).append(name or "this layer")
    every = [
        (n, mod)
        for n, mod in layer_or_model.named_modules()
        if isinstance(mod, (Fp8Linear, ExpertTensors))
    ]
    notes = {name or "this layer": layer.form_note for name, layer in every if layer.form_note}
    return Explanation(tuple((tuple(found), choice) for choice, found in names.items()), notes)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
