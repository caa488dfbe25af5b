"""ComfyUI: one file, with a ``scaled_fp8`` marker and ``scale_weight``, or ``comfy_quant`` entries.

There is no config. Activations are static where a layer has ``scale_input``, unless its entry asks
for ``full_precision_matrix_mult``, or a marker of two elements does so for all; elsewhere ComfyUI
computes in 16 bit unless asked otherwise, and so do these layers. A ``scale_input`` that is a copy
of ``scale_weight`` fills a gap: convert_to_quant writes it in text encoders, in which ComfyUI
always computes in 16 bit. Scales of MXFP8 and NVFP4 lie in tiles of 128x4, as tensor cores read
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, Source
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import GroupShape
from fp8kit.quantizers.scale_layout import E8M0_DTYPES

METADATA = "_quantization_metadata"
ENTRY = "comfy_quant"
MARKER = "scaled_fp8"


def describes_layers(names: Iterable[str], metadata: Mapping[str, str]) -> bool:
    """Return whether a file says layer by layer how ComfyUI packed it, as those with FP4 do."""
    return METADATA in metadata or any(name.endswith(f".{ENTRY}") for name in names)


def _detect(source: Source) -> bool:
    marked = source.has(".scale_weight", f".{MARKER}") or MARKER in source.kinds
    return marked or describes_layers(source.kinds, source.metadata)


def _parse(source: Source) -> Announcement:
    said = base.object_in(METADATA, source.metadata.get(METADATA, "{}"))
    layers = base.object_in(f"{METADATA}: layers", said.get("layers", {}))
    entries = {f"{METADATA}: {name}": entry for name, entry in layers.items()}
    entries |= {n: text for n, text in source.metadata.items() if n.endswith(f".{ENTRY}")}
    for place, text in entries.items():
        entry = base.object_in(place, text)
        if entry.get("format") in ("nvfp4", "mxfp8") and "quantization_config" in source.metadata:
            raise CheckpointError(
                f"{place} is {entry['format']}, in a file with quantization_config in its header.",
                "ModelOpt writes both; its scales lie row by row or in tiles, which the file does "
                "not say, and its FP4 codes in another order than ComfyUI's.",
                "Export it as a folder, without swizzling and without metadata of layers.",
            )
        more = base.object_in(f"{place}: params", entry.get("params") or {})
        if entry.get("convrot") or more.get("convrot"):
            raise base.rotated_inputs(f"{place} says convrot")
    # a file of several models has a marker for each
    markers = [n for n in source.kinds if n.rpartition(".")[2] == MARKER]
    exact_in = tuple(n.removesuffix(MARKER) for n in markers if source.kinds[n][1] == (2,))

    def format_of(layer: str) -> Format:
        place = f"{layer}.{ENTRY}".lstrip(".")
        entry = base.object_in(place, source.metadata.get(place, layers.get(layer, {})))
        if not entry:
            _refuse_bytes(layer, source)
        _check_format(layer, entry.get("format"), source)
        exact = layer.startswith(exact_in) or bool(entry.get("full_precision_matrix_mult"))
        exact = exact or layer in source.repeated
        side = entry.get("group_size") if str(entry.get("format")).endswith("_blockwise") else None
        square = GroupShape(side, side) if isinstance(side, int) and side > 0 else None
        # convert_to_quant scales rows where a side is no multiple of the blocks, and says blocks
        scale = source.kinds.get(f"{layer}.weight_scale".lstrip("."), (None, ()))[1]
        square = None if len(scale) == 1 else square
        return Format(square, static=None, weight_only=True, swizzled=True, unscaled=exact)

    some = some_of(sorted(source.repeated))
    copies = f"Input scales that are copies of scales of weights are ignored: {some}."
    return Announcement(format_of, unread=(copies,) if source.repeated else ())


def _refuse_bytes(layer: str, source: Source) -> None:
    """Refuse MX scales of a layer without an entry, which may lie in tiles or row by row."""
    for kind in ("weight_scale", "scale_weight"):
        name = f"{layer}.{kind}".lstrip(".")
        if name in source.kinds and source.kinds[name][0] in E8M0_DTYPES:
            raise CheckpointError(
                f"{name} is {source.kinds[name][0]}, and no {ENTRY} entry describes its layer.",
                "ComfyUI's MXFP8 has one: without it, scales may lie row by row or in tiles.",
                f'If they lie in tiles of 128x4, add {ENTRY} with {{"format": "mxfp8"}}; if row by '
                "row, export a folder with a config.json.",
            )


def _check_format(layer: str, form: object, source: Source) -> None:
    """Refuse an entry whose format is not that of the layer's codes."""
    weight = f"{layer}.weight".lstrip(".")
    codes = str(source.kinds[weight][0]).removeprefix("torch.") if weight in source.kinds else ""
    # tools add the granularity, as in float8_e4m3fn_rowwise; ModelOpt says fp8
    fits = form in (None, "fp8") or str(form).startswith(codes) or str(form).endswith("mxfp8")
    if not fits and not (form == "nvfp4" and layer in source.made):
        raise base.invalid(
            f"{layer}: format", form, f"the format of {weight}, {codes}", file="The file"
        )


COMFYUI = Dialect("comfyui", _detect, _parse)
