"""Quantizers and products by groups of 1x128 and blocks of 128x128, as engines name them.

Sources: ``fp8_utils.py`` of vLLM, ``fp8_kernel.py`` of SGLang, ``deep_gemm/utils/math.py`` of
DeepGEMM. The lower bound of a group's amax is that of its source: 1e-10, and 1e-4 for DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.shapes import as_scale, written
from fp8kit.errors import InvalidType, InvalidValue
from fp8kit.formats import MX, ROW, GroupShape, QTensor, fp8_format
from fp8kit.ops import operators
from fp8kit.ops.validation import check_float
from fp8kit.quantizers.scale_layout import laid_out

FP8 = torch.float8_e4m3fn
_SIDE = 128
_CAST_FLOOR = 1e-4


@names_wrong_argument
def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize with one scale per ``group_size`` elements of a row.

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``, any strides.
        group_size: elements per scale; the last group of a row may be shorter.
        eps: the least amax of a group.
        dtype: of the codes, by default e4m3fn.
        column_major_scales: scales of neighbouring rows are adjacent, columns a multiple of four
            apart, as ``tma_aligned_scales`` requires.
        tma_aligned_scales: accepted and ignored.
        out_q: FP8 of the shape of ``x``, into which the codes are written.
        use_ue8m0: round scales up to powers of two, which stay fp32; by default ``False``.

    Returns:
        codes of the shape of ``x``, and fp32 scales ``[..., ceil(K / group_size)]``.

    Raises:
        TypeError: if ``x`` is no float tensor, or ``dtype`` is not FP8.
        ValueError: if ``group_size`` is not positive, or ``out_q`` has another shape or dtype.

    Example:
        >>> codes, scale = fp8kit.compat.per_token_group_quant_fp8(torch.randn(4, 256), 128)
        >>> scale.shape
        torch.Size([4, 2])
    """
    del tma_aligned_scales
    layout = "column" if column_major_scales else "row"
    group = GroupShape(1, group_size)
    codes, scale = _quantized(x, group, eps, bool(use_ue8m0), dtype=dtype or FP8, layout=layout)
    return written(codes, out_q), scale


@names_wrong_argument
def per_token_cast_to_fp8(
    x: Tensor, use_ue8m0: bool = False, gran_k: int = _SIDE, use_packed_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix with one scale per ``gran_k`` elements of a row, as DeepGEMM's tests do.

    Args:
        x: bf16, fp16 or fp32 ``[M, K]``.
        use_ue8m0: round scales up to powers of two.
        gran_k: elements per scale.
        use_packed_ue8m0: must be ``False``: nothing here reads four scales packed in an integer.

    Returns:
        e4m3fn ``[M, K]`` and fp32 ``[M, ceil(K / gran_k)]``.

    Raises:
        ValueError: for packed scales.

    Example:
        >>> codes, scale = fp8kit.compat.per_token_cast_to_fp8(torch.randn(4, 300))
        >>> scale.shape
        torch.Size([4, 3])
    """
    if use_packed_ue8m0:
        raise InvalidValue(
            "Got use_packed_ue8m0=True.",
            "Scales are fp32 numbers, also where they are powers of two.",
            "Leave it out, and pack what you pass to DeepGEMM's kernels with its own function.",
        )
    return _quantized(x, GroupShape(1, gran_k), _CAST_FLOOR, use_ue8m0)


@names_wrong_argument
def per_block_cast_to_fp8(
    x: Tensor,
    block_size: Sequence[int] | bool = (_SIDE, _SIDE),
    use_ue8m0: bool | int = False,
    *,
    gran_k: int = _SIDE,
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix with one scale per block.

    Args:
        x: bf16, fp16 or fp32 ``[M, K]``.
        block_size: rows and columns per scale, as in vLLM; or ``use_ue8m0``, which comes second in
            DeepGEMM.
        use_ue8m0: round scales up to powers of two; or ``gran_k``, which comes third in DeepGEMM.
        gran_k: the side of a block, under DeepGEMM's name.

    Returns:
        e4m3fn ``[M, K]`` and fp32 ``[ceil(M / rows), ceil(K / columns)]``.

    Raises:
        TypeError: for a side where ``use_ue8m0`` is expected, or the other way round.
        ValueError: if ``block_size`` and ``gran_k`` name different sides.

    Example:
        >>> codes, scale = fp8kit.compat.per_block_cast_to_fp8(torch.randn(130, 256))
        >>> scale.shape
        torch.Size([2, 2])
    """
    third, by_deep_gemm = use_ue8m0, isinstance(block_size, bool)
    if third is not False and isinstance(third, bool) == by_deep_gemm:
        raise InvalidType(
            f"Got {third!r} as third argument after {block_size!r}.",
            "After the sides of a block it is use_ue8m0, True or False; after use_ue8m0 it is "
            "gran_k, an integer.",
            "Pass block_size=, use_ue8m0= or gran_k= by name.",
        )
    if isinstance(block_size, bool):
        side = third or gran_k
        third, block_size = block_size, (side, side)
    elif gran_k != _SIDE:
        if tuple(block_size) not in ((_SIDE, _SIDE), (gran_k, gran_k)):
            raise InvalidValue(
                f"Got block_size={block_size!r} and gran_k={gran_k!r}.",
                "Both name the sides of a block.",
                "Pass one of them.",
            )
        block_size = (gran_k, gran_k)
    return _quantized(x, _block(block_size), _CAST_FLOOR, bool(third))


@names_wrong_argument
def w8a8_block_fp8_matmul(
    A: Tensor,
    B: Tensor,
    As: Tensor,
    Bs: Tensor,
    block_size: Sequence[int],
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Multiply codes with scales per group by a weight with scales per block.

    Args:
        A: FP8 ``[..., K]``.
        B: FP8 ``[N, K]``.
        As: float ``[..., ceil(K / block_k)]``, any strides.
        Bs: float or E8M0 ``[ceil(N / block_n), ceil(K / block_k)]``.
        block_size: ``(block_n, block_k)``.
        output_dtype: bf16, fp16 or fp32.

    Returns:
        ``[..., N]``.

    Raises:
        TypeError: if ``block_size`` is not two integers.
        ValueError: if shapes or scales do not fit.

    Example:
        >>> y = fp8kit.compat.w8a8_block_fp8_matmul(a, w, a_scale, w_scale, [128, 128])
    """
    return block_product((A, As), (B, Bs), block_size, output_dtype)


w8a8_triton_block_scaled_mm = w8a8_block_fp8_matmul


def block_product(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    block_size: Sequence[int],
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply ``[..., K]`` by ``[N, K]``, each with its scales; see ``w8a8_block_fp8_matmul``."""
    block, scales = _block(block_size), [as_scale(s, codes.device) for codes, s in (x, weight)]
    if block.cols == MX.cols:
        # the core has E8M0 bytes as scales of 32 columns: for floats, each group becomes two of 16
        block = GroupShape(block.rows, MX.cols // 2)
        parts = -(-x[0].shape[-1] // block.cols)
        scales = [scale.repeat_interleave(2, -1)[..., :parts] for scale in scales]
    x_q = QTensor(x[0], scales[0], GroupShape(1, block.cols))
    w_q = QTensor(weight[0], scales[1], block)
    return functional.scaled_mm(x_q, w_q, bias, out_dtype=out_dtype)


def _block(block_size: Sequence[int]) -> GroupShape:
    if not isinstance(block_size, Sequence) or len(block_size) != 2:
        raise InvalidType(
            f"Got block_size={block_size!r}.",
            "A block has two sides: rows and columns of the weight.",
            "Pass block_size=[128, 128].",
        )
    return GroupShape(*block_size)


def _quantized(
    x: Tensor,
    group: GroupShape,
    least: float,
    powers: bool,
    *,
    dtype: torch.dtype = FP8,
    layout: str = "row",
) -> tuple[Tensor, Tensor]:
    """Quantize with ``least`` as the lower bound of each group's amax."""
    check_float("x", x)
    if x.dim() < (2 if group.rows > 1 else 1):
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)}.",
            f"Groups of {group} need a last dimension K, blocks a matrix [M, K].",
            "Add the missing dimension, e.g. with unsqueeze(0).",
        )
    options = (dtype, least / fp8_format(dtype).max, None, "up" if powers else "exact")
    if group != MX:
        codes, scale = operators.QUANTIZE(x, (group.rows, group.cols), *options, layout)
        return codes, scale
    # the core has E8M0 bytes as scales of 32 columns: for floats, each group becomes a row
    padded = F.pad(x, (0, -x.shape[-1] % group.cols))
    rows = padded.reshape(-1, group.cols)
    codes, scale = operators.QUANTIZE(rows, (ROW.rows, ROW.cols), *options, "row")
    codes = codes.view(padded.shape)[..., : x.shape[-1]].contiguous()
    return codes, laid_out(scale.view(*x.shape[:-1], padded.shape[-1] // group.cols), layout)
