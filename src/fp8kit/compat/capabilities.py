"""What runs on a device, under vLLM's names; probed once per device, not looked up in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.dispatch.backends import choose
from fp8kit.errors import check_choice
from fp8kit.formats import BLOCK, GROUP128, SCHEMES, Scheme
from fp8kit.matmul.problem import DECODING, MATMUL_BACKENDS, linear_problem
from fp8kit.moe.functional import grouped_scaled_mm
from fp8kit.moe.problem import MOE_BACKENDS, GroupedProblem
from fp8kit.ops.validation import check_device

_N, _K, _M = 256, 256, 32
DECODING_EXPERTS = ("by_expert", "reference")
# twice the rounding to bf16 of a product whose operands are powers of two and sums exact
_TOLERANCE = 2**-7
KINDS: dict[str, Scheme | None] = {
    "fp8": SCHEMES["FP8_DYNAMIC"],
    "block_fp8": SCHEMES["FP8_BLOCK"],
    "group_gemm": None,
    "sparse": None,
    "torch_rowwise": SCHEMES["FP8_DYNAMIC"],
}


def supports(kind: str, device: torch.device | str | None = None) -> bool:
    """Return whether a kind of FP8 product runs on FP8 tensor cores of a device.

    A product is computed once and compared, because a device capability without a kernel is no
    support. ``False`` does not mean that layers fail: they decode the weight.

    Args:
        kind: ``"fp8"`` (scales per tensor, token or channel), ``"block_fp8"`` (128x128),
            ``"group_gemm"`` (experts), ``"sparse"`` (2:4, of which there is none here), or
            ``"torch_rowwise"`` (torch's own product with a scale per row).
        device: by default the current CUDA device, if there is one. One that is not on this
            machine supports nothing.

    Raises:
        ValueError: for an unknown kind, or if ``device`` names no device.

    Example:
        >>> fp8kit.compat.supports("fp8", "cpu")
        False
    """
    check_choice("kind", kind, KINDS)
    if device is None:
        if not torch.cuda.is_available():
            return False
        device = torch.device("cuda", torch.cuda.current_device())
    check_device(device)
    device = torch.device(device)
    found = device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()
    return found and _probed(kind, device)


@functools.cache
def _probed(kind: str, device: torch.device) -> bool:
    scheme = KINDS[kind]
    if scheme is None:
        return kind == "group_gemm" and _grouped_product_runs(device)
    if kind == "torch_rowwise":
        return _product_runs(scheme, device, "torch_native")
    problem = linear_problem((_N, _K), scheme, torch.bfloat16, device, False, _M)
    chosen = choose(MATMUL_BACKENDS, problem).backend
    return chosen not in DECODING and _product_runs(scheme, device, chosen)


def _product_runs(scheme: Scheme, device: torch.device, backend: str) -> bool:
    x, w = _operands(device)
    assert scheme.activation is not None
    x_q = functional.quantize(x, scheme.activation)
    w_q = functional.quantize(w, scheme.weight, role="weight")
    return _agrees(
        lambda: functional.scaled_mm(x_q, w_q, backend=backend),
        functional.dequantize(x_q).double() @ functional.dequantize(w_q).double().t(),
    )


def _grouped_product_runs(device: torch.device) -> bool:
    """Return whether a product of two experts, each with half of the rows, is right."""
    x, w = _operands(device)
    x_q = functional.quantize(x, GROUP128)
    w_q = functional.quantize(torch.stack([w, -w]), BLOCK, role="weight")
    groups = (x_q.group, w_q.group)
    problem = GroupedProblem.of(x_q.data, w_q.data, groups, torch.bfloat16)
    chosen = choose(MOE_BACKENDS, problem).backend
    if chosen in DECODING_EXPERTS:
        return False
    wanted = functional.dequantize(x_q).double() @ functional.dequantize(w_q).double()[0].t()
    wanted[_M // 2 :] *= -1
    offsets = torch.tensor([0, _M // 2, _M], device=device)
    return _agrees(lambda: grouped_scaled_mm(x_q, w_q, offsets, backend=chosen), wanted)


def _operands(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.eye(_M, _K, device=device) * 2 + 1, torch.eye(_N, _K, device=device) * 4 - 1


def _agrees(product: Callable[[], Tensor], wanted: Tensor) -> bool:
    try:
        error = (product().double() - wanted).norm()
    except (RuntimeError, ImportError):
        return False
    return bool((error <= _TOLERANCE * wanted.norm()).item())


def cutlass_fp8_supported() -> bool:
    """Return ``supports("fp8")``."""
    return supports("fp8")


def cutlass_block_fp8_supported() -> bool:
    """Return ``supports("block_fp8")``."""
    return supports("block_fp8")


def cutlass_group_gemm_supported() -> bool:
    """Return ``supports("group_gemm")``."""
    return supports("group_gemm")


def sparse_cutlass_supported() -> bool:
    """Return ``supports("sparse")``."""
    return supports("sparse")


# vLLM computes these while it is imported; here an import queries no device
FLAGS: dict[str, Callable[[], bool]] = {
    "CUTLASS_FP8_SUPPORTED": cutlass_fp8_supported,
    "CUTLASS_BLOCK_FP8_SUPPORTED": cutlass_block_fp8_supported,
    "USE_ROWWISE_TORCH_SCALED_MM": functools.partial(supports, "torch_rowwise"),
}
