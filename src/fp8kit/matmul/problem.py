"""A matmul as frozen data, and the backends that multiply, in order of preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kit.dispatch.backends import Backend, BackendTable
from fp8kit.dispatch.device import architecture, capability, device_name
from fp8kit.dispatch.timings import DENSE, Case, Measured, table_for
from fp8kit.formats import ROW, TENSOR, GroupShape, Scheme

MATMUL_BACKENDS: BackendTable = (
    ("hopper_gemm", "fp8kit.matmul.hopper.gemm", ("cuda",)),
    ("torch_native", "fp8kit.matmul.torch_native", ("cuda",)),
    ("triton_gemm", "fp8kit.matmul.triton_gemm", ("cuda",)),
    ("deep_gemm", "fp8kit.matmul.deep_gemm", ("cuda",)),
    ("dequantized", "fp8kit.matmul.dequantized", ()),
    ("reference", "fp8kit.matmul.reference", ()),
)
# rows up to which a backend may quantize inside the GEMM (``quantize_in_gemm``)
IN_GEMM_ROWS = 4
# granularities of x for which ``accum`` matters: groups along K, and 16-bit x, are summed in fp32
_WHOLE_ROWS = (ROW, TENSOR)
TIMED_DTYPES = (torch.bfloat16, torch.float16)
# candidates as fast for fp16 as for bf16; torch writes fp16 in one kernel for tensor scales only
_ANY_16_BITS = (DENSE, "hopper_gemm", "triton_gemm", "dequantized")
# backends that decode the weight before a dense matmul: correct everywhere, faster nowhere
DECODING = ("dequantized", "reference")


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """``y[M, N] = x[M, K] @ w[N, K].T + bias`` with scaled operands.

    ``m`` is rounded up to a power of two, so that few problems exist. If ``x_group`` is ``None``,
    ``x`` has 16 or 32 bits (weight-only); ``x_dtype`` is what the matmul gets. ``accum`` is
    ``"precise"`` (data of one sign is biased by less than 1e-3) or ``"fast"``. With
    ``batch_invariant`` the bits of a row do not depend on other rows. Measured times are kept under
    ``device``, the GPU's name. ``configuration`` names a tile configuration; empty leaves it to the
    backend, ``None`` to dispatch. ``capability`` is CUDA's, ``architecture`` AMD's (``gfx942``).
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
    device: str = ""
    configuration: str | None = None
    architecture: str = ""

    @staticmethod
    def of(
        x: Tensor,
        w: Tensor,
        groups: tuple[GroupShape | None, GroupShape],
        out_dtype: torch.dtype,
        bias: Tensor | None,
        accum: str,
        batch_invariant: bool,
        x_dtype: torch.dtype | None = None,
    ) -> MatmulProblem:
        """Describe multiplying ``x [M, K]`` by ``w [N, K]``; ``groups`` are those of ``(x, w)``.

        ``x_dtype`` is the dtype that an unquantized ``x`` will be quantized to.
        """
        return MatmulProblem(
            m_bucket(x.shape[0]),
            w.shape[0],
            w.shape[1],
            groups[0],
            groups[1],
            x_dtype or x.dtype,
            w.dtype,
            out_dtype,
            bias is not None,
            accum,
            batch_invariant,
            x.device.type,
            capability(x.device),
            device_name(x.device),
            architecture=architecture(x.device),
        )

    def measured(self) -> Measured | None:
        """Return the measured times of the layer this product belongs to, if there are any.

        Tables hold layers with bf16 input and output and e4m3fn codes, without a bias. A backend
        that writes fp16 in the same kernel takes as long. A batch-invariant product has no times:
        they depend on M, so a choice by them would depend on M, too.
        """
        if self.batch_invariant:
            return None
        table = table_for(self.device)
        wide = self.x_group is None and self.x_dtype == self.out_dtype
        e4m3 = self.w_dtype == torch.float8_e4m3fn and (wide or self.x_dtype == self.w_dtype)
        if table is None or self.out_dtype not in TIMED_DTYPES or not e4m3:
            return None
        found = table.find(self.case())
        if found is None or self.out_dtype == torch.bfloat16:
            return found
        single = self.x_group == self.w_group == TENSOR
        alike = (*_ANY_16_BITS, "torch_native") if single else _ANY_16_BITS
        return Measured(found.m, {c: us for c, us in found.us.items() if c in alike})

    def case(self) -> Case:
        """Return the row of a table of measured times that describes this problem."""
        x = "none" if self.x_group is None else self.x_group
        accum = self.accum if self.x_group in _WHOLE_ROWS else "precise"
        return Case(f"{x}*{self.w_group}", accum, self.m, self.n, self.k)

    def __str__(self) -> str:
        x = "unquantized" if self.x_group is None else f"per {self.x_group}"
        where = self.device_type
        if self.capability is not None:
            where += " sm{}{}".format(*self.capability)
        where += f" {self.architecture}" if self.architecture else ""
        return (
            f"[M<={self.m}, K={self.k}] {x} @ [N={self.n}, K] per {self.w_group}"
            f" -> {str(self.out_dtype).removeprefix('torch.')}"
            f"{' + bias' if self.bias else ''}, {self.accum}"
            f"{', batch invariant' if self.batch_invariant else ''}, on {where}"
        )


class MatmulOperands(NamedTuple):
    """The operands: ``x [M, K]``, codes ``w [N, K]``, and their scales, per group of the problem.

    ``x`` holds codes, or bf16, fp16 or fp32 without scales; the bias is ``[N]``, one of these.
    """

    x: Tensor
    x_scale: Tensor | None
    w: Tensor
    w_scale: Tensor
    bias: Tensor | None = None


Run = Callable[[MatmulOperands, MatmulProblem], Tensor]
QuantizeInGemm = Callable[[MatmulOperands, MatmulProblem, float], Tensor | None]


@dataclass(kw_only=True, eq=False, slots=True)
class MatmulBackend(Backend):
    """A backend that multiplies.

    Args:
        run: multiplies; gives ``[M, N]`` in ``problem.out_dtype``. No operand is empty: for those
            the operators return the result without a backend.
        quantize_in_gemm: quantizes up to ``IN_GEMM_ROWS`` rows inside the GEMM, with the bits of
            ``quantize`` and ``run``. It gets high-precision ``x``, and the floor of its scales; it
            returns ``None`` where two kernels are needed.
        row_counts: gives row counts that together run every kernel of a problem's power of two,
            for a warm-up where the kernel depends on the exact count.
    """

    run: Run
    quantize_in_gemm: QuantizeInGemm = lambda *_: None
    row_counts: Callable[[MatmulProblem], list[int]] = lambda _: []


def m_bucket(m: int) -> int:
    """Round a row count up to a power of two (0 stays 0)."""
    return 1 << (m - 1).bit_length() if m else 0


def linear_problem(
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool,
    m: int,
    accum: str = "precise",
    batch_invariant: bool = False,
) -> MatmulProblem:
    """Describe the matmul of a linear layer with a weight ``(N, K)`` for ``m`` rows."""
    return MatmulProblem(
        m=m_bucket(m),
        n=shape[0],
        k=shape[1],
        x_group=scheme.activation,
        w_group=scheme.weight,
        x_dtype=dtype if scheme.activation is None else scheme.dtype,
        w_dtype=scheme.dtype,
        out_dtype=dtype,
        bias=bias,
        accum=accum,
        batch_invariant=batch_invariant,
        device_type=device.type,
        capability=capability(device),
        device=device_name(device),
        architecture=architecture(device),
    )
