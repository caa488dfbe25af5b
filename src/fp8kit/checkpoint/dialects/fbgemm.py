"""``fbgemm_fp8``: scales per row and per token, experts as transposed stacks (Llama 4)."""

from __future__ import annotations

from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Numbers, Source, broken, strings
from fp8kit.formats import ROW


def _detect(source: Source) -> bool:
    return source.method == "fbgemm-fp8"


def _parse(source: Source) -> Announcement:
    found = source.quantization
    bound = found.get("activation_scale_ub")
    if not isinstance(bound, int | float | None) or (bound is not None and not bound > 0):
        raise broken("activation_scale_ub", bound, "a positive number or null")
    unread: tuple[str, ...] = ()
    if bound is not None:
        unread = (f"activation_scale_ub = {bound} is not applied: activations are not clipped.",)
    ignore = strings(found, "modules_to_not_convert")
    return Announcement(lambda _: Numbers(ROW, ROW, transposed=True), ignore, unread)


FBGEMM = Dialect("fbgemm", _detect, _parse)
