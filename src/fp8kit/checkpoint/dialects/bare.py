"""FP8 weights and scales without a quantization config: LoRAX, and SGLang's ``w8a8_fp8``."""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, Source
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, FLOATS, FP8_FORMATS, scale_shape


def _detect(source: Source) -> bool:
    if source.quantization:
        return source.method in ("w8a8-fp8", "fp8-kv")
    return any(dtype in FP8_FORMATS for dtype, _ in source.kinds.values())


def _parse(source: Source) -> Announcement:
    of_sdnq = next((n for n in sorted(source.kinds) if _is_of_sdnq(n, source)), "")
    if of_sdnq and not source.quantization:
        raise CheckpointError(
            f"{of_sdnq} is {list(source.kinds[of_sdnq][1])}, and no config is beside it: so SDNQ "
            "names and shapes scales.",
            "SDNQ may rotate or transpose weights; only its config says so.",
            "Start from the high-precision checkpoint; or, if you know that it did neither, name "
            "these scales X.weight_scale.",
        )
    return Announcement(lambda _: Format(static=None))


def _is_of_sdnq(name: str, source: Source) -> bool:
    """Return whether a tensor is ``X.scale`` of FP8 codes ``X.weight``, and not in blocks.

    DeepSeek's own code has that name too, for scales of blocks.
    """
    layer = name.removesuffix(".scale")
    codes, sides = source.kinds.get(f"{layer}.weight", (None, ()))
    if layer == name or codes not in FP8_FORMATS or len(sides) < 2:
        return False
    dtype, found = source.kinds[name]
    return dtype in FLOATS and len(found) == len(sides) and found != scale_shape(sides, BLOCK)


BARE = Dialect("bare", _detect, _parse)
