"""Which layers may share a quantized input, and which weights may be joined into one GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.formats import BLOCK, MX, ROW, Scheme
from fp8kit.modules.linear import Fp8Linear

MOST_JOINED_ROWS = 512  # of an input; above it, one wide product saves nothing
_JOINABLE = (ROW, BLOCK, MX)
_HELD = {"weight", "weight_scale", "bias"}  # the Parameters that a joined product reads


def has_few_rows(x: Tensor) -> bool:
    """Return whether a trace knows that an input has at most ``MOST_JOINED_ROWS``."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

    few: bool = statically_known_true(x.numel() <= MOST_JOINED_ROWS * x.shape[-1])
    return few


def can_share(scheme: Scheme) -> bool:
    """Return whether layers of a scheme quantize an input alike: dynamically, from the data."""
    return scheme.activation is not None and not scheme.static


def are_alike(members: Sequence[Fp8Linear]) -> bool:
    """Return whether FP8 layers have the same scheme, input width and ``scale_ub``."""
    kinds = {(m.scheme, m.in_features, m.scale_ub) for m in members}
    return len(kinds) == 1


def can_join(members: Sequence[Fp8Linear]) -> bool:
    """Return whether the weights of FP8 layers can be multiplied as one matrix.

    They must meet the conditions of ``would_join``, and their operands be of one dtype and device.
    Batch-invariant layers are not joined: the split of a sum depends on the weight's rows, and
    joining on the input's rows, so a row's bits would depend on the other rows.
    """
    first = members[0]
    alike = all(
        m.options() == first.options()
        and not m.batch_invariant
        and _kind(m.codes) == _kind(first.codes)
        and _kind(m.weight_scale) == _kind(first.weight_scale)
        and _kind(m.bias) == _kind(first.bias)
        for m in members
    )
    return alike and are_alike(members) and would_join(first.scheme, members)


def would_join(scheme: Scheme, layers: Sequence[nn.Linear]) -> bool:
    """Return whether layers, once they are FP8, can be multiplied as one matrix.

    Their scales must concatenate along the rows: per-row, MX, or 128x128 blocks where every weight
    but the last ends on a block edge. All have a bias or none has, and none has an input scale.
    """
    edges = all(layer.out_features % scheme.weight.rows == 0 for layer in layers[:-1])
    biases = {layer.bias is None for layer in layers}
    return scheme.weight in _JOINABLE and not scheme.static and edges and len(biases) == 1


def joined_shape(layers: Sequence[nn.Linear]) -> tuple[int, int]:
    """Return ``(N, K)`` of the joined weight of layers."""
    return sum(layer.out_features for layer in layers), layers[0].in_features


def may_move(members: Sequence[Fp8Linear]) -> bool:
    """Return whether the tensors of layers can be moved to other memory.

    A distributed tensor wraps others, ``fully_shard`` puts the whole weight into memory of its own
    at each call, a parametrization may return a new tensor, and other processes may read shared
    memory: none of these can be moved.
    """
    if any(m.sharded or not _HELD <= m._parameters.keys() for m in members):
        return False
    held = [p for m in members for p in m._parameters.values() if p is not None]
    return not any(
        is_traceable_wrapper_subclass(p)
        or (p.device.type == "cpu" and p.untyped_storage().is_shared())
        for p in held
    )


def _kind(part: Tensor | None) -> tuple[torch.dtype, torch.device, bool] | None:
    return None if part is None else (part.dtype, part.device, part.is_inference())
