"""The languages that FP8 checkpoints are written in: one row per dialect.

A dialect says how ``config.json`` announces the numbers (``Spec``) and what the tensors beside a
weight are called on disk. Everything else in the package speaks of ``weight``, ``weight_scale`` and
``input_scale``, in the shapes that ``formats.scale_shape`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import BLOCK, GROUP128, ROW, SCHEMES, TENSOR, GroupShape, Scheme

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a quantization config says, in the words of this package.

    Args:
        scheme: the numbers every quantized layer computes with.
        ignore: names or ``re:`` patterns of the linear layers that are not quantized.
        unread: sentences about parts of the config that this package does not carry out.
    """

    scheme: Scheme
    ignore: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write FP8 layers to disk.

    Args:
        name: the word used in reports.
        detect: whether a quantization config is of this dialect.
        parse: read a quantization config; raises ``CheckpointError`` if it cannot be honoured.
        render: write a quantization config; raises ``CheckpointError`` if the dialect cannot hold
            the scheme.
        suffixes: our name of each tensor of a layer, and the name it has on disk.
        tensor_scale: shape of a per-tensor scale on disk.
    """

    name: str
    detect: Callable[[JsonObject], bool]
    parse: Callable[[JsonObject], Spec]
    render: Callable[[Spec], JsonObject]
    suffixes: Mapping[str, str]
    tensor_scale: tuple[int, ...]


def quantization_config(config: JsonObject) -> JsonObject | None:
    """Find the quantization config in a ``config.json``, wherever tools have put it.

    Args:
        config: the parsed file.

    Returns:
        The object, or ``None`` for a checkpoint that says nothing about quantization.

    Raises:
        CheckpointError: if it is there and is not a JSON object.

    Example:
        >>> quantization_config({"quantization_config": {"quant_method": "fp8"}})
        {'quant_method': 'fp8'}
    """
    text = config.get("text_config")
    for holder, key in (
        (config, "quantization_config"),
        (text, "quantization_config"),
        (config, "compression_config"),
    ):
        found = holder.get(key) if isinstance(holder, dict) else None
        if found is None:
            continue
        if not isinstance(found, dict):
            raise CheckpointError(
                teach(
                    f"config.json has {key} = {found!r}.",
                    "It is a JSON object.",
                    "Correct the file, or remove the entry if nothing is quantized.",
                )
            )
        # the oldest writers of compression_config did not name their method
        method = "compressed-tensors" if key == "compression_config" else None
        return {"quant_method": method, **found} if method else found
    return None


def detect(config: JsonObject) -> tuple[Dialect, Spec] | None:
    """Say which dialect a checkpoint is written in, and what it says.

    Args:
        config: the parsed ``config.json``.

    Returns:
        The dialect and its ``Spec``, or ``None`` if the config announces no quantization.

    Raises:
        CheckpointError: if it announces a quantization that no dialect here understands.

    Example:
        >>> dialect, spec = detect(json.loads(Path("dir/config.json").read_text()))
        >>> dialect.name, spec.scheme.name
        ('compressed-tensors', 'FP8_DYNAMIC')
    """
    found = quantization_config(config)
    if found is None:
        return None
    for dialect in DIALECTS:
        if dialect.detect(found):
            return dialect, dialect.parse(found)
    known = ", ".join(d.name for d in DIALECTS)
    raise CheckpointError(
        teach(
            f"config.json says quant_method = {found.get('quant_method')!r}, "
            f"format = {found.get('format')!r}.",
            f"This version reads {known} (FP8 float-quantized).",
            "Export the model to that format, or start from its high-precision checkpoint.",
        )
    )


_ARGS: JsonObject = {"num_bits": 8, "type": "float", "symmetric": True}
_CT_WEIGHTS: dict[GroupShape, JsonObject] = {
    TENSOR: {"strategy": "tensor"},
    ROW: {"strategy": "channel"},
    BLOCK: {"strategy": "block", "block_structure": [128, 128]},
}
_CT_ACTIVATIONS: dict[tuple[GroupShape, bool], JsonObject] = {
    (TENSOR, True): {"strategy": "tensor", "dynamic": False},
    (ROW, False): {"strategy": "token", "dynamic": True},
    (GROUP128, False): {"strategy": "group", "group_size": 128, "dynamic": True},
}
_CT_FORMATS = ("float-quantized", "naive-quantized")
# these describe how the values were found; reading the values does not need them
_CT_HISTORY = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")


def _ct_detect(found: JsonObject) -> bool:
    method = str(found.get("quant_method")).lower().replace("_", "-")
    return method == "compressed-tensors"


def _ct_parse(found: JsonObject) -> Spec:
    groups = found.get("config_groups")
    ignore = found.get("ignore") or []
    if not isinstance(groups, dict) or not groups:
        raise _broken("config_groups", groups, "an object with at least one group")
    if not isinstance(ignore, list) or not all(isinstance(i, str) for i in ignore):
        raise _broken("ignore", ignore, "a list of names")
    schemes = {name: _ct_group(name, group, found) for name, group in groups.items()}
    first, *others = schemes.values()
    if any(s != first for s in others):
        listed = ", ".join(f"{n}: {s}" for n, s in schemes.items())
        raise CheckpointError(
            teach(
                f"The config groups differ ({listed}).",
                "This version reads checkpoints whose quantized layers all share one scheme.",
                "Export the model with one scheme.",
            )
        )
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _broken("sparsity_config", sparsity, "absent or dense")
    if found.get("transform_config"):
        raise _broken("transform_config", found["transform_config"], "absent: weights as they are")
    unread = []
    if found.get("kv_cache_scheme"):
        unread.append("The config quantizes the KV cache; its scales are not used.")
    return Spec(first, tuple(ignore), tuple(unread))


def _ct_group(name: str, group: Any, found: JsonObject) -> Scheme:
    if not isinstance(group, dict):
        raise _broken(f"config_groups.{name}", group, "an object")
    layout = group.get("format") or found.get("format") or _CT_FORMATS[0]
    if layout not in (*_CT_FORMATS, "mixed-precision"):
        raise _broken("format", layout, " or ".join(_CT_FORMATS))
    if group.get("output_activations") is not None:
        raise _broken(
            f"config_groups.{name}.output_activations", group["output_activations"], "null"
        )
    weights = _ct_args(name, group, "weights")
    inputs = _ct_args(name, group, "input_activations")
    if isinstance(weights.get("block_structure"), str):  # written so by early exporters
        weights["block_structure"] = [
            int(n) for n in weights["block_structure"].split("x") if n.isdigit()
        ]
    for scheme in SCHEMES.values():
        w, x = _ct_of(scheme)
        if w is not None and w == weights and (x or {}) == inputs:
            return scheme
    known = ", ".join(s.name for s in SCHEMES.values() if _ct_of(s)[0] is not None)
    raise CheckpointError(
        teach(
            f"Config group {name} has weights {weights} and input_activations {inputs or None}.",
            f"This version reads the combinations of {known}.",
            "Export the model with one of these schemes.",
        )
    )


def _ct_args(name: str, group: JsonObject, key: str) -> JsonObject:
    args = group.get(key)
    if args is None:
        return {}
    if not isinstance(args, dict):
        raise _broken(f"config_groups.{name}.{key}", args, "an object or null")
    known = {k: v for k, v in args.items() if v is not None and k not in _CT_HISTORY}
    return {"symmetric": True, "dynamic": False, **known}


def _ct_of(scheme: Scheme) -> tuple[JsonObject | None, JsonObject | None]:
    """Give the arguments for weights and activations; no weights if it cannot be said."""
    weights = _CT_WEIGHTS.get(scheme.weight)
    if weights is None or scheme.ue8m0 or scheme.dtype != SCHEMES["FP8"].dtype:
        return None, None
    weights = {**_ARGS, **weights, "dynamic": False}
    if scheme.activation is None:
        return weights, None
    inputs = _CT_ACTIVATIONS.get((scheme.activation, scheme.static))
    return (weights, {**_ARGS, **inputs}) if inputs else (None, None)


def _ct_render(spec: Spec) -> JsonObject:
    weights, inputs = _ct_of(spec.scheme)
    if weights is None:
        s = spec.scheme
        raise CheckpointError(
            teach(
                f"Scheme {s} has {s.weight} weights and {s.activation} activations"
                f"{', powers of two as scales' if s.ue8m0 else ''}.",
                "compressed-tensors float-quantized, which this version writes, cannot hold it.",
                "Convert with FP8_DYNAMIC, FP8_TENSOR, FP8, FP8_BLOCK or FP8_WEIGHT_ONLY.",
            )
        )
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": sorted({"lm_head", *spec.ignore}),
        "kv_cache_scheme": None,
    }


def _broken(key: str, found: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        teach(
            f"The quantization config has {key} = {found!r}.",
            f"It is {wanted}.",
            "Correct config.json, or export the model again.",
        )
    )


DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        "compressed-tensors",
        _ct_detect,
        _ct_parse,
        _ct_render,
        {"weight": "weight", "weight_scale": "weight_scale", "input_scale": "input_scale"},
        (1,),
    ),
)
