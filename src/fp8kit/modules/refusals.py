"""Errors for features of torch, and states of layers, that FP8 layers do not support."""

from __future__ import annotations

from collections.abc import Sequence

from fp8kit.errors import CheckpointError, UnsupportedError


def scripting(layer: str) -> UnsupportedError:
    """Return the error that ``torch.jit.script`` cannot compile ``layer``, a description."""
    return UnsupportedError(
        f"torch.jit.script was called with {layer} inside.",
        "An FP8 layer chooses its kernel in Python, which TorchScript cannot compile.",
        "Use torch.compile, torch.export or torch.jit.trace.",
    )


def tensor_parallel(layer: str) -> UnsupportedError:
    """Return the error that torch's tensor parallelism cannot split ``layer``, a description."""
    return UnsupportedError(
        f"torch's tensor parallelism was requested for {layer}.",
        "Its styles split each parameter alike; codes and scales split differently.",
        "Split the dense model and convert each rank's part, or leave the layer dense with "
        "exclude=.",
    )


def merged(name: str, adapters: Sequence[str]) -> CheckpointError:
    """Return the error that the base tensor of this name cannot be loaded under merged adapters."""
    return CheckpointError(
        f"{name} arrives while {', '.join(adapters)} are merged into it.",
        "Unmerging puts back the bytes that were there before.",
        "Call unmerge_adapter() first, or load the adapters alone.",
    )
