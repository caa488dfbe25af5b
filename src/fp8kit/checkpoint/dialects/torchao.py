"""torchao's safetensors: subclasses taken apart, described by JSON in the headers of the files.

``X.weight`` is stored as ``X._weight_qdata`` and ``X._weight_scale``. The scales of ``MXTensor``
are usually swizzled into 128x4 tiles. Pickled version-1 files are not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source
from fp8kit.errors import CheckpointError
from fp8kit.formats import MX, ROW, TENSOR, GroupShape

_GRANULARITIES = {"PerRow": ROW, "PerTensor": TENSOR}
# what is said of bounds on amax of activations that are not carried out
_BOUNDS = {
    "hp_value_lb": "The headers bound activations from below (hp_value_lb); here it is not.",
    "hp_value_ub": "The headers bound activations from above (hp_value_ub), but not by one "
    "number for all layers; it is not bounded here.",
}


def _detect(source: Source) -> bool:
    return source.method == "torchao" or source.has("_weight_qdata")


def _parse(source: Source) -> Announcement:
    ignore = base.strings(source.quantization, "modules_to_not_convert")
    if not source.metadata.get("tensor_names"):
        raise CheckpointError(
            "The headers (__metadata__) do not describe torchao's tensors (tensor_names).",
            "torchao writes its subclasses as safetensors since version 0.15.",
            "Save the model again with a current torchao; pickled files are not read.",
        )

    def format_of(layer: str) -> Format:
        for name in (f"{layer}.weight", layer):
            if name in source.metadata:
                return _described(name, source.metadata[name], source)
        raise base.invalid(f"{layer}.weight", None, "a description", file="The safetensors header")

    inputs = [_inputs(t) for name, t in source.metadata.items() if _codes(name) in source.kinds]
    bound = _common_bound(inputs)
    asked = {key for acts in inputs for key in _BOUNDS if acts.get(key) is not None}
    unread = [_BOUNDS[key] for key in sorted(asked) if key != "hp_value_ub" or bound is None]
    dtypes = str([(acts.get("float8_dtype"), acts.get("elem_dtype")) for acts in inputs])
    if "float8_e5m2" in dtypes:
        unread.append("The headers say float8_e5m2 for activations; here they are float8_e4m3fn.")
    return Announcement(format_of, ignore, tuple(unread), bound)


def _inputs(text: str) -> JsonObject:
    """Return what a description says about activations; empty if that cannot be read."""
    try:
        acts = json.loads(text)["_data"]["act_quant_kwargs"]["_data"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}  # reported where the layer is described
    return acts if isinstance(acts, dict) else {}


def _common_bound(inputs: Sequence[JsonObject]) -> float | None:
    """Return the bound on amax that all layers have; ``None`` if there is no such number."""
    bounds = [acts.get("hp_value_ub") for acts in inputs]
    first = bounds[0] if bounds else None
    fits = isinstance(first, int | float) and 0 < first < math.inf
    return first if fits and all(bound == first for bound in bounds) else None


def _described(name: str, text: str, source: Source) -> Format:
    file = "The safetensors header"
    try:
        described: Any = json.loads(text)
        kind, data = described["_type"], described["_data"]
        acts = data.get("act_quant_kwargs")
        acts = None if acts is None else acts["_data"]
        if kind == "MXTensor" and data["elem_dtype"]["_data"] == "float8_e4m3fn":
            group = _sides([1, data["block_size"]])
            if group == MX and (acts is None or acts["block_size"] == 32):
                return Format(
                    MX, weight_only=acts is None, swizzled=bool(data["is_swizzled_scales"])
                )
        if kind == "Float8Tensor":
            weight = _weight(data["block_size"], source.kinds[_codes(name)][1])
            if acts is None:
                return Format(weight, weight_only=True)
            return _with_activations(weight, acts, data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise base.invalid(name, text, f"a description of a tensor ({error})", file=file) from error
    raise base.invalid(
        name, text, "a Float8Tensor, or an MXTensor of float8_e4m3fn by 32", file=file
    )


def _with_activations(weight: GroupShape, acts: JsonObject, data: JsonObject) -> Format:
    granularity = acts["granularity"]
    word = granularity["_type"]
    if word == "PerBlock":
        return Format(weight, _sides(granularity["_data"]["block_size"]))
    static = data.get("act_quant_scale") is not None or None
    if static and "float8_e5m2" in str(acts.get("float8_dtype")):
        raise ValueError("its static scale is for activations in float8_e5m2")
    return Format(weight, _GRANULARITIES[word], static=static)


def _weight(block: list[int], shape: tuple[int, ...]) -> GroupShape:
    sides = list(block[-2:])
    if sides == list(shape[-2:]) and all(b == s for b, s in zip(block, shape, strict=True)):
        return TENSOR
    group = _sides(sides)
    return ROW if (group.rows, group.cols) == (1, shape[-1]) else group


def _sides(found: list[int]) -> GroupShape:
    rows, cols = found
    if not all(type(n) is int and 0 < n <= 2**40 for n in (rows, cols)):
        raise ValueError(f"a group of {found!r}")
    return GroupShape(rows, cols)


def _codes(name: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layer}._{kind}_qdata" if layer else f"_{kind}_qdata"


TORCHAO = Dialect("torchao", _detect, _parse)
