"""``fbgemm_fp8``: scales per row and per token, experts as transposed stacks (Llama 4).

``activation_scale_ub`` bounds the amax of every token. No other dialect has such a bound, so this
one is written for layers that have it.
"""

from __future__ import annotations

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source, Spec
from fp8kit.formats import ROW


def _parse(source: Source) -> Announcement:
    found = source.quantization
    bound = found.get("activation_scale_ub")
    if not isinstance(bound, int | float | None) or (bound is not None and not bound > 0):
        raise base.invalid("activation_scale_ub", bound, "a positive number or null")
    ignore = base.strings(found, "modules_to_not_convert")
    fmt = Format(ROW, ROW, transposed=True)
    return Announcement(lambda _: fmt, ignore, scale_ub=bound)


def _render(spec: Spec) -> JsonObject:
    scheme = spec.scheme
    fits = (scheme.weight, scheme.activation) == (ROW, ROW) and not scheme.ue8m0
    fits = fits and scheme.dtype == torch.float8_e4m3fn and spec.scale_ub is not None
    if spec.others or spec.kv_scales or not fits:
        bound = "no scale_ub" if spec.scale_ub is None else f"scale_ub = {spec.scale_ub}"
        raise base.unwritable(
            spec,
            f"fbgemm, with {bound}",
            "This dialect holds FP8_DYNAMIC everywhere, with a bound on the amax of tokens; no "
            "other dialect has one.",
            "Convert with FP8_DYNAMIC and set one layer.scale_ub; None writes another dialect.",
        )
    return {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": spec.scale_ub,
        "modules_to_not_convert": sorted(base.listed(spec.ignore)),
    }


FBGEMM = Dialect("fbgemm", lambda source: source.method == "fbgemm-fp8", _parse, _render)
