"""What is asked of a quantizer, as frozen data, and the ordered implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.dispatch import Backend, BackendTable
from fp8kit.formats import GroupShape

BACKENDS: BackendTable = (
    ("triton", "fp8kit.quantizers.triton", ("cuda",)),
    ("cpu", "fp8kit.quantizers.cpu", ("cpu",)),
    ("reference", "fp8kit.quantizers.reference", ()),
)


@dataclass(frozen=True, slots=True)
class QuantizeProblem:
    """One quantization, static or dynamic.

    Args:
        group: elements per scale.
        in_dtype: dtype of the input.
        dtype: dtype of the codes.
        device_type: ``"cpu"``, ``"cuda"``, …
        capability: CUDA compute capability, ``None`` elsewhere.
    """

    group: GroupShape
    in_dtype: torch.dtype
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None

    @staticmethod
    def of(x: Tensor, group: GroupShape, dtype: torch.dtype) -> QuantizeProblem:
        """Describe quantizing ``x``."""
        return QuantizeProblem(group, x.dtype, dtype, x.device.type, capability(x.device))

    def __str__(self) -> str:
        return f"quantize {self.in_dtype} to {self.dtype} per {self.group} on {self.device_type}"


@dataclass(frozen=True, slots=True)
class DequantizeProblem:
    """One dequantization; fields as in ``QuantizeProblem``, ``out_dtype`` of the result."""

    group: GroupShape
    dtype: torch.dtype
    out_dtype: torch.dtype
    device_type: str

    def __str__(self) -> str:
        return f"dequantize {self.dtype} per {self.group} on {self.device_type}"


@dataclass(kw_only=True, eq=False, slots=True)
class QuantizerBackend(Backend):
    """An implementation of quantization, with the arguments of ``reference``.

    Args:
        quantize: takes scales from the data.
        quantize_static: takes given scales.
        dequantize: multiplies codes by their scales; for what ``supports`` a ``DequantizeProblem``.
    """

    quantize: Callable[..., tuple[Tensor, Tensor]]
    quantize_static: Callable[[Tensor, Tensor, GroupShape, torch.dtype], Tensor]
    dequantize: Callable[[Tensor, Tensor, GroupShape, torch.dtype], Tensor]


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, ``None`` for any other device.

    Never initialises CUDA. What torch gives for GPUs of AMD, (9, 4) for an MI300, would be taken
    for a Hopper.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return _gpu(_index(device))[0]


def device_name(device: torch.device) -> str:
    """Name of a CUDA device, empty for any other (never initialises CUDA)."""
    return _gpu(_index(device))[1] if device.type == "cuda" else ""


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _gpu(index: int) -> tuple[tuple[int, int], str]:
    return torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
