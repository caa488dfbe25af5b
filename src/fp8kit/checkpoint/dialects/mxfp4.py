"""``mxfp4``: stacks of FP4 experts, as GPT-OSS is published; read as MXFP8, which holds its values.

The model holds experts with K before N. The layers that are not quantized are listed.
"""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, Source, strings
from fp8kit.formats import MX


def _parse(source: Source) -> Announcement:
    ignore = strings(source.quantization, "modules_to_not_convert", "ignored_layers")
    return Announcement(lambda _: Format(MX, MX, transposed=True), ignore)


MXFP4 = Dialect("mxfp4", lambda source: source.method == "mxfp4", _parse)
