"""The activation between an expert's two GEMMs, as data and as a formula in plain torch.

gated      (up + up_offset) * f(gate)      after  gate <= limit, -limit <= up <= limit
ungated    f(x)                            after  x <= limit

silu  x * sigmoid(alpha * x)     gelu, gelu_tanh  as torch has them     relu2  max(x, 0)^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.errors import InvalidValue, check_choice, check_number, check_switch

KINDS = ("silu", "gelu", "gelu_tanh", "relu2")
_GELU = {"gelu": "none", "gelu_tanh": "tanh"}  # how torch names them


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the two products of an expert.

    Args:
        kind: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"relu2"`` (squared ReLU).
        gated: the first product has ``2 I`` columns: the gates, which are activated, and the ups,
            by which they are multiplied. Otherwise it has ``I``, which are activated.
        interleaved: gate and up rows of the weight alternate, gates first (GPT-OSS); otherwise all
            gates come before all ups.
        limit: bound on gates from above and on ups on both sides; ``None`` for none.
        alpha: factor inside the sigmoid of ``"silu"``; 1.702 in GPT-OSS.
        up_offset: added to the ups after they were bounded; 1 in GPT-OSS.

    Raises:
        ValueError: for an unknown kind, or settings that the kind does not have.

    Example:
        >>> Activation("silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0).columns(4)
        8
    """

    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        check_switch("gated", self.gated)
        check_switch("interleaved", self.interleaved)
        check_number("alpha", self.alpha)
        check_number("up_offset", self.up_offset)
        if self.alpha != 1.0 and self.kind != "silu":
            raise InvalidValue(
                f"Got alpha={self.alpha} for {self.kind!r}.",
                "It stands inside the sigmoid of 'silu'.",
                "Leave it out.",
            )
        if not self.gated and (self.interleaved or self.up_offset):
            raise InvalidValue(
                "Got interleaved or up_offset without a gate.",
                "They say how gate and up are combined.",
                "Leave them out, or pass gated=True.",
            )
        number = isinstance(self.limit, int | float) and not isinstance(self.limit, bool)
        if self.limit is not None and not (number and 0 < self.limit < math.inf):
            raise InvalidValue(
                f"Got limit={self.limit!r:.80}.",
                "It bounds magnitudes: it is positive and finite.",
                "Pass None for no bound.",
            )

    def columns(self, intermediate: int) -> int:
        """Return the number of columns of the first product for an ``intermediate`` of ``I``."""
        return 2 * intermediate if self.gated else intermediate

    def words(self) -> tuple[str, bool, bool, float | None, float, float]:
        """Return the fields in the order of the operator's schema."""
        return self.kind, self.gated, self.interleaved, self.limit, self.alpha, self.up_offset

    def __call__(self, x: Tensor) -> Tensor:
        """Compute ``[..., I]`` from the first product, in its dtype.

        Args:
            x: float ``[..., 2 I]``, or ``[..., I]`` without a gate.
        """
        gate, up = self._parts(x)
        y = _activated(self.kind, gate, self.alpha)
        return y if up is None else (up + self.up_offset) * y

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the first product.

        Args:
            x: fp32, the argument of ``__call__``.
            grad: fp32, the gradient of its result.
        """
        gate, up = self._parts(x)
        slope = _derivative(self.kind, gate, self.alpha)
        found = torch.empty_like(x)
        at_gate, at_up = self._halves(found)
        given_gate, given_up = self._halves(x)
        if up is None or given_up is None or at_up is None:
            at_gate.copy_(grad * slope)
        else:
            at_gate.copy_(grad * (up + self.up_offset) * slope)
            at_up.copy_(grad * _activated(self.kind, gate, self.alpha))
            if self.limit is not None:
                at_up.masked_fill_(given_up.abs() > self.limit, 0.0)
        if self.limit is not None:
            at_gate.masked_fill_(given_gate > self.limit, 0.0)
        return found

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.gated:
            return x, None
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        gate, up = self._halves(x)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = None if up is None else up.clamp(-self.limit, self.limit)
        return gate, up


def _activated(kind: str, x: Tensor, alpha: float) -> Tensor:
    if kind == "silu":
        return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate=_GELU[kind])


def _derivative(kind: str, x: Tensor, alpha: float) -> Tensor:
    if kind == "silu":
        s = torch.sigmoid(alpha * x)
        return s * (1 + alpha * x * (1 - s))
    if kind == "relu2":
        return 2 * F.relu(x)
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=_GELU[kind])
