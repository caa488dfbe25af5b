"""Activations by the kernels' own device function; torch's may differ in the last bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kit.fused.triton_activations import activate
from fp8kit.fused.triton_output import narrow
from fp8kit.quantizers.triton_encode import widen


@triton.jit
def _activate_kernel(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    y = narrow(activate(widen(x), KIND), y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=at < n)


def applied(kind: str, x: Tensor) -> Tensor:
    """Apply the kernels' activation and round to the dtype of ``x``."""
    x, block = x.contiguous(), 1 << 12
    y = torch.empty_like(x)
    _activate_kernel[(triton.cdiv(x.numel(), block),)](
        x, y, x.numel(), KIND=kind, BLOCK=block, enable_fp_fusion=False
    )
    return y
