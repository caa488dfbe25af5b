"""The functions that users call: validate the arguments, then replay a call or run the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.errors import check_switch
from fp8kit.formats import QTensor, Scheme
from fp8kit.moe import arguments, operators
from fp8kit.moe.activation import Activation
from fp8kit.ops.operators import autocast
from fp8kit.ops.validation import activation_format, check_float, check_run_options
from fp8kit.runtime.replay_cache import cache_on

_SWIGLU = Activation()


def experts(
    x: Tensor,
    w13: QTensor,
    w2: QTensor,
    ids: Tensor,
    weights: Tensor,
    *,
    activation: Activation = _SWIGLU,
    scheme: Scheme | str | None = None,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    input_scale13: Tensor | None = None,
    input_scale2: Tensor | None = None,
    expert_map: Tensor | None = None,
    router_weight_on_input: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute a layer of experts in FP8; differentiable in ``x`` and ``weights``.

    ``y[m] = sum_j weights[m, j] * (act(x[m] @ w13[e].T + bias13[e]) @ w2[e].T + bias2[e])`` with
    ``e = ids[m, j]``, added in a fixed order in fp32 and rounded once. ``x`` is quantized as
    the scheme says, the input of the second product in groups of 1x128, or by ``input_scale2``.

    Args:
        x: bf16, fp16 or fp32 ``[M, H]``.
        w13: codes ``[E, 2 I, H]`` (``[E, I, H]`` without a gate), scales
            ``stack_scale_shape(codes.shape, group)``.
        w2: codes ``[E, H, I]`` in the same groups.
        ids: int32 or int64 ``[M, k]``. Ids outside ``0 .. E - 1`` (or those of ``expert_map``)
            have no row in the weights: they add nothing. An id may occur several times.
        weights: the router's weights, float ``[M, k]``.
        activation: the function between the products.
        scheme: how ``x`` is quantized; by default the standard partner of ``w13.group``.
        bias13: float ``[E, 2 I]`` (``[E, I]``), in the order of the rows of ``w13``.
        bias2: float ``[E, H]``.
        input_scale13: fp32 ``[1, 1]``, positive and finite: ``x`` is quantized per tensor with it.
        input_scale2: the same for the input of the second product.
        expert_map: integer ``[L]``, from ids to rows of the weights, -1 for experts without a row
            here; or ``[L, R]``, replicas among which tokens take turns.
        router_weight_on_input: multiply ``x`` by the weights instead of the results (Llama-4).
        batch_invariant: a token's bits depend neither on M nor on the other tokens.
        backend: compute with this backend or fail; ``None`` takes the first that fits.

    Returns:
        ``[M, H]`` in the dtype of ``x`` (under autocast, in autocast's dtype).

    Raises:
        TypeError: if an argument is of another kind or dtype.
        ValueError: if shapes, devices, scheme or scales do not fit.
        UnsupportedError: if no backend computes it, with every backend's reason.

    Example:
        >>> w13, w2 = (fp8kit.quantize(w, fp8kit.ROW, role="weight") for w in (gate_up, down))
        >>> y = fp8kit.moe.experts(x, w13, w2, *fp8kit.moe.route(logits, 2))
    """
    check_float("x", x)
    arguments.check_kinds(w13, w2, activation)
    check_switch("router_weight_on_input", router_weight_on_input)
    check_run_options(batch_invariant, backend)
    x_group, rounding = activation_format(w13.group, scheme, input_scale13)
    # before the lookup: recordings are keyed by the dtypes after these casts
    x = autocast(x)
    if isinstance(weights, Tensor) and weights.is_floating_point():
        weights = weights.float()
    constants = (
        w13.data, arguments.stacked_scale(w13), bias13, input_scale13,
        w2.data, arguments.stacked_scale(w2), bias2, input_scale2, expert_map,
    )  # fmt: skip
    options = (
        None if x_group is None else (x_group.rows, x_group.cols),
        (w13.group.rows, w13.group.cols), rounding, *activation.words(),
        router_weight_on_input, batch_invariant, backend,
    )  # fmt: skip
    call = (operators.LAYER, (x, ids, weights), constants, options)
    cache = None if torch.compiler.is_compiling() else cache_on(w13.data)
    y: Tensor | None = None if cache is None else cache.replay(*call)
    if y is None:
        arguments.check_layer(
            x, (w13, bias13, input_scale13), (w2, bias2, input_scale2), activation
        )
        arguments.check_routes(x, ids, weights, expert_map)
        arguments.check_scheme(scheme, x_group, w13, input_scale2)
        if cache is None:
            y = operators.LAYER.registered(x, ids, weights, *constants, *options)
        else:
            y = cache.run(*call)
    return y


def grouped_scaled_mm(
    x_q: QTensor,
    w_q: QTensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Multiply rows that are sorted by expert, each by the weight of its expert.

    Args:
        x_q: rows ``[S, K]``, those of an expert next to each other.
        w_q: weights of all experts, codes ``[E, N, K]``, scales
            ``stack_scale_shape(codes.shape, group)``.
        offsets: int32 or int64 ``[E + 1]``, never decreasing: expert ``e`` has the rows from
            ``offsets[e]`` up to, and without, ``offsets[e + 1]``, which may be none. Rows before
            the first offset and from the last one on have no expert.
        bias: float ``[E, N]``.
        out_dtype: bf16, fp16 or fp32.
        batch_invariant: a row's bits depend neither on S nor on the other rows.
        backend: compute with this backend or fail; ``None`` takes the first that fits.

    Returns:
        ``[S, N]`` in ``out_dtype``; rows without an expert are zero.

    Raises:
        TypeError: if an argument is of another kind or dtype.
        ValueError: if shapes or devices differ.
        UnsupportedError: if no backend computes it, with every backend's reason.

    Example:
        >>> offsets = torch.tensor([0, 3, 3, 8])  # three experts: 3, 0 and 5 rows
        >>> y = fp8kit.grouped_scaled_mm(fp8kit.quantize(x), w_q, offsets)
    """
    arguments.check_grouped(x_q, w_q, offsets, bias, out_dtype)
    check_run_options(batch_invariant, backend)
    return torch.ops.fp8kit.grouped_scaled_mm(
        x_q.data, x_q.scale, w_q.data, arguments.stacked_scale(w_q), offsets, bias,
        (x_q.group.rows, x_q.group.cols), (w_q.group.rows, w_q.group.cols),
        out_dtype, batch_invariant, backend,
    )  # fmt: skip
