"""Read a checkpoint directory, trusting nothing in it: names, shapes and scales are all checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8kit.checkpoint.dialects import Dialect, JsonObject, Spec, detect
from fp8kit.checkpoint.pairing import FLOATS, named, pair
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import FP8_FORMATS, TENSOR, GroupShape, scale_shape

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
STEMS = ("model", "diffusion_pytorch_model")
_JSON_LIMIT = 2**28
# a shard is mapped into memory, and what was read counts as used until it is mapped anew
_REMAP_EVERY = 2**26


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is and what it is, without its data.

    Args:
        name: its name on disk.
        shard: file name inside the directory.
        dtype: dtype on disk.
        shape: shape on disk.
        offset: position of its data in the shard.
    """

    name: str
    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint directory whose files have been looked at and whose tensors are still on disk.

    Args:
        path: the directory.
        config: ``config.json``, empty if there is none.
        tensors: our name of each tensor (``X.weight``, ``X.weight_scale``, ...) to where it is.
        shards: file names.
        dialect: how the quantization is written; ``None`` for a high-precision checkpoint.
        spec: what the quantization config says.
        layers: names of the layers with an FP8 weight, in name order.
        problems: damage that was found, one text each; ``open_checkpoint`` raises instead.
    """

    path: Path
    config: JsonObject
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    dialect: Dialect | None = None
    spec: Spec | None = None
    layers: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The high precision of the model: what the config says, else the commonest float dtype."""
        for key in ("dtype", "torch_dtype"):
            word = self.config.get(key)
            found = getattr(torch, word, None) if isinstance(word, str) else None
            if found in FLOATS:
                return found  # type: ignore[no-any-return]
        scales = {named(n, s) for n in self.layers for s in ("weight_scale", "input_scale")}
        count = Counter(i.dtype for n, i in self.tensors.items() if n not in scales)
        floats = [d for d, _ in count.most_common() if d in FLOATS]
        return floats[0] if floats else torch.bfloat16

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Load tensors one at a time, shard by shard, in the order they have on disk.

        Args:
            names: which ones, in our names; by default all.

        Yields:
            Our name and a tensor on the CPU that owns its memory; scales are fp32, in the shape
            of ``scale_shape``.

        Raises:
            CheckpointError: for a scale that is not finite and positive.

        Example:
            >>> for name, tensor in open_checkpoint("dir").stream(): ...
        """
        for name, tensor in self._raw(self.tensors if names is None else names):
            yield name, self._ours(name, tensor).clone()

    def mapped(self) -> dict[str, Tensor]:
        """Give every tensor as a view of its file: nothing is read before it is used.

        Returns:
            Our name to tensor, scales as in ``stream``.

        Raises:
            CheckpointError: for a scale that is not finite and positive.

        Example:
            >>> state = open_checkpoint("dir").mapped()
        """
        handles = {shard: _open(self.path / shard) for shard in self.shards}
        return {
            name: self._ours(name, handles[info.shard].get_tensor(info.name))
            for name, info in self.tensors.items()
        }

    def scale_problems(self) -> list[str]:
        """Read all scales and describe those that are not finite and positive."""
        found = []
        for name, tensor in self._raw(n for n in self.tensors if self._scale_group(n)):
            try:
                self._ours(name, tensor)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def _raw(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the files, in file order; each is to be used before the next is taken."""
        chosen = {name: self.tensors[name] for name in names}
        handle, opened, used = None, "", 0
        for name, info in sorted(chosen.items(), key=lambda c: (c[1].shard, c[1].offset)):
            if handle is None or opened != info.shard or used > _REMAP_EVERY:
                handle, opened, used = _open(self.path / info.shard), info.shard, 0
            used += info.nbytes
            yield name, handle.get_tensor(info.name)

    def _scale_group(self, name: str) -> GroupShape | None:
        """Give the granularity of the scale of this name; ``None`` if it is not an FP8 scale."""
        layer, _, kind = name.rpartition(".")
        weight = self.tensors.get(named(layer, "weight"))
        if self.spec is None or weight is None or weight.dtype not in FP8_FORMATS:
            return None
        return {"weight_scale": self.spec.scheme.weight, "input_scale": TENSOR}.get(kind)

    def _ours(self, name: str, tensor: Tensor) -> Tensor:
        group = self._scale_group(name)
        if group is None:
            return tensor
        weight = self.tensors[named(name.rpartition(".")[0], "weight")]
        scale = tensor.float().reshape(scale_shape(weight.shape, group))
        if not (scale.isfinite() & (scale > 0)).all():
            raise CheckpointError(
                teach(
                    f"{self.tensors[name].shard}: {name} holds NaN, infinite, zero or negative"
                    " values.",
                    "Scales are finite and positive.",
                    "The file is damaged: get or make it again.",
                )
            )
        return scale


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint directory without loading its tensors.

    Args:
        path: a directory with ``model.safetensors``, or ``model.safetensors.index.json`` and its
            shards, and usually ``config.json``.

    Returns:
        The checkpoint; every tensor is known by name, place, dtype and shape.

    Raises:
        CheckpointError: if it does not exist, holds no safetensors, is of an unknown dialect, or is
            damaged; every damage is named.

    Example:
        >>> checkpoint = open_checkpoint("dir")
        >>> checkpoint.spec.scheme.name
        'FP8_DYNAMIC'
    """
    checkpoint = scan(path)
    if checkpoint.problems:
        raise CheckpointError("\n".join(checkpoint.problems))
    return checkpoint


def scan(path: str | Path) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, but collect damage in ``problems``.

    Raises:
        CheckpointError: only if there is nothing to look at, or the config cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            teach(
                f"There is no directory {path}.",
                "A checkpoint is a directory with safetensors files.",
                "Check the path; a model from a hub is downloaded first.",
            )
        )
    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    index, shards = _files(path)
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        try:
            found = read_header(path, shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name in found:
            if name in tensors:
                problems.append(_damaged(shard, f"{name} is also in {tensors[name].shard}"))
        tensors.update(found)
        if index is not None:
            problems += _disagreements(shard, found, index)
    known = detect(config)
    checkpoint = Checkpoint(path, config, tensors, tuple(shards), problems=problems)
    if known is not None:
        checkpoint.dialect, checkpoint.spec = known
        own = {disk: ours for ours, disk in checkpoint.dialect.suffixes.items()}
        checkpoint.tensors = {_renamed(name, own): info for name, info in tensors.items()}
    kinds = {n: (info.dtype, info.shape) for n, info in checkpoint.tensors.items()}
    checkpoint.layers, unpaired = pair(kinds, checkpoint.spec)
    problems += unpaired
    return checkpoint


def read_json(path: Path) -> JsonObject:
    """Read a JSON object from a file; raises ``CheckpointError`` for anything else."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise ValueError(f"it has more than {_JSON_LIMIT} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(_damaged(path.name, str(error))) from error
    if not isinstance(found, dict):
        raise CheckpointError(_damaged(path.name, f"it holds {type(found).__name__}, no object"))
    return found


def read_header(path: Path, shard: str) -> dict[str, TensorInfo]:
    """Read what one safetensors file holds, by the names it uses.

    Raises:
        CheckpointError: if the file is missing, truncated, or not safetensors.
    """
    file = path / shard
    if not file.is_file():
        raise CheckpointError(
            teach(
                f"{shard} is missing in {path}.",
                "The index names it.",
                "Complete the download or the copy.",
            )
        )
    _open(file)  # the library's own checks: sizes, offsets, no holes, no overlap
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        pairs = json.loads(f.read(size), object_pairs_hook=_no_repeats(shard))
    start = 8 + size
    found = {}
    for name, entry in pairs.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(_damaged(shard, f"{name} has dtype {entry['dtype']}"))
        offset = start + entry["data_offsets"][0]
        found[name] = TensorInfo(name, shard, DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
    return found


def _no_repeats(shard: str) -> Any:
    def check(pairs: list[tuple[str, Any]]) -> JsonObject:
        repeated = [n for n, count in Counter(n for n, _ in pairs).items() if count > 1]
        if repeated:
            raise CheckpointError(_damaged(shard, f"its header names {repeated[0]} twice"))
        return dict(pairs)

    return check


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_damaged(file.name, str(error))) from error


def _files(path: Path) -> tuple[dict[str, str] | None, list[str]]:
    """Find the weights: the index, if there is one, and the shards."""
    for stem in STEMS:
        single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if (path / single).exists() and (path / index).exists():
            raise CheckpointError(
                teach(
                    f"{path} holds both {single} and {index}.",
                    "One of them is the model; the other is left over from something else.",
                    "Remove the one that does not belong.",
                )
            )
        if (path / index).exists():
            weights = _weight_map(path / index)
            return weights, sorted(set(weights.values()))
        if (path / single).exists():
            return None, [single]
    pickles = sorted(p.name for p in path.glob("*.bin")) + sorted(
        p.name for p in path.glob("*.pt*")
    )
    raise CheckpointError(
        teach(
            f"{path} holds no model.safetensors and no model.safetensors.index.json"
            f"{f', only {pickles[0]}' if pickles else ''}.",
            "Weights are read from safetensors, never from pickle files.",
            "Check the path, or save the model as safetensors first.",
        )
    )


def _weight_map(index: Path) -> dict[str, str]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(_damaged(index.name, "it has no weight_map"))
    for name, shard in weights.items():
        safe = (
            isinstance(shard, str)
            and shard.endswith(".safetensors")
            and PurePosixPath(shard).name == shard
            and PureWindowsPath(shard).name == shard
        )
        if not safe:
            raise CheckpointError(
                teach(
                    f"{index.name} places {name} in {shard!r}.",
                    "A shard is the plain name of a .safetensors file in the same directory.",
                    "Do not use this checkpoint unless you know where it comes from.",
                )
            )
    return weights


def _disagreements(shard: str, found: Iterable[str], index: dict[str, str]) -> list[str]:
    promised = {name for name, place in index.items() if place == shard}
    here = set(found)
    absent = [f"the index places {n} in it, but it is not there" for n in sorted(promised - here)]
    extra = [f"it holds {n}, which the index does not place in it" for n in sorted(here - promised)]
    return [_damaged(shard, what) for what in absent + extra]


def _damaged(file: str, what: str) -> str:
    return teach(f"{file} is damaged.", f"What is wrong: {what}.", "Get or make it again.")


def _renamed(name: str, own: dict[str, str]) -> str:
    layer, _, kind = name.rpartition(".")
    return named(layer, own[kind]) if kind in own else name
