"""Patches for accelerate's loaders, which place the tensors of a checkpoint one by one.

The loaders cast each tensor to the dtype of the Parameter in its place, or to a given one. A dense
weight cast to FP8 would be codes under the scales of another weight, so it is quantized instead,
with its own scales. Without a device map they load file by file, where codes may come before their
scales; so they get a map, and what is dense is copied into its Parameter, as without one: under a
map they give a new Parameter to one of two tied names alone. They bypass ``register_parameter``, so
guards are removed here.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import modeling
from torch import Tensor, nn

from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.guarded_weight import unguarded
from fp8kit.modules.kept_weight import Made, codes_replaced
from fp8kit.modules.libraries import wrap_in_place
from fp8kit.modules.linear import Fp8Linear

# what the codes that accelerate last brought to a layer were made of
_BROUGHT: WeakKeyDictionary[Fp8Linear, Made | None] = WeakKeyDictionary()
# codes and scales that the load in progress has placed, and whether it copies dense tensors
_LOADING: ContextVar[tuple[set[tuple[nn.Module, str]], bool] | None] = ContextVar(
    "_LOADING", default=None
)


def patch() -> None:
    """Let accelerate quantize a dense weight that it places into an FP8 layer."""
    wrap_in_place(modeling.set_module_tensor_to_device, _place)
    wrap_in_place(modeling.load_checkpoint_in_model, _fill)


def _fill(
    own: Any, model: nn.Module, checkpoint: Any, device_map: Any = None, *args: Any, **kwargs: Any
) -> None:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear | ExpertTensors)}
    placed: set[tuple[nn.Module, str]] = set()
    token = _LOADING.set((placed, device_map is None))
    if device_map is None and layers:
        held = {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
        device_map = {n: "cpu" if t.is_meta else str(t.device) for n, t in held.items()}
    try:
        own(model, checkpoint, device_map, *args, **kwargs)
    finally:
        _LOADING.reset(token)
    apart = [
        f"{name}.{kind}"
        for name, layer in layers.items()
        for kind, kinds in _codes_of(layer).items()
        if 0 < sum((layer, n) in placed for n in kinds) < len(kinds)
    ]
    if apart:
        raise CheckpointError(
            f"{checkpoint} brought codes or scales of {some_of(apart)}, and not both.",
            "Codes and scales mean nothing without each other, and their names vary from file to "
            "file.",
            "Fill the model by fp8kit.load(dir, model), which knows these names.",
        )


def _codes_of(layer: nn.Module) -> dict[str, list[str]]:
    """Return the names of codes in an FP8 layer, each with those of all that they mean."""
    held = {n: p for n, p in layer._parameters.items() if p is not None}
    return {
        name: [n for n in (name, f"{name}_scale", f"{name}_exponents") if n in held]
        for name, p in held.items()
        if p.dtype in FP8_FORMATS
    }


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
    fp8 = isinstance(layer, Fp8Linear | ExpertTensors)
    held: Any = layer._parameters.get(name) if fp8 else None
    into_codes = held is not None and held.dtype in FP8_FORMATS
    placed, in_place = _LOADING.get() or (set(), False)
    given = isinstance(value, Tensor)
    if given and value.dtype not in FP8_FORMATS and into_codes and str(device) != "meta":
        layer.load_state_dict({name: value}, strict=False, assign=held.is_meta)
        layer.to(device)
        return
    if into_codes or (held is not None and name.endswith(("_scale", "_exponents"))):
        dtype = None  # meant for dense weights: codes and scales keep their dtypes, as in any cast
        placed.add((layer, name))
        if given and value.numel() == held.numel() == 1:
            value = value.reshape(held.shape)  # files drop its sides
    elif in_place and given:
        target = layer._parameters.get(name, layer._buffers.get(name))
        if target is not None and not target.is_meta and target.shape == value.shape:
            with torch.no_grad():
                target.copy_(value)
            return
    own(module, tensor_name, device, value, dtype, *args, **kwargs)
    if held is not None:
        layer._parameters[name] = unguarded(layer._parameters[name])
    if isinstance(layer, Fp8Linear) and name == "weight":
        _mark(layer, str(device) == "meta")


def _mark(layer: Fp8Linear, put_away: bool) -> None:
    """Note what the codes of a layer were made of, which are put away on meta or brought back.

    Codes that are made of a changed kept weight during a call are lost behind it.
    """
    if put_away:
        layer._quantized_from = _BROUGHT.pop(layer, layer._quantized_from)
    else:
        _BROUGHT[layer] = layer._quantized_from
        codes_replaced(layer)
