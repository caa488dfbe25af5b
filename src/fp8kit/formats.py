"""What a quantized tensor is: codes, scales, and the two integers of its granularity.

Everything here is frozen data. ``GroupShape``, ``QTensor`` and ``Scheme`` carry the granularity
through the package: no other module may infer it from the shape of a scale or from a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fp8kit.errors import (
    InvalidType,
    InvalidValue,
    check_choice,
    check_shape,
    check_strided,
    check_switch,
    did_you_mean,
    is_integer,
)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How many rows and columns of a matrix share one scale; ``-1`` means the whole extent.

    Args:
        rows: rows per scale; ``-1`` only together with ``cols == -1`` (one scale for the tensor).
        cols: columns (along K) per scale; ``-1`` for the whole row.

    Raises:
        TypeError: if ``rows`` or ``cols`` is no integer.
        ValueError: for any other combination.

    Example:
        >>> scale_shape((300, 512), GroupShape(128, 128))
        (3, 4)
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if not (is_integer(self.rows) and is_integer(self.cols)):
            raise InvalidType(
                f"Got GroupShape(rows={self.rows!r}, cols={self.cols!r}).",
                "Rows and columns per scale are integers.",
                "Use fp8kit.TENSOR, ROW, GROUP128, BLOCK or MX, or pass integers.",
            )
        whole = self.rows == -1 and self.cols == -1
        if not whole and (self.rows < 1 or (self.cols < 1 and self.cols != -1)):
            raise InvalidValue(
                f"Got GroupShape(rows={self.rows}, cols={self.cols}).",
                "Groups have rows >= 1 and cols >= 1, or -1 cols; (-1, -1) is the tensor.",
                "Use fp8kit.TENSOR, ROW, GROUP128, BLOCK or MX, or positive integers.",
            )

    def __str__(self) -> str:
        return _GROUP_NAMES.get(self, f"{self.rows}x{self.cols}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes that can be quantized
TENSOR = GroupShape(-1, -1)
ROW = GroupShape(1, -1)
GROUP128 = GroupShape(1, 128)
BLOCK = GroupShape(128, 128)
MX = GroupShape(1, 32)
_GROUP_NAMES = {TENSOR: "tensor", ROW: "row", GROUP128: "1x128", BLOCK: "128x128", MX: "mx"}
_CONSTANTS = ("TENSOR", "ROW", "GROUP128", "BLOCK", "MX")


def check_group(group: object) -> None:
    """Raise ``TypeError`` unless ``group`` is a ``GroupShape``; a name such as "ROW" is none."""
    if not isinstance(group, GroupShape):
        named = isinstance(group, str) and group.upper() in _CONSTANTS
        raise InvalidType(
            f"Got {group!r} as the granularity.",
            f"It must be a GroupShape: fp8kit.{', '.join(_CONSTANTS[:-1])} or {_CONSTANTS[-1]}.",
            f"Pass fp8kit.{str(group).upper()}."
            if named
            else "Pass one of these, or fp8kit.GroupShape(rows, cols).",
        )


def scale_shape(shape: Sequence[int], group: GroupShape) -> tuple[int, ...]:
    """Return the shape of the scales that belong to a tensor.

    For ``TENSOR`` it is always ``(1, 1)``. Otherwise the last dimension is K, and an incomplete
    group at an edge has a scale of its own. With ``group.rows > 1`` the last two dimensions form
    the matrix and all before them a stack; with one row per group every leading dimension is kept.

    Args:
        shape: shape of the codes, K last; at least 1-D.
        group: elements per scale.

    Returns:
        The shape that every scale tensor of this package has, never squeezed.

    Raises:
        TypeError: if ``shape`` holds no integers, or ``group`` is no ``GroupShape``.
        ValueError: if ``shape`` has too few dimensions for the group.

    Example:
        >>> scale_shape((2, 5, 300), GROUP128), scale_shape((5, 300), TENSOR)
        ((2, 5, 3), (1, 1))
    """
    check_shape(shape)
    check_group(group)
    least = 2 if group.rows > 1 else 1
    if len(shape) < least:
        raise InvalidValue(
            f"Got a tensor of {len(shape)} dimensions for {group} groups.",
            f"These groups need at least {least}, K last.",
            "Add the missing dimension, e.g. with unsqueeze(0).",
        )
    if group == TENSOR:
        return (1, 1)
    cols = 1 if group.cols == -1 else math.ceil(shape[-1] / group.cols)
    if group.rows == 1:
        return (*shape[:-1], cols)
    return (*shape[:-2], math.ceil(shape[-2] / group.rows), cols)


def stack_scale_shape(shape: Sequence[int], group: GroupShape) -> tuple[int, ...]:
    """Return the shape of the scales of a stack of matrices, each with scales of its own.

    Like ``scale_shape``, errors included, but for ``TENSOR`` each matrix has one scale.

    Args:
        shape: shape of the codes, ``[..., N, K]``.
        group: elements per scale of one matrix.

    Returns:
        ``[..., *scale_shape((N, K), group)]``.

    Example:
        >>> stack_scale_shape((8, 300, 512), TENSOR), stack_scale_shape((8, 300, 512), BLOCK)
        ((8, 1, 1), (8, 3, 4))
    """
    check_shape(shape)
    return (*shape[:-2], *scale_shape(shape[-2:], group))


def scale_dtype(group: GroupShape) -> torch.dtype:
    """Return the dtype of scales: ``uint8`` (E8M0 bytes) for MX, else ``float32``."""
    return torch.uint8 if group == MX else torch.float32


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """The constants of one 8-bit float encoding.

    ``max`` is the largest magnitude that quantization produces (for fnuz, 224: see
    ``numerics.md``), and ``nan_code`` the byte that every NaN becomes.
    """

    dtype: torch.dtype
    max: float
    nan_code: int

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two that fits, ``emax`` of the OCP MX specification."""
        return math.frexp(self.max)[1] - 1


E4M3FN = Fp8Format(torch.float8_e4m3fn, 448.0, 0x7F)
E4M3FNUZ = Fp8Format(torch.float8_e4m3fnuz, 224.0, 0x80)
E5M2 = Fp8Format(torch.float8_e5m2, 57344.0, 0x7F)
FP8_FORMATS: dict[torch.dtype, Fp8Format] = {f.dtype: f for f in (E4M3FN, E4M3FNUZ, E5M2)}


def fp8_format(dtype: torch.dtype) -> Fp8Format:
    """Look up an 8-bit float dtype; raises ``TypeError`` for anything else."""
    if not isinstance(dtype, torch.dtype) or dtype not in FP8_FORMATS:
        raise InvalidType(
            f"Got {dtype!r:.80} as the dtype of FP8 codes.",
            f"Known are {', '.join(str(d).removeprefix('torch.') for d in FP8_FORMATS)}.",
            "Pass one of these, e.g. torch.float8_e4m3fn.",
        )
    return FP8_FORMATS[dtype]


def min_scale(group: GroupShape, dtype: torch.dtype, role: str) -> float:
    """Return the lower bound of a scale that is computed from data.

    Per-token activations use ``1 / (fp8_max * 512)``, as vLLM and FBGEMM do. All others use the far
    lower ``1e-10 / fp8_max``, because weights can be small and must not be coarsened.
    """
    check_choice("role", role, ("activation", "weight"))
    largest = fp8_format(dtype).max
    return 1 / (largest * 512) if group == ROW and role == "activation" else 1e-10 / largest


@dataclass(frozen=True, slots=True)
class Scheme:
    """Which numbers a layer computes with: the granularity of its weight and of its activations.

    Args:
        name: the word used on the command line, in reports and in checkpoints.
        weight: granularity of the weight ``[N, K]``.
        activation: granularity of the activations ``[M, K]``; ``None`` leaves them in 16 bit.
        static: activations use a calibrated ``input_scale``, not their own amax; for ``TENSOR``.
        ue8m0: scales are rounded up to powers of two (they stay ``float32``).
        dtype: dtype of the codes.
        rebased: the weight is an MXFP8 one whose codes were rewritten for scales of granularity
            ``weight`` (``fp8kit.rebase``). The layer keeps the MX exponents and is saved as MXFP8.

    Example:
        >>> Scheme.of("FP8_BLOCK").activation
        GroupShape(rows=1, cols=128)
    """

    name: str
    weight: GroupShape
    activation: GroupShape | None
    static: bool = False
    ue8m0: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn
    rebased: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidType(
                f"Got {self.name!r:.80} as the name of a scheme.",
                "Reports, plans and checkpoints name it by a str.",
                "Pass one, such as name='MINE'.",
            )
        check_group(self.weight)
        if self.activation is not None:
            check_group(self.activation)
        for switch in ("static", "ue8m0", "rebased"):
            check_switch(switch, getattr(self, switch))
        if self.rebased and (self.weight == MX or self.dtype == E5M2.dtype):
            raise InvalidValue(
                f"Got rebased=True for {self.weight} weights of {self.dtype}.",
                "E4m3 codes of MX groups are rebased to rows or blocks.",
                "Pass weight=ROW or BLOCK, or leave rebased out.",
            )
        if self.static and self.activation != TENSOR:
            raise InvalidValue(
                f"Got a static scheme {self.name!r} with {self.activation} activations.",
                "A calibrated input scale is one number per layer.",
                "Use activation=TENSOR, or static=False.",
            )
        if self.ue8m0 and MX in (self.weight, self.activation):
            raise InvalidValue(
                f"Got ue8m0=True for the MX scheme {self.name!r}.",
                "MX scales are powers of two anyway; ue8m0 rounds float32 scales up.",
                "Leave it out.",
            )
        fp8_format(self.dtype)

    @staticmethod
    def of(scheme: Scheme | str) -> Scheme:
        """Resolve a preset by name; raises ``ValueError`` listing the presets if unknown."""
        if isinstance(scheme, Scheme):
            return scheme
        known = SCHEMES | MX_FORMS
        if not isinstance(scheme, str) or scheme not in known:
            raise InvalidValue(
                f"Unknown scheme {scheme!r:.80}.",
                f"Known schemes are {', '.join(known)}.",
                "Pass one of these names, or a fp8kit.Scheme of your own."
                + did_you_mean(str(scheme)[:80], known),
            )
        return known[scheme]

    @property
    def stored(self) -> Scheme:
        """The scheme of these layers in a checkpoint: MXFP8 for ``MX_FORMS``, else itself."""
        return SCHEMES["MXFP8"] if self in MX_FORMS.values() else self

    @property
    def numbers(self) -> str:
        """The name, then weights and activations in words, as ``plan`` and ``explain`` print it."""
        held = "MXFP8 weights rebased to scales" if self.rebased else "weights with scales"
        acts = "in 16 bit" if self.activation is None else f"per {self.activation}"
        acts = "by a given scale" if self.static else acts.replace("per row", "per token")
        words = f"{held} per {self.weight}, activations {acts}".replace("per mx", "per 1x32")
        return f"{self.name}: {words}"

    def __str__(self) -> str:
        return self.name


def _take_fields(data: Scheme | QTensor, state: Sequence[object]) -> None:
    """Restore the fields from a pickle; older ones lack the last of a scheme, ``rebased``."""
    for entry, value in zip(fields(data), (*state, False), strict=False):
        object.__setattr__(data, entry.name, value)


# assigned here, because the dataclass decorator of Python 3.11.2 replaces one in the class body
Scheme.__setstate__ = _take_fields  # type: ignore[attr-defined]

SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme("FP8", TENSOR, TENSOR, static=True),
        Scheme("FP8_DYNAMIC", ROW, ROW),
        Scheme("FP8_TENSOR", TENSOR, ROW),
        Scheme("FP8_BLOCK", BLOCK, GROUP128),
        Scheme("MXFP8", MX, MX),
        Scheme("FP8_WEIGHT_ONLY", ROW, None),
    )
}
# the ways to compute with an MXFP8 weight; scheme MXFP8 itself takes the fastest on the device
MX_FORMS: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme("MXFP8_ROW", ROW, ROW, rebased=True),
        Scheme("MXFP8_BLOCK", BLOCK, GROUP128, rebased=True),
        Scheme("MXFP8_ROW_WEIGHT_ONLY", ROW, None, rebased=True),
        Scheme("MXFP8_WEIGHT_ONLY", MX, None),
        Scheme("MXFP8_EMULATED", MX, MX),
    )
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class QTensor:
    """FP8 codes and their scales: validated at construction, unpacked at the start of functions.

    The value of an element is ``data.float() * scale`` with the scale of its group.

    Args:
        data: FP8 codes, any shape, K last.
        scale: ``float32`` multipliers, or E8M0 bytes (``uint8``) for ``MX``; shape
            ``scale_shape(data.shape, group)``, or ``stack_scale_shape`` of a stack of matrices such
            as experts ``[E, N, K]``; on the device of ``data``.
        group: elements per scale.

    Raises:
        TypeError: if ``data`` is not FP8, or ``scale`` has the wrong dtype.
        ValueError: if the scale has the wrong shape or sits on another device.

    Example:
        >>> q = fp8kit.quantize(torch.randn(4, 256), group=fp8kit.ROW)
        >>> q.data.dtype, tuple(q.scale.shape)
        (torch.float8_e4m3fn, (4, 1))
    """

    data: Tensor
    scale: Tensor
    group: GroupShape

    def __post_init__(self) -> None:
        if not isinstance(self.data, Tensor):
            raise InvalidType(
                f"Got codes of type {type(self.data).__name__}.",
                "They must be an FP8 tensor, and their scales another.",
                "Pass both, or quantize numbers: fp8kit.quantize(x).",
            )
        check_strided("codes", self.data)
        fp8_format(self.data.dtype)
        check_scale(self.scale, self.data.shape, self.group, self.data.device)

    def __repr__(self) -> str:
        kind = str(self.data.dtype).removeprefix("torch.")
        return f"QTensor({kind}, shape={tuple(self.shape)}, {self.group} scales, {self.device})"

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Device of codes and scales."""
        return self.data.device

    def to(self, device: torch.device | str) -> QTensor:
        """Move codes and scales to a device, or return them as they are if they are there."""
        return QTensor(self.data.to(device), self.scale.to(device), self.group)


def _as_bytes(q: QTensor) -> tuple[Tensor, Tensor, GroupShape, torch.dtype]:
    """Return the state of a pickle, with codes as uint8: plain pickle has no storage for FP8."""
    return q.data.view(torch.uint8), q.scale, q.group, q.data.dtype


def _of_bytes(q: QTensor, state: tuple[Tensor, Tensor, GroupShape, torch.dtype]) -> None:
    """Restore the fields from a pickle; older pickles have FP8 codes, and no dtype beside them."""
    codes = state[0].view(state[3]) if len(state) > 3 else state[0]
    _take_fields(q, (codes, *state[1:3]))


QTensor.__getstate__ = _as_bytes  # type: ignore[method-assign, assignment]
QTensor.__setstate__ = _of_bytes  # type: ignore[attr-defined]


def check_scale(
    scale: Tensor, shape: Sequence[int], group: GroupShape, device: torch.device
) -> None:
    """Check that ``scale`` fits codes of this shape and group.

    Raises ``TypeError`` for a wrong dtype, or if ``scale`` is no dense tensor or ``group`` no
    ``GroupShape``, and ``ValueError`` for a wrong shape or device.
    """
    wanted, dtype = scale_shape(shape, group), scale_dtype(group)
    if not isinstance(scale, Tensor):
        raise InvalidType(
            f"Got a scale of type {type(scale).__name__}.",
            f"The scale is a {dtype} tensor of shape {wanted}.",
            f"Pass torch.full({wanted}, number, device=x.device).",
        )
    check_strided("a scale", scale)
    if scale.dtype != dtype:
        raise InvalidType(
            f"Got a scale of dtype {scale.dtype} for {group} groups.",
            f"The scale must be {dtype}" + (" (E8M0 bytes)." if group == MX else "."),
            "View float8_e8m0fnu as uint8 for MX; convert others with .float().",
        )
    if tuple(scale.shape) != wanted and tuple(scale.shape) != stack_scale_shape(shape, group):
        raise InvalidValue(
            f"Got a scale of shape {tuple(scale.shape)}.",
            f"Codes of shape {tuple(shape)} in {group} groups need {wanted}.",
            "Reshape the scale: all its dimensions stay, and one scale per tensor is [1, 1].",
        )
    if scale.device != device:
        raise InvalidValue(
            f"Got a scale on {scale.device}.",
            f"The codes are on {device}.",
            "Move both to one device.",
        )
