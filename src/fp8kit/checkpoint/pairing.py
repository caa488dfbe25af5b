"""Which weights belong to which scales: found by name, judged by dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8kit.checkpoint.dialects import Spec
from fp8kit.errors import teach
from fp8kit.formats import FP8_FORMATS, ROW, TENSOR, GroupShape, scale_shape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CODES = (*FP8_FORMATS, torch.float8_e5m2fnuz)
_SCALES = ("weight_scale", "input_scale")
Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def named(layer: str, kind: str) -> str:
    """Name a tensor of a layer; the layer that is the whole model has no name."""
    return f"{layer}.{kind}" if layer else kind


def pair(tensors: Kinds, spec: Spec | None) -> tuple[tuple[str, ...], list[str]]:
    """Find the layers with an FP8 weight, and everything that does not fit together.

    Args:
        tensors: our name of each tensor to its dtype and shape.
        spec: what the quantization config says; ``None`` if there is none.

    Returns:
        The names of the FP8 layers, sorted, and one text per problem.

    Example:
        >>> pair({"a.weight": (torch.float8_e4m3fn, (2, 3))}, spec)[1]
        ['a.weight is torch.float8_e4m3fn and has no a.weight_scale. ...']
    """
    layers: list[str] = []
    problems: list[str] = []
    for name, (dtype, shape) in sorted(tensors.items()):
        layer, _, kind = name.rpartition(".")
        if dtype in _CODES:
            if spec is None:
                problems.append(
                    teach(
                        f"{name} is {dtype}, and config.json has no quantization_config.",
                        "It says what FP8 codes mean.",
                        "Restore the config.json that belongs to these files.",
                    )
                )
            elif kind == "weight":
                layers.append(layer)
                problems += _weight_problems(layer, dtype, shape, tensors, spec)
            else:
                problems.append(
                    teach(
                        f"{name} is {dtype} and is not the weight of a layer.",
                        "Only weights are FP8 in this dialect.",
                        "Export the model again with this tensor in high precision.",
                    )
                )
        elif spec is not None and kind in _SCALES:
            weight = tensors.get(named(layer, "weight"))
            if weight is None or weight[0] not in FP8_FORMATS:
                problems.append(
                    teach(
                        f"{name} has no FP8 {named(layer, 'weight')} beside it"
                        f"{f', but one of {weight[0]}' if weight else ''}.",
                        "A scale belongs to an FP8 weight.",
                        "A shard may be missing or mixed up: get the checkpoint again.",
                    )
                )
    return tuple(layers), problems


def _weight_problems(
    layer: str, dtype: torch.dtype, shape: tuple[int, ...], tensors: Kinds, spec: Spec
) -> list[str]:
    scheme, name = spec.scheme, named(layer, "weight")
    if len(shape) != 2 or dtype != scheme.dtype:
        return [
            teach(
                f"{name} is {dtype} of shape {list(shape)}.",
                f"{scheme} weights are {scheme.dtype} matrices [N, K].",
                "Export the model again; stacked experts are stored one by one.",
            )
        ]
    wanted = [("weight_scale", scheme.weight, True), ("input_scale", TENSOR, scheme.static)]
    problems = []
    for kind, group, needed in wanted:
        scale = tensors.get(named(layer, kind))
        if scale is None and needed:
            problems.append(
                teach(
                    f"{name} is {dtype} and has no {named(layer, kind)}.",
                    f"{scheme} needs it: the codes mean nothing without their scales.",
                    "A shard may be missing: get the checkpoint again.",
                )
            )
        elif scale is not None and not needed:
            problems.append(
                teach(
                    f"{named(layer, kind)} is there, and the config says {scheme}.",
                    "Its activations are scaled by their own amax.",
                    "Correct config.json to the scheme of the tensors.",
                )
            )
        elif scale is not None:
            shapes = _scale_shapes(shape, group)
            if scale[0] not in FLOATS or scale[1] not in shapes:
                problems.append(
                    teach(
                        f"{named(layer, kind)} is {scale[0]} of shape {list(scale[1])}.",
                        f"{scheme} with a weight of {list(shape)} needs float32 (or 16 bit) of "
                        f"shape {' or '.join(str(list(s)) for s in shapes)}.",
                        "Correct config.json if it names another scheme, or export again.",
                    )
                )
    return problems


def _scale_shapes(shape: tuple[int, ...], group: GroupShape) -> tuple[tuple[int, ...], ...]:
    """List the shapes in which exporters write one and the same scale."""
    if group == TENSOR:
        return ((1,), (), (1, 1))
    if group == ROW:
        return ((shape[0], 1), (shape[0],))
    return (scale_shape(shape, group),)
