"""Sibling groups (``SharedInput``) without a model that would hold their layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

import fp8kit
from fp8kit.formats import min_scale
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops.operators import QUANTIZE, CodesCall
from fp8kit.quantizers.scale_layout import product_layout
from fp8kit.runtime.replay_cache import ReplayCache


class Group(SharedInput):
    """A group that holds its layers; ``SharedInput`` refers to them only weakly."""

    def __init__(self, layers: Sequence[fp8kit.Fp8Linear]) -> None:
        super().__init__(layers, unchanging=True)
        self.layers = layers


def hand_over_codes(group: SharedInput, stand_in: Tensor, x: Tensor) -> None:
    """Give a group the codes of ``x [..., K]``, as a norm does, for calls with ``stand_in``."""
    scheme = group.members[0].scheme
    kind = scheme.activation
    assert kind is not None
    floor, layout = min_scale(kind, scheme.dtype, "activation"), product_layout(kind)
    options = ((kind.rows, kind.cols), scheme.dtype, floor, None, "exact", layout)
    rows = x.reshape(-1, x.shape[-1])
    call = CodesCall(QUANTIZE, (rows,), (), options, kind, x.shape, x.dtype, lambda: None)
    assert group.produce(stand_in, ReplayCache(), call) == []
