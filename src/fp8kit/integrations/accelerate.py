"""accelerate's loaders, which place the tensors of a checkpoint into a model one by one.

They cast each tensor to the dtype of what is there, or to one they are given. A dense weight cast
to FP8 would be codes under the scales of another weight, so it is quantized with scales of its own.
Without a device map they fill the model file by file, and codes may come before their scales.
What they move they put past ``register_parameter``, which would make it plain.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate import big_modeling, hooks, utils
from accelerate.utils import modeling
from torch import Tensor, nn

from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.guarded_weight import plain
from fp8kit.modules.libraries import run_through
from fp8kit.modules.linear import Fp8Linear


def tell() -> None:
    """Let accelerate quantize a dense weight that it places into an FP8 layer."""
    for user in (utils, modeling, hooks):
        run_through(user, "set_module_tensor_to_device", _place)
    for user in (accelerate, utils, modeling, big_modeling):
        run_through(user, "load_checkpoint_in_model", _fill)


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
        dtype = None  # it is for numbers: codes and scales keep theirs, as in any cast
    dense = isinstance(value, Tensor) and value.dtype not in FP8_FORMATS
    into_codes = held is not None and held.dtype in FP8_FORMATS
    if str(device) == "meta" or held is None or not (dense and into_codes):
        own(module, tensor_name, device, value, dtype, *args, **kwargs)
        if held is not None:
            layer._parameters[name] = plain(layer._parameters[name])
        return
    layer.load_state_dict({name: value}, strict=False, assign=held.is_meta)
    layer.to(device)
