"""Errors for features of torch that FP8 layers do not support."""

from __future__ import annotations

from fp8kit.errors import UnsupportedError


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
