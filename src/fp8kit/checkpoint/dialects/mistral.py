"""Mistral's own files: ``params.json`` beside ``consolidated.safetensors``.

Layers keep Mistral's names, and the rows of ``wq`` and ``wk`` keep Mistral's order. A checkpoint by
llm-compressor has its own config in ``params.json``, and is read as compressed-tensors.
"""

from __future__ import annotations

from dataclasses import replace

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source
from fp8kit.checkpoint.dialects.compressed_tensors import COMPRESSED_TENSORS

FILE = "params.json"
_STATIC = {"NO_SCALES": False, "TENSOR": True, None: None}


def _detect(source: Source) -> bool:
    return (not source.method and _said(source) is not None) or source.has("qscale_weight")


def _said(source: Source) -> JsonObject | None:
    params = source.documents.get(FILE, {})
    found = (params.get(key) for key in ("quantization", "quantization_config"))
    return next((said for said in found if isinstance(said, dict)), None)


def _parse(source: Source) -> Announcement:
    found = _said(source) or {}
    unread = ("Layers have Mistral's own names; rows of wq and wk are in Mistral's order.",)
    if "config_groups" in found:
        base.check_transforms(found)
        theirs = COMPRESSED_TENSORS.parse(replace(source, config={"quantization_config": found}))
        return replace(theirs, unread=(*theirs.unread, *unread))
    if found.get("qformat_weight", "fp8_e4m3") != "fp8_e4m3":
        raise base.invalid("qformat_weight", found["qformat_weight"], "'fp8_e4m3'", file=FILE)
    word = found.get("qscheme_act")
    if not isinstance(word, str | None) or word not in _STATIC:
        raise base.invalid("qscheme_act", word, "'NO_SCALES', 'TENSOR' or null", file=FILE)
    static = _STATIC[word]
    return Announcement(lambda _: Format(static=static), (), unread)


MISTRAL = Dialect("mistral", _detect, _parse)
