"""FP8 weights of layers that a model joins or splits along their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.errors import CheckpointError, ConversionError, some_of
from fp8kit.formats import MX, ROW, SCHEMES, TENSOR, GroupShape, QTensor, Scheme, stack_scale_shape
from fp8kit.modules.entries import quantize_weight
from fp8kit.modules.weight_parts import join_scales, requantize

_E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The codes and scales of one layer; ``input_scale`` is fp32 ``[1, 1]`` of a static scheme."""

    q: QTensor
    input_scale: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return self.q.shape


def fp8_weight(
    name: str, codes: Tensor, scale: Tensor, input_scale: Tensor | None, group: GroupShape
) -> Fp8Weight:
    """Build an ``Fp8Weight`` from codes and scales.

    Codes are FP8 ``[N, K]``, or a stack ``[E, N, K]``; the scale has the shape for ``group``, with
    or without sides of one. The input scale is one number; of several, the largest is taken. Raises
    ``CheckpointError`` for ``name`` if the scale has another dtype or shape, or if it or the input
    scale is not finite and positive.
    """
    wanted = stack_scale_shape(codes.shape, group)
    scale = scale.to(codes.device)
    if [n for n in scale.shape if n != 1] == [n for n in wanted if n != 1]:
        scale = scale.reshape(wanted)
    try:
        q = QTensor(codes, scale, group)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: {error}") from error
    usable = is_finite(q) and (group == MX or (scale > 0).all())
    if usable and input_scale is not None and not input_scale.is_meta:
        name = name.removesuffix("weight_scale") + "input_scale"
        usable = ((input_scale > 0) & input_scale.isfinite()).all()
    if not usable:
        raise CheckpointError(
            f"{name} holds NaN, infinite, zero or negative values.",
            "Scales are finite and positive.",
            "Look for the fault where they were made.",
        )
    return Fp8Weight(q, None if input_scale is None else input_scale.amax().reshape(1, 1))


def is_finite(q: QTensor) -> bool:
    """Return whether all scales are finite, as they are for finite weights; true on meta."""
    finite = q.scale != _E8M0_NAN if q.group == MX else q.scale.isfinite()
    return q.scale.is_meta or bool(finite.all())


def quantized(dense: Tensor, scheme: Scheme, name: str) -> QTensor:
    """Quantize a weight ``[N, K]``; raises ``ConversionError`` for NaN or infinities.

    Raises ``TypeError`` if it is not bf16, fp16 or fp32.
    """
    q = quantize_weight(dense, scheme, name)
    if not is_finite(q):
        raise not_finite([name])
    return q


def not_finite(names: Sequence[str]) -> ConversionError:
    """Return the error for weights that hold NaN or infinities."""
    verb, layers = ("holds", "this layer") if len(names) == 1 else ("hold", "these layers")
    return ConversionError(
        f"{some_of(names)} {verb} NaN or infinities.",
        "Weights are finite.",
        f"Repair the checkpoint, or exclude {layers}.",
    )


def holds(held: Scheme, scheme: Scheme) -> bool:
    """Return whether a layer of a scheme holds tensors such as those of another scheme."""
    both = [(s.weight, s.static, s.dtype, s.rebased) for s in (held, scheme)]
    return both[0] == both[1]


def joined_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme of a layer joined from several: scales per tensor become scales per row.

    So nothing is requantized: every row keeps the scale it had.
    """
    if scheme.weight != TENSOR:
        return scheme
    for preset in SCHEMES.values():
        same = (ROW, scheme.activation, scheme.static, scheme.ue8m0, scheme.dtype)
        if (preset.weight, preset.activation, preset.static, preset.ue8m0, preset.dtype) == same:
            return preset
    name = f"{scheme.name}_ROWS"
    return Scheme(name, ROW, scheme.activation, scheme.static, scheme.ue8m0, scheme.dtype)


def is_one_each(scales: Tensor) -> bool:
    """Return whether the scales of the rows of a stack, ``[E, N, 1]``, are one for each matrix."""
    return torch.equal(scales, scales[:, :1].expand_as(scales))


def rows_of(weight: Fp8Weight, first: int, last: int, name: str) -> Fp8Weight:
    """Cut rows ``first`` to ``last`` (exclusive) out of an FP8 weight; refuse to cut a block."""
    q = weight.q
    if q.group == TENSOR:
        scale = q.scale
    else:
        _check_cut(first, q.group, name)
        _check_cut(last, q.group, name, end=q.shape[0])
        scale = q.scale[first // q.group.rows : -(-last // q.group.rows)]
    return Fp8Weight(QTensor(q.data[first:last], scale, q.group), weight.input_scale)


def join(weights: Sequence[Fp8Weight], group: GroupShape, name: str) -> Fp8Weight:
    """Concatenate FP8 weights along their rows.

    With ``group`` ``ROW``, scales per tensor become scales per row, which changes no number. With
    ``TENSOR``, the largest scale is taken, and weights with a smaller one are requantized, as in
    serving engines. The largest input scale is taken. Raises ``CheckpointError`` if blocks would
    straddle two weights, or granularities do not fit.
    """
    groups = {w.q.group for w in weights}
    found = groups.pop()
    if groups or (found != group and (found, group) != (TENSOR, ROW)):
        raise CheckpointError(
            f"{name} is joined from weights with scales per "
            f"{' and '.join(sorted(map(str, {found, *groups})))}, and is itself per {group}.",
            "They are alike, or one scale per tensor becomes one per row.",
            "Load into a model that keeps these layers apart.",
        )
    codes, scales = (
        torch.cat(of) for of in zip(*((w.q.data, w.q.scale) for w in weights), strict=True)
    )
    if found == TENSOR:
        merge = requantize if group == TENSOR else join_scales
        q = merge(codes, scales, [w.shape[0] for w in weights])
    else:
        for weight in weights[:-1]:
            _check_cut(weight.shape[0], group, name)
        q = QTensor(codes, scales, group)
    inputs = [w.input_scale for w in weights if w.input_scale is not None]
    largest = torch.stack(inputs).amax(0) if inputs else None
    return Fp8Weight(q, largest)


def _check_cut(row: int, group: GroupShape, name: str, end: int = -1) -> None:
    if row % group.rows and row != end:
        raise CheckpointError(
            f"{name} is cut at row {row}, inside a {group} block.",
            f"Blocks begin at multiples of {group.rows} rows.",
            "Load into a model whose layers are those of the checkpoint.",
        )


def other_scheme(name: str, scheme: Scheme, held: str) -> CheckpointError:
    """Return the error for codes whose scheme is not that of the model's layer."""
    return CheckpointError(
        f"{name} is {scheme} in the checkpoint and {held} in the model.",
        "Codes load into dense layers inside a model, or into FP8 ones of the same scheme.",
        "Pass a dense model, built as before its conversion.",
    )


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Refuse a tensor of another shape than the model's; raises ``CheckpointError``."""
    if list(found) != list(wanted):
        raise CheckpointError(
            f"{name} has shape {list(found)}.",
            f"The model needs {list(wanted)}.",
            "Pass the tensors of the model that was built.",
        )
