"""A quantization as frozen data, and the backends that quantize, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.dispatch.backends import Backend, BackendTable
from fp8kit.dispatch.device import capability
from fp8kit.formats import GroupShape

QUANTIZER_BACKENDS: BackendTable = (
    ("triton", "fp8kit.quantizers.triton", ("cuda",)),
    ("cpu", "fp8kit.quantizers.cpu", ("cpu",)),
    ("reference", "fp8kit.quantizers.reference", ()),
)


@dataclass(frozen=True, slots=True)
class QuantizeProblem:
    """One quantization, static or dynamic, of a tensor of ``in_dtype`` to codes of ``dtype``."""

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


@dataclass(kw_only=True, eq=False, slots=True)
class QuantizerBackend(Backend):
    """A backend whose functions take the arguments of those in ``reference``.

    Dequantizing is not memory-critical: ``reference`` does it on every device.
    """

    quantize: Callable[..., tuple[Tensor, Tensor]]
    quantize_static: Callable[[Tensor, Tensor, GroupShape, torch.dtype], Tensor]
