"""AMD Quark: a global config, and others for layers by name or pattern."""

from __future__ import annotations

from typing import Any

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.base import Announcement, Dialect, Format, JsonObject, Source
from fp8kit.formats import MX, ROW, TENSOR, GroupShape

_E4M3 = "fp8_e4m3"


def _parse(source: Source) -> Announcement:
    found = source.quantization
    ignore = base.strings(found, "exclude")
    pack = base.objects(found, "export").get("weight_format")
    if pack not in (None, "real_quantized"):
        raise base.invalid(
            "export.weight_format", pack, "'real_quantized': fake quantization has no codes"
        )
    if found.get("global_quant_config") is None and "activation_scheme" in found:
        # the custom mode of early exporters: AutoFP8's layout
        return Announcement(lambda _: Format(TENSOR, static=None), ignore)
    of_types = base.objects(found, "layer_type_quant_config")
    key = "layer_type_quant_config.Linear" if "Linear" in of_types else "global_quant_config"
    general = of_types.get("Linear", found.get("global_quant_config"))
    common = _format(key, general)
    special = base.objects(found, "layer_quant_config")
    layers = {n: _format(f"layer_quant_config.{n}", c) for n, c in special.items()}
    # an excluded layer may have been FP8 in the source already: its tensors tell the rest
    layers = {**dict.fromkeys(ignore, Format(static=None)), **layers}
    quantized = [c for c in (general, *special.values()) if c.get("weight") is not None]
    dtypes = {str(base.objects(c, "input_tensors").get("dtype", _E4M3)) for c in quantized}
    others = sorted(dtypes - {_E4M3, "fp4"})
    unread = tuple(f"The config says {d} for activations; here they are FP8." for d in others)
    return Announcement(lambda layer: base.first_match(layers, layer, common), ignore, unread)


def _format(key: str, config: Any) -> Format:
    if not isinstance(config, dict):
        raise base.invalid(key, config, "an object")
    said = config.get("weight")
    if said is None:  # such a layer is not quantized, or was before: its tensors tell
        return Format(static=None)
    if isinstance(said, list):  # int4_fp8: codes of codes
        raise base.invalid(f"{key}.weight", said, "one object, not several", base.OTHER_FORMAT)
    weight = _group(f"{key}.weight", base.objects(config, "weight"))
    inputs = base.objects(config, "input_tensors")
    if not inputs:
        return Format(weight, weight_only=True)
    if inputs.get("is_dynamic") is not True:
        # a scale maps the largest input to the largest number of its dtype
        if inputs.get("qscheme") != "per_tensor" or inputs.get("dtype", _E4M3) != _E4M3:
            wanted = f"dynamic, or static per_tensor in {_E4M3}"
            raise base.invalid(f"{key}.input_tensors", inputs, wanted)
        return Format(weight, static=True)
    # per channel of an activation means per token; a block weight brings groups along K
    activation = None
    if inputs.get("qscheme") == "per_tensor" and weight in (TENSOR, ROW):
        activation = TENSOR
    return Format(weight, activation)


def _group(key: str, config: JsonObject) -> GroupShape:
    dtype, scheme = config.get("dtype"), config.get("qscheme")
    e8m0 = "e8m0" in f"{config.get('scale_format')} {config.get('scale_type')}"
    groups = scheme == "per_group" and config.get("group_size") == 32 and e8m0
    if groups and dtype in (_E4M3, "fp4"):  # FP4 values are FP8 values
        return MX
    if dtype != _E4M3:
        wanted = "'fp8_e4m3', or 'fp4' in groups of 32 with e8m0"
        raise base.invalid(f"{key}.dtype", dtype, wanted, base.OTHER_FORMAT)
    if scheme == "per_tensor":
        return TENSOR
    if scheme == "per_channel" and config.get("ch_axis") in (0, None):
        return ROW
    block = config.get("block_size")
    if scheme == "per_block" and isinstance(block, list) and len(block) == 2:
        if block[1] == 32 and e8m0:
            return MX
        if all(isinstance(n, int) and 0 < n <= 2**20 for n in block):
            return GroupShape(*block)
    raise base.invalid(
        key, config, "per_tensor, per_channel over axis 0, per_block, or groups of 32"
    )


QUARK = Dialect("quark", lambda source: source.method == "quark", _parse)
