"""A fused producer as frozen data, and the backends that compute it, in order of preference.

A fused producer computes a norm or an activation and quantizes its result in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kit.dispatch.backends import Backend, BackendTable
from fp8kit.dispatch.device import capability
from fp8kit.formats import GroupShape

FUSED_BACKENDS: BackendTable = (
    ("triton", "fp8kit.fused.triton", ("cuda",)),
    ("reference", "fp8kit.fused.reference", ()),
)
# where a chain of 16-bit operations rounds: after each one, or only at its end
ROUNDINGS = ("stepwise", "once")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class CodesFormat(NamedTuple):
    """How the result is quantized; the last seven arguments of every fused operator.

    Args:
        scale: static ``float32 [1, 1]``, only with ``TENSOR``; ``None``: scales from the data.
        group: elements per scale.
        dtype: dtype of the codes.
        min_scale: floor under a dynamic ``float32`` scale.
        scale_ub: ``float32`` scalar bound of the amax, or ``None``.
        scale_rounding: ``"exact"``, ``"up"`` to a power of two, or ``"floor"`` (MX).
        scale_layout: ``"row"``, or ``"column"`` for groups along a row, see ``scale_layout``.
    """

    scale: Tensor | None
    group: GroupShape
    dtype: torch.dtype
    min_scale: float
    scale_ub: Tensor | None
    scale_rounding: str
    scale_layout: str = "row"


@dataclass(frozen=True, slots=True)
class FusedProblem:
    """One producer and how its result is quantized.

    ``producer`` is ``"rms_norm"``, ``"layer_norm"``, ``"rotary"`` or one of ``ACTIVATIONS``;
    without a group its result is not quantized. ``in_dtype`` is the dtype of the input, and of the
    result before it is quantized; ``k`` is the number of elements of a row.
    """

    producer: str
    group: GroupShape | None
    static: bool
    in_dtype: torch.dtype
    dtype: torch.dtype
    k: int
    device_type: str
    capability: tuple[int, int] | None

    @staticmethod
    def of(producer: str, x: Tensor, how: CodesFormat) -> FusedProblem:
        """Describe quantizing the result of ``producer`` for ``x``."""
        static, place = how.scale is not None, (x.device.type, capability(x.device))
        facts = (how.group, static, x.dtype, how.dtype, x.shape[-1])
        return FusedProblem(producer, *facts, *place)

    @staticmethod
    def plain(producer: str, x: Tensor) -> FusedProblem:
        """Describe the result of ``producer`` for ``x``, which is not quantized."""
        place = (x.device.type, capability(x.device))
        return FusedProblem(producer, None, False, x.dtype, x.dtype, x.shape[-1], *place)

    def __str__(self) -> str:
        if self.group is None:
            return f"{self.producer} in {self.in_dtype}, K = {self.k}, on {self.device_type}"
        kind = "static " if self.static else ""
        numbers = f"{self.in_dtype} to {self.dtype} per {kind}{self.group}"
        return f"{self.producer} and quantize {numbers}, K = {self.k}, on {self.device_type}"


@dataclass(kw_only=True, eq=False, slots=True)
class FusedBackend(Backend):
    """A backend of the fused producers; its functions take the arguments of those in ``reference``.

    Args:
        rms_norm: returns codes, scales, and the new residual or ``None``.
        layer_norm: returns codes and scales.
        activation: returns codes and scales.
        rms_normed: returns the norm itself, which is not quantized.
        rotated: returns queries and keys with rotary embedding.
    """

    rms_norm: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    layer_norm: Callable[..., tuple[Tensor, Tensor]]
    activation: Callable[..., tuple[Tensor, Tensor]]
    rms_normed: Callable[[Tensor, Tensor, float, float, str], Tensor]
    rotated: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
