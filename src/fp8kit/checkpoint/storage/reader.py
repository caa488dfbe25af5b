"""Read a checkpoint directory, trusting nothing in it: names, shapes and scales are all checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import lexists
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from torch import Tensor

from fp8kit.checkpoint.dialects import BARE, Dialect, JsonObject, Source, Spec, quantization_config
from fp8kit.checkpoint.dialects.comfyui import COMFYUI, ENTRY, METADATA, describes_layers
from fp8kit.checkpoint.schema import decoding
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import engine_name, named
from fp8kit.checkpoint.schema.pairing import group_repeated, interpret
from fp8kit.checkpoint.storage import fp4, nvfp4, rebased
from fp8kit.checkpoint.storage.headers import (
    TensorInfo,
    check_unchanged,
    damaged,
    printable,
    read_header,
    read_json,
    read_tensor,
    shown,
)
from fp8kit.checkpoint.storage.refusals import check_source, no_weights, of_ranks
from fp8kit.checkpoint.storage.stacked_scales import sliced
from fp8kit.conversion.patterns import matches
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import FLOATS, QTensor, Scheme

STEMS = ("model", "diffusion_pytorch_model", "consolidated")
# files besides config.json that tell how a checkpoint is quantized
DOCUMENTS = tuple(
    f"{name}.json" for name in ("hf_quant_config", "params", "quanto_qmap", "quantization_config")
)
_PROBLEMS_SHOWN, _TEXT_LIMIT = 20, 2**16
_WORDS = {str(d).removeprefix("torch."): d for d in FLOATS}


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint directory whose files have been looked at and whose tensors are still on disk.

    ``tensors``, ``layers`` and ``kv_scales`` have our names (``X.weight``, ``X.weight_scale``);
    without a ``dialect`` it is in high precision. ``problems`` are damage, one text each, for which
    ``open_checkpoint`` raises. ``errors`` has the relative error that FP8 adds to NVFP4 layers that
    were read, ``metadata`` the texts in the headers of files.
    """

    path: Path
    config: JsonObject
    tensors: dict[str, TensorInfo]
    shards: tuple[str, ...]
    dialect: Dialect | None = None
    spec: Spec | None = None
    layers: dict[str, Layer] = field(default_factory=dict)
    kv_scales: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    _owners: dict[str, Layer] = field(init=False, repr=False)
    _converted: dict[str, QTensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._owners = {
            name: layer for layer in self.layers.values() for name in layer.tensors.values()
        }

    @property
    def dtype(self) -> torch.dtype:
        """The high precision of the model: what the config says, else the commonest float dtype."""
        for key in ("dtype", "torch_dtype"):
            word = self.config.get(key)
            if isinstance(word, str) and word in _WORDS:
                return _WORDS[word]
        count = Counter(i.dtype for n, i in self.tensors.items() if not self.is_scale(n))
        floats = [d for d, _ in count.most_common() if d in FLOATS]
        return floats[0] if floats else torch.bfloat16

    @property
    def names_schemes(self) -> bool:
        """Whether it says how its layers compute, beyond their codes and scales."""
        return self.dialect is not BARE or quantization_config(self.config) is not None

    @property
    def announced_but_dense(self) -> str:
        """Error text for a config that announces a quantization that no weight has; else empty."""
        if self.spec is None or self.layers or self.problems:
            return ""
        if self.kv_scales:
            return teach(
                f"{self.path} quantizes the KV cache alone: none of its weights is FP8.",
                "It loads as the dense model that it is.",
                "To quantize it, remove quantization_config from config.json.",
            )
        return teach(
            f"{self.path} is announced as {self.spec.scheme}, and none of its weights is FP8.",
            "Loaders look for codes and scales.",
            "If its weights were dequantized, remove quantization_config from config.json.",
        )

    def for_engines(self) -> Checkpoint:
        """Return the same checkpoint under the names by which engines and Transformers load it."""
        model_type = str(self.config.get("model_type"))
        return self.renamed({n: engine_name(n, model_type) for n in (*self.tensors, *self.layers)})

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """Return the same checkpoint under other names of all its tensors and layers.

        If two tensors would have the same name, all keep theirs.
        """
        taken = len({names[n] for n in self.tensors}) < len(self.tensors)
        if taken or all(n == name for n, name in names.items()):
            return self
        layers = {
            names[n]: replace(
                layer,
                name=names[n],
                weight=names[layer.weight],
                scale=names[layer.scale],
                input_scale=names[layer.input_scale] if layer.input_scale else None,
            )
            for n, layer in self.layers.items()
        }
        tensors = {names[n]: info for n, info in self.tensors.items()}
        kv_scales = tuple(names[n] for n in self.kv_scales)
        return replace(self, tensors=tensors, layers=layers, kv_scales=kv_scales)

    def read(self, name: str) -> Tensor:
        """Load one tensor by our name: on the CPU, in memory of its own.

        Scales are fp32, in the shape of ``scale_shape``. Raises ``CheckpointError`` for one that is
        not finite and positive, and if the file has changed.
        """
        return self._decode(name, self._raw(name))

    def _raw(self, name: str) -> Tensor:
        info = self.tensors[name]
        if isinstance(info, nvfp4.ConvertedPart):
            return self._from_nvfp4(info)
        if isinstance(info, rebased.RestoredCodes):
            return rebased.codes_of(info, lambda part: read_tensor(self.path, part))
        if not info.packed:
            return read_tensor(self.path, info)
        flat = replace(info, dtype=torch.uint8, shape=(info.nbytes,), packed=False)
        return fp4.unpack(read_tensor(self.path, flat), info.shape)

    def _from_nvfp4(self, part: nvfp4.ConvertedPart) -> Tensor:
        """Convert a weight when its codes or its scales are read; only the last one is kept."""
        q = self._converted.get(part.layer)
        if q is None:
            q, error = nvfp4.convert(part, lambda info: read_tensor(self.path, info))
            # replaced, not changed: loaders read from several threads
            self._converted, self.errors[part.layer] = {part.layer: q}, error
        return q.data if part.dtype == q.data.dtype else q.scale

    def scale_problems(self) -> list[str]:
        """Read all scales and describe those that are not finite and positive."""
        found = []
        for name in self.tensors:
            try:
                if self.is_scale(name):
                    self.read(name)
            except CheckpointError as error:
                found.append(str(error))
        return found

    def is_scale(self, name: str) -> bool:
        """Return whether our name is that of a scale of a layer or of the KV cache."""
        layer = self._owners.get(name)
        return name in self.kv_scales or (layer is not None and name != layer.weight)

    @property
    def nameless(self) -> str:
        """A note for a checkpoint whose config names no model; empty if it names one."""
        named = any(self.config.get(key) for key in ("model_type", "architectures", "_class_name"))
        if named or (self.path / "params.json").is_file():
            return ""
        there = "names no model" if self.config else "is missing"
        return (
            f"config.json {there}: engines and Transformers need the original model's. Without "
            "one, build the model yourself: fp8kit.load(dir, model=...)."
        )

    def _decode(self, name: str, tensor: Tensor) -> Tensor:
        layer, info = self._owners.get(name), self.tensors[name]
        where = f"{info.shard}: {info.name}"
        if name in self.kv_scales:
            fnuz = any(x.codes == torch.float8_e4m3fnuz for x in self.layers.values())
            return decoding.decode_cache_scale(tensor, fnuz, where)
        if layer is None:
            return tensor
        if name == layer.weight:
            return decoding.decode_weight(layer, tensor, where)
        if name == layer.input_scale:
            return decoding.decode_input_scale(layer, tensor, where)
        return decoding.decode_scale(layer, tensor, lambda: self._raw(layer.weight), where)


def open_checkpoint(
    path: str | Path,
    widths: Mapping[str, Sequence[int]] | None = None,
    scheme: Scheme | None = None,
) -> Checkpoint:
    """Open a checkpoint directory without loading its tensors.

    ``widths`` are the rows of the parts of fused layers with one scale for each part, by patterns
    of their names, where neither names nor config tell. NVFP4 weights become ``scheme`` as they are
    read, by default ``FP8_DYNAMIC``. Raises ``CheckpointError`` if there are no safetensors, the
    dialect is unknown, widths do not fit, or anything is damaged; it lists up to 20 problems.
    """
    checkpoint = scan(path, widths, scheme)
    for pattern in widths or ():
        if not any(matches(pattern, name) for name in checkpoint.layers):
            checkpoint.problems.append(f"widths: {pattern!r} matches no FP8 layer.")
    if checkpoint.problems:
        problems = group_repeated(checkpoint.problems)
        more = len(problems) - _PROBLEMS_SHOWN
        rest = [f"{more} more problems; fp8kit inspect lists them."] if more > 0 else []
        raise CheckpointError("\n".join(problems[:_PROBLEMS_SHOWN] + rest))
    return checkpoint


def scan(
    path: str | Path,
    widths: Mapping[str, Sequence[int]] | None = None,
    scheme: Scheme | None = None,
) -> Checkpoint:
    """Open a checkpoint as ``open_checkpoint`` does, but collect damage in ``problems``.

    Raises ``CheckpointError`` only if there is nothing to look at, the config cannot be read, or a
    file changes during the scan.
    """
    check_source(path)
    path, index = Path(path), None
    config: JsonObject = {}
    documents: dict[str, JsonObject] = {}
    if path.is_file() and _is_all_of_its_folder(path):
        path = path.parent
    if path.is_file():  # it has no config of its own
        path, shards = path.parent, [path.name]
    else:
        config = read_json(path / "config.json") if lexists(path / "config.json") else {}
        documents = {n: read_json(path / n) for n in DOCUMENTS if lexists(path / n)}
        index, shards = _files(path)
    tensors, metadata, problems = _headers(path, shards, index)
    tiled = describes_layers(tensors, metadata)
    tensors = sliced(fp4.unpacked(nvfp4.as_fp8(rebased.as_mx(tensors), scheme, tiled)))
    kinds = {n: (info.dtype, info.shape) for n, info in tensors.items()}
    parts = [info for info in tensors.values() if isinstance(info, nvfp4.ConvertedPart)]
    nvfp4.check_order(parts, metadata)
    made = {part.layer: part.scheme.weight for part in parts}
    source = Source(config, kinds, documents, metadata, widths or {}, made)
    if COMFYUI.detect(source):
        source = replace(source, repeated=_repeated(path, tensors))
    read = interpret(source)
    return Checkpoint(
        path,
        config,
        {ours: tensors[on_disk] for ours, on_disk in read.tensors.items()},
        tuple(shards),
        read.dialect,
        read.spec,
        read.layers,
        read.kv_scales,
        of_ranks(shards) + problems + [_placed(problem, tensors) for problem in read.problems],
        metadata=metadata,
    )


def _headers(
    path: Path, shards: list[str], index: dict[str, str] | None
) -> tuple[dict[str, TensorInfo], dict[str, str], list[str]]:
    """Return the tensors of all files, the texts in their headers, and what is wrong with them."""
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        try:
            found, texts = read_header(path, shard)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name in found:
            if name in tensors:
                problems.append(damaged(shard, f"{shown(name)} is also in {tensors[name].shard}"))
        tensors.update(found)
        metadata.update(texts)
        if index is not None:
            problems += _disagreements(shard, found, index)
    check_unchanged(path, tensors.values())
    metadata.update({n: _text(path, i) for n, i in tensors.items() if n.endswith(ENTRY)})
    return tensors, metadata, problems


def _text(path: Path, info: TensorInfo) -> str:
    """Read a text that is stored as a tensor of bytes; empty if the tensor cannot be a text."""
    if info.dtype != torch.uint8 or info.nbytes > _TEXT_LIMIT:
        return ""
    return bytes(read_tensor(path, info).flatten().tolist()).decode(errors="replace")


def _repeated(path: Path, tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """Name the layers whose input scale has the bytes of the scale of their weight."""
    found = set()
    for name, info in tensors.items():
        layer, _, kind = name.rpartition(".")
        beside = {"scale_input": "scale_weight", "input_scale": "weight_scale"}.get(kind)
        scale = tensors.get(named(layer, beside)) if beside else None
        if scale is not None and (scale.dtype, scale.shape) == (info.dtype, info.shape):
            if torch.equal(read_tensor(path, scale), read_tensor(path, info)):
                found.add(layer)
    return frozenset(found)


def _placed(problem: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Prefix a problem with the file of the tensor that it names, or of a weight beside it."""
    problem = printable(problem)
    words = [word.rstrip(".,;:") for word in problem.split()]
    words += [f"{word.rpartition('.')[0]}.weight" for word in words]
    shards = [tensors[word].shard for word in words if word in tensors]
    if not shards and any(name in problem for name in ("config.json", METADATA, *DOCUMENTS)):
        return problem
    return f"{shards[0] if shards else 'config.json (quantization_config)'}: {problem}"


def _files(path: Path) -> tuple[dict[str, str] | None, list[str]]:
    """Find the weights: the index, if there is one, and the shards."""
    for stem in STEMS:
        single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
        if lexists(path / index):
            weights = _weight_map(path / index)
            shards = sorted(set(weights.values()))
            if lexists(path / single) and single not in shards:
                raise CheckpointError(
                    f"{path} holds both {single} and {index}.",
                    "One of them is the model; the other is left over from something else.",
                    "Remove the one that does not belong.",
                )
            return weights, shards
        if lexists(path / single):
            return None, [single]
    # of another stem (msmodelslim), or of Transformers' variant=
    indexes = [p for ending in ("", ".*") for p in path.glob(f"*.safetensors.index{ending}.json")]
    if len(indexes) == 1:
        weights = _weight_map(indexes[0])
        return weights, sorted(set(weights.values()))
    single_files = [p.name for p in path.glob("*.safetensors")]
    if len(single_files) == 1:
        return None, single_files
    raise no_weights(path)


def _is_all_of_its_folder(file: Path) -> bool:
    """Return whether a file holds all weights of its folder, and that has a config."""
    told = any(lexists(file.parent / name) for name in ("config.json", *DOCUMENTS))
    try:
        return told and _files(file.parent)[1] == [file.name]
    except CheckpointError:  # other files there are not as they should be
        return False


def _weight_map(index: Path) -> dict[str, str]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(damaged(index.name, "it has no weight_map"))
    for name, shard in weights.items():
        safe = (
            isinstance(shard, str)
            and shard.endswith(".safetensors")
            and shard.isprintable()
            and len(shard) < 256
            and PurePosixPath(shard).name == shard
            and PureWindowsPath(shard).name == shard
        )
        if not safe:
            raise CheckpointError(
                f"{index.name}: weight_map places {shown(name)} in {shown(repr(shard))}.",
                "A shard is the plain name of a .safetensors file in the same directory.",
                "Do not use this checkpoint unless you know where it comes from.",
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
