"""``Fp8LinearOp`` of vLLM: a linear layer without its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.known_weights import KnownWeights
from fp8kit.compat.shapes import as_number, as_vector, check_view, with_scale, with_scale_as_stored
from fp8kit.compat.w8a8 import scaled_fp8_quant
from fp8kit.errors import InvalidValue
from fp8kit.formats import FP8_FORMATS, ROW, TENSOR, QTensor, Scheme

# how an input is quantized: per token as the core does, or per tensor; a flag of another kind is no
# key, so `names_wrong_argument` names it
_DYNAMIC: dict[tuple[Any, ...], Scheme | None] = {
    (group, dtype, per_token): None
    if per_token
    else Scheme(f"FP8_{word}_BY_TENSOR", group, TENSOR, dtype=dtype)
    for word, group in (("ROW", ROW), ("TENSOR", TENSOR))
    for dtype in FP8_FORMATS
    for per_token in (True, False)
}


class Fp8LinearOp:
    """Compute ``quantize(input) @ weight + bias`` with scales of any of the four pairings.

    Source: ``vllm/model_executor/layers/quantization/utils/w8a8_utils.py``, 0.7 to 0.12, whose
    constructors differ. All their keywords are accepted, and positional arguments in the orders
    that begin with ``act_quant_static``. The kernel is chosen per call.

    Args:
        act_quant_static: the input has a static scale; then ``apply`` must get one.
        cutlass_fp8_supported: accepted and ignored; or, as vLLM has it since 0.11, the group shape.
        act_quant_group_shape: granularity of dynamic scales, ``GroupShape.PER_TENSOR`` or
            ``PER_TOKEN``; also as a pair of numbers, or an ``fp8kit.GroupShape``.
        pad_output: accepted and ignored: no kernel here needs padded rows.
        use_per_token_if_dynamic: the older word for ``PER_TOKEN``.

    Raises:
        ValueError: for a group shape that is neither.

    Example:
        >>> op = fp8kit.compat.Fp8LinearOp(False, act_quant_group_shape=GroupShape.PER_TOKEN)
        >>> y = op.apply(input=x, weight=w_q.t(), weight_scale=scale)
    """

    def __init__(
        self,
        act_quant_static: bool = False,
        cutlass_fp8_supported: Any = None,
        act_quant_group_shape: Any = None,
        pad_output: bool | None = None,
        use_per_token_if_dynamic: bool = False,
    ) -> None:
        if isinstance(cutlass_fp8_supported, bool | None):
            self.cutlass_fp8_supported = cutlass_fp8_supported
        else:
            self.cutlass_fp8_supported = None
            act_quant_group_shape = cutlass_fp8_supported
        self.act_quant_static = act_quant_static
        self.act_quant_group_shape = act_quant_group_shape
        self.pad_output = pad_output
        self._known = KnownWeights()
        self.per_token = use_per_token_if_dynamic or _is_per_token(act_quant_group_shape)

    def quant_fp8(
        self, x: Tensor, scale: Tensor | None = None, scale_ub: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Quantize ``x [M, K]`` as ``apply`` does: codes and their scale."""
        return scaled_fp8_quant(
            x, scale, scale_ub=scale_ub, use_per_token_if_dynamic=self.per_token
        )

    @names_wrong_argument
    def apply(
        self,
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        out_dtype: torch.dtype | None = None,
        input_scale: Tensor | None = None,
        input_scale_ub: Tensor | None = None,
        bias: Tensor | None = None,
        use_per_token_if_dynamic: bool | None = None,
    ) -> Tensor:
        """Compute ``[..., N]``.

        Args:
            input: bf16, fp16 or fp32 ``[..., K]``; or FP8 codes, whose scale, per tensor or per
                token, is ``input_scale``.
            weight: FP8 ``[K, N]``, the view ``stored.t()``.
            weight_scale: one number or one per channel, in any shape and float dtype.
            out_dtype: of the result; by default that of ``input`` (bf16 for codes).
            input_scale: one number for static quantization; without it, scales are dynamic.
            input_scale_ub: bounds amax of each token; ignored with ``input_scale``, as in vLLM.
            bias: ``[N]``, bf16, fp16 or fp32.
            use_per_token_if_dynamic: overrides what the constructor said.

        Raises:
            TypeError: if a dtype does not fit.
            ValueError: if a shape does not fit, or a static operator gets no ``input_scale``.
            UnsupportedError: if no backend computes it.
        """
        check_view(weight, input.shape[-1])
        w_q = self._known.of(weight, weight_scale, with_scale_as_stored)
        bias = as_vector(bias, w_q.shape[0])
        if input.dtype in FP8_FORMATS:
            return _of_codes(input, input_scale, w_q, bias, out_dtype or torch.bfloat16)
        if self.act_quant_static and input_scale is None:
            raise InvalidValue(
                "A static Fp8LinearOp got no input_scale.",
                "act_quant_static=True says that the input has a calibrated scale.",
                "Pass input_scale, or make the operator with act_quant_static=False.",
            )
        per_token = self.per_token if use_per_token_if_dynamic is None else use_per_token_if_dynamic
        scales = (input_scale, input_scale_ub)
        return compute(input, w_q, bias, *scales, out_dtype=out_dtype, per_token=per_token)


def compute(
    x: Tensor,
    w_q: QTensor,
    bias: Tensor | None,
    scale: Tensor | None,
    bound: Tensor | None,
    *,
    out_dtype: torch.dtype | None = None,
    per_token: bool = True,
) -> Tensor:
    """Compute a linear layer of ``x [..., K]`` and a weight ``[N, K]`` with the core.

    ``scale`` is a static input scale; without it, scales are dynamic, per token or per tensor, with
    ``bound`` above their amax. Each of the two is one number.
    """
    scheme = None if scale is not None else _DYNAMIC[w_q.group, w_q.data.dtype, per_token]
    bound = None if bound is None or scale is not None else as_number(bound, x.device)
    scale = None if scale is None else as_number(scale, x.device)
    return functional.linear(
        x, w_q, bias, scheme=scheme, input_scale=scale, scale_ub=bound, out_dtype=out_dtype
    )


def _of_codes(
    x: Tensor, scale: Tensor | None, w_q: QTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if scale is None:
        raise InvalidValue(
            f"Got {x.dtype} codes as the input and no input_scale.",
            "Codes mean nothing without their scale.",
            "Pass what quantized them gave beside them.",
        )
    x_q = with_scale(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), scale)
    y = functional.linear(x_q, w_q, bias, out_dtype=out_dtype)
    return y.reshape(*x.shape[:-1], w_q.shape[0])


def _is_per_token(group: Any) -> bool:
    if group is None:
        return False
    rows = getattr(group, "rows", None)
    pair = group if rows is None else (rows, group.cols)
    if not isinstance(pair, Sequence) or tuple(pair) not in ((-1, -1), (1, -1)):
        raise InvalidValue(
            f"Got act_quant_group_shape={group!r}.",
            "Inputs are quantized per tensor (-1, -1) or per token (1, -1) here.",
            "For groups along K pass a block-quantized weight to fp8kit.linear.",
        )
    return tuple(pair) == (1, -1)
