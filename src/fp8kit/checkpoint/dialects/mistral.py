"""Mistral's own files: ``params.json`` beside ``consolidated.safetensors``.

Layers keep Mistral's names, and the rows of ``wq`` and ``wk`` the order they have there.
"""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Numbers, Source, broken, objects

FILE = "params.json"
_STATIC = {"NO_SCALES": False, "TENSOR": True, None: None}


def _detect(source: Source) -> bool:
    params = source.documents.get(FILE, {})
    announced = not source.method and isinstance(params.get("quantization"), dict)
    return announced or source.has("qscale_weight")


def _parse(source: Source) -> Announcement:
    found = objects(source.documents.get(FILE, {}), "quantization")
    if found.get("qformat_weight", "fp8_e4m3") != "fp8_e4m3":
        raise broken("qformat_weight", found["qformat_weight"], "'fp8_e4m3'", file=FILE)
    word = found.get("qscheme_act")
    if not isinstance(word, str | None) or word not in _STATIC:
        raise broken("qscheme_act", word, "'NO_SCALES', 'TENSOR' or null", file=FILE)
    static = _STATIC[word]
    unread = ("Layers have Mistral's own names; rows of wq and wk are in Mistral's order.",)
    return Announcement(lambda _: Numbers(static=static), (), unread)


MISTRAL = Dialect("mistral", _detect, _parse)
