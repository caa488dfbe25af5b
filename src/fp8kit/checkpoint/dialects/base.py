"""What a dialect is: the mapping between a checkpoint's own format and this package's terms."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8kit.conversion.model_families import GATE_UP, OF_DELTA_NET
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape, Scheme

JsonObject = dict[str, Any]
AUTO_ROUND = ("auto-round", "intel/auto-round")  # its names of quant_method
OTHER_FORMAT = "Weights of other formats are not read: start from the high-precision checkpoint."
_AGAIN = "Correct it, or export the model again."
_CONFIG = "The quantization config"
Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
_EMBEDDING = re.compile(r"(embed|wte|wpe)[^.]*$")
_SINGLE_EXPERT = re.compile(r"\bexperts\.\d+\.")
# merged layers that engines look up by name -> the layers in files that they consist of
_ASKED_FOR = {"gate_up_proj": GATE_UP, "qkv_proj": ("qkv",), **OF_DELTA_NET}
# keys under which the config of a model of several parts holds that of its language model
TEXT_PARTS = ("text_config", "llm_config", "language_config")
_NATURAL = {TENSOR: ROW, ROW: ROW, BLOCK: GROUP128, MX: MX}


@dataclass(frozen=True, slots=True)
class Source:
    """All that a checkpoint says about itself before a tensor is read.

    ``kinds`` has dtype and shape of each tensor on disk, ``documents`` the JSON files beside
    ``config.json``, ``metadata`` the texts in headers, and those stored as tensors (ComfyUI).
    ``widths`` has the user's row counts of the parts of fused layers, by patterns of names, and
    ``made`` the granularity of weights that become FP8 when they are read (NVFP4), by layer.
    ``repeated`` has the layers of ComfyUI whose input scale is a copy of their weight's scale.
    """

    config: JsonObject
    kinds: Kinds = field(default_factory=dict)
    documents: Mapping[str, JsonObject] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    made: Mapping[str, GroupShape] = field(default_factory=dict)
    repeated: frozenset[str] = frozenset()

    @property
    def quantization(self) -> JsonObject:
        """The quantization config; empty if there is none."""
        return quantization_config(self.config) or {}

    @property
    def method(self) -> str:
        """The announced ``quant_method``, in lower case and with dashes; empty if there is none."""
        return str(self.quantization.get("quant_method") or "").lower().replace("_", "-")

    def has(self, *endings: str) -> bool:
        """Return whether a tensor's name ends in one of these."""
        return any(name.endswith(endings) for name in self.kinds)


@dataclass(frozen=True, slots=True)
class Format:
    """How one layer is stored and computes; tensors decide what a config leaves open (``None``).

    Without ``activation`` the weight decides (rows for tensors and rows, 1x128 for blocks, MX for
    MX). ``static`` activations have an ``input_scale``, which ``unscaled`` layers have and do not
    use (ComfyUI); ``weight_only`` leaves all others in 16 bit. ``swizzled`` MX scales lie in 128x4
    tiles (torchao, ComfyUI); ``transposed`` stacks have K before N (FBGEMM).
    """

    weight: GroupShape | None = None
    activation: GroupShape | None = None
    static: bool | None = False
    weight_only: bool = False
    ue8m0: bool = False
    swizzled: bool = False
    transposed: bool = False
    unscaled: bool = False

    def scheme(self, weight: GroupShape, has_input_scale: bool) -> Scheme:
        """Return the scheme of a layer once the granularity of its weight is known."""
        if self.static or (self.static is None and has_input_scale):
            return scheme_of(weight, TENSOR, static=True)
        if self.weight_only:
            return scheme_of(weight, None)
        natural = _NATURAL.get(weight, GroupShape(1, weight.cols))
        return scheme_of(weight, self.activation or natural, ue8m0=self.ue8m0)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a checkpoint announces: how each layer computes, by its name, and what is left dense.

    ``unread`` has sentences about announcements that this package does not carry out, ``scale_ub``
    bounds the amax of activations from above.
    """

    format_of: Callable[[str], Format]
    ignore: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    scale_ub: float | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """How the quantized layers of a checkpoint compute, as it is read or to be written.

    ``scheme`` is that of most of them. ``others`` has the layers that an entry for linear layers in
    general does not cover: those of another scheme, and a quantized output head. ``kv_scales`` is
    ``"tensor"`` or ``"attn_head"``, the granularity of the KV cache's scales, or empty without any.
    The rest is as in ``Announcement``.
    """

    scheme: Scheme
    ignore: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    others: Mapping[str, Scheme] = field(default_factory=dict)
    kv_scales: str = ""
    scale_ub: float | None = None


def _read_only(spec: Spec) -> JsonObject:
    raise CheckpointError(
        f"Got {spec.scheme} to write in a dialect that is read and not written.",
        "What is written must load in current engines.",
        "Pass target='vllm', 'sglang' or 'transformers' for a dialect that does.",
    )


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to write FP8 layers to disk, under the name that reports and the command line use.

    ``parse`` reads what a checkpoint announces, ``render`` writes a quantization config; both raise
    ``CheckpointError`` for what cannot be honoured, and ``render`` where a dialect is only read.
    ``suffixes`` maps our names of tensors to those on disk where they differ; ``tensor_scale`` is
    the shape of a per-tensor scale on disk.
    """

    name: str
    detect: Callable[[Source], bool]
    parse: Callable[[Source], Announcement]
    render: Callable[[Spec], JsonObject] = _read_only
    suffixes: Mapping[str, str] = field(default_factory=dict)
    tensor_scale: tuple[int, ...] = (1,)

    @property
    def writable(self) -> bool:
        """Whether checkpoints are written in it."""
        return self.render is not _read_only


def unwritable(spec: Spec, dialect: str, holds: str, remedy: str) -> CheckpointError:
    """Return the error for a scheme that a dialect cannot hold; ``holds`` says what it can."""
    others = " and others" if spec.others else ""
    return CheckpointError(
        f"Got scheme {spec.scheme}{others} to write as {dialect}.", holds, remedy
    )


def rotated_inputs(where: str) -> CheckpointError:
    """Return the error for layers whose inputs are rotated while the model runs."""
    return CheckpointError(
        f"{where}: inputs of layers are rotated at run time.",
        "Layers here multiply their inputs as they come: every number would be wrong.",
        "Export the model without rotations, or with those alone that are part of the weights.",
    )


def check_transforms(found: JsonObject) -> None:
    """Refuse rotations in a quantization config, but for those that are part of the weights.

    compressed-tensors describes them so, and AngelSlim in the configs of other methods too.
    """
    transforms = objects(found, "transform_config")
    places = _places_of_rotations(transforms)
    of_weights = [place in ("weight_input", "weight_output") for place in places]
    if transforms and not (of_weights and all(of_weights)):
        wanted = "absent, or applied to weights alone: a rotation of inputs is not computed"
        raise invalid("transform_config", transforms, wanted)


def _places_of_rotations(transforms: JsonObject) -> list[object]:
    """List the place of each rotation; ``None`` for each that the config does not tell."""
    found: list[object] = []
    for group in objects(transforms, "config_groups").values():
        uses = group.get("apply") if isinstance(group, dict) else None
        uses = uses if isinstance(uses, list) else [None]
        found += [use.get("location") if isinstance(use, dict) else None for use in uses]
    return found


def left_dense(spec: Spec) -> JsonObject:
    """List the layers in high precision under the keys that vLLM and Transformers read."""
    left = sorted(listed(spec.ignore))
    return {"ignored_layers": left, "modules_to_not_convert": left}


def is_embedding(layer: str) -> bool:
    """Return whether a layer of this name is a table that is looked up, without activations."""
    return _EMBEDDING.search(layer) is not None


def first_match(known: Mapping[str, Format], layer: str, default: Format) -> Format:
    """Return the entry of a layer: by its own name, else by the first pattern it matches."""
    patterns = (n for pattern, n in known.items() if fnmatch.fnmatchcase(layer, pattern))
    return known.get(layer) or next(patterns, default)


def listed(names: Iterable[str]) -> set[str]:
    """List the layers in high precision under every name that engines may look up.

    Engines merge q, k and v, and gate and up. They look most merged layers up by their parts, but
    some, such as those in the vision tower of GLM-4V, by the name of the merged layer. The result
    has these names, the output head, and the merged layers all of whose parts are among the names.
    """
    return with_merged({"lm_head", *names}, _ASKED_FOR)


def with_merged(names: Iterable[str], layers: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Add each merged layer all of whose parts are in ``names``; ``layers`` has the parts."""
    found = set(names)
    for name in sorted(found):
        if _SINGLE_EXPERT.search(name):  # engines look these up in their own way
            continue
        parent, dot, last = name.rpartition(".")
        for merged, parts in layers.items():
            if last == parts[0] and {f"{parent}{dot}{part}" for part in parts} <= found:
                found.add(f"{parent}{dot}{merged}")
    return found


def scheme_of(
    weight: GroupShape, activation: GroupShape | None, *, static: bool = False, ue8m0: bool = False
) -> Scheme:
    """Find the preset that computes so, or describe the scheme; no activation means 16 bit."""
    ue8m0 = ue8m0 and MX not in (weight, activation)
    for preset in SCHEMES.values():
        if (preset.weight, preset.activation, preset.static) == (weight, activation, static):
            same = preset.ue8m0 == ue8m0
            return preset if same else replace(preset, name=f"{preset.name}_UE8M0", ue8m0=ue8m0)
    x = "16bit" if activation is None else f"{'static_' if static else ''}{activation}"
    name = f"FP8_{weight}_BY_{x}{'_UE8M0' if ue8m0 else ''}".upper()
    return Scheme(name, weight, activation, static, ue8m0)


def text_part(config: JsonObject) -> JsonObject:
    """Return what a ``config.json`` says about its language model: a part of it, or all of it."""
    parts = (config.get(part) for part in TEXT_PARTS)
    return next((part for part in parts if isinstance(part, dict)), config)


def quantization_config(config: JsonObject) -> JsonObject | None:
    """Find the quantization config in a ``config.json``, wherever tools have put it.

    ``None`` stands for a checkpoint that says nothing about quantization. Raises
    ``CheckpointError`` if the config is there and is not a JSON object.
    """
    holders = (config, *(config.get(part) for part in TEXT_PARTS))
    for key, holder in itertools.product(("quantization_config", "compression_config"), holders):
        found = holder.get(key) if isinstance(holder, dict) else None
        if found is None:
            continue
        if not isinstance(found, dict):
            raise invalid(key, found, "a JSON object", file="config.json")
        # the oldest writers of compression_config did not name their method
        method = "compressed-tensors" if key == "compression_config" else None
        return {"quant_method": method, **found} if method else found
    return None


def invalid(
    key: str, found: object, wanted: str, remedy: str = _AGAIN, *, file: str = _CONFIG
) -> CheckpointError:
    """Return the error for a config whose entry ``key`` is ``found`` and must be ``wanted``."""
    shown = repr(found)
    return CheckpointError(
        f"{file} has {key} = {shown if len(shown) < 300 else shown[:300] + '...'}.",
        f"It must be {wanted}.",
        remedy,
    )


def strings(config: JsonObject, *keys: str) -> tuple[str, ...]:
    """Read a list of names, under the first of these keys that is there.

    Raises ``CheckpointError`` if it is anything else than a list of strings, or null.
    """
    for key in keys:
        found = config.get(key)
        if found is None:
            continue
        if isinstance(found, list) and [type(i) for i in found] == [list]:
            (found,) = found  # LightCompress writes a list in a list
        if not isinstance(found, list) or not all(isinstance(i, str) for i in found):
            raise invalid(key, found, "a list of names")
        return tuple(found)
    return ()


def sixteen_bit_inputs(found: JsonObject) -> tuple[str, ...]:
    """Say which layers AutoRound gives inputs of 16 bits one by one, which is not carried out."""
    if found.get("act_bits") in (None, 16):
        return ()
    special = objects(found, "extra_config").items()
    exact = [
        name for name, said in special if isinstance(said, dict) and said.get("act_bits") == 16
    ]
    if not exact:
        return ()
    return (f"extra_config leaves the inputs of {some_of(exact)} in 16 bits; here they are FP8.",)


def objects(config: JsonObject, key: str) -> JsonObject:
    """Read an object, empty if it is absent or null; raises ``CheckpointError`` otherwise."""
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise invalid(key, found, "an object or null")
    return found


def object_in(place: str, found: object) -> JsonObject:
    """Return an object from the header of a file, which may hold it as JSON text."""
    try:
        read = json.loads(found) if isinstance(found, str) else found
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise invalid(place, found, "a JSON object", file="The file")
    return read


def block_shape(config: JsonObject, key: str = "weight_block_size") -> GroupShape | None:
    """Read a block size ``[rows, columns]``; ``None`` if it is absent or null.

    Raises ``CheckpointError`` if it is not two positive integers.
    """
    found = config.get(key)
    if found is None:
        return None
    sides = found if isinstance(found, list) and len(found) == 2 else ()
    if not sides or not all(type(n) is int and 0 < n <= 2**20 for n in sides):  # true is no side
        raise invalid(key, found, "two positive integers [rows, columns], or null")
    return GroupShape(*sides)


def choice(config: JsonObject, key: str, allowed: Sequence[str | None]) -> str | None:
    """Read a word out of a few; raises ``CheckpointError`` for any other value."""
    found = config.get(key)
    if not isinstance(found, str | None) or found not in allowed:
        raise invalid(key, found, f"one of {some_of([str(a) for a in allowed])}")
    return found
