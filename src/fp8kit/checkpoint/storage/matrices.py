"""Locate the rows of weight matrices in files, also of experts stacked in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fp8kit.checkpoint.schema.naming import experts_of
from fp8kit.checkpoint.storage.directory import bytes_of
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.errors import CheckpointError
from fp8kit.formats import FLOATS

_STACK = re.compile(
    r"(?P<experts>(?:.*\.)?experts)\.(?P<kind>gate_up_proj|down_proj)(?:\.weight)?$"
)
# of the source; small enough that a slice and its codes stay in a shared cache
SLICE_BYTES = 2**22
# models whose stacks are laid out otherwise: gate and up alternate
_INTERLEAVED = ("gpt_oss",)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix ``[rows, cols]``, or ``[N, K]``, in a file.

    ``offset`` is the byte position of its first element, ``pitch`` the number of elements from one
    stored row to the next. If ``transposed``, it is a range of columns of the stored ``[cols,
    pitch]``.
    """

    shard: str
    dtype: torch.dtype
    offset: int
    rows: int
    cols: int
    pitch: int
    transposed: bool = False

    @staticmethod
    def of(info: TensorInfo) -> Matrix:
        """Describe a whole tensor: a matrix, or any other as one column of elements."""
        n = torch.Size(info.shape).numel()
        rows, cols = info.shape if len(info.shape) == 2 else (n, 1)
        return Matrix(info.shard, info.dtype, info.offset, rows, cols, cols)

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self.cols * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all elements."""
        return self.rows * self.row_bytes

    def slices(self, rows: int = 1) -> Iterator[tuple[int, int]]:
        """Cut the rows into ranges of about ``SLICE_BYTES``, of whole groups of ``rows`` rows."""
        step = max(1, SLICE_BYTES // max(1, self.row_bytes))
        step = -(-step // rows) * rows
        for first in range(0, self.rows, step):
            yield first, min(first + step, self.rows)


class MatrixFile:
    """Reads rows of matrices from the files of one directory; one per thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[bytes]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def rows(self, matrix: Matrix, first: int, last: int) -> Tensor:
        """Read rows ``first`` to ``last`` (exclusive): contiguous, valid until the next call.

        Raises ``CheckpointError`` if the file ends before them.
        """
        count, item = last - first, matrix.dtype.itemsize
        size = count * matrix.row_bytes
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        raw = self._buffer[:size]
        if not matrix.transposed:
            self._read(matrix.shard, matrix.offset + first * matrix.pitch * item, raw)
            return raw.view(matrix.dtype).view(count, matrix.cols)
        for stored, part in enumerate(raw.view(matrix.cols, count * item)):
            start = matrix.offset + (stored * matrix.pitch + first) * item
            self._read(matrix.shard, start, part)
        return raw.view(matrix.dtype).view(matrix.cols, count).t().contiguous()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _read(self, shard: str, start: int, into: Tensor) -> None:
        if shard not in self._open:
            self.close()  # threads walk through the files in order: one is open at a time
            self._open[shard] = (self._folder / shard).open("rb", buffering=0)
        file, view, done = self._open[shard], bytes_of(into), 0
        file.seek(start)
        while done < len(view):
            count = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"{shard} ends at byte {start + done}.",
                    "It was longer when it was opened.",
                    "Something else writes to it: wait, and start again.",
                )
            done += count


def stacked_experts(
    tensors: Mapping[str, TensorInfo], model_type: str = ""
) -> tuple[dict[str, dict[str, Matrix]], dict[str, str]]:
    """Find experts that are stacked in 3-D tensors, and take the stacks apart.

    ``experts.gate_up_proj`` is ``[E, 2I, H]``, gates first, and ``experts.down_proj`` ``[E, H,
    I]``; or, as the shapes of both tell, ``[E, H, 2I]`` and ``[E, I, H]``. Engines take experts one
    by one, as ``experts.<e>.gate_proj``, ``up_proj`` and ``down_proj``. Returns, by module of
    experts, their matrices by layer name; and the reason for each whose stacks cannot be split.
    """
    stacks: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = _STACK.match(name)
        if match and len(info.shape) == 3:
            stacks.setdefault(match["experts"], {})[match["kind"]] = info
    found: dict[str, dict[str, Matrix]] = {}
    odd: dict[str, str] = {}
    for experts, kinds in stacks.items():
        if model_type in _INTERLEAVED:
            odd[experts] = "gate and up alternate in this model, which no FP8 dialect can hold"
        elif set(kinds) != {"gate_up_proj", "down_proj"}:
            odd[experts] = "one of gate_up_proj and down_proj is missing"
        elif any(f"{experts}.{kind}_bias" in tensors for kind in kinds):
            odd[experts] = "its experts have biases, which the FP8 layers of engines do not"
        else:
            split = _split(experts, kinds["gate_up_proj"], kinds["down_proj"])
            if split is None:
                odd[experts] = "the shapes of gate_up_proj and down_proj do not fit together"
            else:
                found[experts] = split
    return found, odd


def single_experts(tensors: Mapping[str, TensorInfo], model_type: str) -> dict[str, TensorInfo]:
    """Return tensors with dense stacks of experts replaced by one matrix per projection.

    Many model classes of engines know no other names. Stacks with K first stay whole, as models
    with such stacks have them in their own files.
    """
    dense = {n: info for n, info in tensors.items() if info.dtype in FLOATS}
    found = {
        f"{layer}.weight": TensorInfo(layer, m.shard, m.dtype, (m.rows, m.cols), m.offset)
        for layers in stacked_experts(dense, model_type)[0].values()
        for layer, m in layers.items()
        if not m.transposed
    }
    whole = {experts_of(name) for name in found}
    return {n: i for n, i in tensors.items() if stack_of(n) not in whole} | found


def stack_of(name: str) -> str | None:
    """Return the module of experts that a stacked tensor belongs to; ``None`` for other names."""
    match = _STACK.match(name)
    return match["experts"] if match else None


def _split(experts: str, gate_up: TensorInfo, down: TensorInfo) -> dict[str, Matrix] | None:
    (e, a, b), (e_, c, d) = gate_up.shape, down.shape
    if e == e_ and b == c and a == 2 * d:
        hidden, inner, transposed = b, d, False
    elif e == e_ and a == d and b == 2 * c:
        hidden, inner, transposed = a, c, True
    else:
        return None
    # elements from the gate of an expert to its up, and from a stored row to the next
    half, wide, narrow = (
        (inner, 2 * inner, hidden) if transposed else (inner * hidden, hidden, inner)
    )
    found = {}
    for expert in range(e):
        for part, info, at, rows, cols, pitch in (
            ("gate_proj", gate_up, 2 * expert * inner * hidden, inner, hidden, wide),
            ("up_proj", gate_up, 2 * expert * inner * hidden + half, inner, hidden, wide),
            ("down_proj", down, expert * inner * hidden, hidden, inner, narrow),
        ):
            offset = info.offset + at * info.dtype.itemsize
            found[f"{experts}.{expert}.{part}"] = Matrix(
                info.shard, info.dtype, offset, rows, cols, pitch, transposed
            )
    return found
