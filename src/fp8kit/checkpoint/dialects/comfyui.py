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


def _parse(source: Source) -> Announcement:
    def numbers(layer: str) -> Numbers:
        inputs = (f"{layer}.scale_input", f"{layer}.input_scale")
        static = any(name in source.kinds for name in inputs)
        return Numbers(static=static, weight_only=not static)

    return Announcement(numbers)


COMFYUI = Dialect("comfyui", _detect, _parse)
