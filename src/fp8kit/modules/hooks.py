"""Hooks of a module that is replaced by another."""

from __future__ import annotations

import torch
from torch import nn


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give a replacement the call hooks of the module it replaces, with their options.

    Args:
        old: the module that is replaced.
        new: what takes its place.
    """
    for name, value in vars(old).items():
        if "hook" in name and "state_dict" not in name:
            setattr(new, name, value)


def is_watched(module: nn.Module) -> bool:
    """Say whether a hook, or a forward put on the instance, sees what a module takes or gives."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )
