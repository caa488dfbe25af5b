"""``fp8`` with ``weight_scale``: AutoFP8 and vLLM's own, one scale per tensor, static or dynamic.

With dynamic activations, engines scale per token where they can, as this package does. LoRAX reads
these tensors without a config.
"""

from __future__ import annotations

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, JsonObject, Source, Spec
from fp8kit.checkpoint.dialects.transformers_fp8 import fp8_format
from fp8kit.formats import ROW, TENSOR


def _parse(source: Source) -> Announcement:
    fmt = fp8_format(source.quantization)
    ignore = base.strings(source.quantization, "ignored_layers", "modules_to_not_convert")
    return Announcement(lambda _: fmt, ignore)


def _render(spec: Spec) -> JsonObject:
    scheme = spec.scheme
    fits = scheme.weight == TENSOR and (scheme.static or scheme.activation == ROW)
    fits = fits and not scheme.ue8m0
    if spec.others or not fits or scheme.dtype != torch.float8_e4m3fn:
        raise base.unwritable(
            spec,
            "autofp8",
            "This dialect holds one scale per tensor, the same scheme everywhere.",
            "Write dialect compressed-tensors, or quantize the original to FP8 or FP8_TENSOR.",
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.static else "dynamic",
        **({"kv_cache_scheme": "static"} if spec.kv_scales else {}),
        **base.left_dense(spec),
    }


AUTOFP8 = Dialect(
    "autofp8", lambda source: source.method == "fp8", _parse, _render, tensor_scale=()
)
