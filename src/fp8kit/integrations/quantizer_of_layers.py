"""What libraries need from a model with FP8 layers: quantizer, schemes, and its dense form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8kit.checkpoint.dialects import JsonObject, scheme_of
from fp8kit.checkpoint.dialects.by_layer import plain
from fp8kit.checkpoint.schema.naming import named
from fp8kit.errors import CheckpointError, UnsupportedError
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.fused_producers import Fused
from fp8kit.modules.hooks import become, own_names
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.own_forward import ModuleForward, drop_forward
from fp8kit.modules.stacked_experts import StackedExperts


class QuantizerOfLayers:
    """The ``hf_quantizer`` of models that hold FP8 layers, whoever put them there.

    Set on the class of a library's models, it is found where a model has no quantizer of its own:
    after ``convert`` of the model, of a part of it or of a module around it, and in copies and
    pickles of these. ``make`` gives a quantizer for models with a layer.
    """

    def __init__(self, make: Callable[[Fp8Linear | ExpertTensors], object]) -> None:
        self.make = make

    def __get__(self, model: Any, owner: type) -> Any:
        """Return a quantizer of the model; ``AttributeError`` if it has no FP8 layer."""
        if model is None:
            return self
        kinds = (Fp8Linear, ExpertTensors)
        layer = next((m for m in model.modules() if isinstance(m, kinds)), None)
        if layer is None:
            raise AttributeError(f"{type(model).__name__} has no FP8 layers.")
        return self.make(layer)


def refuse_disk(device_map: object) -> None:
    """Refuse to quantize into weights that live on disk: they would stay as in the file."""
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise UnsupportedError(
            "Got a device_map that places layers on disk.",
            "The loader keeps such weights as they are in the file, not as FP8.",
            "Pass a device_map without disk, or save an FP8 checkpoint first.",
        )


def misfit(name: str, found: Sequence[int], wanted: Sequence[int], kind: str) -> CheckpointError:
    """Return the error for a tensor of another shape than a model of a kind has for it."""
    return CheckpointError(
        f"{name} has shape {list(found)}.",
        f"{kind}, built from config.json, needs {list(wanted)}.",
        "Get config.json or the tensors again: they do not belong together.",
    )


def described(model: nn.Module) -> str:
    """Return as JSON the scheme of each FP8 layer and stack of a model; empty if it has none."""
    found: dict[str, str | JsonObject] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Fp8Linear):
            found[name] = plain(module.scheme)
        elif isinstance(module, ExpertTensors):
            scheme = module.scheme
            if scheme.rebased:  # exponents of stacks are not read back: what they are without
                scheme = scheme_of(scheme.weight, scheme.activation)
            found |= {named(name, stack): plain(scheme) for stack in module.stacks.names}
    return json.dumps(found) if found else ""


def restore_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Put dense layers in the place of FP8 ones, and what was fused as it was, in place.

    By default they get each layer's ``compute_dtype``.
    """
    dense: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Fp8Linear):
            become(module, module.to_linear(dtype), own_names(Fp8Linear))
        elif isinstance(module, StackedExperts):
            module.to_dense(dtype)
        elif isinstance(module, Fused):
            dense[module] = module.replaced[0]
        elif isinstance(vars(module).get("forward"), ModuleForward):
            drop_forward(module)
        if module in dense:
            model.set_submodule(name, dense[module])
