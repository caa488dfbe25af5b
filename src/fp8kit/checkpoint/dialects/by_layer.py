"""Our own format in models of diffusers and the hub's mixin: each FP8 layer, with its scheme.

diffusers has no public format that holds FP8 layers. What it writes with the quantization method
``fp8kit`` has the names and shapes of ``Fp8Linear``, and loads nowhere else without an error. The
mixin of huggingface_hub writes no such config: its files hold the same entries in their header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source
from fp8kit.formats import MX_FORMS, SCHEMES, GroupShape, Scheme

METHOD = "fp8kit"


def plain(scheme: Scheme) -> str | JsonObject:
    """Return a scheme as JSON can hold it: a preset by its name, another by its fields."""
    if (SCHEMES | MX_FORMS).get(scheme.name) == scheme:
        return scheme.name
    return {**asdict(scheme), "dtype": str(scheme.dtype).removeprefix("torch.")}


def scheme_of_plain(scheme: str | JsonObject) -> Scheme:
    """Read a scheme that ``plain`` returned; raises ``ValueError`` if it is none."""
    if isinstance(scheme, str):
        return Scheme.of(scheme)
    try:
        groups = {
            key: None if scheme[key] is None else GroupShape(**scheme[key])
            for key in ("weight", "activation")
        }
        return Scheme(**{**scheme, **groups, "dtype": getattr(torch, scheme["dtype"])})
    except (TypeError, LookupError, AttributeError) as error:
        raise base.invalid("scheme", scheme, "the name of a preset, or its fields") from error


def schemes_of(layers: Mapping[str, str | JsonObject]) -> dict[str, Scheme]:
    """Read the schemes of FP8 layers, by name, as ``plain`` writes them; refuse anything else."""
    found = {}
    for name, scheme in layers.items():
        try:
            found[name] = scheme_of_plain(scheme)
        except ValueError as error:
            raise base.invalid(f"layers.{name}", scheme, "a scheme") from error
    return found


def _parse(source: Source) -> Announcement:
    said = source.metadata.get(METHOD)
    layers = base.object_in(METHOD, said) if said else base.objects(source.quantization, "layers")
    schemes = schemes_of(layers)

    def format_of(layer: str) -> Format:
        if layer not in schemes:
            raise base.invalid("layers", sorted(schemes)[:5], f"a list with {layer}, which is FP8")
        scheme = schemes[layer].stored  # a rebased weight is read as the MX weight it was
        only = scheme.activation is None
        return Format(scheme.weight, scheme.activation, scheme.static, only, scheme.ue8m0)

    return Announcement(format_of)


def _detect(source: Source) -> bool:
    return source.method == METHOD or METHOD in source.metadata


BY_LAYER = Dialect(METHOD, _detect, _parse)
