"""Convert scales, weights and biases from the shapes of ported code to those of the core.

Engines hold one scale per tensor as ``()``, ``(1,)`` or ``(1, 1)`` and one per row as ``(N,)``,
``(N, 1)`` or ``(1, N)``, in fp32 or bf16; the core knows ``[1, 1]`` and ``[N, 1]`` in fp32 alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue
from fp8kit.formats import ROW, TENSOR, GroupShape, QTensor


def check_scale(scale: Tensor | float) -> None:
    """Raise ``TypeError`` for a tensor of integers: bytes of E8M0 are exponents, no numbers."""
    if isinstance(scale, Tensor) and not scale.is_floating_point():
        raise InvalidType(
            f"Got a scale of dtype {scale.dtype} and shape {tuple(scale.shape)}.",
            "A scale is a floating-point number, or one of float8_e8m0fnu.",
            "View bytes of E8M0 as torch.float8_e8m0fnu; convert numbers by .float().",
        )


def as_scale(scale: Tensor | float, device: torch.device) -> Tensor:
    """Return scales in fp32 on a device, in their shape, after ``check_scale``."""
    check_scale(scale)
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


def as_number(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number, or a float tensor of one element, as fp32 ``[1, 1]`` on a device.

    Raises ``ValueError`` if there are several numbers.
    """
    found = as_scale(value, device)
    if found.numel() != 1:
        raise InvalidValue(
            f"Got a scale of shape {tuple(found.shape)} for a whole tensor.",
            "A static scale, and an upper bound, is one number.",
            "Leave it out for scales per token.",
        )
    return found.reshape(1, 1)


def with_scale(codes: Tensor, scale: Tensor | float) -> QTensor:
    """Pair codes with a scale of any usual shape.

    Codes are FP8 ``[rows, K]``; the scale is one number for the tensor or one for each row, in any
    float dtype. Raises ``TypeError`` if ``codes`` is not FP8 or the scale no float, and
    ``ValueError`` if the scale has another number of elements.
    """
    scale = as_scale(scale, codes.device)
    rows = codes.shape[0]
    if scale.numel() not in (1, rows) or codes.dim() != 2:
        raise InvalidValue(
            f"Got codes of shape {tuple(codes.shape)} and a scale {tuple(scale.shape)}.",
            f"A matrix has one scale, or one for each of its rows ({rows}).",
            "Check the orientation of the matrix; scales per block go to fp8kit.linear.",
        )
    group: GroupShape = TENSOR if scale.numel() == 1 else ROW
    return QTensor(codes, scale.reshape(-1, 1), group)


def check_view(weight: Tensor, k: int) -> None:
    """Raise ``ValueError`` if a matrix is not the view ``[K, N]`` that ``k`` input columns need."""
    if weight.dim() == 2 and weight.shape[0] != k:
        raise InvalidValue(
            f"Got an input with K = {k} and a weight of shape {tuple(weight.shape)}.",
            "Under this name a weight is the view [K, N] of what is stored.",
            "Pass weight.t() if it is [N, K]; else weight and input do not belong together.",
        )


def stored(weight: Tensor) -> Tensor:
    """Return a weight given as ``[K, N]`` as it is stored: ``[N, K]``, rows contiguous.

    The view ``stored_weight.t()``, which engines pass, is undone without a copy. Raises
    ``ValueError`` if it is no matrix.
    """
    if weight.dim() != 2:
        raise InvalidValue(
            f"Got a weight of shape {tuple(weight.shape)}.",
            "It is a matrix, the view [K, N] of what is stored.",
            "Pass stored.t(); stacks of experts go to fp8kit.moe.experts.",
        )
    return weight.t().contiguous()


def is_stored(weight: Tensor, k: int) -> bool:
    """Return whether a weight is ``[N, K]`` as it is stored, and not its view ``[K, N]``.

    The side that equals ``k``, the columns of the input, tells. A square weight is the view if its
    rows are not contiguous in memory. Raises ``ValueError`` if no side is ``k``.
    """
    if weight.dim() != 2 or k not in weight.shape:
        raise InvalidValue(
            f"Got an input with K = {k} and a weight of shape {tuple(weight.shape)}.",
            "The weight is [N, K], or its transposed view [K, N].",
            "Check that weight and input belong together.",
        )
    return weight.stride(1) == 1 if weight.shape[0] == weight.shape[1] else weight.shape[1] == k


def with_scale_as_stored(weight: Tensor, scale: Tensor | float) -> QTensor:
    """Pair a weight given as ``[K, N]`` with its scale."""
    return with_scale(stored(weight), scale)


def as_vector(bias: Tensor | None, n: int) -> Tensor | None:
    """Return a bias of ``n`` elements in any shape as ``[n]``; others are refused by the core."""
    return bias.reshape(-1) if bias is not None and bias.numel() == n else bias


def written(codes: Tensor, output: Tensor | None) -> Tensor:
    """Copy codes into an output, if there is one, and return the tensor that holds them.

    Raises ``ValueError`` if its shape or dtype differs: ``copy_`` would repeat rows, or convert
    codes as numbers.
    """
    if output is None:
        return codes
    if (output.shape, output.dtype) != (codes.shape, codes.dtype):
        raise InvalidValue(
            f"Got an output of shape {tuple(output.shape)} and dtype {output.dtype}.",
            f"The codes are {codes.dtype} {tuple(codes.shape)}, and are written as they are.",
            "Make it by torch.empty of this shape and dtype, or leave it out.",
        )
    return output.copy_(codes)
