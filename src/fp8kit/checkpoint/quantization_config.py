"""Announce what the FP8 layers of a module are: the quantization config of its checkpoint."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8kit.checkpoint import exporting
from fp8kit.checkpoint.cache_scales import held_cache_scales
from fp8kit.checkpoint.dialects import COMPRESSED_TENSORS, FBGEMM, Dialect, JsonObject, Spec
from fp8kit.checkpoint.expert_splitting import stacks_in
from fp8kit.checkpoint.schema import targets
from fp8kit.checkpoint.schema.naming import cache_strategy
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import Scheme
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear


@dataclass(frozen=True, slots=True)
class Announced:
    """How the FP8 layers of a module are written.

    ``main`` is announced for linear layers in general; ``schemes`` has the scheme of each layer,
    under its names in module and checkpoint. ``kv_scales`` and ``scale_ub`` are as in ``Spec``.
    """

    dialect: Dialect
    dtype: torch.dtype
    main: Scheme
    schemes: Mapping[str, Scheme]
    heads: Sequence[str]
    kv_scales: str
    scale_ub: float | None

    def config(self, ignore: Sequence[str]) -> JsonObject:
        """Return the ``quantization_config``; ``ignore`` has names or patterns of dense layers."""
        others = {n: s for n, s in self.schemes.items() if s != self.main}
        others |= {n: self.schemes[n] for n in self.heads}
        spec = Spec(self.main, tuple(ignore), (), others, self.kv_scales, self.scale_ub)
        return self.dialect.render(spec)

    def on_disk(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Return a tensor of the module under its name and in its shape on disk."""
        scheme = self.schemes.get(name.rpartition(".")[0], self.main)
        return exporting.on_disk(name, tensor, self.dialect, scheme)


def refuse_unloadable(names: Sequence[str], target: str) -> None:
    """Refuse experts that Transformers would only warn about and initialize at random."""
    if names and target == "transformers":
        raise CheckpointError(
            f"{some_of(names)} are FP8 experts.",
            "Transformers has no rule to load these: it would draw them at random.",
            "Write for target='vllm', which fp8kit.save does by default and fp8kit.load reads, "
            "or leave these experts in high precision.",
        )


def warn_of_stacks(names: Sequence[str]) -> None:
    """Warn about stacks of experts that are written whole: only ``fp8kit.load`` reads them."""
    if names:
        warnings.warn(
            f"{some_of(names)} are written as stacks of codes, which fp8kit.load reads and no "
            "engine is known to: they have other names than gate_up_proj, up_proj and down_proj, "
            "biases, gates that alternate with ups, a gate of their own, or blocks that reach from "
            "gates into ups. For an engine, exclude these experts when converting; "
            "convert_checkpoint writes them dense with unfit='dequantize'.",
            stacklevel=4,
        )


def announce(
    model: nn.Module, exported: exporting.Exported, target: str, dialect: Dialect | None = None
) -> Announced:
    """Decide how the FP8 layers of a module are written for a target.

    Layers of one scheme are written in its dialect, of several in compressed-tensors, and those
    with a ``scale_ub`` in fbgemm, which alone has such a bound. Raises ``CheckpointError`` if there
    are no FP8 layers, they differ in dtype or bound, have adapters, or the target cannot load them.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    stacked = {n: m for n, m in model.named_modules() if isinstance(m, ExpertTensors)}
    every: list[Fp8Linear | ExpertTensors] = [*layers.values(), *stacked.values()]
    dtypes = sorted({str(m.compute_dtype) for m in every})
    if len(dtypes) != 1:
        raise CheckpointError(
            f"The model holds FP8 layers that compute in {' and '.join(dtypes)}."
            if every
            else "The model holds no FP8 layers.",
            "An FP8 checkpoint has FP8 layers, all with one compute dtype.",
            "Cast the model to one dtype." if every else "Call fp8kit.convert(model) first.",
        )
    exporting.refuse_adapters(
        layers,
        "Save the adapter with PeftModel.save_pretrained, and the base model before the adapter "
        "is attached, or after PeftModel.unload().",
    )
    exporting.refuse_transposed(layers)
    kinds = {n: m.scheme.stored for n, m in layers.items()}
    counts = Counter(kinds.values())
    counts.update(layer.scheme for layer in exported.experts.values())
    counts.update(m.scheme.stored for m in stacked.values())
    main = targets.main_scheme(counts)
    bound = _bound(layers, dialect)
    model_type = str(exported.config.get("model_type"))
    if dialect is None:
        dialect = targets.dialect_for(target, main, exported.config)
        dialect = dialect if len(counts) == 1 else COMPRESSED_TENSORS
        dialect = dialect if bound is None else FBGEMM
    held = {n: (kinds[n], (m.out_features, m.in_features)) for n, m in layers.items()}
    for name, one in exported.experts.items():
        held[name] = one.scheme, (one.weight.shape[0], one.weight.shape[1])
    dense = exporting.dense_linears(model)
    targets.check_dense_stacks(
        exporting.unquantized_stacks(exported.tensors), model_type, target, dialect
    )
    given: JsonObject = {"dialect": dialect, "config": exported.config}
    for scheme in counts:
        targets.dialect_for(target, scheme, exported.config)
        shapes = {n: shape for n, (s, shape) in held.items() if s == scheme}
        others = {n: s for n, (s, _) in held.items() if s != scheme}
        targets.check_layers(target, scheme, shapes, dense, others=others, **given)
    stored = {t.data_ptr(): n for n, t in exported.tensors.items()}
    schemes = {n: one.scheme for n, one in exported.experts.items()}
    schemes |= {name: m.scheme.stored for name, (m, _) in stacks_in(model).items()}
    for name, layer in layers.items():
        found = stored.get(layer.weight.data_ptr(), f"{name}.weight")
        schemes |= dict.fromkeys((name, found.removesuffix(".weight")), kinds[name])
    dtype = every[0].compute_dtype
    cache = cache_strategy(tuple(t.shape) for t in held_cache_scales(model).values())
    targets.check_cache(dialect, cache)
    return Announced(dialect, dtype, main, schemes, targets.output_heads(layers), cache, bound)


def _bound(layers: Mapping[str, Fp8Linear], dialect: Dialect | None) -> float | None:
    """Return the ``scale_ub`` that all layers share; ``None`` if no layer has one."""
    bounds = {layer.scale_ub for layer in layers.values()} or {None}
    if len(bounds) > 1 or (bounds != {None} and dialect not in (None, FBGEMM)):
        found = ", ".join(sorted(map(str, bounds)))
        raise CheckpointError(
            f"Layers have scale_ub = {found}{f', to write as {dialect.name}' if dialect else ''}.",
            "A checkpoint has one bound on activations for all of them, in dialect fbgemm.",
            "Set one scale_ub, or None, on every Fp8Linear before saving.",
        )
    return bounds.pop()
