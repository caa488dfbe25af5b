"""Split stacks of FP8 experts, ``[E, N, K]``, into one layer per matrix, as engines read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fp8kit.checkpoint.schema.naming import named
from fp8kit.conversion.model_families import STACKED
from fp8kit.formats import ROW, SCHEMES, TENSOR, Scheme
from fp8kit.modules.expert_tensors import ExpertTensors

# from {stack: (number of experts, layers of each)} to {stack: names of layers, expert by expert};
# a stack that stays whole on disk is left out
Renames = Callable[[Mapping[str, tuple[int, tuple[str, ...]]]], Mapping[str, list[str]]]


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One matrix of one expert, as a layer of its own.

    ``weight`` is a view of codes ``[N, K]``, ``input_scale`` fp32 ``[1, 1]`` of a static scheme.
    """

    scheme: Scheme
    weight: Tensor
    scale: Tensor
    input_scale: Tensor | None


def stacks_in(model: nn.Module) -> dict[str, tuple[ExpertTensors, str]]:
    """Return every FP8 stack of a model by its full name: its module, and its name there."""
    return {
        named(name, stack): (module, stack)
        for name, module in model.named_modules()
        if isinstance(module, ExpertTensors)
        for stack in module.stacks.names
    }


def parts_of(module: ExpertTensors, stack: str) -> tuple[str, ...]:
    """Name one expert's layers in a stack, such as ``gate_proj``; empty if it cannot be split.

    Engines load no single layers with biases, or of gates that alternate with ups. A block that
    reaches from gates into ups belongs to neither layer.
    """
    names, up, activation = module.stacks.names, module.stacks.up, module.stacks.activation
    n, k = module.codes(up).shape[1], module.codes(module.stacks.down).shape[2]
    gated, rows = n == 2 * k, module.scheme.stored.weight.rows
    whole = (
        any(module.beside(name, "bias") is not None or name not in STACKED for name in names)
        or gated != (up == "gate_up_proj")
        or (gated and (activation is None or activation.interleaved or (rows > 1 and k % rows)))
    )
    return () if whole else STACKED[stack][0]


def split_experts(
    model: nn.Module, renames: Renames | None = None
) -> tuple[dict[str, ExpertLayer], list[str]]:
    """Split the FP8 stacks of a model into layers.

    Returns the layers by their names on disk, which ``renames`` (by default ``in_module``) chooses,
    and the names of stacks that stay whole.
    """
    held = stacks_in(model)
    parts = {name: parts_of(module, stack) for name, (module, stack) in held.items()}
    wanted = {n: (held[n][0].expert_count, words) for n, words in parts.items() if words}
    names = (renames or in_module)(wanted)
    layers: dict[str, ExpertLayer] = {}
    for name in names:
        found = zip(names[name], _layers(*held[name], len(parts[name])), strict=True)
        layers |= dict(found)
    return _with_one_scale(layers), [name for name in parts if name not in names]


def _with_one_scale(layers: dict[str, ExpertLayer]) -> dict[str, ExpertLayer]:
    """Return static experts with one scale per matrix, if all rows of each matrix have the same.

    They had one scale in their checkpoint, and no engine loads static experts with scales per row.
    """
    wide, one = replace(SCHEMES["FP8"], name="", weight=ROW), SCHEMES["FP8"]
    for layer in layers.values():
        fits = replace(layer.scheme, name="") == wide
        if not fits or not bool((layer.scale == layer.scale[0]).all()):
            return layers
    return {n: replace(x, scheme=one, scale=x.scale[:1].clone()) for n, x in layers.items()}


def in_module(wanted: Mapping[str, tuple[int, tuple[str, ...]]]) -> dict[str, list[str]]:
    """Name single experts after the module that stacks them: ``experts.0.gate_proj``."""
    return {
        name: [
            named(name.rpartition(".")[0], f"{expert}.{word}")
            for expert in range(count)
            for word in words
        ]
        for name, (count, words) in wanted.items()
    }


def tensors_of(layers: Mapping[str, ExpertLayer]) -> dict[str, Tensor]:
    """Return the tensors of layers under this package's names (``X.weight_scale``)."""
    found = {}
    for name, layer in layers.items():
        found[named(name, "weight")] = layer.weight
        found[named(name, "weight_scale")] = layer.scale
        if layer.input_scale is not None:
            found[named(name, "input_scale")] = layer.input_scale
    return found


def own_names(model: nn.Module, kept: list[str]) -> set[str]:
    """Name the ``state_dict`` tensors of the stacks that are split, which are all but ``kept``."""
    found = set()
    for name, (module, stack) in stacks_in(model).items():
        if name not in kept:
            home = name.removesuffix(stack)
            found |= {home + tensor for own, tensor in module.tensors() if own == stack}
    return found


def _layers(module: ExpertTensors, stack: str, count: int) -> Iterator[ExpertLayer]:
    q, scheme = module.stored(stack), module.scheme.stored
    fixed = module.beside(stack, "input_scale")
    one = scheme.weight == TENSOR
    for matrix, scales in zip(q.data, q.scale, strict=True):
        pieces = [scales] * count if one else scales.chunk(count)
        for weight, piece in zip(matrix.chunk(count), pieces, strict=True):
            own = None if fixed is None else fixed.detach().clone()
            # cloned: a file holds each tensor separately, also where several share one scale
            yield ExpertLayer(scheme, weight, piece.clone() if one else piece, own)
