"""FP8 weights and scales without a quantization config: LoRAX, and SGLang's ``w8a8_fp8``."""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, Source
from fp8kit.formats import FP8_FORMATS


def _detect(source: Source) -> bool:
    if source.quantization:
        return source.method in ("w8a8-fp8", "fp8-kv")
    return any(dtype in FP8_FORMATS for dtype, _ in source.kinds.values())


def _parse(_: Source) -> Announcement:
    return Announcement(lambda _: Format(static=None))


BARE = Dialect("bare", _detect, _parse)
