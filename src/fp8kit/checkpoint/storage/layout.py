"""Which tensor goes where in which file of a checkpoint, decided by names and shapes alone.

The order is canonical: modules are sorted by name, numbers by value. So the same tensors give the
same files, whether they come from a model, from a stream or on another machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.storage.headers import DTYPES
from fp8kit.errors import CheckpointError, InvalidValue

MAX_SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file before it is written.

    ``header`` holds its first bytes: the length of the JSON header, and the header. ``starts`` has
    the position of each tensor's data in the file; ``size`` is that of the whole file in bytes.
    """

    file: str
    header: bytes
    starts: dict[str, int]
    size: int

    def begin(self, path: Path) -> None:
        """Create the file with its header, and room for its tensors."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.size)


def plan_shards(
    layout: Layout,
    max_shard_bytes: int,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[Shard]:
    """Divide tensors into files; those of one module, such as weight and scale, stay together.

    A file ends before it exceeds ``max_shard_bytes``; a single one is ``<stem>.safetensors``. Each
    has the texts of ``metadata`` in its header. Raises ``ValueError`` if the size is no positive
    number, ``CheckpointError`` for a tensor that no file can hold.
    """
    for name, (dtype, _) in layout.items():
        if dtype not in _NAMES or not name.isprintable():
            raise CheckpointError(
                f"The tensor {name!a} is {dtype}.",
                f"Files hold tensors with printable names, of {', '.join(_NAMES.values())}.",
                "Rename or cast it, or make it a buffer with persistent=False.",
            )
    number = isinstance(max_shard_bytes, int | float) and not isinstance(max_shard_bytes, bool)
    if not number or not max_shard_bytes >= 1:
        raise InvalidValue(
            f"Got max_shard_bytes={max_shard_bytes!r}.",
            "It must be the size of a file in bytes.",
            "Pass a positive number such as 5_000_000_000, or leave it out.",
        )
    modules: dict[str, list[str]] = {}
    for name in layout:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    parts: list[list[str]] = [[]]
    size = 0
    for module in sorted(modules, key=natural):
        added = sum(nbytes(layout[n]) for n in modules[module])
        if parts[-1] and size + added > max_shard_bytes:
            parts.append([])
            size = 0
        parts[-1] += modules[module]
        size += added
    count = len(parts)
    files = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [
        _shard(file, names, layout, metadata or {})
        for file, names in zip(files if count > 1 else [f"{stem}.safetensors"], parts, strict=True)
    ]


def index_of(shards: Sequence[Shard], layout: Layout) -> JsonObject:
    """Return the content of ``<stem>.safetensors.index.json``."""
    places = {name: shard.file for shard in shards for name in shard.starts}
    total = sum(nbytes(kind) for kind in layout.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that orders numbers in names by value: ``a.2`` before ``a.10``."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(p)) if i % 2 else (1, p) for i, p in enumerate(parts))


def nbytes(kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Return the size of a tensor of this dtype and shape."""
    return torch.Size(kind[1]).numel() * kind[0].itemsize


def _shard(file: str, names: Sequence[str], layout: Layout, metadata: Mapping[str, str]) -> Shard:
    # wide dtypes first, so that every tensor is aligned in a mapped file
    ordered = sorted(names, key=lambda n: (-layout[n][0].itemsize, n))
    header: JsonObject = {"__metadata__": {**metadata, "format": "pt"}}
    starts, end = {}, 0
    for name in ordered:
        starts[name], end = end, end + nbytes(layout[name])
        dtype, shape = layout[name]
        offsets = [starts[name], end]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    packed = len(text).to_bytes(8, "little") + text
    return Shard(file, packed, {n: begin + s for n, s in starts.items()}, begin + end)
