"""Try whether Transformers' loader takes a checkpoint before it is written: on meta, no data."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer

from fp8kit.checkpoint.dialects import JsonObject, Kinds
from fp8kit.checkpoint.schema.naming import experts_of, sort_names
from fp8kit.errors import CheckpointError, some_of

_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert")
_METHODS = ("compressed-tensors", "fp8", "mxfp8")
_SCALES = ("_scale", "_scale_inv")
_COMPRESSING = "compressed_tensors.compressors.model_compressors.model_compressor"


def accepted(build: Callable[[], Any], quantization: JsonObject, kinds: Kinds) -> JsonObject:
    """Return the quantization config with which Transformers loads the tensors ``kinds``.

    ``build`` makes a new dense model on meta at each call, which Transformers' loader fills. Layers
    that config groups name as in files get their names in the model, too. Modules that Transformers
    would make FP8 without scales are added to the ignored ones. Raises ``CheckpointError`` if
    Transformers would stop, lose FP8 tensors, or initialize some at random.
    """
    if quantization.get("quant_method") not in _METHODS:
        return quantization
    try:
        model = build()
    except Exception as error:  # of many kinds, by model and version
        return _unchecked(quantization, error)
    if "config_groups" in quantization:
        quantization = quantization | {"config_groups": _groups_in(model, quantization)}
    try:
        found = _try(model, quantization, kinds)
        if dense := found.dense():
            quantization = dict(quantization)
            for key in _IGNORED:
                if key in quantization:
                    quantization[key] = sorted({*quantization[key], *dense})
            found = _try(build(), quantization, kinds)
    except (ImportError, TypeError) as error:  # a library is missing, or of another version
        return _unchecked(quantization, error)
    found.check()
    return quantization


def _groups_in(model: Any, quantization: JsonObject) -> JsonObject:
    """Return the config groups of compressed-tensors, with layers' names in the model added."""
    groups: JsonObject = copy.deepcopy(quantization["config_groups"])
    modules = {n for n, _ in model.named_modules()}
    rules = get_model_conversion_mapping(model)
    for group in groups.values():
        weights = [f"{t}.weight" for t in group["targets"] if not t.isidentifier()]
        places = (place for place, _ in renamed(model, rules, weights).values())
        inside = {place.removesuffix(".weight") for place in places} & modules
        group["targets"] = sorted({*group["targets"], *inside})
    return groups


def accepted_of(
    model: Any, quantization: JsonObject, kinds: Kinds, dtype: torch.dtype
) -> JsonObject:
    """Do as ``accepted`` for a model in memory, which is built anew from its config."""

    def build() -> Any:
        config = copy.deepcopy(model.config)
        for part in (config, config.get_text_config()):
            part.__dict__.pop("quantization_config", None)
        with torch.device("meta"):
            made = type(model)._from_config(config, dtype=dtype)
        made.tie_weights()
        return made

    return accepted(build, quantization, kinds)


def _unchecked(quantization: JsonObject, error: Exception) -> JsonObject:
    warnings.warn(f"That Transformers loads the result is not checked: {error}", stacklevel=5)
    return quantization


@dataclass(slots=True)
class _Trial:
    """The result of a trial load.

    ``missing`` are tensors of the model that nothing on disk fills. ``lost`` are codes on disk
    without a place in the model, and ``bare`` codes whose scales have no place. ``coded`` are the
    modules that get codes. ``mixed`` are dense tensors that go into one tensor with codes.
    ``errors`` say which tensors cannot be converted, or have other shapes.
    """

    kind: str
    missing: set[str]
    lost: list[str]
    bare: list[str]
    coded: set[str]
    mixed: list[str]
    errors: list[str]

    def dense(self) -> set[str]:
        """Return the modules that Transformers would make FP8 although they get no codes."""
        return {n.rpartition(".")[0] for n in self.missing if n.endswith(_SCALES)} - self.coded

    def check(self) -> None:
        """Raise ``CheckpointError`` if Transformers would not load everything correctly."""
        if self.errors:
            raise _refusal(self.kind, f"it cannot load {self.errors[0]}")
        if self.mixed:
            raise CheckpointError(
                f"{some_of(self.mixed)} are in high precision, and others of their layer are FP8.",
                "Transformers makes one tensor of them: it would take codes for numbers.",
                "Include or exclude all experts of a layer together. Of a checkpoint, fp8kit.load "
                "and fp8kit.save write all of them in high precision.",
            )
        if self.bare:
            raise _refusal(self.kind, f"it has no place for the scales of {some_of(self.bare)}")
        absent = sorted(n for n in self.missing if n.endswith(_SCALES))
        if absent:
            raise _refusal(self.kind, f"it would draw {some_of(absent)} at random")
        if self.lost and self.missing:
            raise CheckpointError(
                f"{some_of(self.lost)} are FP8 layers.",
                "Transformers has no rule to load these: it would draw "
                f"{some_of(sorted(self.missing))} at random.",
                "Write for target='vllm', which fp8kit.load reads too, or leave these layers "
                "in high precision.",
            )


def _refusal(kind: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"Transformers does not load these FP8 layers into {kind}: {why.rstrip('.')}.",
        "A checkpoint for target='transformers' loads there whole.",
        "Write for target='vllm', which fp8kit.load reads too, use another scheme, or exclude "
        "these layers.",
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Keep compressed-tensors from splitting work over processes: often only one of them saves."""
    module: Any = sys.modules.get(_COMPRESSING)
    own = getattr(module, "is_distributed", None)
    if own is None:  # not loaded, or of a version that does not split work
        yield
        return
    module.is_distributed = lambda: False
    try:
        yield
    finally:
        module.is_distributed = own


def _try(model: Any, quantization: JsonObject, kinds: Kinds) -> _Trial:
    kind = type(model).__name__
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(quantization), pre_quantized=True)
        if quantization["quant_method"] == "compressed-tensors":
            # the other methods decode there without a GPU, which then hides what a GPU would miss
            quantizer.validate_environment()
        with redirect_stderr(io.StringIO()), _alone():  # hides two progress bars
            quantizer.preprocess_model(model=model, dtype=model.dtype, device_map=None)
        rules = get_model_conversion_mapping(model, None, quantizer)
        options = LoadStateDictConfig(
            device_map={"": "meta"},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            hf_quantizer=quantizer,
            weight_mapping=rules,
        )
        state = {n: torch.empty(s, dtype=d, device="meta") for n, (d, s) in kinds.items()}
        with redirect_stderr(io.StringIO()):
            info, _ = convert_and_load_state_dict_in_model(model, state, options, None)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)
    except (ImportError, TypeError):
        raise
    except Exception as error:  # of many kinds, by model and version
        raise _refusal(kind, f"it stops with {str(error).splitlines()[0]!r}") from error
    errors = [f"{n}: {e.splitlines()[-1]}" for n, e in info.conversion_errors.items()]
    errors += [f"{n}: {list(a)}, not {list(b)}" for n, a, b in info.mismatched_keys]
    places = {n: place for n, (place, _) in renamed(model, rules, kinds).items()}
    layers = sort_names(kinds).layers
    filled = {places[parts.weight] for parts in layers.values()}
    own = {n for p in layers.values() for n in (p.weight, *p.scales, *p.input_scales)}
    mixed = [n for n, place in places.items() if place in filled and n not in own]
    trial = _Trial(kind, set(info.missing_keys), [], [], set(), mixed, errors)
    for name, parts in layers.items():
        # Transformers does not quantize inputs of experts, and ignores their input scales
        inputs = [] if experts_of(name) else parts.input_scales
        scales = [places[s] for s in (*parts.scales, *inputs)]
        trial.coded.add(places[parts.weight].rpartition(".")[0])
        if places[parts.weight] in info.unexpected_keys:
            trial.lost.append(parts.weight)
        elif not info.unexpected_keys.isdisjoint(scales):
            trial.bare.append(parts.weight)
    return trial


def renamed(
    model: Any, rules: list[Any], names: Iterable[str]
) -> dict[str, tuple[str, str | None]]:
    """Return each tensor's name in the model, and the pattern of the rule that converts it, if any.

    Rules remember that they have renamed a tensor.
    """
    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    found = {}
    for name in names:
        found[name] = rename_source_key(name, renamings, converters, prefix, known)
        if found[name][0] not in known and name in known:
            found[name] = name, None
    return found
