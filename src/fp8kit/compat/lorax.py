"""The FP8 layer of LoRAX, with its shapes and argument names.

Source: ``server/lorax_server/layers/fp8.py`` and ``layers/linear.py`` of predibase/lorax.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.known_weights import KnownWeights
from fp8kit.compat.linear_op import compute
from fp8kit.compat.shapes import as_number, as_vector, is_stored, with_scale, with_scale_as_stored
from fp8kit.errors import InvalidValue, teach
from fp8kit.formats import FP8_FORMATS, ROW, SCHEMES, TENSOR, Scheme
from fp8kit.modules import linear as core

_STORED, _VIEWS = KnownWeights(), KnownWeights()
_STATIC = {TENSOR: SCHEMES["FP8"], ROW: Scheme("FP8_ROW_STATIC", ROW, TENSOR, static=True)}
_DYNAMIC = {TENSOR: SCHEMES["FP8_TENSOR"], ROW: SCHEMES["FP8_DYNAMIC"]}


@names_wrong_argument
def apply_fp8_linear(
    input: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    input_scale_ub: Tensor | None = None,
    qbias: Tensor | None = None,
) -> Tensor:
    """Quantize the input and multiply it by a quantized weight.

    Args:
        input: bf16, fp16 or fp32 ``[..., K]``.
        qweight: FP8 ``[N, K]``, or its view ``[K, N]``, which LoRAX passes. For a square weight
            the strides tell them apart: rows of the view are not contiguous.
        weight_scale: one number or one per channel, in any shape and float dtype.
        input_scale: one number for static quantization; without it, scales are dynamic, per token.
        input_scale_ub: bounds amax of each token; ignored with ``input_scale``, as in LoRAX.
        qbias: ``[N]``, bf16, fp16 or fp32.

    Returns:
        ``[..., N]`` in the dtype of ``input``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit.

    Example:
        >>> q = fp8kit.quantize(w, role="weight")
        >>> y = fp8kit.compat.apply_fp8_linear(x, q.data.t(), q.scale.t())
    """
    if is_stored(qweight, input.shape[-1]):
        w_q = _STORED.of(qweight.contiguous(), weight_scale, with_scale)
    else:
        w_q = _VIEWS.of(qweight, weight_scale, with_scale_as_stored)
    bias = as_vector(qbias, w_q.shape[0])
    return compute(input, w_q, bias, input_scale, input_scale_ub)


class Fp8Linear(nn.Module):
    """A linear layer with an FP8 weight and its scales, under LoRAX' names.

    Its tensors are in ``layer``, an ``fp8kit.Fp8Linear``, so that ``state_dict``, moves and casts
    are right; LoRAX' names are views of them.

    Args:
        weight: FP8 ``[N, K]``.
        bias: ``[N]``, bf16, fp16 or fp32, or ``None``.
        weight_scale: one number or one per channel, in any shape and float dtype.
        input_scale: one number for static quantization, or ``None`` for dynamic scales per token.

    Raises:
        TypeError: if the weight is not FP8.
        ValueError: if shapes do not fit, or the input scale is not positive and finite.

    Example:
        >>> q = fp8kit.quantize(w, role="weight")
        >>> layer = fp8kit.compat.Fp8Linear(q.data, None, q.scale, None)
    """

    @names_wrong_argument
    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.dtype = weight.dtype
        w_q = with_scale(weight.detach().contiguous(), weight_scale)
        scale = None if input_scale is None else as_number(input_scale, weight.device)
        self.layer = core.Fp8Linear.from_quantized(
            w_q,
            as_vector(bias, w_q.shape[0]),
            scheme=replace((_DYNAMIC if scale is None else _STATIC)[w_q.group], dtype=self.dtype),
            input_scale=scale,
            dtype=torch.bfloat16 if bias is None else bias.dtype,
        )

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``[..., N]`` in the dtype of the input."""
        return self.layer(input)

    @property
    def qweight(self) -> Tensor:
        """The codes as LoRAX holds them: the view ``[K, N]``."""
        return self.layer.codes.t()

    @property
    def weight(self) -> Tensor:
        """The same as ``qweight``."""
        return self.qweight

    @property
    def weight_scale(self) -> Tensor:
        """fp32 ``[1, 1]`` or ``[1, N]``."""
        return self.layer.weight_scale.view(1, -1)

    @property
    def input_scale(self) -> Tensor | None:
        """fp32 ``[1, 1]``, or ``None``."""
        return self.layer.input_scale

    @property
    def qbias(self) -> Tensor | None:
        """The bias ``[N]``, or ``None``."""
        return self.layer.bias


@names_wrong_argument
def get_linear(
    weight: Tensor,
    bias: Tensor | None,
    quantize: str | None,
    fan_in_fan_out: bool = False,
    weight_scale: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> nn.Module:
    """Make the linear layer for a quantization.

    Args:
        weight: ``[N, K]``: FP8 with ``weight_scale``, or dense, which ``"fp8"`` quantizes per row.
        bias: ``[N]`` or ``None``.
        quantize: ``None`` for a dense layer, ``"fp8"`` or ``"fp8-kv"`` for an FP8 one.
        fan_in_fan_out: the weight is ``[K, N]``.
        weight_scale: as in ``Fp8Linear``.
        input_scale: as in ``Fp8Linear``.

    Raises:
        NotImplementedError: for another quantization.
        ValueError: if an FP8 weight has no scale, or ``quantize`` is ``None`` for it.

    Example:
        >>> layer = fp8kit.compat.get_linear(w, None, "fp8")
    """
    if fan_in_fan_out:
        weight = weight.t().contiguous()
    is_codes = weight.dtype in FP8_FORMATS
    if quantize is None and not is_codes:
        n, k = weight.shape
        dense = nn.Linear(k, n, bias is not None, device="meta")
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            dense.bias = nn.Parameter(bias, requires_grad=False)
        return dense
    if quantize is not None and not quantize.startswith("fp8"):
        raise NotImplementedError(
            teach(
                f"Got quantize={quantize!r}.",
                "Here it is None, 'fp8' or 'fp8-kv'.",
                "Use the library that has this quantization.",
            )
        )
    if is_codes and (weight_scale is None or quantize is None):
        raise InvalidValue(
            f"Got {weight.dtype} codes with weight_scale={weight_scale} for {quantize!r}.",
            "Codes mean nothing without their scale.",
            "Pass weight_scale and quantize='fp8', or a dense weight.",
        )
    if not is_codes:
        q = functional.quantize(weight, role="weight")
        weight, weight_scale = q.data, q.scale
    assert weight_scale is not None
    return Fp8Linear(weight, bias, weight_scale, input_scale)
