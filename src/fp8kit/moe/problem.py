"""The problems of experts as frozen data, and the backends in order of preference.

There are two: a whole layer of experts, and one product of rows that are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kit.dispatch.backends import Backend, BackendTable
from fp8kit.dispatch.device import capability
from fp8kit.formats import GROUP128, TENSOR, GroupShape
from fp8kit.matmul.problem import m_bucket
from fp8kit.moe.activation import Activation
from fp8kit.moe.pairs import physical_ids

MOE_BACKENDS: BackendTable = (
    ("hopper_experts", "fp8kit.moe.hopper.experts", ("cuda",)),
    ("triton_experts", "fp8kit.moe.triton", ("cuda",)),
    ("by_expert", "fp8kit.moe.by_expert", ("cpu",)),
    ("reference", "fp8kit.moe.reference", ()),
)


@dataclass(frozen=True, slots=True)
class ExpertsProblem:
    """A layer of E experts, with ``hidden`` features H and ``intermediate`` I between its products.

    ``m`` counts tokens, rounded up to a power of two. If ``x_group`` is ``None``, input and
    intermediate stay in 16 bit. Input and result have ``x_dtype``, all codes ``w_dtype``.
    ``static_input`` and ``static_intermediate`` say which products have a given input scale;
    ``scale_rounding`` is for dynamic scales ("floor" for MX groups only: those of the intermediate
    are then exact). With ``router_weight_on_input`` results are added without weights. With
    ``batch_invariant`` a token's bits do not depend on others. ``capability`` is that of CUDA.
    """

    m: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation
    x_group: GroupShape | None
    w_group: GroupShape
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    scale_rounding: str
    static_input: bool
    static_intermediate: bool
    router_weight_on_input: bool
    batch_invariant: bool
    device_type: str
    capability: tuple[int, int] | None

    @property
    def intermediate_group(self) -> GroupShape | None:
        """Granularity of the second product's input: 1x128, unless its scale is given."""
        if self.x_group is None:
            return None
        return TENSOR if self.static_intermediate else GROUP128

    def __str__(self) -> str:
        x = "unquantized" if self.x_group is None else f"per {self.x_group}"
        return (
            f"{self.experts} experts, {self.top_k} for each of M<={self.m} tokens, "
            f"H={self.hidden}, I={self.intermediate}, {x} @ per {self.w_group}, "
            f"{self.activation.kind}, on {self.device_type}"
        )


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """``y[r] = x[r] @ w[e].T + bias[e]`` for the rows ``r`` of each expert ``e``.

    Each ``w[e]`` has ``n`` rows and ``k`` columns; the other fields are as in ``ExpertsProblem``
    and ``MatmulProblem``.
    """

    m: int
    experts: int
    n: int
    k: int
    x_group: GroupShape | None
    w_group: GroupShape
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    out_dtype: torch.dtype
    batch_invariant: bool
    device_type: str
    capability: tuple[int, int] | None

    @staticmethod
    def of(
        x: Tensor,
        w: Tensor,
        groups: tuple[GroupShape | None, GroupShape],
        out_dtype: torch.dtype,
        batch_invariant: bool = False,
    ) -> GroupedProblem:
        """Describe multiplying rows ``x [S, K]`` by ``w [E, N, K]``; ``groups`` are theirs."""
        count, n, k = w.shape
        sizes, place = (m_bucket(x.shape[0]), count, n, k), (x.device.type, capability(x.device))
        return GroupedProblem(
            *sizes, groups[0], groups[1], x.dtype, w.dtype, out_dtype, batch_invariant, *place
        )

    def __str__(self) -> str:
        x = "unquantized" if self.x_group is None else f"per {self.x_group}"
        return (
            f"[M<={self.m}, K={self.k}] {x} @ {self.experts} x [N={self.n}, K] per {self.w_group}"
            f" -> {str(self.out_dtype).removeprefix('torch.')}, on {self.device_type}"
        )


class ExpertWeights(NamedTuple):
    """A stack, one weight of all experts: codes ``[E, N, K]``, scales ``stack_scale_shape``.

    The bias is float ``[E, N]``, the static ``input_scale`` float32 ``[1, 1]``.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None


class ExpertOperands(NamedTuple):
    """The operands of a layer of experts: float ``x [M, H]``, and ids and weights ``[M, k]``.

    Ids are rows of the stacks ``w13`` and ``w2``, int32 or int64; a pair with any other id adds
    nothing. The router's ``weights`` are float32.
    """

    x: Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    ids: Tensor
    weights: Tensor

    def placed(self, experts: int) -> ExpertOperands:
        """Return the operands with ``int64`` ids, -1 for a pair that adds nothing."""
        return self._replace(ids=physical_ids(self.ids, None, experts))


class GroupedOperands(NamedTuple):
    """The operands of a grouped product: codes or floats ``x [S, K]``, and weights of all experts.

    Expert ``e`` has the rows from ``offsets[e]`` up to, and without, ``offsets[e + 1]``; offsets
    are integers ``[E + 1]``. The input scale of ``w`` is not read.
    """

    x: Tensor
    x_scale: Tensor | None
    w: ExpertWeights
    offsets: Tensor


@dataclass(kw_only=True, eq=False, slots=True)
class MoeBackend(Backend):
    """A backend of the experts.

    ``experts`` computes a layer, ``[M, H]`` in the dtype of ``x``. ``grouped`` computes one
    product, ``[S, N]`` in ``problem.out_dtype``, zero where a row has no expert; it is ``None`` if
    ``supports`` declines every ``GroupedProblem``.
    """

    experts: Callable[[ExpertOperands, ExpertsProblem], Tensor]
    grouped: Callable[[GroupedOperands, GroupedProblem], Tensor] | None = None
