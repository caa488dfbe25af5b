"""Calls that compute an activation and quantize it for the layer behind it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit.formats import Scheme
from fp8kit.fused import arguments, operators
from fp8kit.modules.codes_calls import activation_group, codes_call, format_options
from fp8kit.ops.operators import CodesCall
from fp8kit.runtime.replay_cache import Options


def activation_kind(act_fn: object) -> str | None:
    """Name the activation of a feed-forward, ``None`` if no kernel computes it."""
    name = type(act_fn).__name__
    if type(act_fn) is nn.SiLU and act_fn.inplace:  # other code may read the overwritten input
        return None
    if type(act_fn) is nn.SiLU or act_fn is F.silu or name == "SiLUActivation":
        return "silu"
    if type(act_fn) is nn.GELU:
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    return "gelu_tanh" if name in ("GELUTanh", "PytorchGELUTanh") else None


def activation_codes(
    kind: str, gate: Tensor, up: Tensor | None, scheme: Scheme, left: Tensor | None = None
) -> CodesCall:
    """Return the call that computes ``act(gate) * up``, or ``act(gate)``, as codes for a layer.

    ``kind`` is ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; ``gate`` and ``up`` are ``[..., K]``. The
    call raises ``TypeError`` if one is not of a float dtype, and ``ValueError`` if shapes differ.
    The columns ``left [..., K1]`` come first, if any: in rows, dtype and device like ``gate``.
    """
    inputs, constants = ((gate,), (None,)) if up is None else ((gate, up), ())
    operator, shape = operators.ACTIVATION_ROWS, gate.shape
    if left is not None:
        operator, inputs = operators.CONCATENATED_ACTIVATION_ROWS, (left, *inputs)
        shape = torch.Size((*gate.shape[:-1], left.shape[-1] + gate.shape[-1]))
    check = functools.partial(arguments.activation_arguments, kind, gate, up)
    return codes_call(operator, inputs, constants, (kind,), scheme, check, shape)


def gated_codes(
    kind: str, call: CodesCall, width: int, options: Options, scheme: Scheme
) -> CodesCall:
    """Return a call that runs ``call``, multiplies its codes by gate and up, and activates.

    It gives the activation's codes, then the other results of ``call``. ``width`` and ``options``
    are those of each projection, and ``scheme`` that of the layer which reads the codes.
    """
    operator, (own, product) = call.then_multiply(options)
    return call._replace(
        operator=operators.then_activate(operator),
        options=(own, product, (kind, *format_options(scheme))),
        group=activation_group(scheme),
        shape=torch.Size((*call.shape[:-1], width)),
        dtype=product[2],
    )
