"""What is asked of a matmul, as frozen data, and the ordered backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.dispatch import BackendTable
from fp8kit.formats import GroupShape
from fp8kit.quantizers.problem import capability

BACKENDS: BackendTable = (
    ("torch_native", "fp8kit.matmul.torch_native", ("cuda",)),
    ("dequantized", "fp8kit.matmul.dequantized", ()),
    ("reference", "fp8kit.matmul.reference", ()),
)
# backends that decode the weight before a dense matmul: correct everywhere, faster nowhere
DECODING = ("dequantized", "reference")


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """``y[M, N] = x[M, K] @ w[N, K].T + bias`` with scaled operands.

    Args:
        m: rows of ``x``, rounded up to a power of two so that few problems exist.
        n: rows of ``w``.
        k: columns of both.
        x_group: granularity of ``x``; ``None`` if ``x`` is in 16 or 32 bit (weight-only).
        w_group: granularity of ``w``.
        x_dtype: dtype of ``x`` as the matmul gets it.
        w_dtype: dtype of the weight codes.
        out_dtype: dtype of ``y``.
        bias: whether a bias is added.
        accum: ``"precise"`` (promoted to fp32 at least every 512 of K) or ``"fast"``.
        batch_invariant: the bits of a row must not depend on the other rows.
        device_type: ``"cpu"``, ``"cuda"``, …
        capability: CUDA compute capability, ``None`` elsewhere.
    """

    m: int
    n: int
    k: int
    x_group: GroupShape | None
    w_group: GroupShape
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    accum: str
    batch_invariant: bool
    device_type: str
    capability: tuple[int, int] | None

    @staticmethod
    def of(
        x: Tensor,
        w: Tensor,
        groups: tuple[GroupShape | None, GroupShape],
        out_dtype: torch.dtype,
        bias: Tensor | None,
        accum: str,
        batch_invariant: bool,
    ) -> MatmulProblem:
        """Describe multiplying ``x [M, K]`` by ``w [N, K]``; ``groups`` are those of ``(x, w)``."""
        return MatmulProblem(
            m_bucket(x.shape[0]),
            w.shape[0],
            w.shape[1],
            groups[0],
            groups[1],
            x.dtype,
            w.dtype,
            out_dtype,
            bias is not None,
            accum,
            batch_invariant,
            x.device.type,
            capability(x.device),
        )

    def __str__(self) -> str:
        x = "unquantized" if self.x_group is None else f"per {self.x_group}"
        where = self.device_type
        if self.capability is not None:
            where += " sm{}{}".format(*self.capability)
        return (
            f"[M<={self.m}, K={self.k}] {x} @ [N={self.n}, K] per {self.w_group}"
            f" -> {str(self.out_dtype).removeprefix('torch.')}"
            f"{' + bias' if self.bias else ''}, {self.accum}"
            f"{', batch invariant' if self.batch_invariant else ''}, on {where}"
        )


def m_bucket(m: int) -> int:
    """Round a row count up to a power of two (0 stays 0)."""
    return 1 << (m - 1).bit_length() if m else 0
