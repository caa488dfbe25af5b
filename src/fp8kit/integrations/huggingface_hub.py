"""huggingface_hub's mixin, whose ``from_pretrained`` fills the dense model that a class builds.

It copies FP8 codes into dense weights as if they were numbers, and passes over their scales.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from safetensors import safe_open
from torch import nn

from fp8kit.checkpoint.loading.into_module import fill
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import UnsupportedError
from fp8kit.modules.weight_parts import recode_for_devices


def tell() -> None:
    """Let the mixin make layers FP8 for which a file has codes and scales."""
    bound = getattr(PyTorchModelHubMixin, "_load_as_safetensor", None)
    if bound is None:
        raise UnsupportedError("its mixin loads by other methods")
    own = bound.__func__

    @functools.wraps(own)
    def load(cls: Any, model: Any, model_file: str, map_location: str, strict: bool) -> Any:
        if not _holds_codes(model_file):
            return own(cls, model, model_file, map_location, strict)
        device = torch.device(map_location)
        fill(model, open_checkpoint(Path(model_file)), None, device=device, strict=strict)
        recode_for_devices(model)
        found: nn.Module = model.eval()
        return found

    setattr(PyTorchModelHubMixin, "_load_as_safetensor", classmethod(load))  # noqa: B010


def _holds_codes(file: str) -> bool:
    with safe_open(file, "pt") as tensors:
        return any(tensors.get_slice(n).get_dtype().startswith("F8_") for n in tensors.keys())
