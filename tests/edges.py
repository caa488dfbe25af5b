"""Edge sizes: sizes at which a kernel's tiling changes, computed from the choice itself.

Compilers and masks fail in tiles of which only a few columns are in use: constants spread from
masked lanes, and every further column changes which lanes are masked. So each edge comes with the
seven sizes before and after it, odd and even ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fp8kit.formats import FP8_FORMATS

REACH = 7
E8M0_NAN = 0xFF
SWEEP_VARIABLE = "FP8KIT_SWEEP"  # environment variable; with "all" no size is left out

T = TypeVar("T")


def changes(choice: Callable[[int], object], most: int, step: int = 1) -> list[int]:
    """Return every size up to ``most`` whose choice differs from that of the size before it."""
    sizes = range(step, most + 1, step)
    chosen = [choice(size) for size in sizes]
    return [n for n, a, b in zip(sizes[1:], chosen, chosen[1:], strict=False) if a != b]


def around(edges: Iterable[int], most: int, step: int = 1) -> list[int]:
    """Return the sizes from seven steps before each edge to seven after it, each size once."""
    found = {e + d * step for e in edges for d in range(-REACH, REACH + 1)}
    return sorted(size for size in found if 0 < size <= most)


def sampled(sizes: Sequence[T], count: int, seed: object) -> list[T]:
    """Return ``count`` random sizes in their given order; all under ``FP8KIT_SWEEP=all``.

    Args:
        sizes: values of any kind; they are not compared.
        count: number of sizes to return.
        seed: the same seed returns the same sizes.
    """
    if os.environ.get(SWEEP_VARIABLE) == "all" or count >= len(sizes):
        return list(sizes)
    chosen = random.Random(str(seed)).sample(range(len(sizes)), count)
    return [sizes[i] for i in sorted(chosen)]


def dealt(sizes: Sequence[T], hands: int) -> list[list[T]]:
    """Deal sizes into ``hands`` lists of about one length, to be tried side by side."""
    return [list(sizes[i::hands]) for i in range(hands)]


def between_nan(values: Tensor) -> Tensor:
    """Copy a tensor, with its strides, into memory with NaN before it, behind it and in its gaps.

    Args:
        values: codes, E8M0 scales as bytes, or floats.
    """
    codes = FP8_FORMATS.get(values.dtype)
    kind = values.dtype if codes is None else torch.uint8
    nan = codes.nan_code if codes else E8M0_NAN if kind == torch.uint8 else torch.nan
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True))
    # farther than a tile might reach beyond the tensor, and a multiple of every alignment
    beside = 4096 + 16 * 256 * -(-values.shape[-1] // 256)
    room = torch.full((extent + 2 * beside,), nan, dtype=kind, device=values.device)
    inside = room[beside:].as_strided(values.shape, values.stride())
    return inside.copy_(values.view(kind)).view(values.dtype)
