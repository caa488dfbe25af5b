"""Write an FP8 checkpoint in another dialect: the same numbers, without a model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.checkpoint.dialects import COMPRESSED_TENSORS, FBGEMM, Dialect, Spec, dialect_named
from fp8kit.checkpoint.exporting import on_disk, with_quantization
from fp8kit.checkpoint.rebasing import fall_back, weights_of
from fp8kit.checkpoint.schema import targets
from fp8kit.checkpoint.schema.naming import dense_stacks, named, standard_names
from fp8kit.checkpoint.storage.layout import MAX_SHARD_BYTES, Layout
from fp8kit.checkpoint.storage.matrices import single_experts
from fp8kit.checkpoint.storage.nvfp4 import conversion_notes
from fp8kit.checkpoint.storage.reader import Checkpoint, open_checkpoint
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.checkpoint.translated import TranslatedMatrix, Translation, fit_to_target, matrices_of
from fp8kit.errors import CheckpointError, check_choice
from fp8kit.formats import MX, ROW, TENSOR, QTensor, Scheme
from fp8kit.io.models import accepted
from fp8kit.modules.parameters import empty_tensors
from fp8kit.moe.arguments import stacked_scale
from fp8kit.quantizers.rebase import rebase

UNFIT = ("refuse", "dequantize")


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
    one at a time, those to rebase are read twice; the destination appears complete or not at all.

    Args:
        source: a directory, or a safetensors file, of any dialect this package reads.
        destination: directory to make.
        target: who will load it: ``"vllm"``, ``"sglang"`` or ``"transformers"``; by default
            ``"vllm"``, unless a dialect is named.
        dialect: name of the dialect to write, if not the target's own.
        scheme: what MX weights become, e.g. ``"FP8_DYNAMIC"``: they are rebased, which keeps nearly
            all values, and a warning counts the others. By default they stay MX; other FP8 weights
            always keep their scheme. A layer that rebasing would change by more than 1e-4 gets
            block scales, else MX with 16-bit activations, else high precision: the first that the
            target loads, and a warning names it. NVFP4 weights are quantized to ``scheme``, by
            default to FP8_DYNAMIC, and a warning states the error.
        unfit: what happens to layers that the target cannot load: ``"refuse"`` (an error), or
            ``"dequantize"`` to write them in the model's high precision. Stacks of experts that no
            engine loads (GPT-OSS) are written with a warning, as by ``fp8kit.save``.
        overwrite: replace a destination that is a checkpoint.
        max_shard_bytes: start a new file before this size is exceeded.

    Returns:
        The names of the files.

    Raises:
        TypeError: if a path or ``overwrite`` is of another type.
        ValueError: for an unknown target, dialect or ``unfit``.
        CheckpointError: if the source is damaged, in high precision, or neither MX nor of the given
            ``scheme``; if the dialect cannot hold its numbers, or the target cannot load them; or
            if the destination exists and may not be replaced.

    Example:
        >>> convert_checkpoint("modelopt-dir", "dir", target="transformers")
        ['config.json', 'model.safetensors']
    """
    remedy = "Pass what is to happen to layers that the target cannot load."
    check_choice("unfit", unfit, UNFIT, remedy)
    checkpoint = open_checkpoint(source, scheme=None if scheme is None else Scheme.of(scheme))
    held = _scheme(checkpoint)
    wanted = held if scheme is None else _wanted(checkpoint, Scheme.of(scheme))
    if target is None and dialect is None:
        target = "vllm"
    if target in targets.ENGINES:
        kind = str(checkpoint.config.get("model_type"))
        checkpoint = replace(checkpoint, tensors=single_experts(checkpoint.tensors, kind))
    if target is not None:
        checkpoint = checkpoint.for_engines()
    every = list(matrices_of(checkpoint))
    if scheme is not None:
        every = [replace(m, scheme=wanted) if m.layer.group == MX else m for m in every]
    if dialect is None:
        written = _dialect("vllm" if target is None else target, every, checkpoint)
    else:
        written = dialect_named(dialect)
    job = Translation(checkpoint, written, every)
    dense = _dense(checkpoint)
    if target is not None:
        fit_to_target(job, target, dense, unfit)
    dense += fall_back(job, target)
    spec = _spec(job, dense)
    quantization = written.render(spec)
    layout = _layout(job)
    if target == "transformers":
        quantization = accepted(checkpoint, quantization, layout)
    written_files = write_checkpoint(
        destination,
        layout,
        _tensors(job),
        config=with_quantization(
            checkpoint.config, quantization, checkpoint.dtype, targets.output_heads(spec.others)
        ),
        source=source,
        overwrite=overwrite,
        max_shard_bytes=max_shard_bytes,
    )
    assert checkpoint.spec is not None
    ignored = [said for said in checkpoint.spec.unread if " are ignored: " in said]
    for sentence in (*ignored, *conversion_notes(checkpoint.errors, wanted)):
        warnings.warn(sentence, stacklevel=2)
    return written_files


def _scheme(checkpoint: Checkpoint) -> Scheme:
    if checkpoint.announced_but_dense:
        raise CheckpointError(checkpoint.announced_but_dense)
    if checkpoint.spec is None:
        raise CheckpointError(
            f"{checkpoint.path} is in high precision.",
            "A dialect is a way to write FP8 layers.",
            "Quantize it with fp8kit quantize.",
        )
    return checkpoint.spec.scheme


def _wanted(checkpoint: Checkpoint, scheme: Scheme) -> Scheme:
    """Return the scheme that MX weights become; without MX weights, one that layers have."""
    held = {layer.scheme for layer in checkpoint.layers.values()}
    mx = any(s.weight == MX for s in held)
    if (scheme.static or scheme.rebased) if mx else scheme not in held:
        raise CheckpointError(
            f"Got scheme={scheme} for {checkpoint.path}, which is {_scheme(checkpoint)}.",
            "MX weights become FP8_DYNAMIC, FP8_BLOCK, FP8_TENSOR or FP8_WEIGHT_ONLY; others "
            "would be quantized again.",
            "Leave scheme out, or start from the original checkpoint.",
        )
    return scheme


def _dialect(target: str, matrices: Iterable[TranslatedMatrix], checkpoint: Checkpoint) -> Dialect:
    """Choose the dialect that the target loads; for several schemes, compressed-tensors."""
    schemes = {m.scheme for m in matrices}
    found = [targets.dialect_for(target, scheme, checkpoint.config) for scheme in schemes]
    return found[0] if len(found) == 1 else COMPRESSED_TENSORS


def _dense(checkpoint: Checkpoint) -> list[str]:
    """Name the high-precision matrices that engines would take for quantized linear layers."""
    found, dense = [], {}
    for name, info in checkpoint.tensors.items():
        layer, _, kind = name.rpartition(".")
        if checkpoint.is_scale(name) or layer in checkpoint.layers or name in checkpoint.layers:
            continue
        dense[name] = info.shape
        if kind == "weight" and len(info.shape) == 2 and not targets.is_embedding(layer):
            found.append(layer)
    return found + sorted(dense_stacks(dense, checkpoint.layers))


def _spec(job: Translation, dense: list[str]) -> Spec:
    assert job.checkpoint.spec is not None
    if not job.matrices:
        raise CheckpointError(
            f"No layer of {job.checkpoint.path} loads in the target.",
            "Something has to stay FP8.",
            "Name another target or scheme.",
        )
    main = targets.main_scheme(Counter(m.scheme for m in job.matrices))
    others = {m.name: m.scheme for m in job.matrices if m.scheme != main}
    heads = targets.output_heads(m.name for m in job.matrices)
    others |= {m.name: m.scheme for m in job.matrices if m.name in heads}
    cache = job.checkpoint.spec.kv_scales
    targets.check_cache(job.dialect, cache)
    bound = job.checkpoint.spec.scale_ub
    if bound is not None and job.dialect is not FBGEMM:
        warnings.warn(
            f"activation_scale_ub = {bound} is not kept: {job.dialect.name} has no bound on "
            "activations.",
            stacklevel=3,
        )
    return Spec(main, tuple(sorted(set(dense))), (), others, cache, bound)


def _layout(job: Translation) -> Layout:
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, tensor in _empty_tensors(job):
        if name in layout:
            raise CheckpointError(
                f"Two tensors of {job.checkpoint.path} would be called {name}.",
                "Experts are written one by one, under names that were free.",
                "Keep this checkpoint as it is, or start from the original one.",
            )
        layout[name] = (tensor.dtype, tuple(tensor.shape))
    return layout


def _empty_tensors(job: Translation) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the result on meta, without data."""
    checkpoint = job.checkpoint
    with torch.device("meta"):
        for name in _plain(checkpoint):
            info = checkpoint.tensors[name]
            yield name, torch.empty(info.shape, dtype=info.dtype)
        for name in checkpoint.kv_scales:
            shape = checkpoint.tensors[name].shape
            yield _cache_scale(job, name, torch.empty(shape if len(shape) == 3 else (1,)))
        for m in job.matrices:
            for kind, empty in empty_tensors(m.held, m.scheme, "meta").items():
                yield _renamed(job, m, kind, empty)
            if m.scheme.static:
                yield _renamed(job, m, "input_scale", torch.empty(1, 1))
        for m in job.unfit:
            yield _dense_weight(m, torch.empty(m.held, dtype=checkpoint.dtype))


def _tensors(job: Translation) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the result, layer by layer; a stack is read once."""
    checkpoint = job.checkpoint
    for name in _plain(checkpoint):
        yield name, checkpoint.read(name)
    for name in checkpoint.kv_scales:
        yield _cache_scale(job, name, checkpoint.read(name))
    unfit = {m.name for m in job.unfit}
    for m, q in weights_of(checkpoint, (*job.matrices, *job.unfit)):
        if m.name in unfit:
            yield _dense_weight(m, functional.dequantize(q, checkpoint.dtype))
            continue
        part = _part(m, q)
        yield _renamed(job, m, "weight", part.data)
        yield _renamed(job, m, "weight_scale", part.scale)
        if m.layer.input_scale is not None and m.scheme.static:
            inputs = checkpoint.read(m.layer.input_scale)
            one = inputs[m.expert if len(inputs) > 1 else 0].reshape(1, 1)
            yield _renamed(job, m, "input_scale", one)


def _part(m: TranslatedMatrix, q: QTensor) -> QTensor:
    """Return a matrix with scales of the granularity of its scheme."""
    if q.group == MX and m.scheme.weight != MX:
        found = rebase(q, m.scheme.weight).q
        scale = stacked_scale(found).contiguous() if m.whole else found.scale
        return QTensor(found.data, scale, m.scheme.weight)
    if (q.group, m.scheme.weight) == (ROW, TENSOR):  # reading a stack repeated its scale per row
        return QTensor(q.data, q.scale[:1], TENSOR)
    if (q.group, m.scheme.weight) == (TENSOR, ROW):
        return QTensor(q.data, q.scale.expand(len(q.data), 1).contiguous(), ROW)
    return q


def _renamed(
    job: Translation, m: TranslatedMatrix, kind: str, tensor: Tensor
) -> tuple[str, Tensor]:
    name = standard_names(m.name, m.whole)[kind]
    return on_disk(name, tensor.contiguous(), job.dialect, m.scheme)


def _dense_weight(m: TranslatedMatrix, tensor: Tensor) -> tuple[str, Tensor]:
    """Return a decoded weight under its name; a stack is transposed as its model holds it."""
    if not m.whole:
        return named(m.name, "weight"), tensor
    return m.name, tensor.transpose(1, 2).contiguous() if m.layer.transposed else tensor


def _plain(checkpoint: Checkpoint) -> list[str]:
    owned = {layer.weight for layer in checkpoint.layers.values()}
    return [n for n in checkpoint.tensors if n not in owned and not checkpoint.is_scale(n)]


def _cache_scale(job: Translation, name: str, scale: Tensor) -> tuple[str, Tensor]:
    return name, scale.reshape(job.dialect.tensor_scale) if scale.dim() == 1 else scale
