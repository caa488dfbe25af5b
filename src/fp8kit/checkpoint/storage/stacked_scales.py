"""Scales stacked for all experts in files that hold the codes expert by expert.

Transformers writes an FP8 mixture of experts so: it splits the codes, ``X.experts.0.gate_proj``,
and leaves the scales as it holds them, ``X.experts.gate_up_proj_scale_inv`` of ``[E, n, k]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fp8kit.checkpoint.schema.naming import CODES, named
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.conversion.model_families import STACKED

_SCALE = re.compile(
    r"(?P<holder>.+)\.(?P<stack>gate_up_proj|up_proj|down_proj)_(?P<kind>scale(_inv)?|activation_scale)"
)
# kinds of scales of a stack that do not say "weight" -> those of a single layer
_KINDS = {"scale": "weight_scale", "scale_inv": "weight_scale_inv"}


def sliced(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors with stacks of scales cut into slices, where codes come expert by expert.

    A slice has the name of a single layer's scale; its data is a part of the stack's, and is read
    alone.
    """
    found = dict(tensors)
    for name, info in tensors.items():
        match = _SCALE.fullmatch(name)
        if match is None or f"{match['holder']}.{match['stack']}" in tensors:
            continue
        slices = _slices(match["holder"], match["stack"], match["kind"], info, tensors)
        if slices and not slices.keys() & tensors.keys():
            del found[name]
            found |= slices
    return found


def _slices(
    holder: str, stack: str, kind: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Cut a stack of scales; empty if it does not belong to single experts or cannot be cut."""
    options = STACKED.get(stack, ((stack,),))
    parts = next((o for o in options if _are_codes(holder, 0, o, tensors)), ())
    experts = info.shape[0] if info.shape else 0
    if not parts or not all(_are_codes(holder, e, parts, tensors) for e in range(experts)):
        return {}
    rows = info.shape[1] if len(info.shape) > 1 else 1
    shared = rows == 1
    if not shared and rows % len(parts):
        return {}
    height = rows if shared else rows // len(parts)
    shape = (height, *info.shape[2:]) if len(info.shape) > 1 else ()
    piece, found = replace(info, shape=shape), {}
    for expert in range(experts):
        for i, part in enumerate(parts):
            at = expert * rows // height + (0 if shared else i)
            name = named(f"{holder}.{expert}.{part}", _KINDS.get(kind, kind))
            found[name] = replace(piece, offset=info.offset + at * piece.nbytes)
    return found


def _are_codes(
    holder: str, expert: int, parts: tuple[str, ...], tensors: Mapping[str, TensorInfo]
) -> bool:
    names = [f"{holder}.{expert}.{part}.weight" for part in parts]
    return all(n in tensors and tensors[n].dtype in CODES for n in names)
