"""ComfyUI: one file, with a ``scaled_fp8`` marker and ``scale_weight``, or ``comfy_quant`` entries.

There is no config. Activations are static where a layer has ``scale_input``; elsewhere ComfyUI
computes in 16 bit unless asked otherwise, and so do these layers. Scales of MXFP8 and NVFP4 lie in
tiles of 128x4, as tensor cores read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Numbers, Source

_METADATA = "_quantization_metadata"


def describes_layers(names: Iterable[str], metadata: Mapping[str, str]) -> bool:
    """Return whether a file says layer by layer how ComfyUI packed it, as those with FP4 do.

    Args:
        names: of its tensors.
        metadata: text entries of its header.
    """
    return _METADATA in metadata or any(name.endswith(".comfy_quant") for name in names)


def _detect(source: Source) -> bool:
    marked = source.has(".scale_weight", ".scaled_fp8") or "scaled_fp8" in source.kinds
    return marked or describes_layers(source.kinds, source.metadata)


def _parse(_: Source) -> Announcement:
    return Announcement(lambda _: Numbers(static=None, weight_only=True, swizzled=True))


COMFYUI = Dialect("comfyui", _detect, _parse)
