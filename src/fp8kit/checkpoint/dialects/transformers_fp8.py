"""``fp8`` with ``weight_scale_inv``: DeepSeek, Transformers' finegrained FP8, Mistral on the hub.

The name says inverse, the value multiplies. ``scale_fmt: ue8m0`` makes scales powers of two, kept
in F32 (DeepSeek V3.1) or as E8M0 under the name ``scale`` (V4). Experts may be FP4 with a scale for
every 32 columns, read as MXFP8 (V4, and MiMo V2.6, which names this scale ``weight_scale``).
``weight_block_size: null`` is one scale per tensor, then with ``activation_scale`` if
``activation_scheme`` is static. AutoRound's ``auto_round:fp8`` packs weights alike, and so does its
FPW8A16, which names no packing.
"""

from __future__ import annotations

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source, Spec
from fp8kit.formats import BLOCK, MX, TENSOR, GroupShape, scale_shape
from fp8kit.quantizers.scale_layout import E8M0_DTYPES


def _detect(source: Source) -> bool:
    found = source.quantization
    if source.method in base.AUTO_ROUND:
        said = f"{found.get('packing_format')} {found.get('data_type')}"
        # NVFP4 is FP8 once it is read
        return "fp8" in said or "nv_fp" in said or _is_fpw8a16(found)
    if source.method not in ("fp8", "deepseek-v4-fp8"):
        return False
    named = source.has("weight_scale_inv", "proj_scale_inv", "activation_scale")
    e8m0 = any(
        d == torch.float8_e8m0fnu and n.endswith("scale") for n, (d, _) in source.kinds.items()
    )
    return (
        named or e8m0 or (found.get("weight_block_size") is not None and not source.has("_scale"))
    )


def _parse(source: Source) -> Announcement:
    found = source.quantization
    fmt = fp8_format(found)
    if _is_fpw8a16(found):
        fmt = Format(static=None, weight_only=True)
    base.choice(found, "expert_dtype", ("fp8", "fp4", None))
    ignore = base.strings(found, "ignored_layers", "modules_to_not_convert")

    def format_of(layer: str) -> Format:
        if _is_mx(layer, source):
            return Format(MX, MX)
        # Transformers gives an embedding one scale, whatever its linear layers have
        table = base.is_embedding(layer) and f"{layer}.weight_scale" in source.kinds
        return Format(TENSOR, static=None) if table else fmt

    return Announcement(format_of, ignore, base.sixteen_bit_inputs(found))


def _is_fpw8a16(found: JsonObject) -> bool:
    """Return whether AutoRound left activations alone: it writes ``act_bits`` below 16 only."""
    packed = found.get("packing_format"), found.get("act_bits")
    return found.get("data_type") == "fp" and found.get("bits") == 8 and packed == (None, None)


def _is_mx(layer: str, source: Source) -> bool:
    """Return whether a layer is an FP4 expert, which was unpacked to MX."""
    shape = source.kinds.get(f"{layer}.weight", (None, ()))[1]
    kinds = ("scale", "weight_scale_inv", "weight_scale")
    scales = (source.kinds.get(f"{layer}.{kind}") for kind in kinds)
    wanted = {(dtype, scale_shape(shape, MX)) for dtype in E8M0_DTYPES} if shape else set()
    return any(scale in wanted for scale in scales)


def fp8_format(found: JsonObject) -> Format:
    """Read what a config with ``quant_method`` ``fp8`` says about every layer.

    Raises ``CheckpointError`` for a value that this package does not carry out.
    """
    activation = base.choice(found, "activation_scheme", ("dynamic", "static", None))
    base.choice(found, "fmt", ("e4m3", "float8_e4m3fn", None))
    if (said := found.get(key := "weight_scale_semantics")) is not None:  # GPTQModel divides
        raise base.invalid(key, said, "absent, for scales that multiply", base.OTHER_FORMAT)
    ue8m0 = base.choice(found, "scale_fmt", ("ue8m0", "float", None)) == "ue8m0"
    block = base.block_shape(found)
    static = activation == "static"
    if block is None or static:
        return Format(block, static=static)
    return Format(block, GroupShape(1, block.cols), ue8m0=ue8m0)


def _render(spec: Spec) -> JsonObject:
    scheme = spec.scheme
    dynamic = scheme.activation is not None and not scheme.static
    block = scheme.weight == BLOCK and scheme.activation == GroupShape(1, 128)
    tensor = scheme.weight == TENSOR and (dynamic or scheme.static) and not scheme.ue8m0
    if spec.others or not (block or tensor) or scheme.dtype != torch.float8_e4m3fn:
        raise base.unwritable(
            spec,
            "fp8",
            "This dialect holds 128x128 blocks or one scale per tensor, the same everywhere.",
            "Write dialect compressed-tensors, or quantize the original to FP8_BLOCK.",
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.static else "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128] if block else None,
        **({"scale_fmt": "ue8m0"} if scheme.ue8m0 else {}),
        **base.left_dense(spec),
    }


_SUFFIXES = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
TRANSFORMERS_FP8 = Dialect("fp8", _detect, _parse, _render, _SUFFIXES)
