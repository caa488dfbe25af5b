"""Codes in the other e4m3 encoding: the same bytes, under scales twice or half as large."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.errors import InvalidValue
from fp8kit.formats import E4M3FNUZ, MX, QTensor, fp8_format

_SIGN, _ALL_BITS = 0x80, 0x7F
_LARGEST_E8M0 = 254


def recoded(q: QTensor, dtype: torch.dtype) -> QTensor:
    """Write e4m3fn codes as e4m3fnuz or the other way round; see ``fp8kit.recode``.

    ``dtype`` is one of the two, and so is that of ``q``, which is returned if both are the same.
    Raises ``ValueError`` if an MX scale cannot be doubled or halved.
    """
    if q.data.dtype == dtype:
        return q
    old, new = fp8_format(q.data.dtype), fp8_format(dtype)
    data = q.data.view(torch.uint8)
    to_fnuz = dtype == E4M3FNUZ.dtype
    if not to_fnuz and bool((data & _ALL_BITS == _ALL_BITS).any()):
        return QTensor(q.data.float().to(dtype), q.scale, q.group)
    nan = data & _ALL_BITS == _ALL_BITS if to_fnuz else data == old.nan_code
    # -0 becomes 0: as fnuz these bits are NaN, and of fnuz they are among those set next
    codes = data.masked_fill(data == _SIGN, 0).masked_fill(nan, new.nan_code).view(dtype)
    return QTensor(codes, _scaled(q, to_fnuz), q.group)


def _scaled(q: QTensor, double: bool) -> Tensor:
    if q.group != MX:
        return q.scale * 2 if double else q.scale / 2
    edge = _LARGEST_E8M0 if double else 0
    if bool((q.scale == edge).any()):
        raise InvalidValue(
            f"Got an MX scale of byte {edge}.",
            f"The other encoding needs it {'doubled' if double else 'halved'}, and E8M0 ends "
            "there.",
            "Quantize the original values with dtype=.",
        )
    stays = q.scale == _LARGEST_E8M0 + 1  # NaN
    return torch.where(stays, q.scale, q.scale + 1 if double else q.scale - 1)
