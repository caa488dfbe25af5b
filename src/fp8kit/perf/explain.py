"""Explain which backend computes a layer, how long it takes, and why the others decline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fp8kit.dispatch.backends import BackendTable, Choice, choose
from fp8kit.errors import InvalidType, InvalidValue, is_integer, some_of
from fp8kit.formats import MX, Scheme
from fp8kit.matmul.problem import MATMUL_BACKENDS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.moe.problem import MOE_BACKENDS, ExpertsProblem
from fp8kit.perf.warmup_experts import experts_of, pairs_of_a_token

_SHOWN = 3  # notes of layers that share an entry
_ALONE = "this layer"
_Layer = Fp8Linear | ExpertTensors


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choice made for each distinct matmul, and each distinct layer of experts, of a model.

    Args:
        entries: pairs of layer names and the choice that they share.
        notes: by layer name, for MXFP8 weights: why the layer computes in the form that it has.
        numbers: by layer name: scheme, scales, activations, and the form in which MX runs.
    """

    entries: tuple[tuple[tuple[str, ...], Choice], ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> list[dict[str, object]]:
        """Return everything as plain data for JSON."""
        return [
            {
                "layers": list(names),
                "numbers": self.numbers.get(names[0], ""),
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
            "\n".join((some_of(names, most=1), str(choice), *self._details(names)))
            for names, choice in self.entries
        )

    def _details(self, names: Sequence[str]) -> list[str]:
        notes = [f"  {n}: {self.notes[n]}" for n in names if n in self.notes]
        more, numbers = len(notes) - _SHOWN, self.numbers.get(names[0])
        return (
            [f"  {numbers}"] * bool(numbers)
            + notes[:_SHOWN]
            + ([f"  and {more} more layers like it"] if more > 0 else [])
        )


def explain(layer_or_model: nn.Module, m: int = 16) -> Explanation:
    """Tell which backend each FP8 layer uses for ``m`` rows, its expected time, and why no other.

    The number formats are told, too: the scales of weights and activations, and whether MX weights
    run natively, rebased, emulated or weight-only. Experts are explained for ``m`` tokens, each of
    which takes as many experts as the model says, else up to 8; their times are not measured. ``m``
    is rounded up to a power of two, for which choices, tiles and times hold. A time is that of the
    layer alone with weights outside the cache, from the measured table of the device. Layers that
    are joined with siblings, or fused with a norm or activation, are faster.

    Args:
        layer_or_model: an ``Fp8Linear``, FP8 experts, or a module that contains some.
        m: number of rows (tokens) of the input.

    Returns:
        An ``Explanation``: ``print`` it; layers with the same problem share an entry.

    Raises:
        TypeError: if ``m`` is not one integer, or there is no module.
        ValueError: if there is no FP8 layer, or ``m`` is negative.

    Example:
        >>> print(fp8kit.explain(model, m=1))
    """
    if not isinstance(layer_or_model, nn.Module):
        raise InvalidType(
            f"Got {layer_or_model!r:.80} as the model.",
            "It must be an FP8 layer, or a module that holds some.",
            "Load a checkpoint with fp8kit.load(directory), or run fp8kit explain directory.",
        )
    if not is_integer(m):
        raise InvalidType(
            f"Got m={m!r}.",
            "It must be one row count, an integer.",
            "Call fp8kit.explain(model, m=16) once for each row count.",
        )
    if m < 0:
        raise InvalidValue(
            f"Got m={m}.", "A row count is not negative.", "Pass the number of tokens."
        )
    asked = list(_products(layer_or_model, int(m)))
    if not asked:
        raise InvalidValue(
            f"{type(layer_or_model).__name__} holds no Fp8Linear and no FP8 experts.",
            "There is a choice to explain only for FP8 layers.",
            "Call fp8kit.convert(model) first.",
        )
    names: dict[tuple[Choice, str], list[str]] = {}
    notes, numbers = {}, {}
    for name, layer, table, problem in asked:
        choice = choose(table, problem)
        numbers[name] = _numbers(layer.scheme, choice)
        if layer.form_note:
            notes[name] = layer.form_note
        names.setdefault((choice, numbers[name]), []).append(name)
    entries = tuple((tuple(found), choice) for (choice, _), found in names.items())
    return Explanation(entries, notes, numbers)


def _products(model: nn.Module, m: int) -> Iterator[tuple[str, _Layer, BackendTable, object]]:
    """Yield each product of ``m`` tokens, with the backends that may compute it."""
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            yield name or _ALONE, layer, MATMUL_BACKENDS, layer.problem(m)
    for name, experts, taken in experts_of(model):
        if experts.stacks.activation is not None:
            most = pairs_of_a_token(experts, taken[-1])[0]
            yield name or _ALONE, experts, MOE_BACKENDS, experts.problem(m, most)
            continue
        for own, product in experts.products(m).items():  # with the module's own gate between them
            yield f"{name}.{own}".lstrip("."), experts, MATMUL_BACKENDS, product


def _numbers(scheme: Scheme, choice: Choice) -> str:
    """Return the number formats of a product, and how MX weights are multiplied."""
    told = scheme.numbers
    if isinstance(choice.problem, ExpertsProblem) and choice.problem.x_group is not None:
        between = "by a given scale" if choice.problem.static_intermediate else "per 1x128"
        told += f", between the products {between}"
    if scheme.weight != MX:
        return told
    if scheme.activation is None:
        return f"{told}; weight-only, decoded as it is multiplied"
    native = choice.backend == "torch_native"
    return f"{told}; {'native' if native else 'emulated: both are decoded to be multiplied'}"
