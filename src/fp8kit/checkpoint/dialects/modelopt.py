"""NVIDIA ModelOpt: nested in ``hf_quant_config.json``, or flat in ``config.json``, which wins."""

from __future__ import annotations

from collections.abc import Callable

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, JsonObject, Numbers, Source
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR

FILE = "hf_quant_config.json"
_ALGORITHMS = {
    "FP8": Numbers(TENSOR, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Numbers(ROW, ROW),
    # the name says weight-only; vLLM quantizes activations by 1x128 all the same
    "FP8_PB_WO": Numbers(BLOCK, GROUP128),
    "FP8_BLOCK_SCALES": Numbers(BLOCK, GROUP128),
    "MXFP8": Numbers(MX, MX),
    "MXFP4": Numbers(MX, MX),  # FP4 values are FP8 values
    "W4A8_MXFP4_FP8": Numbers(MX, MX),
    "NVFP4": Numbers(),  # what it became as it was read
    "W4A16_NVFP4": Numbers(),
}


def _detect(source: Source) -> bool:
    return source.method.startswith("modelopt") or (not source.method and FILE in source.documents)


def _parse(source: Source) -> Announcement:
    found = source.quantization
    if not source.method:
        found = base.objects(source.documents[FILE], "quantization")
    elif "quant_algo" not in found and isinstance(found.get("quantization"), dict):
        found = found["quantization"]
    ignore = base.strings(found, "ignore", "exclude_modules")
    word = found.get("quant_algo")
    if word == "MIXED_PRECISION":
        return Announcement(_mixed(base.objects(found, "quantized_layers")), ignore)
    cache = word is None and found.get("kv_cache_quant_algo") is not None
    numbers = Numbers() if cache else _algorithm("quant_algo", word)
    return Announcement(lambda _: numbers, ignore)


def _mixed(layers: JsonObject) -> Callable[[str], Numbers]:
    known = {
        name: _algorithm(f"quantized_layers.{name}", base.objects(layers, name).get("quant_algo"))
        for name in layers
    }
    if not known:
        raise base.broken("quantized_layers", layers, "an object with at least one layer")

    # a layer that is not listed and FP8 all the same: its tensors say the rest
    return lambda layer: base.first_match(known, layer, Numbers(static=None))


def _algorithm(key: str, word: object) -> Numbers:
    found = _ALGORITHMS.get(str(word).upper())
    if found is None:
        raise base.broken(key, word, f"one of {', '.join(_ALGORITHMS)}", base.OTHER_FORMAT)
    return found


MODELOPT = Dialect("modelopt", _detect, _parse)
