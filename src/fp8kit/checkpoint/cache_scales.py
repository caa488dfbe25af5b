"""KV cache scales of a checkpoint, kept from ``load`` to ``save``; the model does not use them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.reader import Checkpoint

# attribute of an attention module: a dict of its scales, by "k_scale" and so on
_HOME = "cache_scales"


def keep_cache_scales(
    model: nn.Module, checkpoint: Checkpoint, places: Mapping[str, str]
) -> set[str]:
    """Keep the scales of the KV cache on the modules they belong to, for ``save`` to write again.

    ``module.cache_scales`` maps ``"k_scale"`` and so on to fp32 tensors on the CPU, neither
    parameters nor buffers: ``state_dict`` has only the model's own names, and no cast or move of
    the model touches them. ``places`` maps names in the checkpoint to names in the model. Returns
    the checkpoint's names of the scales for which the model has a module.
    """
    kept, modules = set(), dict(model.named_modules())
    for module in modules.values():  # left by an earlier load
        module.__dict__.pop(_HOME, None)
    for name in checkpoint.kv_scales:
        owner, _, kind = places.get(name, "").rpartition(".")
        if owner and owner in modules:
            modules[owner].__dict__.setdefault(_HOME, {})[kind] = checkpoint.read(name)
            kept.add(name)
    return kept


def has_home(model: nn.Module, checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor is a scale of the KV cache whose module the model has."""
    owner = name.rpartition(".")[0]
    return name in checkpoint.kv_scales and owner != "" and owner in dict(model.named_modules())


def held_cache_scales(model: nn.Module) -> dict[str, Tensor]:
    """Return the scales of the KV cache that ``load`` left on attention modules.

    They are ``X.k_scale``, ``X.v_scale`` and ``X.q_scale``, fp32 ``[1]`` or ``[heads, 1, 1]``.
    """
    return {
        named(name, kind): scale
        for name, module in model.named_modules()
        for kind, scale in getattr(module, _HOME, {}).items()
    }
