"""Files of a checkpoint as untrusted input: JSON, safetensors headers, and the bytes of tensors.

The checks follow the safetensors format, and are stricter only for elements below a byte. They run
before the library's own, so that an error names the file and the field. Symbolic links are
followed, because hub caches consist of them; the target must be a regular file.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8kit.checkpoint.storage.refusals import pointer
from fp8kit.errors import CheckpointError, teach

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_BELOW_A_BYTE = ("F4", "F6_E2M3", "F6_E3M2")  # of the format, and of no size in whole bytes
_HEADER_LIMIT = 100_000_000  # that of the safetensors library
_JSON_LIMIT = 2**28
# a parsed value takes some 60 bytes, and as few as two in the file: this bounds the memory
_VALUE_LIMIT = 2**23
_DEPTH_LIMIT = 64
_DIMENSION_LIMIT = 64  # that of torch
_NOT_THE_FILE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
_ENTRY = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it is, without its data.

    ``offset`` is the position of its data in the shard. ``packed`` data are FP4 codes, two to a
    byte; ``dtype`` and ``shape`` are then those after reading. ``stamp`` holds size and time of the
    file when its header was read; an empty one is not compared.
    """

    name: str
    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    packed: bool = False
    stamp: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return size // 2 if self.packed else size


def damaged(file: str, what: str) -> str:
    """Return the error text for a damaged file: its name, what is wrong, what to do."""
    return teach(f"{file} is damaged.", f"What is wrong: {what}.", "Get or make it again.")


@contextmanager
def _as_checkpoint_errors(file: str, folder: Path | None = None, what: str = "") -> Iterator[None]:
    """Raise ``CheckpointError`` for a file that is damaged, missing or may not be opened.

    A file in a ``folder`` may be missing, because an index names it; ``what`` begins the reason.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        refused = CheckpointError(damaged(file, f"{what}{error}"))
        if isinstance(error, FileNotFoundError) and folder is not None:
            refused = CheckpointError(
                f"{file} is missing in {folder}.",
                "The index, or a link, names it.",
                "Complete the download or the copy.",
            )
        elif isinstance(error, OSError) and error.errno in _NOT_THE_FILE:
            refused = CheckpointError(
                f"{file} cannot be opened: {error.strerror}.",
                "This process needs to read it, and the right to open one file more.",
                "Look at its permissions (ls -lL) and at the limit of open files (ulimit -n).",
            )
        raise refused from error


def shown(name: object) -> str:
    """Return a name from a file for an error text: short, and without control characters."""
    text = name if isinstance(name, str) and name.isprintable() else repr(name)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """Escape control characters, which would move the cursor or change colours when printed."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises ``CheckpointError`` if it is no regular file or no JSON object, is too large or nested
    too deep, or names a key twice.
    """
    with _as_checkpoint_errors(path.name):
        with _reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _JSON_LIMIT:
                raise ValueError(f"it has {size} bytes, more than {_JSON_LIMIT}")
            _refuse_pointer(file, size, path.name)
            found = _parsed(_exactly(file, 0, size))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, no object")
        _check_depth(found)
        _check_text(found)
    return found


def read_header(path: Path, shard: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read the tensors of one safetensors file, by their names there, and the texts in its header.

    Raises ``CheckpointError`` if the file is missing, truncated, or not safetensors.
    """
    with _as_checkpoint_errors(shard, path):
        with _reading(path / shard) as file:
            size, stamp = (status := os.fstat(file.fileno())).st_size, _stamp(status)
            if size < 8:
                raise ValueError(f"it has {size} bytes, less than the length of a header")
            _refuse_pointer(file, size, shard)
            length = int.from_bytes(_exactly(file, 0, 8), "little")
            if length > (most := min(_HEADER_LIMIT, size - 8)):
                raise ValueError(
                    f"its header length is {length}, and the file or the format allows {most}"
                )
            header = _parsed(_exactly(file, 8, length))
        if not isinstance(header, dict):
            raise ValueError(f"its header is {type(header).__name__}, no object")
        found = dict(_entries(header, shard, 8 + length, stamp))
        _check_cover(list(found.values()), 8 + length, size)
        with safe_open(str(path / shard), framework="pt"):
            pass  # what the library refuses for reasons of its own is refused here too
    return found, header.get("__metadata__", {})


def read_tensor(path: Path, info: TensorInfo) -> Tensor:
    """Read the data of one tensor: on the CPU, with its own memory, dtype and shape as on disk.

    Raises ``CheckpointError`` if the file has changed since its header was read, or is unreadable.
    """
    if info.nbytes == 0:
        return torch.empty(info.shape, dtype=info.dtype)
    with _as_checkpoint_errors(info.shard, what=f"{shown(info.name)} cannot be read: "):
        with _reading(path / info.shard) as file:
            _check_stamp(info.shard, info.stamp, os.fstat(file.fileno()))
            data = _exactly(file, info.offset, info.nbytes)
    return torch.frombuffer(data, dtype=torch.uint8).view(info.dtype).view(info.shape)


def check_unchanged(path: Path, tensors: Iterable[TensorInfo]) -> None:
    """Raise ``CheckpointError`` if a file is not as it was when its header was read.

    A saver may put other weights of the same shapes in its place, and parts of two models would be
    taken for one.
    """
    for shard, stamp in {info.shard: info.stamp for info in tensors}.items():
        with _as_checkpoint_errors(shard, path):
            _check_stamp(shard, stamp, os.stat(path / shard))


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns  # not the inode, which some systems make up anew


def _check_stamp(shard: str, stamp: tuple[int, ...], status: os.stat_result) -> None:
    if stamp and stamp != _stamp(status):
        raise CheckpointError(
            f"{shard} has changed since it was opened.",
            "The tensors of a checkpoint belong together.",
            "Something else writes to it: wait, and start again.",
        )


def _reading(path: Path) -> FileIO:
    # without blocking: a named pipe would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return FileIO(descriptor)


def _refuse_pointer(file: FileIO, size: int, name: str) -> None:
    found = pointer(name, bytes(_exactly(file, 0, min(size, 64))))
    if found is not None:
        raise found


def _exactly(file: FileIO, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    file.seek(offset)
    while done < length:
        got = file.readinto(view[done:])
        if not got:
            raise ValueError(f"it ends {length - done} bytes early")
        done += got
    return data


def _parsed(raw: bytearray) -> Any:
    values = sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if values > _VALUE_LIMIT:
        raise ValueError(f"it holds more than {_VALUE_LIMIT} values")
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it names {shown(name)} twice")
    return found


def _check_depth(found: Any) -> None:
    level = [found]
    for _ in range(_DEPTH_LIMIT):
        level = [
            value
            for holder in level
            for value in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(value, (dict, list))
        ]
    if level:
        raise ValueError(f"it is nested more than {_DEPTH_LIMIT} deep")


def _check_text(found: Any) -> None:
    """Refuse one half of a surrogate pair, which JSON can escape and nothing can print."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        place = ".".join(shown(key) for key in _first_bad_text(found))
        raise ValueError(f"it holds what is no character at {place}") from error


def _first_bad_text(found: Any) -> tuple[str, ...]:
    if isinstance(found, str):
        return () if _is_text(found) else ("here",)
    if not isinstance(found, (dict, list)):
        return ()
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        inner = _first_bad_text(value)
        if inner or not _is_text(str(key)):
            return (str(key), *inner)
    return ()


def _is_text(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _entries(
    header: dict[str, Any], shard: str, start: int, stamp: tuple[int, ...]
) -> Iterator[tuple[str, TensorInfo]]:
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
                raise ValueError("its __metadata__ is not an object of texts")
            continue
        if not isinstance(entry, dict) or entry.keys() != _ENTRY:
            raise ValueError(f"{shown(name)} is not an object of {', '.join(sorted(_ENTRY))}")
        if not name.isprintable():
            raise ValueError(f"{shown(name)} is no name: it has characters that cannot be printed")
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if kind in _BELOW_A_BYTE:
            raise CheckpointError(
                f"{shard}: {shown(name)} has dtype {kind}.",
                "Elements of four and six bits are read where they are packed into bytes (U8).",
                "Save the tensor as tensor.view(torch.uint8), or get the checkpoint in that form.",
            )
        if not isinstance(kind, str) or kind not in DTYPES:
            raise ValueError(f"{shown(name)} has dtype {shown(kind)}")
        if not _is_sizes(shape) or len(shape) > _DIMENSION_LIMIT:
            raise ValueError(f"{shown(name)} has shape {shown(shape)}")
        if not _is_sizes(offsets) or len(offsets) != 2:
            raise ValueError(f"{shown(name)} has data_offsets {shown(offsets)}")
        first, last = offsets
        if last - first != _count(shape) * DTYPES[kind].itemsize:
            raise ValueError(
                f"{shown(name)} is {kind} of shape {shape} and has data_offsets {offsets}"
            )
        dtype, position = DTYPES[kind], start + first
        yield name, TensorInfo(name, shard, dtype, tuple(shape), position, stamp=stamp)


def _is_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**63 for n in numbers)


def _count(shape: list[int]) -> int:
    """Count elements; -1 if too large for torch, which counts the other sides of empty tensors."""
    product = 1
    for n in shape:
        product *= max(n, 1)
        if product >= 2**60:
            return -1
    return 0 if 0 in shape else product


def _check_cover(tensors: list[TensorInfo], start: int, end: int) -> None:
    """Refuse tensors that overlap, leave holes, or end elsewhere than the file."""
    position, before = start, ""
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != position:
            what = "overlaps" if info.offset < position else "leaves a hole after"
            raise ValueError(f"{shown(info.name)} {what} {before or 'the header'} (data_offsets)")
        position, before = info.offset + info.nbytes, shown(info.name)
    if position != end:
        what = "has bytes that no tensor owns" if position < end else "ends early"
        raise ValueError(f"its tensors end at byte {position} and the file at {end}: it {what}")
