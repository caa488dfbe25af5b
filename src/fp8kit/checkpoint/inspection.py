"""Look at a checkpoint without loading it: what it holds, how it is quantized, what is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8kit.checkpoint.pairing import named
from fp8kit.checkpoint.reader import Checkpoint, scan
from fp8kit.report import table

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One FP8 layer of a checkpoint.

    Args:
        name: of the layer, as in the checkpoint.
        shape: of its weight, ``(N, K)``.
        weight: granularity of the weight.
        activation: granularity of its activations, ``"16 bit"`` if they are not quantized.
        scale_dtype: dtype of the weight's scale on disk; empty if it is missing.
        bytes: size of weight and scales.
    """

    name: str
    shape: tuple[int, ...]
    weight: str
    activation: str
    scale_dtype: str
    bytes: int


@dataclass(slots=True)
class Inspection:
    """What a checkpoint directory holds.

    Args:
        path: the directory.
        dialect: how its quantization is written; empty for a high-precision checkpoint.
        scheme: name of its scheme; empty likewise.
        layers: its FP8 layers.
        ignored: names or patterns of the layers that its config leaves in high precision.
        bytes_by_dtype: dtype to bytes of data.
        tensors: number of tensors.
        shards: number of files.
        problems: damage, one text each; empty for a sound checkpoint.
        notes: what else the config asks for, and is not carried out.

    Example:
        >>> found = inspect("dir")
        >>> print(found)
    """

    path: str
    dialect: str = ""
    scheme: str = ""
    layers: list[LayerInfo] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    shards: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("layer", "weight", "scales", "activations", "stored", "MiB")]
        for layer in self.layers:
            shape, size = "x".join(map(str, layer.shape)), f"{layer.bytes / _MIB:.2f}"
            row = (layer.name, shape, layer.weight, layer.activation, layer.scale_dtype, size)
            rows.append(row)
        total = sum(self.bytes_by_dtype.values())
        parts = (f"{d} {b / _MIB:.1f} MiB" for d, b in self.bytes_by_dtype.items())
        kind = f"{self.dialect}, {self.scheme}" if self.dialect else "high precision"
        files = f"{self.shards} file{'' if self.shards == 1 else 's'}"
        lines = [
            f"{self.path}: {kind}, {self.tensors} tensors in {files}",
            f"{total / _MIB:.1f} MiB: {', '.join(parts)}",
        ]
        if self.layers:
            lines += ["", table(rows), ""]
        if self.ignored:
            lines.append(f"left in high precision: {', '.join(self.ignored)}")
        lines += [*self.notes, *(f"PROBLEM: {p}" for p in self.problems)]
        if not self.problems:
            lines.append("no problems found")
        return "\n".join(lines)


def inspect(path: str | Path) -> Inspection:
    """Describe a checkpoint directory and list its damage; weights are not loaded, scales are.

    Args:
        path: the directory.

    Returns:
        An ``Inspection``: ``print`` it, or take ``to_dict()``.

    Raises:
        CheckpointError: only if there is nothing to describe: no such directory, no safetensors,
            an unreadable config, or one of an unknown dialect.

    Example:
        >>> inspect("dir").scheme
        'FP8_DYNAMIC'
    """
    checkpoint = scan(path)
    sizes = Counter[str]()
    for info in checkpoint.tensors.values():
        sizes[str(info.dtype).removeprefix("torch.")] += info.nbytes
    found = Inspection(
        str(checkpoint.path),
        bytes_by_dtype=dict(sizes.most_common()),
        tensors=len(checkpoint.tensors),
        shards=len(checkpoint.shards),
        problems=list(checkpoint.problems),
    )
    if checkpoint.dialect is not None and checkpoint.spec is not None:
        found.dialect, found.scheme = checkpoint.dialect.name, checkpoint.spec.scheme.name
        found.ignored = list(checkpoint.spec.ignore)
        found.notes = list(checkpoint.spec.unread)
        found.layers = [_layer(checkpoint, name) for name in checkpoint.layers]
    if not found.problems:  # a scale of the wrong shape could not be read anyway
        found.problems = checkpoint.scale_problems()
    return found


def _layer(checkpoint: Checkpoint, name: str) -> LayerInfo:
    assert checkpoint.spec is not None
    scheme = checkpoint.spec.scheme
    parts = [
        checkpoint.tensors.get(named(name, kind))
        for kind in ("weight", "weight_scale", "input_scale")
    ]
    weight, scale, _ = parts
    assert weight is not None
    activation = "16 bit" if scheme.activation is None else str(scheme.activation)
    return LayerInfo(
        name,
        weight.shape,
        str(scheme.weight),
        f"static {activation}" if scheme.static else activation,
        "" if scale is None else str(scale.dtype).removeprefix("torch."),
        sum(p.nbytes for p in parts if p is not None),
    )
