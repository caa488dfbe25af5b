"""NVIDIA ModelOpt: in ``hf_quant_config.json``, or in ``config.json``, which wins.

Each may be flat, or nest its entries under ``quantization``.
"""

from __future__ import annotations

from dataclasses import replace

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR

FILE = "hf_quant_config.json"
_ALGORITHMS = {
    "FP8": Format(TENSOR, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Format(ROW, ROW),
    # the name says weight-only; vLLM quantizes activations by 1x128 all the same
    "FP8_PB_WO": Format(BLOCK, GROUP128),
    "FP8_BLOCK_SCALES": Format(BLOCK, GROUP128),
    "MXFP8": Format(MX, MX),
    "MXFP4": Format(MX, MX),  # FP4 values are FP8 values
    "W4A8_MXFP4_FP8": Format(MX, MX),
    "NVFP4": Format(),  # its tensors tell what it became when it was read
    "W4A16_NVFP4": Format(),
    "W4A8_NVFP4_FP8": Format(),
}


def _detect(source: Source) -> bool:
    return source.method.startswith("modelopt") or (not source.method and FILE in source.documents)


def _parse(source: Source) -> Announcement:
    file = _entries(source.documents.get(FILE, {}))
    found = _entries(source.quantization) if source.method else file
    ignore = base.strings(found, "ignore", "exclude_modules")
    word, known = found.get("quant_algo"), {}
    if word == "MIXED_PRECISION":
        layers = base.objects(found, key := "quantized_layers") or base.objects(file, key)
        if not (layers or base.objects(found, "config_groups")):
            raise base.invalid(key, layers, "an object with at least one layer")
        algorithms = {name: base.objects(layers, name).get("quant_algo") for name in layers}
        known = {n: _algorithm(f"{key}.{n}", said) for n, said in algorithms.items()}
        # of an FP8 layer that is not listed: its tensors tell the rest
        others = Format(static=None)
    else:
        cache = word is None and found.get("kv_cache_quant_algo") is not None
        others = Format() if cache else _algorithm("quant_algo", word)

    def format_of(layer: str) -> Format:
        said = base.first_match(known, layer, others)
        return replace(said, static=None) if said.static and base.is_embedding(layer) else said

    return Announcement(format_of, ignore)


def _entries(config: JsonObject) -> JsonObject:
    nested = config.get("quantization")
    return nested if "quant_algo" not in config and isinstance(nested, dict) else config


def _algorithm(key: str, word: object) -> Format:
    found = _ALGORITHMS.get(str(word).upper())
    if found is None:
        raise base.invalid(key, word, f"one of {', '.join(_ALGORITHMS)}", base.OTHER_FORMAT)
    return found


MODELOPT = Dialect("modelopt", _detect, _parse)
