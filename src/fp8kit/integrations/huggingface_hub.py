"""huggingface_hub's mixin, whose ``from_pretrained`` fills the dense model that a class builds.

It copies FP8 codes into dense weights as if they were numbers, and passes over their scales.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from safetensors import safe_open

from fp8kit.errors import UnsupportedError
from fp8kit.modules.libraries import on_demand

_load = on_demand("fp8kit.io.models", "load")  # the mixin is told when fp8kit is imported


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
        return _load(Path(model_file), model, device=map_location, strict=strict).eval()

    setattr(PyTorchModelHubMixin, "_load_as_safetensor", classmethod(load))  # noqa: B010


def _holds_codes(file: str) -> bool:
    with safe_open(file, "pt") as tensors:
        return any(tensors.get_slice(n).get_dtype().startswith("F8_") for n in tensors.keys())
