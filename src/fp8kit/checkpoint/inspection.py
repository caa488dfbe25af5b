"""Look at a checkpoint without loading it: what it holds, how it is quantized, what is broken."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import CODES
from fp8kit.checkpoint.schema.pairing import group_repeated
from fp8kit.checkpoint.storage.directory import side_pointers
from fp8kit.checkpoint.storage.headers import printable
from fp8kit.checkpoint.storage.reader import Checkpoint, scan
from fp8kit.conversion.report import table
from fp8kit.errors import counted
from fp8kit.formats import FLOATS

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One FP8 layer of a checkpoint.

    Args:
        name: of the layer, as in the checkpoint.
        shape: of its weight, ``(N, K)``, or ``(E, N, K)`` for a stack of experts.
        scheme: name of its scheme.
        weight: granularity of the weight.
        activation: granularity of its activations, ``"16 bit"`` if they are not quantized.
        scale_dtype: dtype of the weight's scale on disk; empty if it is missing.
        bytes: size of weight and scales.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    weight: str
    activation: str
    scale_dtype: str
    bytes: int


@dataclass(slots=True)
class Inspection:
    """What a checkpoint directory holds.

    Args:
        path: the directory, or the file.
        dialect: name of its dialect; empty for a high-precision checkpoint.
        scheme: name of the scheme of most of its layers; empty for a high-precision checkpoint.
        layers: its FP8 layers.
        ignored: names or patterns of the layers that its config leaves in high precision.
        kv_scales: names of the scales of its KV cache.
        bytes_by_dtype: dtype to bytes of data.
        tensors: number of tensors.
        shards: number of files.
        problems: damage, one text each; empty for a sound checkpoint.
        notes: remarks that are no damage.

    Example:
        >>> found = inspect("dir")
        >>> print(found)
    """

    path: str
    dialect: str = ""
    scheme: str = ""
    layers: list[LayerInfo] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    kv_scales: list[str] = field(default_factory=list)
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    shards: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("layer", "weight", "scales", "activations", "scale dtype", "MiB"), *self._rows()]
        total = sum(self.bytes_by_dtype.values())
        parts = (f"{d} {b / _MIB:.1f} MiB" for d, b in self.bytes_by_dtype.items())
        others = len({layer.scheme for layer in self.layers}) > 1
        kind = f"{self.dialect}, {self.scheme}{' and others' * others}"
        codes = {str(dtype).removeprefix("torch.") for dtype in CODES}
        dense = codes.isdisjoint(self.bytes_by_dtype)
        unknown = "high precision" if dense else "FP8 of no known dialect"
        kind = kind if self.dialect else unknown
        files = counted(self.shards, "file")
        lines = [
            f"{self.path}: {kind}, {self.tensors} tensors in {files}",
            f"{total / _MIB:.1f} MiB: {', '.join(parts)}",
        ]
        if not self.tensors:
            lines = [f"{self.path}: no tensor could be read, of {files}"]
        if self.layers:
            lines += ["", table(rows), ""]
        if self.ignored:
            lines.append(f"left in high precision: {', '.join(_alike(self.ignored))}")
        if self.kv_scales:
            lines.append(f"scales of the KV cache: {', '.join(_alike(self.kv_scales))}")
        lines += [*self.notes, *(f"PROBLEM: {p}" for p in group_repeated(self.problems))]
        if not self.problems:
            lines.append("no problems found")
        return printable("\n".join(lines))

    def _rows(self) -> list[tuple[str, ...]]:
        """Describe layers, those that differ only in the numbers of their names in one row."""
        names: dict[tuple[str, ...], list[str]] = {}
        for layer in self.layers:
            shape, size = "x".join(map(str, layer.shape)), f"{layer.bytes / _MIB:.2f}"
            facts = (shape, layer.weight, layer.activation, layer.scale_dtype, size)
            names.setdefault((_pattern(layer.name), *facts), []).append(layer.name)
        return [(_alike(group)[0], *key[1:]) for key, group in names.items()]


def inspect(path: str | Path) -> Inspection:
    """Describe a checkpoint and list its damage; weights are not loaded, scales are.

    Args:
        path: a directory, or a safetensors file.

    Returns:
        An ``Inspection``: ``print`` it, or take ``to_dict()``.

    Raises:
        TypeError: if ``path`` is no path.
        CheckpointError: only if there is nothing to describe: no such directory, no safetensors,
            or an unreadable config.

    Example:
        >>> inspect("dir").scheme
        'FP8_DYNAMIC'
    """
    checkpoint = scan(path)
    sizes = Counter[str]()
    for info in checkpoint.tensors.values():
        sizes[str(info.dtype).removeprefix("torch.")] += info.nbytes
    found = Inspection(
        str(path),
        bytes_by_dtype=dict(sizes.most_common()),
        tensors=len(checkpoint.tensors),
        shards=len(checkpoint.shards),
        problems=list(checkpoint.problems),
    )
    if checkpoint.dialect is not None and checkpoint.spec is not None:
        found.dialect, found.scheme = checkpoint.dialect.name, checkpoint.spec.scheme.name
        found.ignored = list(checkpoint.spec.ignore)
        found.kv_scales = list(checkpoint.kv_scales)
        found.notes = list(checkpoint.spec.unread)
        found.layers = [_layer(checkpoint, layer) for layer in checkpoint.layers.values()]
        short = [n for n, info in checkpoint.tensors.items() if info.dtype in FLOATS[:2]]
        if short := [n for n in short if checkpoint.is_scale(n)]:
            found.notes.append(
                f"{len(short)} scales have 16 bit, e.g. {short[0]}: they are read as they are, and "
                "are coarser than the scales that were computed."
            )
        found.problems += [checkpoint.announced_but_dense] * bool(checkpoint.announced_but_dense)
    if checkpoint.nameless and Path(path).is_dir():
        found.notes.append(checkpoint.nameless)
    if not found.problems:  # a scale of the wrong shape could not be read anyway
        found.problems = checkpoint.scale_problems()
    found.problems += side_pointers(Path(path))
    return found


def _layer(checkpoint: Checkpoint, layer: Layer) -> LayerInfo:
    scheme, held = layer.scheme, layer.tensors.values()
    scale = checkpoint.tensors.get(layer.scale)
    activation = "16 bit" if scheme.activation is None else str(scheme.activation)
    return LayerInfo(
        layer.name,
        layer.shape,
        scheme.name,
        str(scheme.weight),
        f"static {activation}" if scheme.static else activation,
        "" if scale is None else str(scale.dtype).removeprefix("torch."),
        sum(checkpoint.tensors[n].nbytes for n in held if n in checkpoint.tensors),
    )


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _alike(names: list[str]) -> list[str]:
    """Merge names that differ only in numbers into one, with their count."""
    count = Counter(_pattern(n) for n in names)
    first = {_pattern(n): n for n in reversed(names)}
    return [first[p] if n == 1 else f"{p} ({n})" for p, n in count.items()]
