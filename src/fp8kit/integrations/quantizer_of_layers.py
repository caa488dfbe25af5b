"""What libraries need of a model with FP8 layers: a quantizer, its schemes, its dense form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.checkpoint.dialects import JsonObject, scheme_of
from fp8kit.checkpoint.dialects.by_layer import plain
from fp8kit.checkpoint.schema.naming import named
from fp8kit.errors import CheckpointError, UnsupportedError
from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.hooks import become, own_names
from fp8kit.modules.library_experts import LibraryExperts
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.own_forward import ModuleForward, drop_forward


class QuantizerOfLayers:
    """A descriptor ``hf_quantizer`` for models with FP8 layers that no loader has quantized.

    It is set on the class of a library's models, so it is found where a model has no quantizer of
    its own: after ``convert`` of the model, of a part of it or of a module around it, and in copies
    and pickles. ``make`` returns a quantizer, given one FP8 layer of the model.
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
    """Refuse to quantize weights that a device map keeps on disk: they would stay dense."""
    if isinstance(device_map, dict) and "disk" in device_map.values():
        raise UnsupportedError(
            "Got a device_map that places layers on disk.",
            "The loader keeps such weights as they are in the file, not as FP8.",
            "Pass a device_map without disk, or save an FP8 checkpoint first.",
        )


def refuse_codes(
    own: Any, model: Any, state_dict: Mapping[str, Tensor] | None, *args: Any, **kwargs: Any
) -> Any:
    """Fill a model by Transformers' loader; refuse codes with scales for one that is dense.

    It would cast the codes to the dtype of the model and list their scales as unexpected.
    """
    given = state_dict or {}
    codes = [n for n, t in given.items() if getattr(t, "dtype", None) in FP8_FORMATS]
    coded = [n for n in codes if not {f"{n}_scale", f"{n}_scale_inv"}.isdisjoint(given)]
    quantized = any(getattr(a, "hf_quantizer", None) for a in (*args, *kwargs.values()))
    tensors = itertools.chain(model.parameters(), model.buffers())
    if coded and not quantized and all(t.dtype not in FP8_FORMATS for t in tensors):
        raise CheckpointError(
            f"state_dict has codes with scales of {len(coded)} FP8 weights, such as {coded[0]}, "
            f"and {type(model).__name__} is dense.",
            "In dense layers, codes without their scales are wrong numbers.",
            "Build the model, convert it to this scheme, and call model.load_state_dict(state); "
            "or save by fp8kit.save, and pass the directory.",
        )
    return own(model, state_dict, *args, **kwargs)


def misfit(name: str, found: Sequence[int], wanted: Sequence[int], kind: str) -> CheckpointError:
    """Return the error for a tensor of a wrong shape; ``kind`` names the model's class."""
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
            if scheme.rebased:  # a stack's exponents are not read back: name the plain scheme
                scheme = scheme_of(scheme.weight, scheme.activation)
            found |= {named(name, stack): plain(scheme) for stack in module.stacks.names}
    return json.dumps(found) if found else ""


def restore_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Turn FP8 layers into dense ones and undo fusion, in place.

    ``dtype`` is that of the dense weights, by default each layer's ``compute_dtype``.
    """
    dense: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Fp8Linear):
            become(module, module.to_linear(dtype), own_names(Fp8Linear))
        elif isinstance(module, LibraryExperts):
            module.to_dense(dtype)
        elif isinstance(module, Fused):
            dense[module] = module.replaced[0]
        elif isinstance(vars(module).get("forward"), ModuleForward):
            drop_forward(module)
        if module in dense:
            model.set_submodule(name, dense[module])
