"""vLLM's functions for MXFP8: quantize, decode, swizzle, and a linear layer without its weight.

Source: ``vllm/model_executor/layers/quantization/utils/mxfp8_utils.py``.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.known_weights import KnownWeights
from fp8kit.dispatch.device import capability
from fp8kit.errors import InvalidValue
from fp8kit.formats import MX, MX_FORMS, QTensor
from fp8kit.modules.parameters import frozen
from fp8kit.ops.validation import check_operands, check_options
from fp8kit.quantizers.scale_layout import swizzle_scales, unswizzle_scales

MXFP8_VALUE_DTYPE = torch.float8_e4m3fn
MXFP8_SCALE_DTYPE = torch.uint8
MXFP8_BLOCK_SIZE = 32
_WEIGHT_ONLY = MX_FORMS["MXFP8_WEIGHT_ONLY"]
_SIZES = ("size_n", "size_k", "out_features", "in_features")
_NATIVE, _WIDE = (10, 0), (8, 0)


class Mxfp8LinearBackend(Enum):
    """How a weight in MXFP8 is multiplied; the names are those of vLLM's kernels."""

    EMULATION = "emulation"  # decoded to the input's dtype
    FLASHINFER_CUTLASS = "flashinfer-cutlass"  # MX times MX on tensor cores
    MARLIN = "marlin"  # 16-bit input, the weight decoded inside the kernel


# the words that vLLM's ``Mxfp8LinearOp`` took before there was an enumeration, and the values
_BY_WORD = {
    "torch": Mxfp8LinearBackend.EMULATION,
    "flashinfer": Mxfp8LinearBackend.FLASHINFER_CUTLASS,
    **{b.value: b for b in Mxfp8LinearBackend},
}


def select_mxfp8_linear_backend() -> Mxfp8LinearBackend:
    """Return the best backend of the current device: native from sm100, weight-only from sm80.

    Example:
        >>> fp8kit.compat.select_mxfp8_linear_backend().value  # on a CPU
        'emulation'
    """
    if not torch.cuda.is_available():
        return Mxfp8LinearBackend.EMULATION
    found = capability(torch.device("cuda", torch.cuda.current_device()))
    if found is None or found < _WIDE:
        return Mxfp8LinearBackend.EMULATION
    native = found >= _NATIVE
    return Mxfp8LinearBackend.FLASHINFER_CUTLASS if native else Mxfp8LinearBackend.MARLIN


@names_wrong_argument
def mxfp8_e4m3_quantize(
    x: Tensor, is_sf_swizzled_layout: bool = False, alignment: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3fn codes with one E8M0 scale per 32 elements along the last dimension.

    Exponents are rounded up, so that no element saturates, as by FlashInfer
    (``cvt_warp_fp16_to_mxfp8``: amax / 448 is converted with ``cudaRoundPosInf``).

    Args:
        x: bf16, fp16 or fp32 ``[..., K]``.
        is_sf_swizzled_layout: return scales in tiles of 128x4, flat and padded, matrix by matrix.
        alignment: K is padded with zeros to a multiple of it; 0 adds none.

    Returns:
        codes ``[..., K]``, and ``uint8`` scales ``[..., ceil(K / 32)]``, or flat.

    Raises:
        TypeError: if ``x`` is no float tensor.

    Example:
        >>> codes, scales = fp8kit.compat.mxfp8_e4m3_quantize(torch.randn(4, 64))
        >>> scales.shape
        torch.Size([4, 2])
    """
    padded = F.pad(x, (0, -x.shape[-1] % alignment)) if alignment else x
    q = functional.quantize(padded, MX, scale_rounding="up")
    return q.data, swizzle_scales(q.scale).flatten() if is_sf_swizzled_layout else q.scale


@names_wrong_argument
def mxfp8_e4m3_quantize_fake(
    x: Tensor, is_sf_swizzled_layout: bool = False, alignment: int = 0
) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes and dtypes that ``mxfp8_e4m3_quantize`` gives.

    Example:
        >>> fp8kit.compat.mxfp8_e4m3_quantize_fake(torch.empty(4, 64, device="meta"))[1].shape
        torch.Size([4, 2])
    """
    codes, scales = mxfp8_e4m3_quantize(x.to("meta"), is_sf_swizzled_layout, alignment)
    return torch.empty_like(codes, device=x.device), torch.empty_like(scales, device=x.device)


@names_wrong_argument
def dequant_mxfp8_to_bf16(x: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes by their scales and round once to bf16.

    Args:
        x: e4m3fn ``[..., K]``.
        scales: E8M0 ``[..., ceil(K / 32)]``, ``uint8`` or ``float8_e8m0fnu``, or swizzled and flat.

    Returns:
        bf16 of the shape of ``x``.

    Raises:
        ValueError: if the scales are not those of ``x``.

    Example:
        >>> y = fp8kit.compat.dequant_mxfp8_to_bf16(*fp8kit.compat.mxfp8_e4m3_quantize(x))
    """
    return functional.dequantize(_with_scales(x, scales), torch.bfloat16)


@names_wrong_argument
def swizzle_mxfp8_scale(sf: Tensor, M: int, K: int) -> Tensor:
    """Rearrange scales of a matrix into tiles of 128x4; ``fp8kit.unswizzle_scales`` undoes it.

    Args:
        sf: E8M0 bytes, at least ``[M, ceil(K / 32)]``; the rest is dropped.
        M: rows of the matrix.
        K: its columns.

    Returns:
        flat, ``ceil(M / 128) * ceil(K / 128) * 512`` bytes.

    Raises:
        ValueError: if ``sf`` has fewer rows or columns, or another dtype.

    Example:
        >>> fp8kit.compat.swizzle_mxfp8_scale(torch.zeros(4, 2, dtype=torch.uint8), 4, 64).shape
        torch.Size([512])
    """
    columns = -(-K // MXFP8_BLOCK_SIZE)
    if sf.dim() != 2 or not (0 <= M <= sf.shape[0] and 0 <= columns <= sf.shape[1]):
        raise InvalidValue(
            f"Got scales of shape {tuple(sf.shape)} for a matrix {(M, K)}.",
            f"It has scales of at least {(M, columns)}.",
            "Pass them row by row, before they are swizzled, and M and K of the codes.",
        )
    return swizzle_scales(sf[:M, :columns])


class Mxfp8LinearOp:
    """Multiply by a weight in MXFP8, by one of three backends.

    Args:
        backend: a ``Mxfp8LinearBackend`` or its word; by default
            ``select_mxfp8_linear_backend()``. Each of them computes on any device.

    Raises:
        ValueError: for an unknown ``backend``.

    Example:
        >>> op = fp8kit.compat.Mxfp8LinearOp()
        >>> op.process_weights(layer)
        >>> y = op.apply(x, layer.weight, layer.weight_scale, torch.bfloat16)
    """

    def __init__(self, backend: Mxfp8LinearBackend | str | None = None) -> None:
        if backend is None:
            backend = select_mxfp8_linear_backend()
        found = _BY_WORD.get(backend) if isinstance(backend, str) else backend
        if not isinstance(found, Mxfp8LinearBackend):
            raise InvalidValue(
                f"Got backend={backend!r}.",
                f"It must be one of {', '.join(map(str, Mxfp8LinearBackend))}.",
                "Pass one of these, or leave it out.",
            )
        self.backend = found
        self._known = KnownWeights()

    def process_weights(self, layer: nn.Module) -> None:
        """Bring a loaded layer's weight and scales into the form of the backend.

        Args:
            layer: with ``weight`` e4m3fn ``[N, K]`` and ``weight_scale`` ``uint8``, at least
                ``[N, ceil(K / 32)]``. Its scales become ``[N, ceil(K / 32)]``, or swizzled and
                flat for ``FLASHINFER_CUTLASS``; for ``MARLIN`` it also gets the ``workspace``
                that ported code passes on, which is empty.
        """
        weight = layer.get_parameter("weight").detach()
        scale = layer.get_parameter("weight_scale").detach()
        n, k = weight.shape
        if scale.dim() == 1:
            scale = unswizzle_scales(scale, (n, -(-k // MXFP8_BLOCK_SIZE)))
        scale = scale[:n, : -(-k // MXFP8_BLOCK_SIZE)].contiguous()
        if self.backend is Mxfp8LinearBackend.FLASHINFER_CUTLASS:
            scale = swizzle_mxfp8_scale(scale, n, k)
        if self.backend is Mxfp8LinearBackend.MARLIN:
            layer.workspace = scale.new_empty(0, dtype=torch.int32)
        layer.weight = frozen(weight.contiguous())
        layer.weight_scale = frozen(scale)

    @names_wrong_argument
    def apply(
        self,
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        out_dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        workspace: Tensor | None = None,
        **sizes: int,
    ) -> Tensor:
        """Compute ``[..., N]``.

        Args:
            input: bf16, fp16 or fp32 ``[..., K]``.
            weight: e4m3fn ``[N, K]``.
            weight_scale: E8M0 ``[N, ceil(K / 32)]``, or swizzled and flat except for ``EMULATION``.
            out_dtype: of the result.
            bias: ``[N]``, bf16, fp16 or fp32.
            workspace: accepted and ignored.
            sizes: ``size_n`` and ``size_k``, or ``out_features`` and ``in_features``: ignored, too.

        Raises:
            ValueError: if scales are of another dtype or shape.
        """
        del workspace
        check_options(sizes, _SIZES)
        if self.backend is Mxfp8LinearBackend.EMULATION:
            _check_emulated(weight_scale)
            check_operands(input, weight, bias, "precise")
            decoded = functional.dequantize(_with_scales(weight, weight_scale), input.dtype)
            offset = None if bias is None else bias.to(input.dtype)
            return F.linear(input, decoded, offset).to(out_dtype)
        q = self._known.of(weight, weight_scale, _with_scales)
        native = self.backend is Mxfp8LinearBackend.FLASHINFER_CUTLASS
        scheme = None if native else _WEIGHT_ONLY
        return functional.linear(input, q, bias, scheme=scheme, out_dtype=out_dtype)


def _with_scales(codes: Tensor, scales: Tensor) -> QTensor:
    shape = (*codes.shape[:-1], -(-codes.shape[-1] // MXFP8_BLOCK_SIZE))
    scales = scales.detach()
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    if scales.dim() == 1 and codes.dim() > 1:
        scales = unswizzle_scales(scales, shape)
    return QTensor(codes.detach(), scales, MX)


def _check_emulated(scale: Tensor) -> None:
    if scale.dtype != MXFP8_SCALE_DTYPE or scale.dim() != 2:
        raise InvalidValue(
            f"Got a weight_scale {scale.dtype} of {scale.dim()} dimensions.",
            f"The emulation takes {MXFP8_SCALE_DTYPE} of two, row by row.",
            "Call process_weights first.",
        )
