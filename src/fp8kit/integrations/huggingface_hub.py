"""Patches for huggingface_hub's mixin, whose ``from_pretrained`` fills a dense model.

Unpatched, it copies FP8 codes into dense weights as if they were numbers, and ignores the scales.
It also has no place for the schemes of layers: they go into the header of its files.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from huggingface_hub.hub_mixin import PyTorchModelHubMixin
from safetensors import safe_open
from safetensors.torch import save_model

from fp8kit.errors import UnsupportedError
from fp8kit.modules.libraries import on_demand, wrap_once

# imported on demand, because the mixin is patched while fp8kit itself is imported
_load = on_demand("fp8kit.io.models", "load")
_described = on_demand("fp8kit.integrations.quantizer_of_layers", "described")


def patch() -> None:
    """Let the mixin load files with codes by ``fp8kit.load``, and save FP8 layers' schemes."""
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
    wrap_once(PyTorchModelHubMixin, "_save_pretrained", _save)


def _save(own: Any, self: Any, save_directory: Path) -> None:
    model = self.module if hasattr(self, "module") else self
    if schemes := _described(model):
        file = str(save_directory / SAFETENSORS_SINGLE_FILE)
        save_model(model, file, metadata={"fp8kit": schemes})
    else:
        own(self, save_directory)


def _holds_codes(file: str) -> bool:
    with safe_open(file, "pt") as tensors:
        return any(tensors.get_slice(n).get_dtype().startswith("F8_") for n in tensors.keys())
