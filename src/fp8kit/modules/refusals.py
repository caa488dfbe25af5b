"""Errors for what torch may request of an FP8 layer and cannot get."""

from __future__ import annotations

from fp8kit.errors import UnsupportedError


def scripting(layer: str) -> UnsupportedError:
    """Return why ``torch.jit.script`` cannot compile a layer, which is named."""
    return UnsupportedError(
        f"torch.jit.script was called with {layer} inside.",
        "An FP8 layer chooses its kernel in Python, which TorchScript cannot compile.",
        "Use torch.compile, torch.export or torch.jit.trace.",
    )


def tensor_parallel(layer: str) -> UnsupportedError:
    """Return why torch's tensor parallelism cannot split a layer, which is named."""
    return UnsupportedError(
        f"torch's tensor parallelism was requested for {layer}.",
        "Its styles split each parameter alike; codes and scales split differently.",
        "Split the dense model and convert each rank's part, or leave the layer dense with "
        "exclude=.",
    )
