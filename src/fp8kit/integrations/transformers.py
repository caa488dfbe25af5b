"""Load Transformers models from any checkpoint that this package reads.

``checkpoint.storage.reader`` opens and checks the checkpoint. Transformers' own loader builds the
model, and gets each tensor under the name and in the shape that this package gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from fp8kit import functional
from fp8kit.checkpoint.cache_scales import keep_cache_scales
from fp8kit.checkpoint.dialects.by_layer import plain, scheme_of_plain
from fp8kit.checkpoint.loading.into_module import Filled
from fp8kit.checkpoint.loading.merged_weights import not_finite
from fp8kit.checkpoint.schema.decoding import beyond_fp16
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import experts_of, named
from fp8kit.checkpoint.schema.targets import output_heads
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.model_families import JOINED
from fp8kit.conversion.readers.held import read_elsewhere
from fp8kit.conversion.report import tied_to
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import QTensor, Scheme
from fp8kit.integrations.quantizer_of_layers import misfit
from fp8kit.integrations.transformers_experts import DirectExperts, chosen_experts, take_experts
from fp8kit.integrations.transformers_quantizer import Fp8KitConfig as Fp8KitConfig
from fp8kit.integrations.transformers_quantizer import Fp8KitQuantizer as Fp8KitQuantizer
from fp8kit.integrations.transformers_quantizer import decide, layers_in_model, not_quantized
from fp8kit.integrations.transformers_saving import check_version
from fp8kit.integrations.transformers_saving import export as export
from fp8kit.integrations.transformers_trial import accepted as accepted
from fp8kit.integrations.transformers_trial import accepted_of as accepted_of
from fp8kit.integrations.transformers_trial import renamed
from fp8kit.modules.mx_forms import set_forms

# fields of a config that count modules which a model builds one by one
_COUNT = re.compile(r"(layer|expert|block|stage|depth)s?$|^n_layer")
_FEW = 4096


def load(
    checkpoint: Checkpoint,
    config: Fp8KitConfig | None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    form: Scheme | None = None,
) -> tuple[Any, Filled]:
    """Load a Transformers model from a checkpoint that has been opened.

    Each tensor is read when it is placed; experts are read one by one into the model's stacks.
    Other FP8 layers that the model merges, or whose weight its code reads, are decoded to high
    precision. ``config`` is only for a checkpoint in high precision, which is quantized. ``strict``
    raises if the checkpoint has tensors that the model does not use. ``form`` is as in
    ``mx_forms.set_forms``. Returns the model in eval mode, and a ``Filled`` about the load. Raises
    ``CheckpointError`` if Transformers has no such model, or tensors are missing, and
    ``UnsupportedError`` if this version of Transformers is too old.
    """
    check_version()
    checkpoint = checkpoint.for_engines()
    built = skeleton(checkpoint)
    taken = _direct(checkpoint, built, config)
    _check_shapes(checkpoint, built, taken.tensors)
    kept, merged, read = _layers(checkpoint, built)
    surplus = _surplus(checkpoint, taken)
    alone = taken.tensors | surplus
    merged = [n for n in merged if checkpoint.layers[n].weight not in alone]
    hf_config = _config(checkpoint, kept, taken, form)
    high = dtype or checkpoint.dtype
    places = _cache_places(checkpoint, built)
    apart = places.keys() | alone
    state = {n: _OnDisk(checkpoint, n) for n in checkpoint.tensors if n not in apart}
    for layer in (checkpoint.layers[name] for name in merged):
        for name in layer.tensors.values():
            if name != layer.weight:
                state.pop(name, None)
        state[layer.weight] = _OnDisk(checkpoint, layer.weight, layer, high)
    placed = device is not None and device.type != "cpu" and find_spec("accelerate")
    options: dict[str, Any] = {"device_map": {"": device}} if placed else {}
    if config is not None:
        config.deferred, config.experts = True, taken.schemes
        options["quantization_config"] = config
    model, info = type(built).from_pretrained(
        None,
        config=hf_config,
        state_dict=state,
        dtype=high,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the info, and refused by name
        **options,
    )
    info["unexpected_keys"] = [*info["unexpected_keys"], *surplus]
    _check_loaded(model, info, strict)
    taken.fill(model, checkpoint, device, high)
    if high is torch.float16 and checkpoint.dtype is not high:
        _refuse_infinities(model)
    experts = {name: model.get_submodule(name) for name in taken.experts}
    told = model.hf_quantizer.told + set_forms(experts, form)
    if device is not None:
        model.to(device)
    keep_cache_scales(model, checkpoint, places)
    model.config.name_or_path = model.name_or_path = str(checkpoint.path.resolve())
    if model.can_generate() and (checkpoint.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
    return model.eval(), Filled(sorted(info["unexpected_keys"]), merged, told, read)


def _refuse_infinities(model: PreTrainedModel) -> None:
    """Refuse parameters that have become infinite in Transformers' own cast to fp16."""
    halves = {n: p for n, p in model.named_parameters() if p.dtype is torch.float16}
    if beyond := [name for name, p in halves.items() if p.isinf().any()]:
        raise beyond_fp16(f"{some_of(beyond)} have")


def in_model(checkpoint: Checkpoint, model: Any) -> Checkpoint:
    """Return a checkpoint whose tensors have their names in a Transformers model.

    Tensors of many models have other names in files, and Transformers' loader renames them. A
    tensor that the loader splits by rows gets this package's name of the joined layer.
    """
    every = get_model_conversion_mapping(model)
    rules = [r for r in every if isinstance(r, WeightRenaming)]
    found = {n: name for n, (name, _) in renamed(model, rules, checkpoint.tensors).items()}
    cuts = {r.source_patterns[0]: (r, joined) for r in every if (joined := _cuts(r))}
    rules += [rule for rule, _ in cuts.values()]
    for n, (name, pattern) in renamed(model, rules, checkpoint.tensors).items() if cuts else ():
        if pattern in cuts:
            part, _, kind = name.rpartition(".")
            found[n] = f"{part.rpartition('.')[0]}.{cuts[pattern][1]}.{kind}"
    for name, layer in checkpoint.layers.items():  # a dense model has no names for scales
        kind = layer.weight.removeprefix(name)
        found[name] = found[layer.weight].removesuffix(kind)
        for scale in (layer.scale, layer.input_scale):
            if scale is not None:
                found[scale] = found[name] + scale.removeprefix(name)
    return checkpoint.renamed(found)


def _cuts(rule: Any) -> str:
    """Return the joined layer that a rule splits by rows; empty if it does something else."""
    kinds = [type(operation).__name__ for operation in getattr(rule, "operations", ())]
    if kinds != ["Chunk"] or rule.operations[0].dim != 0 or len(rule.source_patterns) != 1:
        return ""
    targets = (re.sub(r"\.(weight|bias)$", "", target) for target in rule.target_patterns)
    parts = tuple(target.rpartition(".")[2] for target in targets)
    return next((joined for joined, options in JOINED.items() if parts in options), "")


def skeleton(checkpoint: Checkpoint) -> Any:
    """Build the model of a checkpoint on the meta device: names and shapes, no weights.

    Raises ``CheckpointError`` if Transformers has no such model, or cannot build it from
    config.json.
    """
    check_version()
    model_class, config = _model_class(checkpoint), _model_config(checkpoint)
    _check_counts(checkpoint, config.to_dict())
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=checkpoint.dtype)
        model.tie_weights()
    except Exception as error:  # of many kinds, by model and version
        raise CheckpointError(
            f"Transformers {transformers.__version__} cannot build {model_class.__name__} from "
            f"config.json of {checkpoint.path}: {_first_line(error)}",
            "It must describe the model that the tensors belong to.",
            "Get it again, or build the model yourself: fp8kit.load(dir, model=...).",
        ) from error
    return model


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """A tensor that is read when the loader indexes it, which is right before placing it."""

    checkpoint: Checkpoint
    name: str
    codes: Layer | None = None  # if given, this FP8 layer is decoded to ``high``
    high: torch.dtype = torch.bfloat16

    @property
    def dtype(self) -> torch.dtype:
        return self.high if self.codes else self.checkpoint.tensors[self.name].dtype

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Tensor:
        tensor, layer = self.checkpoint.read(self.name), self.codes
        if layer is not None:
            q = QTensor(tensor, self.checkpoint.read(layer.scale), layer.group)
            tensor = functional.dequantize(q, self.high)
            tensor = tensor.transpose(-1, -2).contiguous() if layer.transposed else tensor
        return tensor[index]


def _layers(checkpoint: Checkpoint, model: Any) -> tuple[list[str], list[str], Mapping[str, str]]:
    """Divide the FP8 layers into those that stay FP8 in the model, and those that are decoded.

    Decoded are layers that the model merges, whose weight its code reads, or is tied to a layer
    that is not in the files; the third result has the reasons of all but the merged ones.
    """
    weights = {layer.weight: name for name, layer in checkpoint.layers.items()}
    kept, merged = layers_in_model(model, weights)
    by_code = read_elsewhere(model) if kept else {}
    modules = {weights[w]: model.get_submodule(name) for w, name in kept.items()}
    read = {name: by_code[module] for name, module in modules.items() if module in by_code}
    read |= {weights[w]: reason for w, reason in _tied(checkpoint, model, kept).items()}
    others = [*(weights[w] for w in merged), *read]
    return [name for name in modules if name not in read], others, read


def _tied(checkpoint: Checkpoint, model: Any, kept: Mapping[str, str]) -> dict[str, str]:
    """Return the FP8 layers that are tied to a linear layer without a weight on disk, with reasons.

    The other layer would get the codes as its weight. ``kept`` maps weights, named as on disk, to
    modules; the result has the same names.
    """
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    held, _ = layers_in_model(model, [n for n in checkpoint.tensors if n.endswith(".weight")])
    on_disk = {f"{module}.weight": weight for weight, module in kept.items()}
    there = {f"{module}.weight" for module in held.values()}
    return {
        on_disk[first]: tied_to(second)
        for first, second in (*ties.items(), *((b, a) for a, b in ties.items()))
        if first in on_disk
        and second not in there
        and isinstance(model.get_submodule(second.rpartition(".")[0]), nn.Linear)
    }


def _surplus(checkpoint: Checkpoint, taken: DirectExperts) -> set[str]:
    """Return tensors of experts beyond the model's, which its loader would stack nevertheless."""

    def place(name: str) -> tuple[str, str]:
        holder = experts_of(name)
        return holder, name.removeprefix(f"{holder}.").partition(".")[0]

    known = {place(name) for name in taken.tensors}
    holders = {holder for holder, _ in known}
    rest = {n: place(n) for n in checkpoint.tensors if experts_of(n) in holders}
    return {n for n, at in rest.items() if at[1].isdigit() and at not in known}


def _cache_places(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """Return the name in the model of each KV cache scale that the model does not load itself."""
    homes = {name.rpartition(".")[0] for name in checkpoint.kv_scales}
    weights = [n for n in checkpoint.tensors if n.rpartition(".")[0].rpartition(".")[0] in homes]
    linears, _ = layers_in_model(model, [n for n in weights if n.endswith(".weight")])
    modules = {n.rpartition(".")[0].rpartition(".")[0]: m for n, m in linears.items()}
    places = {}
    for name in set(checkpoint.kv_scales) - model.state_dict().keys():
        home, _, kind = name.rpartition(".")
        if home in modules:
            places[name] = named(modules[home].rpartition(".")[0], kind)
    return places


def _model_class(checkpoint: Checkpoint) -> Any:
    named = checkpoint.config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        what = f"config.json of {checkpoint.path} has architectures = {named!r}."
        needed = (
            f"Transformers {transformers.__version__} has no model class of this name; code that "
            "comes with a checkpoint is not run."
        )
        if not checkpoint.config:
            what = f"{checkpoint.path} has no config.json, or a file in it was passed alone."
            needed = "config.json names the class of the model."
        remedy = "Build the model yourself and pass it: fp8kit.load(dir, model=...)."
        if checkpoint.config and (kind := checkpoint.config.get("_class_name")):
            what = f"{checkpoint.path} holds a {kind} of diffusers."
            needed = "Without model=, a directory must hold a model of Transformers."
            remedy = (
                f"With kind = diffusers.{kind}, build it and pass it: "
                "fp8kit.load(dir, model=kind.from_config(kind.load_config(dir)))."
            )
        raise CheckpointError(what, needed, remedy)
    return found


def _direct(checkpoint: Checkpoint, model: Any, config: Fp8KitConfig | None) -> DirectExperts:
    if config is None:
        return take_experts(checkpoint, model, None)
    scheme = scheme_of_plain(config.scheme).stored
    stacks = decide(model, config).stacks
    return take_experts(checkpoint, model, chosen_experts(model, {r.name: scheme for r in stacks}))


def _config(
    checkpoint: Checkpoint, layers: Sequence[str], taken: DirectExperts, form: Scheme | None
) -> Any:
    """Read the model's config; its quantization becomes one of the method ``fp8kit``."""
    config = _model_config(checkpoint)
    if checkpoint.spec is not None:
        config.quantization_config = {
            "quant_method": "fp8kit",
            "scheme": plain(checkpoint.spec.scheme),
            "layers": {name: plain(checkpoint.layers[name].scheme) for name in layers},
            "mx_form": None if form is None else form.name,
            "experts": taken.schemes,
        }
    return config


def _model_config(checkpoint: Checkpoint) -> Any:
    """Read the model's config without its quantization."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
    except Exception as error:  # of many kinds, by model and version
        raise CheckpointError(
            f"Transformers {transformers.__version__} cannot read config.json of "
            f"{checkpoint.path}: {_first_line(error)}",
            "It must describe a model that Transformers knows.",
            "Correct it, or build the model yourself: fp8kit.load(dir, model=...).",
        ) from error
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        if output_heads(checkpoint.layers):  # codes are not the table of embeddings
            part.tie_word_embeddings = False
    return config


def _check_counts(checkpoint: Checkpoint, config: Any, place: str = "") -> None:
    """Refuse a config with more layers or experts than tensors, before they are built."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            _check_counts(checkpoint, value, f"{place}{key}.")
        elif _COUNT.search(str(key)) and type(value) is int:
            if value > max(_FEW, len(checkpoint.tensors)):
                raise CheckpointError(
                    f"config.json of {checkpoint.path} has {place}{key} = {value}.",
                    f"The files hold {len(checkpoint.tensors)} tensors.",
                    "Get config.json again: it does not belong to these files.",
                )


def _check_shapes(checkpoint: Checkpoint, model: Any, apart: set[str]) -> None:
    """Refuse wrong shapes before memory is allocated; renamed tensors are checked later."""
    wanted = model.state_dict()
    for name, info in checkpoint.tensors.items():
        found = tuple(wanted[name].shape) if name in wanted else info.shape
        if found != info.shape and not checkpoint.is_scale(name) and name not in apart:
            raise misfit(name, info.shape, found, type(model).__name__)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return f"{lines[0][:200].rstrip('.')}."


def _check_loaded(model: Any, info: dict[str, Any], strict: bool) -> None:
    if damaged := model.hf_quantizer.not_finite:
        raise not_finite(damaged)
    for name, found, wanted in info["mismatched_keys"]:
        raise misfit(name, found, wanted, type(model).__name__)
    absent = (
        "Complete it, pass the model (fp8kit.load(dir, model) joins and cuts q/k/v and gate/up)"
    )
    for keys, what, remedy in (
        (info["missing_keys"], "are in the model and not in the checkpoint", absent),
        (info["unexpected_keys"] if strict else (), "are not used by the model", "Drop strict"),
    ):
        if keys:
            raise CheckpointError(
                f"{', '.join(sorted(keys)[:5])} {what} ({len(keys)} in all).",
                f"{type(model).__name__} and the checkpoint must have the same tensors.",
                f"{remedy}, or load with the model class that the checkpoint was made from.",
            )
    if unfilled := model.hf_quantizer.unfilled:
        raise not_quantized(unfilled)
