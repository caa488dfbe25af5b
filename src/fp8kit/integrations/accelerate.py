"""Patches for accelerate's loaders, which place the tensors of a checkpoint one by one.

The loaders cast each tensor to the dtype of the Parameter in its place, or to a given one. A dense
weight cast to FP8 would be codes under the scales of another weight, so it is quantized instead,
with its own scales. Without a device map they load file by file, where codes may come before their
scales; so they get a map. They bypass ``register_parameter``, so guards are removed here.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from accelerate.utils import modeling
from torch import Tensor, nn

from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.guarded_weight import unguarded
from fp8kit.modules.kept_weight import Made, codes_replaced
from fp8kit.modules.libraries import wrap_in_place
from fp8kit.modules.linear import Fp8Linear

# what the codes that accelerate last brought to a layer were made of
_BROUGHT: WeakKeyDictionary[Fp8Linear, Made | None] = WeakKeyDictionary()


def patch() -> None:
    """Let accelerate quantize a dense weight that it places into an FP8 layer."""
    wrap_in_place(modeling.set_module_tensor_to_device, _place)
    wrap_in_place(modeling.load_checkpoint_in_model, _fill)


def _fill(
    own: Any, model: nn.Module, checkpoint: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> None:
    if device_map is None and any(
        isinstance(m, Fp8Linear | ExpertTensors) for m in model.modules()
    ):
        held = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        device_map = {n: "cpu" if t.is_meta else str(t.device) for n, t in held.items()}
    own(model, checkpoint, device_map, *args, **kwargs)


def _place(
    own: Any,
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    owner, _, name = tensor_name.rpartition(".")
    layer = module.get_submodule(owner)
    held = layer._parameters.get(name) if isinstance(layer, Fp8Linear | ExpertTensors) else None
    if held is not None and (held.dtype in FP8_FORMATS or name.endswith(("_scale", "_exponents"))):
        dtype = None  # meant for dense weights: codes and scales keep their dtypes, as in any cast
    dense = isinstance(value, Tensor) and value.dtype not in FP8_FORMATS
    into_codes = held is not None and held.dtype in FP8_FORMATS
    if str(device) == "meta" or held is None or not (dense and into_codes):
        own(module, tensor_name, device, value, dtype, *args, **kwargs)
        if held is not None:
            layer._parameters[name] = unguarded(layer._parameters[name])
        if isinstance(layer, Fp8Linear) and name == "weight":
            _mark(layer, str(device) == "meta")
        return
    layer.load_state_dict({name: value}, strict=False, assign=held.is_meta)
    layer.to(device)


def _mark(layer: Fp8Linear, put_away: bool) -> None:
    """Note what the codes of a layer were made of, which are put away on meta or brought back.

    Codes that are made of a changed kept weight during a call are lost behind it.
    """
    if put_away:
        layer._quantized_from = _BROUGHT.pop(layer, layer._quantized_from)
    else:
        _BROUGHT[layer] = layer._quantized_from
        codes_replaced(layer)
