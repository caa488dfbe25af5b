"""``mxfp8``: E8M0 bytes for every 32 columns, as MiniMax, SGLang and Transformers write them.

There are two spellings: SGLang and Transformers read ``weight_scale_inv``, vLLM and SGLang read
``weight_scale``. A file with both is refused by vLLM, so the writer has to choose.
"""

from __future__ import annotations

import functools

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source, Spec
from fp8kit.formats import MX, SCHEMES


def _detect(source: Source) -> bool:
    found = source.quantization
    if source.method in base.AUTO_ROUND:
        return str(found.get("data_type")) == "mx_fp" and found.get("bits") in (4, 8)
    blocks = found.get("weight_block_size") == [1, 32]
    return source.method == "mxfp8" or (source.method == "fp8" and blocks)


def _parse(source: Source) -> Announcement:
    found = source.quantization
    if base.block_shape(found) not in (None, MX):
        raise base.invalid("weight_block_size", found["weight_block_size"], "[1, 32]")
    base.choice(found, "scale_fmt", ("ue8m0", None))
    base.choice(found, "activation_scheme", ("dynamic", None))
    ignore = base.strings(found, "ignored_layers", "modules_to_not_convert")
    # AutoRound writes act_bits below 16 only
    sixteen = source.method in base.AUTO_ROUND and found.get("act_bits") in (None, 16)
    exact = sixteen and found.get("bits") == 8
    fmt = Format(MX, None if exact else MX, weight_only=exact)
    return Announcement(lambda _: fmt, ignore, base.sixteen_bit_inputs(found))


def _render(dialect: str, spec: Spec) -> JsonObject:
    if spec.others or spec.scheme != SCHEMES["MXFP8"]:
        raise base.unwritable(
            spec,
            dialect,
            "This dialect holds MX weights and activations, everywhere the same.",
            "Write dialect compressed-tensors, or quantize the original to MXFP8.",
        )
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        **base.left_dense(spec),
    }


MXFP8_INVERSE = Dialect(
    "mxfp8",
    lambda source: _detect(source) and not source.has(".weight_scale"),
    _parse,
    functools.partial(_render, "mxfp8"),
    {"weight_scale": "weight_scale_inv"},
)
_PLAIN = "mxfp8-weight-scale"
MXFP8_PLAIN = Dialect(_PLAIN, _detect, _parse, functools.partial(_render, _PLAIN))
