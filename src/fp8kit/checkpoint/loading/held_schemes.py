"""The scheme of codes in files that name none: that of the model's FP8 layers, if scales fit it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.formats import Scheme, scale_dtype, stack_scale_shape
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear


def read_as_held(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose small weights have the scheme of the model's FP8 layers.

    One scale is that of a tensor or of a single block, and files of other savers do not say which.
    A checkpoint that names schemes is returned as it is.
    """
    if checkpoint.names_schemes:
        return checkpoint
    held: dict[str, Scheme] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Fp8Linear):
            held[name] = module.scheme.stored
        elif isinstance(module, ExpertTensors):
            held |= {named(name, stack): module.scheme.stored for stack in module.stacks.names}
    found = {n: _as(layer, held.get(n), checkpoint) for n, layer in checkpoint.layers.items()}
    return replace(checkpoint, layers=found)


def _as(layer: Layer, held: Scheme | None, checkpoint: Checkpoint) -> Layer:
    if held is None or (held.static, held.dtype) != (layer.scheme.static, layer.scheme.dtype):
        return layer
    scales = checkpoint.tensors[layer.scale]
    wanted = stack_scale_shape(layer.shape, held.weight), scale_dtype(held.weight)
    return replace(layer, scheme=held) if (scales.shape, scales.dtype) == wanted else layer
