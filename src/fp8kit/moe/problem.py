"""The experts' problem as frozen data, and the backends in order.

Two questions: the whole layer, and one product of rows that lie sorted by expert.
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
    """A layer of E experts, of ``hidden`` columns H and ``intermediate`` I between its products.

    ``m`` are tokens, rounded up to a power of two. Without ``x_group`` input and intermediate stay
    in 16 bit; input and result have ``x_dtype``, all codes ``w_dtype``. ``static_input`` and
    ``static_intermediate`` say which products have a given input scale; ``scale_rounding`` is of
    other scales; "floor" is of MX groups alone, and the intermediate's are exact then. With
    ``router_weight_on_input`` results are added as they are. The bits of a token's result depend on
    no other token if ``batch_invariant``; ``capability`` is that of CUDA, ``None`` elsewhere.
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
        """Granularity of what the second product reads: 1x128, unless a scale is given."""
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

    ``n`` rows of each ``w[e]`` and ``k`` columns are multiplied; the other fields are as in
    ``ExpertsProblem`` and ``MatmulProblem``.
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
    """One of the two weights of all experts: codes ``[E, N, K]``, scales ``stack_scale_shape``.

    The bias is float ``[E, N]``, the static ``input_scale`` float32 ``[1, 1]``.
    """

    data: Tensor
    scale: Tensor
    bias: Tensor | None
    input_scale: Tensor | None


class ExpertOperands(NamedTuple):
    """What a layer of experts computes with: float ``x [M, H]``, and ids and weights ``[M, k]``.

    Ids are int32 or int64 rows of the weights; a pair with any other counts as zero. Weights are
    float32.
    """

    x: Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    ids: Tensor
    weights: Tensor

    def placed(self, experts: int) -> ExpertOperands:
        """Return them with ids as ``int64``, -1 for a pair that counts as zero."""
        return self._replace(ids=physical_ids(self.ids, None, experts))


class GroupedOperands(NamedTuple):
    """What a grouped product multiplies: codes or floats ``x [S, K]``, and weights of all experts.

    Expert ``e`` has the rows ``offsets[e] .. offsets[e + 1]``, integers ``[E + 1]``. The input
    scale of ``w`` is not read.
    """

    x: Tensor
    x_scale: Tensor | None
    w: ExpertWeights
    offsets: Tensor


@dataclass(kw_only=True, eq=False, slots=True)
class MoeBackend(Backend):
    """An implementation of the experts.

    ``experts``, the layer, gives ``[M, H]`` in the dtype of ``x``; ``grouped``, one product, ``[S,
    N]`` in ``problem.out_dtype``, zero where a row has no expert. It is ``None`` if ``supports``
    declines every ``GroupedProblem``.
    """

    experts: Callable[[ExpertOperands, ExpertsProblem], Tensor]
    grouped: Callable[[GroupedOperands, GroupedProblem], Tensor] | None = None
