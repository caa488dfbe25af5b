"""FP8 weights and scales without a quantization config: LoRAX, and SGLang's ``w8a8_fp8``."""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, Source
from fp8kit.errors import CheckpointError
from fp8kit.formats import FP8_FORMATS


def _detect(source: Source) -> bool:
    if source.quantization:
        return source.method in ("w8a8-fp8", "fp8-kv")
    return any(dtype in FP8_FORMATS for dtype, _ in source.kinds.values())


def _parse(source: Source) -> Announcement:
    of_rows = next((n for n in sorted(source.kinds) if _scales_rows(n, source)), "")
    if of_rows and not source.quantization:
        raise CheckpointError(
            f"{of_rows} has one scale per row, and no config beside it: so SDNQ names scales.",
            "SDNQ may rotate weights before it quantizes them; only its config says so.",
            "Start from the high-precision checkpoint; or, if you know that nothing was rotated, "
            "name these scales X.weight_scale.",
        )
    return Announcement(lambda _: Format(static=None))


def _scales_rows(name: str, source: Source) -> bool:
    """Return whether a tensor is ``X.scale`` with one number per row of FP8 codes ``X.weight``."""
    layer = name.removesuffix(".scale")
    codes, sides = source.kinds.get(f"{layer}.weight", (None, ()))
    rows = (*sides[:-1], 1)
    return (
        layer != name and codes in FP8_FORMATS and max(rows) > 1 and source.kinds[name][1] == rows
    )


BARE = Dialect("bare", _detect, _parse)
