"""Dense layers by qualified name, in a model or from the names and shapes of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fp8kit.modules.dense import as_linear


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the dense layer of a qualified name, as ``as_linear`` does."""
    module: nn.Module | None = model
    for part in name.split("."):
        assert module is not None
        module = module._modules[part]
    return as_linear(module)


def tree_of(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Make a model on meta of bf16 layers without a bias, from their names and ``(N, K)``."""
    # a file may name layers as no module could: by nothing, or by what modules have already
    root = nn.Module()
    for name, (n, k) in shapes.items():
        *path, last = name.split(".")
        children: dict[str, Any] = root._modules
        for part in path:
            children = children.setdefault(part, nn.Module())._modules
        layer = nn.Linear(k, n, False, device="meta", dtype=torch.bfloat16)
        if last in children:
            layer._modules.update(children[last]._modules)
        children[last] = layer
    return root
