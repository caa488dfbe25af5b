"""An architecture of the zoo: a tiny random model that can be built repeatedly, and its input.

The zoo is hundreds of architectures of Transformers, diffusers, timm and torch; ``check.py``
converts each one and compares it layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture, tiny and with random weights.

    Args:
        name: unique, ``family/model``.
        build: makes the model in fp32; called once per use, under a fixed seed.
        inputs: returns candidates for the arguments of its forward, as keywords, in fp32; the key
            ``""`` holds positional arguments. The first candidate that runs is used.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], list[dict[str, Any]]]

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Make the model with the same weights at every call."""
        torch.manual_seed(0)
        model = self.build().eval()
        with torch.no_grad():  # zeros, as adapters and heads start with, would hide a fault
            for p in model.parameters():
                if p.is_floating_point() and not p.is_meta and p.dim() > 1 and not p.any():
                    p.normal_(std=0.02)
        return model.to(dtype)

    def run(self, model: nn.Module, dtype: torch.dtype, candidate: int) -> list[Tensor]:
        """Run a model on the same input at every call; return the tensors of its result."""
        given = self.given(model, dtype, candidate)
        torch.manual_seed(2)  # for models that draw noise
        with torch.no_grad():
            return list(tensors(model(*given.pop("", ()), **given)))

    def given(self, model: nn.Module, dtype: torch.dtype, candidate: int) -> dict[str, Any]:
        """Return a candidate for the arguments of forward, the same values at every call."""
        torch.manual_seed(1)
        chosen = self.inputs(model)[candidate]
        return {name: _cast(value, dtype) for name, value in chosen.items()}

    def runs(self, model: nn.Module, dtype: torch.dtype) -> int:
        """Return the first candidate that runs; if none does, raise the error of the first one."""
        first: Exception | None = None
        for candidate in range(len(self.inputs(model))):
            try:
                found = self.run(model, dtype, candidate)
            except Exception as error:
                first = first or error
            else:
                if any(t.is_floating_point() and t.isfinite().all() for t in found):
                    return candidate
                first = first or ValueError("it returns no finite numbers")
        raise first or ValueError("nobody knows its inputs")


def tensors(value: object) -> Iterator[Tensor]:
    """Return the tensors in a model's result, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from tensors(part)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(part, dtype) for part in value)
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value
