"""Write an FP8 checkpoint again in another dialect: the same numbers, without a model."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.checkpoint.dialects import FBGEMM, Dialect, Spec, dialect_named, scheme_of
from fp8kit.checkpoint.exporting import on_disk, with_quantization
from fp8kit.checkpoint.loading.merged_weights import Fp8Weight, joined_scheme, rows_of
from fp8kit.checkpoint.schema.decoding import check_codes
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import (
    dense_stacks,
    engine_name,
    experts_of,
    named,
    standard_names,
)
from fp8kit.checkpoint.schema.targets import (
    check_cache,
    check_layers,
    dialect_for,
    is_embedding,
    misfit,
    output_heads,
)
from fp8kit.checkpoint.storage.nvfp4 import told
from fp8kit.checkpoint.storage.reader import Checkpoint, open_checkpoint
from fp8kit.checkpoint.storage.writer import MAX_SHARD_BYTES, Layout, write_checkpoint
from fp8kit.conversion.model_families import JOINED
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import (
    MX,
    ROW,
    SCHEMES,
    TENSOR,
    QTensor,
    Scheme,
    scale_dtype,
    stack_scale_shape,
)
from fp8kit.modules.mx_forms import LARGEST_CHANGE
from fp8kit.moe.arguments import stacked_scale
from fp8kit.quantizers.rebase import rebase

_EQUAL = 1e-5
UNFIT = ("refuse", "dequantize")
# the halves of a stack that holds two projections, in the order of their rows
_HALVES = {name: JOINED[name][0] for name in ("gate_up_proj", "w13")}
_ALL_EXPERTS = r"re:.*\bexperts\.\d+\..*"
_EXPERT = re.compile(r".*experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One weight of the result: a layer of the source, a slice of a stack of experts, or all."""

    name: str
    scheme: Scheme
    layer: Layer
    first: int
    last: int
    expert: int = -1

    @property
    def whole(self) -> bool:
        """Whether it is a stack that is not cut."""
        return self.expert < 0 and len(self.layer.shape) == 3

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.layer.shape[-1]

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the codes on disk."""
        return self.layer.shape if self.whole else self.shape


@dataclass(slots=True)
class _Translation:
    checkpoint: Checkpoint
    dialect: Dialect
    matrices: list[_Matrix]
    unfit: list[_Matrix] = field(default_factory=list)
    apart: set[_Matrix] = field(default_factory=set)  # experts with a scheme of their own


def convert_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    target: str | None = None,
    dialect: str | None = None,
    scheme: Scheme | str | None = None,
    unfit: str = "refuse",
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write an FP8 or MXFP4 checkpoint in another dialect, without quantizing anything again.

    Codes and scales keep their bits; stacks of experts become one matrix per expert, and one scale
    per tensor becomes one per row where the target needs it. Tensors are read, renamed and written
    one at a time; the destination appears complete or not at all.

    Args:
        source: a directory, or a safetensors file, of any dialect this package reads.
        destination: directory to make.
        target: who shall load it: ``"vllm"``, ``"sglang"`` or ``"transformers"``; by default
            ``"vllm"``, unless a dialect is named.
        dialect: name of the dialect to write, if not the target's own.
        scheme: what MX weights become, e.g. ``"FP8_DYNAMIC"``: they are rebased, which keeps nearly
            all values; by default they stay MX. NVFP4 weights are quantized to it, by default to
            FP8_DYNAMIC, and a warning tells the error.
        unfit: what happens to layers that the target cannot load: ``"refuse"``, or
            ``"dequantize"`` to write them in the model's high precision.
        overwrite: replace a destination that is a checkpoint.
        max_shard_bytes: start a new file before this size is exceeded.

    Returns:
        The names of the files.

    Raises:
        ValueError: for an unknown target, dialect or ``unfit``.
        CheckpointError: if the source is damaged, in high precision, or not MX and given a scheme,
            if the numbers do not go
            into the dialect, if the target cannot load them, or if the destination is in the way.

    Example:
        >>> convert_checkpoint("modelopt-dir", "dir", target="transformers")
        ['config.json', 'model.safetensors']
    """
    if unfit not in UNFIT:
        raise ValueError(
            teach(
                f"Got unfit={unfit!r}.",
                f"It is one of {', '.join(UNFIT)}.",
                "Pass what shall happen to layers that the target cannot load.",
            )
        )
    checkpoint = open_checkpoint(source, scheme=None if scheme is None else Scheme.of(scheme))
    held = _scheme(checkpoint)
    wanted = held if scheme is None else _rebased_scheme(checkpoint, Scheme.of(scheme))
    if target is None and dialect is None:
        target = "vllm"
    if target is not None:
        checkpoint = checkpoint.for_engines()
    written = dialect_named(dialect) if dialect else dialect_for(target or "vllm", wanted)
    every = (replace(m, scheme=wanted) if m.scheme == held else m for m in _matrices(checkpoint))
    job = _Translation(checkpoint, written, list(every))
    dense = _dense(checkpoint)
    if target is not None:
        _check_target(job, target, dense, unfit)
    spec = _spec(job, dense)
    quantization = written.render(spec)
    layout = _layout(job)
    written_files = write_checkpoint(
        destination,
        layout,
        _stream(job),
        config=with_quantization(checkpoint.config, quantization, checkpoint.dtype),
        source=source,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )
    for sentence in told(checkpoint.errors, wanted):
        warnings.warn(sentence, stacklevel=2)
    return written_files


def _scheme(checkpoint: Checkpoint) -> Scheme:
    if checkpoint.spec is None or not checkpoint.layers:
        raise CheckpointError(
            teach(
                f"{checkpoint.path} is in high precision.",
                "A dialect is a way to write FP8 layers.",
                "Quantize it with fp8kit quantize.",
            )
        )
    return checkpoint.spec.scheme


def _rebased_scheme(checkpoint: Checkpoint, scheme: Scheme) -> Scheme:
    assert checkpoint.spec is not None
    held = checkpoint.spec.scheme
    if scheme != held and (held.weight != MX or scheme.static or scheme.rebased):
        raise CheckpointError(
            teach(
                f"Got scheme={scheme} for {checkpoint.path}, which is {held}.",
                "MX weights become FP8_DYNAMIC, FP8_BLOCK, FP8_TENSOR or FP8_WEIGHT_ONLY; others "
                "would be quantized again.",
                "Leave scheme out, or start from the original checkpoint.",
            )
        )
    return scheme


def _matrices(checkpoint: Checkpoint) -> Iterator[_Matrix]:
    """List what is written, experts one by one."""
    for layer in checkpoint.layers.values():
        if len(layer.shape) == 2:
            yield _Matrix(layer.name, layer.scheme, layer, 0, layer.shape[0])
            continue
        if str(checkpoint.config.get("model_type")) == "gpt_oss":
            if layer.group != MX:
                raise _interleaved(layer.name, "Keep this checkpoint as it is.")
            yield _Matrix(layer.name, layer.scheme, layer, 0, layer.shape[1])
            continue
        parent, _, last = layer.name.rpartition(".")
        parts = _HALVES.get(last, (last,))
        rows = layer.shape[1] // len(parts)
        for expert in range(layer.shape[0]):
            for i, part in enumerate(parts):
                name = engine_name(
                    named(parent, f"{expert}.{part}"), str(checkpoint.config.get("model_type"))
                )
                yield _Matrix(name, layer.scheme, layer, i * rows, (i + 1) * rows, expert)


def _interleaved(name: str, remedy: str) -> CheckpointError:
    return CheckpointError(
        teach(
            f"{name} interleaves the rows of two projections (GPT-OSS).",
            "No engine loads such experts in FP8 by a dialect that is written here.",
            remedy,
        )
    )


def _check_target(job: _Translation, target: str, dense: list[str], unfit: str) -> None:
    assert job.checkpoint.dialect is not None
    if job.checkpoint.dialect.name == "mistral":
        raise CheckpointError(
            teach(
                f"{job.checkpoint.path} has Mistral's own names of layers.",
                f"{target} expects those of Transformers in a checkpoint with config.json.",
                "Use the repository's model.safetensors files, or name a dialect instead.",
            )
        )
    experts = any(m.expert >= 0 or ".experts." in m.name for m in job.matrices)
    if experts and target != "transformers" and not job.dialect.name.startswith("autofp8"):
        # engines have no experts of one scale with dynamic activations, but the same by rows
        for i, m in enumerate(job.matrices):
            if m.scheme == SCHEMES["FP8_TENSOR"]:
                job.matrices[i] = replace(m, scheme=joined_scheme(m.scheme))
    stacks = [m for m in job.matrices if m.whole]
    if stacks and unfit == "refuse":
        raise _interleaved(
            stacks[0].name,
            "Pass unfit='dequantize' to write them in high precision, or a dialect instead of a "
            "target for stacks of codes, which fp8kit.load reads.",
        )
    if unfit == "dequantize":
        every, job.matrices = job.matrices, []
        for m in every:
            fits = not m.whole and not misfit(target, m.scheme, m.name, m.shape)
            (job.matrices if fits else job.unfit).append(m)
        dense += [m.name for m in job.unfit]
    for scheme in {m.scheme for m in job.matrices}:
        shapes = {m.name: m.shape for m in job.matrices if m.scheme == scheme}
        check_layers(target, scheme, shapes, dense, dialect=job.dialect)
    if job.dialect.name == "compressed-tensors":
        if target == "vllm":
            _check_input_scales(job)
        if target == "transformers":
            _drop_input_scales(job)
    odd = [m.name for m in job.matrices if experts_of(m.name) and not _EXPERT.fullmatch(m.name)]
    if odd:
        warnings.warn(
            f"{odd[0]} and {len(odd) - 1} more layers of experts have names that no engine is "
            f"known to load; they are written as they are.",
            stacklevel=3,
        )


def _drop_input_scales(job: _Translation) -> None:
    """Leave out the input scales of experts, which Transformers runs in high precision."""
    experts = [m for m in job.matrices if experts_of(m.name) and m.scheme.static]
    if not experts:
        return
    left = [m for m in job.matrices if m not in set(experts)]
    job.apart = {replace(m, scheme=scheme_of(m.scheme.weight, None)) for m in experts}
    job.matrices = sorted((*left, *job.apart), key=lambda m: m.name)
    warnings.warn(
        f"The input scales of {len(experts)} experts, e.g. {experts[0].name}, are left out: "
        "Transformers merges experts, and does not quantize what goes into them.",
        stacklevel=4,
    )


def _check_input_scales(job: _Translation) -> None:
    """Refuse experts whose gate and up projection differ in their input scale, as vLLM does."""
    halves = {name: first for first, second in _HALVES.values() for name in (first, second)}
    scales: dict[str, tuple[str, float]] = {}
    for m in job.matrices:
        parent, _, last = m.name.rpartition(".")
        if m.layer.input_scale is None or last not in halves or ".experts." not in m.name:
            continue
        held = job.checkpoint.read(m.layer.input_scale).flatten()
        scale = held[m.expert if len(held) > 1 else 0].item()
        other, theirs = scales.setdefault(f"{parent}.{halves[last]}", (m.name, scale))
        if abs(scale - theirs) > _EQUAL:
            raise CheckpointError(
                teach(
                    f"{other} has the input scale {theirs:.6g}, and {m.name} {scale:.6g}.",
                    "vllm merges them and needs one scale in compressed-tensors.",
                    "Write dialect autofp8, which takes the larger one.",
                )
            )


def _dense(checkpoint: Checkpoint) -> list[str]:
    """Name the matrices in high precision that engines would take for quantized linear layers."""
    found, dense = [], {}
    for name, info in checkpoint.tensors.items():
        layer, _, kind = name.rpartition(".")
        if checkpoint.is_scale(name) or layer in checkpoint.layers or name in checkpoint.layers:
            continue
        dense[name] = info.shape
        if kind == "weight" and len(info.shape) == 2 and not is_embedding(layer):
            found.append(layer)
    return found + sorted(dense_stacks(dense, checkpoint.layers))


def _spec(job: _Translation, dense: list[str]) -> Spec:
    assert job.checkpoint.spec is not None
    if not job.matrices:
        raise CheckpointError(
            teach(
                f"No layer of {job.checkpoint.path} loads in the target.",
                "Something has to stay FP8.",
                "Name another target.",
            )
        )
    apart = [m for m in job.matrices if m in job.apart]
    schemes = Counter(m.scheme for m in job.matrices if m not in job.apart)
    main = (schemes or Counter(m.scheme for m in apart)).most_common(1)[0][0]
    others = {m.name: m.scheme for m in job.matrices if m.scheme != main and m not in job.apart}
    if apart and apart[0].scheme != main:
        others[_ALL_EXPERTS] = apart[0].scheme
    heads = output_heads(m.name for m in job.matrices)
    others |= {m.name: m.scheme for m in job.matrices if m.name in heads}
    cache = job.checkpoint.spec.kv_scales
    check_cache(job.dialect, cache)
    bound = job.checkpoint.spec.scale_ub
    if bound is not None and job.dialect is not FBGEMM:
        warnings.warn(
            f"activation_scale_ub = {bound} is not kept: {job.dialect.name} has no bound on "
            "activations.",
            stacklevel=3,
        )
    return Spec(main, tuple(sorted(set(dense))), (), others, cache, bound)


def _layout(job: _Translation) -> Layout:
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in _announced(job):
        if name in layout:
            raise CheckpointError(
                teach(
                    f"Two tensors of {job.checkpoint.path} would be called {name}.",
                    "Experts are written one by one, under names that were free.",
                    "Keep this checkpoint as it is, or start from the original one.",
                )
            )
        layout[name] = (tensor.dtype, tuple(tensor.shape))
    return layout


def _announced(job: _Translation) -> Iterator[tuple[str, Tensor]]:
    """Return all tensors of the result without data."""
    checkpoint = job.checkpoint
    with torch.device("meta"):
        for name in _plain(checkpoint):
            info = checkpoint.tensors[name]
            yield name, torch.empty(info.shape, dtype=info.dtype)
        for name in checkpoint.kv_scales:
            yield _cache_scale(job, name, torch.empty(_cache_shape(checkpoint, name)))
        for m in job.matrices:
            group = m.scheme.weight
            codes = torch.empty(m.held, dtype=torch.float8_e4m3fn)
            scale = torch.empty(stack_scale_shape(m.held, group), dtype=scale_dtype(group))
            yield _renamed(job, m, "weight", codes)
            yield _renamed(job, m, "weight_scale", scale)
            if m.scheme.static:
                yield _renamed(job, m, "input_scale", torch.empty(1, 1))
        for m in job.unfit:
            yield _dense_weight(m, torch.empty(m.held, dtype=checkpoint.dtype))


def _stream(job: _Translation) -> Iterator[tuple[str, Tensor]]:
    """Return all tensors of the result, layer by layer; a stack is read once."""
    checkpoint = job.checkpoint
    for name in _plain(checkpoint):
        yield name, checkpoint.read(name)
    for name in checkpoint.kv_scales:
        yield _cache_scale(job, name, checkpoint.read(name))
    unfit = {m.name for m in job.unfit}
    by_layer: dict[str, list[_Matrix]] = {}
    for m in (*job.matrices, *job.unfit):
        by_layer.setdefault(m.layer.name, []).append(m)
    for matrices in by_layer.values():
        layer = matrices[0].layer
        codes, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
        check_codes(codes, f"{checkpoint.tensors[layer.weight].shard}: {layer.weight}")
        inputs = checkpoint.read(layer.input_scale) if layer.input_scale else None
        for m in matrices:
            part = _part(m, codes, scale)
            if m.name in unfit:
                yield _dense_weight(m, functional.dequantize(part, checkpoint.dtype))
                continue
            yield _renamed(job, m, "weight", part.data)
            yield _renamed(job, m, "weight_scale", part.scale)
            if inputs is not None and m.scheme.static:
                one = inputs[m.expert if len(inputs) > 1 else 0].reshape(1, 1)
                yield _renamed(job, m, "input_scale", one)


def _part(m: _Matrix, codes: Tensor, scale: Tensor) -> QTensor:
    """Cut one matrix out of a layer, with scales as fine as its scheme has them."""
    stacked = m.expert >= 0
    whole = QTensor(
        codes[m.expert] if stacked else codes, scale[m.expert] if stacked else scale, m.layer.group
    )
    q = whole if m.whole else rows_of(Fp8Weight(whole), m.first, m.last, m.name).q
    if q.group == MX and m.scheme.weight != MX:
        found = rebase(q, m.scheme.weight)
        if found.largest_change > LARGEST_CHANGE:
            warnings.warn(
                f"{m.name}: one power of two per {m.scheme.weight} changed {found.changed} of "
                f"{q.data.numel()} values, by {found.largest_change:.1e} at most.",
                stacklevel=2,
            )
        scale = stacked_scale(found.q).contiguous() if m.whole else found.q.scale
        return QTensor(found.q.data, scale, m.scheme.weight)
    if (q.group, m.scheme.weight) == (ROW, TENSOR):  # spread over the rows of a stack when read
        return QTensor(q.data, q.scale[:1], TENSOR)
    if (q.group, m.scheme.weight) == (TENSOR, ROW):
        return QTensor(q.data, q.scale.expand(len(q.data), 1).contiguous(), ROW)
    return q


def _renamed(job: _Translation, m: _Matrix, kind: str, tensor: Tensor) -> tuple[str, Tensor]:
    name = standard_names(m.name, m.whole)[kind]
    return on_disk(name, tensor.contiguous(), job.dialect, m.scheme)


def _dense_weight(m: _Matrix, tensor: Tensor) -> tuple[str, Tensor]:
    """Name a weight in high precision; a stack is turned as its model holds it."""
    if not m.whole:
        return named(m.name, "weight"), tensor
    return m.name, tensor.transpose(1, 2).contiguous() if m.layer.transposed else tensor


def _plain(checkpoint: Checkpoint) -> list[str]:
    owned = {layer.weight for layer in checkpoint.layers.values()}
    return [n for n in checkpoint.tensors if n not in owned and not checkpoint.is_scale(n)]


def _cache_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    shape = checkpoint.tensors[name].shape
    return shape if len(shape) == 3 else (1,)


def _cache_scale(job: _Translation, name: str, scale: Tensor) -> tuple[str, Tensor]:
    return name, scale.reshape(job.dialect.tensor_scale) if scale.dim() == 1 else scale
