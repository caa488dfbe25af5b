"""MX scales of weights as Blackwell's tensor cores load them, rearranged once and kept.

The cache belongs to one state of the scale tensor: it is made again when the scales are written or
moved, freed with them, and never saved, copied or pickled. During CUDA graph capture the
rearrangement becomes part of the graph, so that a replay follows weights that were reloaded in
place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from fp8kit.quantizers.scale_layout import swizzle_scales
from fp8kit.runtime.weight_hazards import UNCOUNTED, version


class _Kept(NamedTuple):
    """Tiles, and the state of the scales they were made from."""

    state: tuple[int, int, int]  # version, address, rows
    tiles: Tensor


_KEPT: WeakIdKeyDictionary = WeakIdKeyDictionary()


def swizzled_weight_scales(scale: Tensor, rows: int) -> Tensor:
    """Return the E8M0 scales ``[N, K / 32]`` of a weight in 128x4 tiles, padded to ``rows``.

    They are flat ``float8_e8m0fnu``, as ``torch.nn.functional.scaled_mm`` takes them.
    """
    state = (version(scale), scale.data_ptr(), rows)
    kept: _Kept | None = _KEPT.get(scale)  # type: ignore[no-untyped-call]
    captured = scale.is_cuda and torch.cuda.is_current_stream_capturing()
    if kept is not None and kept.state == state and not captured:
        return kept.tiles
    padded = F.pad(scale, (0, 0, 0, rows - len(scale)))
    tiles = swizzle_scales(padded).view(torch.float8_e8m0fnu)
    if state[0] != UNCOUNTED and not captured:
        _KEPT[scale] = _Kept(state, tiles)
    return tiles
