"""Collect the tensors of Transformers models under the names and in the layouts of checkpoints."""

from __future__ import annotations

import functools
import json
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fp8kit.checkpoint import expert_splitting
from fp8kit.checkpoint.cache_scales import held_cache_scales
from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.exporting import Exported, as_stored, unquantized, untied
from fp8kit.checkpoint.loading.expected import ties
from fp8kit.checkpoint.loading.into_module import tie
from fp8kit.checkpoint.quantization_config import announce, refuse_unloadable
from fp8kit.checkpoint.schema.naming import experts_of, named
from fp8kit.errors import CheckpointError, UnsupportedError, some_of, teach
from fp8kit.formats import FP8_FORMATS, MX
from fp8kit.integrations.transformers_renames import scales_follow
from fp8kit.integrations.transformers_trial import accepted_of
from fp8kit.modules.expert_tensors import FROZEN_KINDS, ExpertTensors
from fp8kit.modules.libraries import bare
from fp8kit.modules.linear import Fp8Linear

OLDEST = (5, 17)
METHOD = "fp8kit"
_BESIDE = ("weight_scale", "weight_exponents", "input_scale")  # tensors that belong to codes
GIVEN: ContextVar[Mapping[str, Tensor] | None] = ContextVar("GIVEN", default=None)


def check_version() -> None:
    """Refuse a Transformers that is too old: its loader differs from what these modules extend."""
    found = tuple(int(p) for p in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        raise UnsupportedError(
            f"Transformers is {transformers.__version__}.",
            f"The integration is written for {OLDEST[0]}.{OLDEST[1]} and later.",
            "Upgrade with pip install 'fp8kit[transformers]'.",
        )


def export(model: Any) -> Exported:
    """Return the tensors and configs of a Transformers model as a checkpoint has them.

    Renames and merges that Transformers does while loading are undone, experts are one matrix each,
    tied weights appear once. Raises ``CheckpointError`` if the model is quantized by another
    method, too.
    """
    check_version()
    method = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if method is not None and method.quant_method != METHOD:
        raise CheckpointError(
            f"{type(model).__name__} was quantized by {type(method).__name__} too.",
            "Only layers that fp8kit made can be saved here.",
            "Load the model in high precision and convert it.",
        )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    kept = untied(model, tied)
    _tell_of_shared(model, kept.keys() | tied | ignored)
    layers, whole = expert_splitting.split_experts(model, functools.partial(names_on_disk, model))
    ignored |= expert_splitting.own_names(model, [])
    tensors = {n: t for n, t in kept.items() if n not in ignored} | held_cache_scales(model)
    tensors = _as_in_checkpoints(model, tensors) | expert_splitting.tensors_of(layers)
    stacked = expert_splitting.own_names(model, []) - expert_splitting.own_names(model, whole)
    tensors |= {n: kept[n] for n in stacked & kept.keys()}
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    texts = {}
    if model.can_generate():
        texts["generation_config.json"] = model.generation_config.to_json_string()
    return Exported(tensors, unquantized(model, tensors), config, texts, layers, whole)


def _tell_of_shared(model: Any, known: set[str]) -> None:
    """Warn of shared Parameters, which are written under one of their names only."""
    names = (n for n, _ in model.named_parameters(remove_duplicate=False))
    shared = [n for n in names if n not in known and not n.endswith("_exponents")]
    if shared:
        warnings.warn(
            teach(
                f"{some_of(shared)} are tensors of other modules, too.",
                "A checkpoint has each tensor once; a model built from its config has them apart.",
                "Load it into a model that shares them: fp8kit.load(directory, model).",
            ),
            stacklevel=4,
        )


def names_on_disk(
    model: Any, wanted: Mapping[str, tuple[int, tuple[str, ...]]]
) -> dict[str, list[str]]:
    """Return the names of single experts' layers on disk, by Transformers' rules for the model.

    Stacks of running numbers go through the rules, which split and rename them. If the rules keep
    a stack whole, experts get the name of their module and names that engines know; not so stacks
    outside of a module of experts, as in GraniteMoE: engines expect these whole.
    """
    numbers: dict[str, Tensor] = {}
    first: dict[str, int] = {}
    total = 0
    for name, (count, words) in wanted.items():
        first[name] = total
        total += count * len(words)
        numbers[name] = torch.arange(first[name], total).float().view(count, len(words), 1)
    by_rule, kept = _names_of_numbers(model, numbers)
    others = {n: w for n, w in wanted.items() if _in_experts(kept.get(first[n], ""))}
    fallback = expert_splitting.in_module(others)
    singles = {
        f"{layer}.weight": torch.full((1, 1), float(first[name] + i), dtype=torch.float32)
        for name, layers in fallback.items()
        for i, layer in enumerate(layers)
    }
    by_rule |= _names_of_numbers(model, singles)[0]
    return {
        name: [by_rule[first[name] + i] for i in range(count * len(words))]
        for name, (count, words) in wanted.items()
        if first[name] in by_rule
    }


def _in_experts(stack: str) -> bool:
    return bool(experts_of(stack)) and experts_of(stack) == stack.rpartition(".")[0]


def _names_of_numbers(
    model: Any, numbers: dict[str, Tensor]
) -> tuple[dict[int, str], dict[int, str]]:
    """Return the tensor of each number that became one alone, and of each that kept others."""
    alone: dict[int, str] = {}
    several: dict[int, str] = {}
    for name, tensor in revert_weight_conversion(model, numbers).items():
        single = tensor.numel() == 1 and name.endswith(".weight")
        (alone if single else several)[int(tensor.min().item())] = name.removesuffix(".weight")
    return alone, several


def _reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with scales_follow(model):
        found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def _as_in_checkpoints(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo the renames and merges of a model, and apply them to per-row scales like to weights.

    Rules match names of weights, often up to their end, and would leave the scales behind.
    """
    rows = {
        n: scale
        for n, t in tensors.items()
        if t.dtype in FP8_FORMATS
        and (scale := tensors.get(f"{n}_scale")) is not None
        and scale.shape == (t.shape[0], 1)
    }
    try:
        others = {n for n in tensors if n.removesuffix("_scale") not in rows or n in rows}
        found = _reverted(model, {n: t for n, t in tensors.items() if n in others})
        moved = _reverted(model, rows)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{type(model).__name__} joins or splits weights as it is saved: {error}",
            "Layers that are one tensor in a checkpoint must all be FP8 or all dense, with "
            "scales that can be joined.",
            "Convert with FP8_DYNAMIC, and exclude all of such layers or none.",
        ) from error
    found |= {f"{n}_scale": t for n, t in moved.items()}
    codes = [n for n, t in found.items() if t.dtype in FP8_FORMATS and t.dim() == 2]
    joined = [n for n in codes if not n.endswith(".weight") or f"{n}_scale" not in found]
    if joined:
        raise CheckpointError(
            f"{type(model).__name__} keeps several FP8 layers as one tensor in a checkpoint: "
            f"{some_of(joined)}.",
            "Such a tensor needs a name that ends in .weight, and scales per row.",
            "Convert with FP8_DYNAMIC if the name does, else exclude these layers.",
        )
    return found


def save_what_is_given(own: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``save_pretrained``, with its ``state_dict`` in ``GIVEN`` for our quantizer to read."""
    token = GIVEN.set(args[2] if len(args) > 2 else kwargs.get("state_dict"))
    announced = hasattr(model.config, "quantization_config")
    try:
        return own(model, *args, **kwargs)
    finally:
        GIVEN.reset(token)
        if not announced:  # a dense model may have the same config
            vars(model.config).pop("quantization_config", None)


@contextmanager
def _holding(model: Any, given: Mapping[str, Tensor]) -> Iterator[set[str]]:
    """Let a model temporarily hold given tensors, quantized where its layers are FP8.

    ``given`` has names of the model's ``state_dict``: codes with scales, or dense weights. Yields
    the names of the model's tensors that were not given, which it keeps.
    """
    own = model.state_dict(keep_vars=True)
    ties_of = {n: group for group in ties(own) for n in group}
    absent = {n for n in own if given.keys().isdisjoint(ties_of.get(n, (n,)))}
    fp8 = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear | ExpertTensors)}
    of = {named(n, k): named(n, "weight") for n in fp8 for k in _BESIDE}
    of |= {f"{n}{k}": n for n in expert_splitting.stacks_in(model) for k in FROZEN_KINDS[1:]}
    absent -= {n for n in absent if of.get(n) in given}  # quantizing a dense weight makes them
    odd = sorted(given.keys() - own.keys()) or sorted(
        absent & expert_splitting.own_names(model, [])
    )
    if odd:
        raise _unfit(f"The state_dict {'has' if odd[0] in given else 'lacks'} {some_of(odd)}.")
    kept = {m: (vars(m).copy(), m._parameters.copy(), m._buffers.copy()) for m in model.modules()}
    try:
        for module in fp8.values():  # loading would overwrite kept dense weights in place
            held: JsonObject = {"original_weight": None, "originals": {}}
            vars(module).update({k: v for k, v in held.items() if k in vars(module)})
        problems: list[str] = []
        of_module: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in given.items():
            of_module[name.rpartition(".")[0]][name] = tensor
        rest: Any = ({"assign_to_params_buffers": True}, False, [], [], problems)
        for name, module in model.named_modules(remove_duplicate=False):
            # not load_state_dict, after which FSDP2 expects its own shards in place
            module._load_from_state_dict(of_module[name], named(name, ""), *rest)
        if problems:
            raise _unfit(f"The state_dict does not fit: {' '.join(problems)[:400]}")
        for group in ties(own):
            tie(model, group, given)
        yield absent
    finally:
        for module, (attributes, parameters, buffers) in kept.items():
            vars(module).update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _unfit(what: str) -> CheckpointError:
    return CheckpointError(
        what,
        "It holds tensors of the model, and all those of its FP8 experts: codes with scales, "
        "or dense weights without.",
        "Take what model.state_dict() gives, or save without state_dict=.",
    )


def as_saved(model: Any) -> tuple[dict[str, Any], JsonObject]:
    """Return the tensors that ``save_pretrained`` writes, as ``fp8kit.save`` does, and the config.

    Scales have the names and shapes of files; the second result is the quantization config. If
    ``save_pretrained`` got a ``state_dict``, its tensors are written, as from a model that holds
    them, and no others. Raises ``CheckpointError`` if Transformers could not load the result, or a
    tensor does not fit the model.
    """
    given = GIVEN.get()
    with bare(model):
        if given is None:
            return _as_saved(model, ())
        with _holding(model, given) as absent:
            return _as_saved(model, absent)


def _as_saved(model: Any, absent: Collection[str]) -> tuple[dict[str, Any], JsonObject]:
    check_version()
    if model.dtype in FP8_FORMATS:
        raise CheckpointError(
            f"The first tensor of {type(model).__name__} is FP8.",
            f"save_pretrained takes its dtype, {model.dtype}, for that of the whole model.",
            "Save it with fp8kit.save(model, directory).",
        )
    exported = export(model)
    refuse_unloadable(exported.whole_stacks, "transformers")
    announced = announce(model, exported, "transformers")
    if announced.main.weight != MX:  # vLLM's dialect of MX is decoded to bf16 by Transformers
        with suppress(CheckpointError):  # a model that engines cannot load may still be saved
            both = announce(model, exported, "vllm")
            announced = announce(model, exported, "transformers", both.dialect)
    taken_apart = expert_splitting.own_names(model, exported.whole_stacks)
    state = as_stored(model, model.state_dict())
    held = {n: t for n, t in state.items() if n not in taken_apart}
    held |= expert_splitting.tensors_of(exported.experts) | held_cache_scales(model)
    lost = exported.tensors.keys() - revert_weight_conversion(model, held).keys()
    if lost:
        raise CheckpointError(
            f"save_pretrained would not write {some_of(sorted(lost))}.",
            f"{type(model).__name__} joins or renames these layers as it is saved, by rules that "
            "know nothing of scales.",
            "Save it with fp8kit.save(model, directory).",
        )
    written = dict(announced.on_disk(n, t) for n, t in exported.tensors.items())
    kinds = {n: (t.dtype, tuple(t.shape)) for n, t in written.items()}
    quantization = accepted_of(model, announced.config(exported.dense), kinds, announced.dtype)
    stored = dict(announced.on_disk(n, t) for n, t in held.items() if n not in absent)
    return stored, quantization
