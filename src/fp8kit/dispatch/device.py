"""The compute capability and the name of a device."""

from __future__ import annotations

import contextlib
import functools

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, ``None`` for any other device.

    Initialises CUDA for CUDA devices only. An AMD GPU gives ``None``, because the pair that torch
    reports for it, (9, 4) for an MI300, would be taken for a Hopper.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _gpu(_index(device))[0]


def device_name(device: torch.device) -> str:
    """Return the name of a CUDA device; empty for any other, without initialising CUDA."""
    return _gpu(_index(device))[1] if device.type == "cuda" else ""


def architecture(device: torch.device) -> str:
    """Return the instruction set of an AMD GPU, such as ``gfx942``; empty for any other device."""
    return "" if device.type != "cuda" or torch.version.hip is None else _amd(_index(device))


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a CUDA device is current, for launches; an empty one for others."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def native_codes(architecture: str) -> torch.dtype:
    """Return the e4m3 encoding that a GPU multiplies: e4m3fnuz on MI300 (gfx94), else e4m3fn."""
    return torch.float8_e4m3fnuz if architecture.startswith("gfx94") else torch.float8_e4m3fn


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _amd(index: int) -> str:
    name: str = torch.cuda.get_device_properties(index).gcnArchName
    return name.partition(":")[0]


@functools.cache
def _gpu(index: int) -> tuple[tuple[int, int], str]:
    return torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
