"""ComfyUI: one file, with a ``scaled_fp8`` marker and ``scale_weight``, or ``comfy_quant`` entries.

There is no config. Activations are static where a layer has ``scale_input``; elsewhere ComfyUI
computes in 16 bit unless asked otherwise, and so do these layers.
"""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Numbers, Source

MARKERS = ("scaled_fp8", "comfy_quant")
_METADATA = "_quantization_metadata"


def _detect(source: Source) -> bool:
    marked = source.has(".scale_weight", *(f".{m}" for m in MARKERS))
    return marked or "scaled_fp8" in source.kinds or _METADATA in source.metadata


def _parse(_: Source) -> Announcement:
    return Announcement(lambda _: Numbers(static=None, weight_only=True))


COMFYUI = Dialect("comfyui", _detect, _parse)
