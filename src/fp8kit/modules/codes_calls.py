"""The format of codes that layers of a scheme read, and calls of producers that write it.

An eager call replays the launches of an earlier one; see ``replay_cache``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fp8kit.formats import GROUP128, ROW, GroupShape, Scheme, min_scale
from fp8kit.fused import arguments
from fp8kit.ops.operators import CodesCall
from fp8kit.ops.validation import default_rounding
from fp8kit.quantizers.scale_layout import product_layout
from fp8kit.runtime.replay_cache import Operands, Operator, Options

_FUSABLE = (ROW, GROUP128)


def takes_codes(scheme: Scheme) -> bool:
    """Return whether layers of a scheme quantize inputs dynamically, per row or 1x128 group."""
    return scheme.activation in _FUSABLE and not scheme.static


def quantize_options(scheme: Scheme) -> arguments.QuantizeOptions:
    """Return the keywords by which ``fp8kit.fused`` quantizes as layers of a scheme do."""
    group = activation_group(scheme)
    return {
        "group": group,
        "dtype": scheme.dtype,
        "scale_rounding": default_rounding(group, scheme.ue8m0),
        "scale_layout": product_layout(group),
    }


def codes_call(
    operator: Operator,
    inputs: tuple[Tensor, ...],
    constants: Operands,
    settings: Options,
    scheme: Scheme,
    check: Callable[[arguments.QuantizeOptions], object],
    shape: torch.Size | None = None,
) -> CodesCall:
    """Describe a call; ``check`` gets ``quantize_options`` and raises if arguments do not fit.

    ``shape`` is that of the tensor that is quantized, by default of the first input.
    """
    x, options = inputs[0], (*settings, *format_options(scheme))
    kind = (activation_group(scheme), x.shape if shape is None else shape, x.dtype)
    return CodesCall(
        operator, inputs, constants, options, *kind, lambda: check(quantize_options(scheme))
    )


def activation_group(scheme: Scheme) -> GroupShape:
    """Return the activation granularity of a scheme whose layers take codes."""
    assert scheme.activation is not None
    return scheme.activation


def format_options(scheme: Scheme) -> Options:
    """Return ``quantize_options`` as the last seven options of an operator that quantizes."""
    # torch.compile warns of functions with a cache
    return (_new_options if torch.compiler.is_compiling() else _kept_options)(scheme)


def _new_options(scheme: Scheme) -> Options:
    group, dtype = activation_group(scheme), scheme.dtype
    floor, how = min_scale(group, dtype, "activation"), default_rounding(group, scheme.ue8m0)
    return None, (group.rows, group.cols), dtype, floor, None, how, product_layout(group)


_kept_options = functools.cache(_new_options)
