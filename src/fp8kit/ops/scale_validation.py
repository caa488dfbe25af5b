"""Checks of scales that users give: bounds of amax, and static scales of inputs and groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp8kit.errors import InvalidType, InvalidValue, check_strided
from fp8kit.formats import TENSOR, GroupShape, check_scale

_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor  # vmap has many values in one


def check_scale_ub(scale_ub: Tensor | None, x: Tensor) -> None:
    """Refuse a bound that is not one fp32 number on the device of ``x``, positive on a CPU."""
    if scale_ub is None:
        return
    if not isinstance(scale_ub, Tensor):
        raise InvalidType(
            f"Got scale_ub={scale_ub!r}.",
            f"It must be one float32 number on {x.device}, as a tensor.",
            f"Pass torch.tensor({scale_ub!r}, device=x.device).",
        )
    check_strided("scale_ub", scale_ub)
    if scale_ub.numel() != 1 or scale_ub.dtype != torch.float32 or scale_ub.device != x.device:
        raise InvalidValue(
            f"Got scale_ub {scale_ub.dtype} {tuple(scale_ub.shape)} on {scale_ub.device}.",
            f"It must be one float32 number on {x.device}.",
            "Pass torch.tensor(bound, device=x.device).",
        )
    if _can_read(scale_ub) and not scale_ub.item() > 0:
        raise InvalidValue(
            f"Got scale_ub={scale_ub.item():.4g}.",
            "It bounds amax, of which a scale is made: it is positive.",
            "Pass the largest magnitude that is to be kept, or None for no bound.",
        )


def check_static_scale(scale: Tensor, x: Tensor, group: GroupShape) -> None:
    """Refuse given scales of the wrong form, and on a CPU any that is not above zero.

    NaN is allowed: it is the scale of a group that is NaN. Values on a GPU are not read, because
    a call would wait for them.
    """
    check_scale(scale, x.shape, group, x.device)
    if scale.dtype == torch.float32 and _can_read(scale) and (scale <= 0).any():
        raise InvalidValue(
            f"Got a static scale of {scale.min().item():.4g}.",
            "Values are divided by scales, which are positive.",
            "Take scales from data that are not all zero: amax / 448.",
        )


def check_static_options(
    scale_ub: Tensor | None, scale_rounding: str | None, scale_layout: str
) -> None:
    """Refuse options of dynamic scales beside a static scale."""
    if scale_ub is not None or scale_rounding is not None or scale_layout != "row":
        raise InvalidValue(
            "Got a static scale with scale_ub, scale_rounding or scale_layout.",
            "These shape scales that are taken from the data.",
            "Leave them out, or leave out scale.",
        )


def check_input_scale(
    scale: Tensor | None, shape: Sequence[int], device: torch.device, *, wait: bool = False
) -> None:
    """Refuse an input scale that is not one positive finite number on a device.

    With ``wait`` a value on a GPU is read, too, which synchronizes with it. ``None`` passes.
    """
    if scale is None:
        return
    check_scale(scale, shape, TENSOR, device)
    if _can_read(scale, wait) and not 0 < (value := scale.item()) < torch.inf:
        raise InvalidValue(
            f"Got an input_scale of {value:.4g}.",
            "Activations are divided by it: it is positive and finite.",
            "Calibrate with data that reach this layer: fp8kit.convert(model, calibrate=...).",
        )


def _can_read(scale: Tensor, wait: bool = False) -> bool:
    """Return whether a value can be read: not meta, not traced, and no unwanted wait for a GPU."""
    there = scale.device.type == "cpu" or (wait and not scale.is_meta)
    if not there or torch.compiler.is_compiling():
        return False
    return type(scale) in (Tensor, nn.Parameter) and not _is_transformed(scale)
