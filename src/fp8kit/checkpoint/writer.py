"""Write a checkpoint directory: all of it or nothing, one tensor in memory at a time.

The layout (names, dtypes, shapes) is given first, so every file's header and size are known
before the first byte; tensors may then arrive in any order. Everything goes into a folder beside
the destination, is read back, made durable, and renamed in one step.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.reader import DTYPES, open_checkpoint
from fp8kit.errors import CheckpointError, teach

MAX_SHARD_BYTES = 5 * 10**9
# what a model needs beside its weights and config.json, copied from its source directory
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class _Shard:
    file: str
    header: bytes
    starts: dict[str, int]
    size: int


def write_checkpoint(
    destination: str | Path,
    layout: Layout,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: JsonObject,
    source: str | Path | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint directory in one step.

    Args:
        destination: directory to make; parents are made too.
        layout: name of every tensor to its dtype and shape, in the order of the files. Tensors of
            one module, such as a weight and its scale, stay in one file.
        tensors: each name of the layout once, in any order, on any device.
        config: the content of ``config.json``.
        source: directory the model came from; its tokenizer and the like are copied.
        texts: further files by name, instead of the source's.
        overwrite: replace a destination that is a checkpoint; its old files go last.
        max_shard_bytes: start a new file before this size is exceeded.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: if the destination is in the way, is the source, or lacks space; if the
            tensors are not those of the layout; if the result does not read back. The destination
            is then untouched and nothing is left behind.
        ValueError: if ``max_shard_bytes`` is not positive.

    Example:
        >>> layout = {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}
        >>> write_checkpoint("dir", layout, state.items(), config={})
        ['config.json', 'model.safetensors']
    """
    destination = Path(os.path.realpath(destination))
    origin = None if source is None else Path(os.path.realpath(source))
    check_destination(destination, origin, overwrite)
    shards = _plan(layout, max_shard_bytes)
    with _staging(destination) as folder:
        _check_space(folder, sum(s.size for s in shards))
        with ExitStack() as stack:
            files = {s.file: _start(stack, folder, s) for s in shards}
            _fill(files, shards, layout, tensors)
        if len(shards) > 1:
            _write_json(folder / "model.safetensors.index.json", _index(shards, layout))
        _write_json(folder / "config.json", config)
        for name, text in (texts or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        if origin is not None:
            _copy_side_files(origin, folder)
        _read_back(folder)
        for entry in (*folder.rglob("*"), folder):
            _sync(entry)
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        _install(folder, destination)
    return names


def check_destination(destination: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse a destination that is in the way, before any work is done.

    Args:
        destination: directory to make.
        source: directory that is read.
        overwrite: a checkpoint at the destination may be replaced.

    Raises:
        CheckpointError: if the destination is a file, the source, or not empty and not replaceable.
    """
    if source is not None and (source == destination or destination in source.parents):
        raise CheckpointError(
            teach(
                f"The destination {destination} is or holds the source {source}.",
                "The source is never written to.",
                "Save into another directory.",
            )
        )
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(
            teach(
                f"The destination {destination} is a file.",
                "A checkpoint is a directory.",
                "Choose another path.",
            )
        )
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            teach(
                f"The destination {destination} exists and is not empty.",
                "Nothing is replaced unasked.",
                "Choose another path, or pass overwrite=True.",
            )
        )
    if not (destination / "config.json").exists() and not any(destination.glob("*.safetensors")):
        raise CheckpointError(
            teach(
                f"The destination {destination} holds neither config.json nor safetensors files.",
                "overwrite=True replaces a whole directory, and only if it is a checkpoint.",
                "Choose another path, or empty the directory yourself.",
            )
        )


def _check_space(folder: Path, wanted: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise CheckpointError(
            teach(
                f"{folder.parent} has {free} bytes free.",
                f"The checkpoint needs {wanted}.",
                "Make room, or choose another disk.",
            )
        )


def _plan(layout: Layout, max_shard_bytes: int) -> list[_Shard]:
    if max_shard_bytes < 1:
        raise ValueError(
            teach(
                f"Got max_shard_bytes={max_shard_bytes}.",
                "It is the size of a file in bytes.",
                "Pass a positive number, or leave it out.",
            )
        )
    modules: dict[str, list[str]] = {}
    for name in layout:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    parts: list[list[str]] = [[]]
    size = 0
    for names in modules.values():
        added = sum(_nbytes(layout[n]) for n in names)
        if parts[-1] and size + added > max_shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += names
        size += added
    count = len(parts)
    files = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [
        _shard(file, names, layout)
        for file, names in zip(files if count > 1 else ["model.safetensors"], parts, strict=True)
    ]


def _shard(file: str, names: Sequence[str], layout: Layout) -> _Shard:
    # wide dtypes first, so that every tensor is aligned in a mapped file
    ordered = sorted(names, key=lambda n: (-layout[n][0].itemsize, n))
    header: JsonObject = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in ordered:
        starts[name], end = end, end + _nbytes(layout[name])
        dtype, shape = layout[name]
        offsets = [starts[name], end]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    packed = len(text).to_bytes(8, "little") + text
    return _Shard(file, packed, {n: begin + s for n, s in starts.items()}, begin + end)


def _start(stack: ExitStack, folder: Path, shard: _Shard) -> IO[bytes]:
    file = stack.enter_context((folder / shard.file).open("wb"))
    file.write(shard.header)
    file.truncate(shard.size)
    return file


def _fill(
    files: Mapping[str, IO[bytes]],
    shards: Sequence[_Shard],
    layout: Layout,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    places = {name: (shard.file, start) for shard in shards for name, start in shard.starts.items()}
    awaited = set(layout)
    for name, tensor in tensors:
        arrived = (tensor.dtype, tuple(tensor.shape))
        if name not in awaited or arrived != layout[name]:
            raise CheckpointError(
                teach(
                    f"Got {name}, {tensor.dtype} of shape {list(tensor.shape)}.",
                    f"The layout has {layout.get(name, 'no tensor of this name')}, once.",
                    "This is a defect of the caller: give the tensors that were announced.",
                )
            )
        awaited.remove(name)
        file, start = places[name]
        files[file].seek(start)
        files[file].write(_bytes_of(tensor))
    if awaited:
        raise CheckpointError(
            teach(
                f"The stream ended without {', '.join(sorted(awaited)[:5])}.",
                f"The layout has {len(layout)} tensors.",
                "This is a defect of the caller: give the tensors that were announced.",
            )
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    raw._tensor = flat  # type: ignore[attr-defined]  # keeps the memory while the view lives
    return memoryview(raw)


def _index(shards: Sequence[_Shard], layout: Layout) -> JsonObject:
    places = {name: shard.file for shard in shards for name in shard.starts}
    total = sum(_nbytes(kind) for kind in layout.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _nbytes(kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(kind[1]).numel() * kind[0].itemsize


def _write_json(file: Path, content: JsonObject) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def _copy_side_files(source: Path, folder: Path) -> None:
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            copy = folder / file.relative_to(source)
            if file.is_file() and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)


def _read_back(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    problems = checkpoint.scale_problems()
    if problems:
        raise CheckpointError("\n".join(problems))


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """Make a folder beside the destination; whatever happens, it is not there afterwards."""
    made = [p for p in destination.parents if not p.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = destination.parent / f".{destination.name}.{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise


def _install(folder: Path, destination: Path) -> None:
    if not destination.exists() or not any(destination.iterdir()):
        folder.rename(destination)
    elif _exchange(folder, destination):
        shutil.rmtree(folder)  # now the old files
    else:
        aside = folder.with_name(f"{folder.name}.old")
        destination.rename(aside)
        try:
            folder.rename(destination)
        except BaseException:
            aside.rename(destination)
            raise
        shutil.rmtree(aside)
    _sync(destination.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step where the system can; say whether it did."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    old, new = os.fsencode(a), os.fsencode(b)
    return bool(swap(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE) == 0)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
