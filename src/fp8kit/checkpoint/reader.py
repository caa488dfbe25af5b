"""Read a checkpoint directory, trusting nothing in it: names, shapes and scales are all checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from torch import Tensor

from fp8kit.checkpoint.dialects import Dialect, JsonObject, Spec, detect
from fp8kit.checkpoint.files import DTYPES as DTYPES
from fp8kit.checkpoint.files import TensorInfo as TensorInfo
from fp8kit.checkpoint.files import damaged, read_tensor, shown
from fp8kit.checkpoint.files import read_header as read_header
from fp8kit.checkpoint.files import read_json as read_json
from fp8kit.checkpoint.pairing import FLOATS, named, pair
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import FP8_FORMATS, TENSOR, GroupShape, scale_shape

STEMS = ("model", "diffusion_pytorch_model")
_PROBLEMS_SHOWN = 20
_WORDS = {str(d).removeprefix("torch."): d for d in FLOATS}


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
            if isinstance(word, str) and word in _WORDS:
                return _WORDS[word]
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
        chosen = [(n, self.tensors[n]) for n in (self.tensors if names is None else names)]
        for name, _ in sorted(chosen, key=lambda c: (c[1].shard, c[1].offset)):
            yield name, self.read(name)

    def read(self, name: str) -> Tensor:
        """Load one tensor.

        Args:
            name: our name.

        Returns:
            A tensor on the CPU that owns its memory; scales as in ``stream``.

        Raises:
            CheckpointError: for a scale that is not finite and positive, or a file that changed.

        Example:
            >>> open_checkpoint("dir").read("lm_head.weight").shape
            torch.Size([4096, 256])
        """
        return self._ours(name, read_tensor(self.path, self.tensors[name]))

    def scale_problems(self) -> list[str]:
        """Read all scales and describe those that are not finite and positive."""
        found = []
        for name in self.tensors:
            try:
                if self._scale_group(name):
                    self.read(name)
            except CheckpointError as error:
                found.append(str(error))
        return found

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
        more = len(checkpoint.problems) - _PROBLEMS_SHOWN
        rest = [f"{more} more problems; fp8kit inspect lists them."] if more > 0 else []
        raise CheckpointError("\n".join(checkpoint.problems[:_PROBLEMS_SHOWN] + rest))
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
                problems.append(damaged(shard, f"{shown(name)} is also in {tensors[name].shard}"))
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
        raise CheckpointError(damaged(index.name, "it has no weight_map"))
    for name, shard in weights.items():
        safe = (
            isinstance(shard, str)
            and shard.endswith(".safetensors")
            and shard.isprintable()
            and PurePosixPath(shard).name == shard
            and PureWindowsPath(shard).name == shard
        )
        if not safe:
            raise CheckpointError(
                teach(
                    f"{index.name} places {shown(name)} in {shown(repr(shard))}.",
                    "A shard is the plain name of a .safetensors file in the same directory.",
                    "Do not use this checkpoint unless you know where it comes from.",
                )
            )
    return weights


def _disagreements(shard: str, found: Iterable[str], index: dict[str, str]) -> list[str]:
    promised = {name for name, place in index.items() if place == shard}
    here = set(found)
    absent = [
        f"the index places {shown(n)} in it, but it is not there" for n in sorted(promised - here)
    ]
    extra = [
        f"it holds {shown(n)}, which the index does not place in it"
        for n in sorted(here - promised)
    ]
    return [damaged(shard, what) for what in absent + extra]


def _renamed(name: str, own: dict[str, str]) -> str:
    layer, _, kind = name.rpartition(".")
    return named(layer, own[kind]) if kind in own else name
