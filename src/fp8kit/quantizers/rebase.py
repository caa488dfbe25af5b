"""MX weights under coarser scales, by shifting exponents instead of quantizing again.

    value = code * 2^(exponent - 127) = shifted code * 2^(shared - 127)

Both scales are powers of two, so a code only moves its exponent field. It keeps every bit unless it
falls below the smallest step of FP8, ``2^-9`` of the shared scale. The shared exponent is the least
that lets the largest value of the row or block still fit. Tables of 256 codes for each distance
make the shift one lookup, the same on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit.errors import InvalidValue
from fp8kit.formats import MX, ROW, TENSOR, GroupShape, QTensor, check_group, scale_shape

LARGEST_CHANGE = 1e-4  # limit of ``Rebased.largest_change`` for a layer that keeps the result
_LARGEST = 448.0
_NAN, _E8M0_NAN, _BIAS = 0x7F, 255, 127
# farther down every code is zero; a single smallest step may move up this far
_DOWN, _UP = 19, 18
_NONE = -(2**15)  # exponent that a group without a value needs: less than any other
_ROUNDED = 4  # magnitude of codes up to which ``rebase`` may leave more than a group could hold
_PIECE = 2**22  # elements at a time, which bounds the temporary memory


@dataclass(frozen=True, slots=True, eq=False)
class Rebased:
    """An MX weight with scales of rows or blocks, and what that changed.

    Args:
        q: codes and ``float32`` scales, powers of two.
        exponents: the original E8M0 bytes of the groups, for ``restore``.
        changed: how many codes lost bits.
        largest_change: for each row, take the root mean square of ``norm(change) / norm(group)``
            over its groups of 32; this is the largest of these. All groups have equal weight, since
            inputs may be small where the weight is large.
    """

    q: QTensor
    exponents: Tensor
    changed: int
    largest_change: float

    @property
    def loses(self) -> str:
        """Reason why a layer should not keep its weight rebased; empty if it may."""
        if (self.exponents == _E8M0_NAN).any():
            return "would lose the codes of NaN groups"
        return f"would change {told_change([self])}" if self.largest_change > LARGEST_CHANGE else ""


def told_change(weights: Iterable[Rebased]) -> str:
    """Say how many values of weights changed, and by how much (see ``Rebased.largest_change``)."""
    every = list(weights)
    changed, count = sum(x.changed for x in every), sum(x.q.data.numel() for x in every)
    largest = max(x.largest_change for x in every)
    size = f", in no row by more than {largest:.1e} of its groups' norms" if changed else ""
    return f"{changed} of {count} values{size}"


@torch.no_grad()
def rebase_or_decline(
    weights: Mapping[str, QTensor], groups: Iterable[GroupShape]
) -> tuple[GroupShape | None, dict[str, Rebased], str]:
    """Rebase the MX weights of a layer to the first of several groups that loses next to nothing.

    All weights get the same groups. Returns the groups, ``None`` if all lose too much; the new
    weights; and a sentence with the count of changed values and the largest change, or with what
    each of the groups would change.
    """
    said: list[str] = []
    for group in groups:
        found = {name: rebase(q, group) for name, q in weights.items()}
        unit = f"one power of two per {group}{' block' if group.rows > 1 else ''}"
        if not (worst := [x for x in found.values() if x.loses]):
            told = "".join(f"{reason}; " for reason in said)
            size = told_change(found.values())
            return group, found, f"{told}MXFP8 rebased to {unit}, which changes {size}"
        said.append(f"{unit} {max(worst, key=lambda x: x.largest_change).loses}")
    return None, {}, "; ".join(said)


def rebase(q: QTensor, group: GroupShape = ROW) -> Rebased:
    """Give an MX weight one power of two as the scale of each row, or of larger blocks.

    Args:
        q: e4m3fn codes ``[N, K]``, or a stack ``[E, N, K]``, with E8M0 scales (``fp8kit.MX``).
        group: elements per new scale: columns all, or a multiple of 32.

    Returns:
        New codes and scales, the old exponents, and how many values changed by how much. NaN codes
        and groups stay NaN.

    Raises:
        ValueError: if ``q`` is not MX e4m3fn, or the new groups cut through the old ones.

    Example:
        >>> found = rebase(fp8kit.quantize(torch.randn(4, 64), fp8kit.MX))
        >>> found.changed, found.q.group
        (0, GroupShape(rows=1, cols=-1))
    """
    _check(q, group)
    data = torch.empty_like(q.data, memory_format=torch.contiguous_format)
    wanted = scale_shape(q.shape, group)
    if not q.data.numel():
        return Rebased(QTensor(data, q.scale.new_ones(wanted).float(), group), q.scale, 0, 0.0)
    shared = _shared_exponents(q, group)
    changed, largest = 0, 0.0
    wide = _spread(shared, q.scale.shape, group)
    for rows in _pieces(q.data):
        parts = (_rows(t, rows) for t in (q.data, q.scale, wide, data))
        lost, change = _shift_rows(*parts)
        changed, largest = changed + lost, max(largest, change)
    powers = (shared << 23).view(torch.float32)
    return Rebased(QTensor(data, powers, group), q.scale, changed, largest)


def restore(q: QTensor, exponents: Tensor, what: str) -> QTensor:
    """Undo ``rebase``: give groups of 32 their exponents back, and codes their bits.

    ``q`` is a result of ``rebase``: e4m3fn codes with powers of two as scales; ``exponents`` are
    the E8M0 bytes that it kept, ``scale_shape(q.shape, MX)``. Where ``rebase`` changed a value, the
    restored code is the one nearest to the changed value. Codes under a scale that is NaN become
    NaN. Raises ``ValueError``, which names ``what``, if groups cannot hold their codes: they are of
    other codes.
    """
    data = torch.empty_like(q.data, memory_format=torch.contiguous_format)
    if data.numel():
        lost = torch.zeros((), dtype=torch.int64, device=q.device)
        shared = torch.frexp(q.scale)[1] + (_BIAS - 1)
        wide = _spread(shared, exponents.shape, q.group)
        absent = _spread(q.scale.isnan(), exponents.shape, q.group)
        for rows in _pieces(data):
            own, no_number = _rows(exponents, rows), _rows(absent, rows)
            codes, index = _shifted(_rows(q.data, rows), _rows(wide, rows) - own.int())
            misfits = _misfit_table(codes.device)[index]  # NaN fits everywhere
            lost += (misfits & ~_per_element(no_number, codes.shape[-1])).count_nonzero()
            nan = _per_element((own == _E8M0_NAN) | no_number, codes.shape[-1])
            _rows(data, rows).view(torch.uint8).copy_(codes.masked_fill_(nan, _NAN))
        if lost:
            raise InvalidValue(
                f"{what} has {int(lost)} codes that do not fit its MX exponents.",
                "A rebased MX weight is saved under the exponents of its groups of 32, which are "
                "those of other codes.",
                "Change such a weight by load_state_dict of its module, which sets them too.",
            )
    return QTensor(data, exponents, MX)


def _check(q: QTensor, group: GroupShape) -> None:
    if not isinstance(q, QTensor) or q.group != MX or q.data.dtype != torch.float8_e4m3fn:
        raise InvalidValue(
            f"Got {q!r:.80}.",
            "E8M0 scales of 32 e4m3fn codes are rebased.",
            "Quantize with group=fp8kit.MX, or leave other weights as they are.",
        )
    check_group(group)
    if group.cols != -1 and group.cols % MX.cols:
        raise InvalidValue(
            f"Got {group} as the new groups.",
            f"They hold whole groups of {MX.cols} columns.",
            "Pass fp8kit.ROW or fp8kit.BLOCK.",
        )


def _shared_exponents(q: QTensor, group: GroupShape) -> Tensor:
    """Return the least biased exponents that let every group fit, ``int32``."""
    need = torch.empty(q.scale.shape, dtype=torch.int32, device=q.device)
    table = _exponent_table(q.device)
    for rows in _pieces(q.data):
        magnitude = _rows(q.data, rows).view(torch.uint8) & 0x7F
        magnitude = magnitude.masked_fill(magnitude == _NAN, 0)
        padded = F.pad(magnitude, (0, -magnitude.shape[-1] % MX.cols))
        largest = padded.view(len(padded), -1, MX.cols).amax(-1)
        own = _rows(q.scale, rows)
        held = table[largest.long()] + own.int()
        _rows(need, rows).copy_(held.masked_fill((largest == 0) | (own == _E8M0_NAN), _NONE))
    shared = _largest_of(need, q, group)
    zeros = q.scale.int().masked_fill(q.scale == _E8M0_NAN, 0)
    # without a value to fit, any scale will do: the largest of the groups' scales, or the least
    plain = _largest_of(zeros, q, group)
    return torch.where(shared == _NONE, plain, shared).clamp_(1, _E8M0_NAN - 1)


def _largest_of(values: Tensor, q: QTensor, group: GroupShape) -> Tensor:
    if group == TENSOR:
        return values.amax().reshape(1, 1)
    cols = values.shape[-1] if group.cols == -1 else group.cols // MX.cols
    right, below = -values.shape[-1] % cols, -values.shape[-2] % group.rows
    values = F.pad(values, (0, right, 0, below), value=_NONE)
    down, across = values.shape[-2] // group.rows, values.shape[-1] // cols
    tiles = values.reshape(*values.shape[:-2], down, group.rows, across, cols)
    return tiles.amax((-3, -1)).reshape(scale_shape(q.shape, group))


def _spread(shared: Tensor, shape: torch.Size, group: GroupShape) -> Tensor:
    """Expand the exponents of rows or blocks to one for each group of 32."""
    if group == TENSOR:
        return shared.reshape([1] * len(shape)).expand(shape)
    if group.rows > 1:
        shared = shared.repeat_interleave(group.rows, -2)[..., : shape[-2], :]
    if group.cols != -1:
        return shared.repeat_interleave(group.cols // MX.cols, -1)[..., : shape[-1]]
    return shared.expand(shape)


def _shift_rows(codes: Tensor, own: Tensor, shared: Tensor, out: Tensor) -> tuple[int, float]:
    """Write shifted codes of some rows; return how many changed, and the largest change."""
    nan = own == _E8M0_NAN
    shifted, index = _shifted(codes, own.int() - shared)
    if nan.any():
        shifted.masked_fill_(_per_element(nan, codes.shape[-1]), _NAN)
    out.view(torch.uint8).copy_(shifted)
    lost = _loss_table(codes.device)[index] & ~_per_element(nan, codes.shape[-1])
    per_row = lost.sum(-1)
    rows = per_row.nonzero().flatten()
    if not len(rows):
        return 0, 0.0
    # the value under the shared scale, exact in fp32 before and after
    before = _value_table(codes.device)[index[rows]]
    change = (before - out[rows].float().nan_to_num()).masked_fill(~lost[rows], 0)
    ratios = (_group_norms(change) / _group_norms(before)).nan_to_num(0)
    return int(per_row.sum()), float(ratios.square().mean(-1).sqrt().max())


def _group_norms(values: Tensor) -> Tensor:
    padded = F.pad(values, (0, -values.shape[-1] % MX.cols))
    return torch.linalg.vector_norm(padded.view(len(padded), -1, MX.cols), dim=-1)


def _shifted(codes: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Shift codes ``[M, K]`` by exponents ``[M, K / 32]``; return bytes, and indices of tables."""
    step = (distance.clamp(-_DOWN, _UP) + _DOWN) * 256
    index = _per_element(step, codes.shape[-1]) + codes.view(torch.uint8)
    return _code_table(codes.device)[index], index


def _per_element(values: Tensor, cols: int) -> Tensor:
    return values.repeat_interleave(MX.cols, -1)[..., :cols]


def _pieces(codes: Tensor) -> Iterator[slice]:
    rows = math.prod(codes.shape[:-1])
    step = max(1, _PIECE // codes.shape[-1])
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[rows]


def _all_codes(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@functools.cache
def _value_table(device: torch.device) -> Tensor:
    """Return the value of each code at each distance, flat; NaN as 0, to keep it out of sums."""
    powers = torch.arange(-_DOWN, _UP + 1, device=device).float().exp2()
    return (_all_codes(device).nan_to_num() * powers[:, None]).flatten()


@functools.cache
def _code_table(device: torch.device) -> Tensor:
    """Return each code at each distance, flat: rounded to nearest even, saturated, NaN kept."""
    bits = _value_table(device).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    own = torch.arange(256, dtype=torch.uint8, device=device).repeat(_DOWN + _UP + 1)
    return torch.where((own & _NAN) == _NAN, own, bits)


@functools.cache
def _loss_table(device: torch.device) -> Tensor:
    values = _value_table(device)
    held: Tensor = _code_table(device).view(torch.float8_e4m3fn).float().nan_to_num()
    return held.ne(values)


@functools.cache
def _misfit_table(device: torch.device) -> Tensor:
    """Return which codes of a rebased weight cannot come from a group at each distance, flat."""
    own = torch.arange(256, dtype=torch.uint8, device=device).repeat(_DOWN + _UP + 1)
    return _loss_table(device) & ((own & 0x7F) > _ROUNDED)


@functools.cache
def _exponent_table(device: torch.device) -> Tensor:
    """Return for each magnitude the distance from its group's exponent to the least that fits."""
    values = _all_codes(device)[:128].nan_to_num(0)
    mantissa, exponent = torch.frexp(values)
    largest, top = math.frexp(_LARGEST)
    return torch.where(values == 0, 0, exponent - top + (mantissa > largest).int()).int()
