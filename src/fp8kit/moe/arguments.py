"""Check the arguments of experts, with errors that say what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue, check_strided
from fp8kit.formats import TENSOR, GroupShape, QTensor, Scheme
from fp8kit.moe.activation import Activation
from fp8kit.moe.routing import check_routing
from fp8kit.ops import scale_validation, validation

_INTEGERS = (torch.int32, torch.int64)
# codes, bias and input scale of one of the two weights
Weight = tuple[QTensor, Tensor | None, Tensor | None]


def check_kinds(w13: QTensor, w2: QTensor, activation: Activation) -> None:
    """Refuse weights that are not quantized alike, and anything but an ``Activation``."""
    validation.check_quantized("w13", w13)
    validation.check_quantized("w2", w2)
    one, other = (w13.group, w13.data.dtype), (w2.group, w2.data.dtype)
    if one != other:
        raise InvalidValue(
            f"Got w13 in {one[0]} groups of {one[1]} and w2 in {other[0]} of {other[1]}.",
            "Both weights of a layer have one granularity and one dtype.",
            "Quantize both alike.",
        )
    check_activation(activation)


def check_rows(name: str, tensor: object) -> None:
    """Refuse what is no strided tensor with a row for each token."""
    validation.check_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    if tensor.layout != torch.strided or not tensor.dim() or not tensor.shape[-1]:
        raise InvalidValue(
            f"Got {name} of shape {tuple(tensor.shape)} and layout {tensor.layout}.",
            "It has a row for each token, and the rows are not empty.",
            "Pass a dense tensor; unsqueeze that of a single token.",
        )


def flat_routes(ids: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids and weights ``[..., k]`` as ``[M, k]``; refuse what is no tensor with rows."""
    if not isinstance(ids, Tensor) or not isinstance(weights, Tensor):
        kinds = f"ids of type {type(ids).__name__} and weights of type {type(weights).__name__}"
        raise InvalidType(
            f"Got {kinds} for the tokens.",
            "Experts take tensors of ids and weights, or logits.",
            "Pass what fp8kit.moe.route gives, or logits= with layer.routing set.",
        )
    check_rows("ids", ids)
    check_rows("weights", weights)
    return ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, weights.shape[-1])


def check_activation(activation: object) -> None:
    """Refuse anything but an ``Activation``."""
    if not isinstance(activation, Activation):
        raise InvalidType(
            f"Got activation={activation!r:.80}.",
            "It must be an fp8kit.moe.Activation, which also says how gates and ups are laid out.",
            "Pass fp8kit.moe.Activation('silu'), for example.",
        )


def check_layer(x: Tensor, first: Weight, second: Weight, activation: Activation) -> None:
    """Refuse an input and weights that do not fit each other."""
    w13, w2 = first[0], second[0]
    if x.dim() != 2:
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)}.",
            "Experts take tokens [M, H], each with its own ids.",
            "Flatten the tokens with x.flatten(0, -2).",
        )
    hidden = x.shape[1]
    intermediate = w2.shape[-1]
    wanted = (w13.shape[0], activation.columns(intermediate), hidden)
    if tuple(w13.shape) != wanted or tuple(w2.shape) != (wanted[0], hidden, intermediate):
        kind = "gated" if activation.gated else "ungated"
        raise InvalidValue(
            f"Got x {tuple(x.shape)}, w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}.",
            f"A {kind} layer has w13 [E, {'2 I' if activation.gated else 'I'}, H] and w2 "
            "[E, H, I].",
            "Check the orientation: the last dimension is the one that is summed over.",
        )
    for name, (q, bias, input_scale) in (("13", first), ("2", second)):
        _check_device(f"w{name}", q.data, x)
        if bias is not None:
            validation.check_operand(f"bias{name}", bias, (q.shape[0], q.shape[1]), x, None)
        scale_validation.check_input_scale(input_scale, x.shape, x.device)


def check_routes(x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None) -> None:
    """Refuse ids, weights and a map of experts that do not fit an input ``[M, H]``."""
    check_routing(ids, weights, x.shape[0])
    _check_device("ids", ids, x)
    _check_device("weights", weights, x)
    if expert_map is None:
        return
    if not isinstance(expert_map, Tensor):
        raise InvalidType(
            f"Got an expert_map of type {type(expert_map).__name__}.",
            "It must be a tensor on the device of x.",
            "Pass torch.tensor(expert_map, device=x.device).",
        )
    check_strided("an expert_map", expert_map)
    if expert_map.dtype not in _INTEGERS or expert_map.dim() not in (1, 2):
        raise InvalidValue(
            f"Got an expert_map {expert_map.dtype} {tuple(expert_map.shape)}.",
            "It must be int32 or int64: [L], or [L, R] for replicas.",
            "Pass the row of the weights for each id, -1 for what lies elsewhere.",
        )
    if not expert_map.numel():
        raise InvalidValue(
            "Got an expert_map without entries.",
            "It has a row for each id that the router gives.",
            "Pass None if ids are rows of the weights.",
        )
    _check_device("expert_map", expert_map, x)


def check_scheme(
    scheme: Scheme | str | None,
    x_group: GroupShape | None,
    w: QTensor,
    input_scale2: Tensor | None,
) -> None:
    """Refuse codes of another dtype than the scheme's, and an ``input_scale2`` without use."""
    if scheme is not None:
        validation.check_codes("w13", w.data.dtype, Scheme.of(scheme))
    if x_group is None and input_scale2 is not None:
        raise InvalidValue(
            "Got input_scale2 for a layer that does not quantize its input.",
            "The second product of such a layer reads 16-bit numbers.",
            "Leave it out, or pass a scheme with FP8 activations.",
        )


def check_grouped(
    x_q: QTensor, w_q: QTensor, offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    """Refuse operands that ``grouped_scaled_mm`` cannot multiply."""
    validation.check_quantized("x_q", x_q)
    validation.check_quantized("w_q", w_q)
    validation.check_out_dtype(out_dtype)
    x, w = x_q.data, w_q.data
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2]:
        raise InvalidValue(
            f"Got x of shape {tuple(x.shape)} and a weight of shape {tuple(w.shape)}.",
            "Rows [S, K] are multiplied by weights [E, N, K] of the same K.",
            "Sort the rows by expert, and stack the experts' weights.",
        )
    if x_q.group.rows > 1:
        raise InvalidValue(
            f"Got x in {x_q.group} groups.",
            "Rows of several experts have no scale in common, but for one per tensor.",
            "Quantize x with fp8kit.ROW, GROUP128, MX or TENSOR.",
        )
    if not isinstance(offsets, Tensor):
        raise InvalidType(
            f"Got offsets of type {type(offsets).__name__}.",
            "They must be a tensor on the device of x.",
            "Pass torch.tensor(offsets, device=x.device).",
        )
    check_strided("offsets", offsets)
    if offsets.dtype not in _INTEGERS or tuple(offsets.shape) != (w.shape[0] + 1,):
        raise InvalidValue(
            f"Got offsets {offsets.dtype} {tuple(offsets.shape)} for {w.shape[0]} experts.",
            f"They must be int32 or int64 [{w.shape[0] + 1}]: where each expert begins, and where "
            "the last one ends.",
            "Put a zero before the cumulated counts.",
        )
    _check_device("the weight", w, x)
    _check_device("offsets", offsets, x)
    if bias is not None:
        validation.check_operand("bias", bias, (w.shape[0], w.shape[1]), x, None)


def stacked_scale(q: QTensor) -> Tensor:
    """Return the scales of a stack with a first dimension for the experts, without copying."""
    if q.group == TENSOR and q.scale.dim() == 2:
        return q.scale.expand(q.shape[0], 1, 1)
    return q.scale


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise InvalidValue(
            f"Got x on {x.device} and {name} on {tensor.device}.",
            "A layer runs on one device.",
            "Move them to the same device.",
        )
