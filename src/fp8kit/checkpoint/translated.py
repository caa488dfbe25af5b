"""The matrices of a checkpoint to write in another dialect, made to fit what will load them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fp8kit.checkpoint.dialects import Dialect, JsonObject
from fp8kit.checkpoint.loading.merged_weights import joined_scheme
from fp8kit.checkpoint.quantization_config import refuse_unloadable, warn_of_stacks
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import engine_name, experts_of, named
from fp8kit.checkpoint.schema.targets import check_layers, loads_stacks_alone, misfit
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.model_families import JOINED
from fp8kit.errors import CheckpointError
from fp8kit.formats import MX, SCHEMES, Scheme

_EQUAL = 1e-5
# the halves of a stack that holds two projections, in the order of their rows
_HALVES = {name: JOINED[name][0] for name in ("gate_up_proj", "w13")}
_EXPERT = re.compile(r".*experts\.\d+\.(gate_proj|up_proj|down_proj|w[123])")


@dataclass(frozen=True, slots=True)
class TranslatedMatrix:
    """One weight of the result: a layer, one expert's rows of a stack, or a whole stack.

    It is rows ``first`` to ``last`` (exclusive) of ``layer`` in the source, written as ``scheme``;
    ``expert`` is the index in the stack, -1 for a layer or a whole stack.
    """

    name: str
    scheme: Scheme
    layer: Layer
    first: int
    last: int
    expert: int = -1

    @property
    def whole(self) -> bool:
        """Whether it is a stack that is not split."""
        return self.expert < 0 and len(self.layer.shape) == 3

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.last - self.first, self.layer.shape[-1]

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of the codes on disk."""
        return self.layer.shape if self.whole else self.shape


@dataclass(slots=True)
class Translation:
    """What a conversion to another dialect writes.

    ``matrices`` stay FP8; those in ``unfit`` are decoded, because the target cannot load them.
    """

    checkpoint: Checkpoint
    dialect: Dialect
    matrices: list[TranslatedMatrix]
    unfit: list[TranslatedMatrix] = field(default_factory=list)


def matrices_of(checkpoint: Checkpoint) -> Iterator[TranslatedMatrix]:
    """Yield the weights of the result, experts one by one."""
    model_type = str(checkpoint.config.get("model_type"))
    for layer in checkpoint.layers.values():
        single = len(layer.shape) == 2
        if model_type == "gpt_oss" and experts_of(layer.name) and (single or layer.group != MX):
            raise CheckpointError(
                f"{layer.name} is an FP8 expert of GPT-OSS, or a stack of them.",
                "No dialect that is written here holds them for an engine: they have biases.",
                "Keep this checkpoint as it is, or quantize the original, its experts excluded.",
            )
        if single or model_type == "gpt_oss":
            yield TranslatedMatrix(layer.name, layer.scheme, layer, 0, layer.shape[-2])
            continue
        parent, _, last = layer.name.rpartition(".")
        parts = (last,) if layer.shape[1] % 2 else _HALVES.get(last, (last,))
        rows, scheme = layer.shape[1] // len(parts), layer.scheme
        if checkpoint.tensors[layer.scale].shape == (layer.shape[0], 2) and len(parts) == 1:
            scheme = joined_scheme(scheme)  # gate and up have scales, but no names of their own
        for expert in range(layer.shape[0]):
            for i, part in enumerate(parts):
                name = engine_name(named(parent, f"{expert}.{part}"), model_type)
                yield TranslatedMatrix(name, scheme, layer, i * rows, (i + 1) * rows, expert)


def fit_to_target(job: Translation, target: str, dense: list[str], unfit: str) -> None:
    """Change, decode or refuse matrices that a target does not load as they are.

    Names of layers that are decoded are added to ``dense``; ``unfit`` is as in
    ``convert_checkpoint``. Raises ``CheckpointError`` for what the target cannot load.
    """
    assert job.checkpoint.dialect is not None
    if job.checkpoint.dialect.name == "mistral":
        raise CheckpointError(
            f"{job.checkpoint.path} has Mistral's own names of layers.",
            f"{target} expects those of Transformers in a checkpoint with config.json.",
            "Use the repository's model.safetensors files, or name a dialect instead.",
        )
    _give_experts_scales_by_row(job, target)
    if loads_stacks_alone(str(job.checkpoint.config.get("model_type")), job.dialect):
        found = [m.name for m in job.matrices if experts_of(m.name) and not m.whole]
        refuse_unloadable(found, target)
    if unfit == "dequantize":
        _decode_unfit(job, target, dense)
    else:
        stacks = [m.name for m in job.matrices if m.whole]
        refuse_unloadable(stacks, target)
        warn_of_stacks(stacks)
    given: JsonObject = {"dialect": job.dialect, "config": job.checkpoint.config}
    for scheme in {m.scheme for m in job.matrices}:
        shapes = {m.name: m.shape for m in job.matrices if m.scheme == scheme and not m.whole}
        others = {m.name: m.scheme for m in job.matrices if m.scheme != scheme}
        check_layers(target, scheme, shapes, dense, others=others, **given)
    if job.dialect.name == "compressed-tensors" and target == "vllm":
        _check_input_scales(job)
    single = [m.name for m in job.matrices if m.expert >= 0 or (experts_of(m.name) and not m.whole)]
    odd = [name for name in single if not _EXPERT.fullmatch(name)]
    if odd:
        warnings.warn(
            f"{odd[0]} and {len(odd) - 1} more layers of experts have names that no engine is "
            f"known to load; they are written as they are.",
            stacklevel=3,
        )


def _give_experts_scales_by_row(job: Translation, target: str) -> None:
    """Give experts that have one scale and dynamic activations scales per row, for engines.

    Engines load them in no other form, except in the dialects of AutoFP8.
    """
    experts = any(m.expert >= 0 or ".experts." in m.name for m in job.matrices)
    if experts and target != "transformers" and not job.dialect.name.startswith("autofp8"):
        for i, m in enumerate(job.matrices):
            if m.scheme == SCHEMES["FP8_TENSOR"]:
                job.matrices[i] = replace(m, scheme=joined_scheme(m.scheme))


def _decode_unfit(job: Translation, target: str, dense: list[str]) -> None:
    """Move the matrices that a target cannot load to ``unfit``, and their names to ``dense``."""
    every, job.matrices = job.matrices, []
    names = {*dense, *(m.name for m in every)}
    for m in every:
        fits = not m.whole and not misfit(target, m.scheme, m.name, m.shape, names)
        (job.matrices if fits else job.unfit).append(m)
    dense += [m.name for m in job.unfit]


def _check_input_scales(job: Translation) -> None:
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
                f"{other} has the input scale {theirs:.6g}, and {m.name} {scale:.6g}.",
                "vllm merges them and needs one scale in compressed-tensors.",
                "Write dialect autofp8, which takes the larger one.",
            )
