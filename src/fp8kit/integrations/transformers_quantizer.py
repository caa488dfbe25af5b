"""The quantization method ``fp8kit`` of Transformers: layers become FP8 while a model loads.

Importing this module registers it, so that ``from_pretrained(...,
quantization_config=Fp8KitConfig())`` quantizes while loading. Saved models declare
compressed-tensors, so loading them does not need this package.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.dialects.by_layer import plain, scheme_of_plain
from fp8kit.checkpoint.expert_splitting import stacks_in
from fp8kit.checkpoint.loading.into_module import empty_layer, plan_to_load
from fp8kit.checkpoint.loading.merged_weights import is_finite, not_finite
from fp8kit.conversion import fusion, siblings
from fp8kit.conversion.patterns import LayerFilter
from fp8kit.conversion.plan import refuse_static, warn_of_nothing
from fp8kit.conversion.report import TIED, Report
from fp8kit.errors import InvalidType, InvalidValue, UnsupportedError, check_switch
from fp8kit.formats import FP8_FORMATS, Scheme
from fp8kit.integrations import transformers_attention
from fp8kit.integrations import transformers_saving as saving
from fp8kit.integrations.quantizer_of_layers import (
    QuantizerOfLayers,
    refuse_codes,
    refuse_disk,
    restore_dense,
)
from fp8kit.integrations.transformers_experts import chosen_experts, hide_stacks, is_stack
from fp8kit.integrations.transformers_renames import with_scales
from fp8kit.integrations.transformers_trial import renamed
from fp8kit.modules.dense import unlike_linear
from fp8kit.modules.entries import quantize_weight, stored_tensors
from fp8kit.modules.expert_stacks import quantize_stack
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.hooks import become, own_names
from fp8kit.modules.libraries import wrap_once
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.mx_forms import named_form, set_forms
from fp8kit.modules.parameters import frozen, held_bytes

if saving.METHOD not in ALL_EXPERTS_FUNCTIONS:
    # for modules that stay dense; FP8 experts have their own forward, whatever this setting
    ALL_EXPERTS_FUNCTIONS.register(saving.METHOD, ALL_EXPERTS_FUNCTIONS["grouped_mm"])
transformers_attention.register()
NEW = "no file has its weight"
_FUNCTION = "a function: pass the Fp8KitConfig itself, and not its dictionary"


@register_quantization_config(saving.METHOD)
class Fp8KitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` by which ``from_pretrained`` quantizes while loading.

    Args:
        scheme: name of a preset without calibration, e.g. ``"FP8_DYNAMIC"``, or another scheme: a
            ``Scheme``, or the dictionary that ``plain`` makes of one.
        include: as in ``fp8kit.plan``.
        exclude: as in ``fp8kit.plan``.
        strict: as in ``fp8kit.plan``.
        layers: only for ``fp8kit.load``: the layers that are FP8 in the checkpoint, with their
            schemes as ``plain`` makes them.
        mx_form: only for ``fp8kit.load``: how MXFP8 layers compute, a name in ``formats.MX_FORMS``.
        experts: only for ``fp8kit.load``: the modules of experts that it fills itself.
        quant_method: always ``"fp8kit"``, as a saved config has it.

    Raises:
        TypeError: if ``strict`` is neither ``True`` nor ``False``.
        ValueError: if the scheme is unknown, or needs calibration.

    Example:
        >>> config = Fp8KitConfig("FP8_DYNAMIC", exclude=["*.o_proj"])
        >>> model = AutoModelForCausalLM.from_pretrained("dir", quantization_config=config)
    """

    def __init__(
        self,
        scheme: Scheme | str | JsonObject = "FP8_DYNAMIC",
        include: Sequence[str] | LayerFilter | None = None,
        exclude: Sequence[str] | LayerFilter | None = None,
        strict: bool = False,
        layers: Mapping[str, str | JsonObject] | None = None,
        experts: Mapping[str, str | JsonObject] | None = None,
        quant_method: str = saving.METHOD,
        mx_form: str | None = None,
    ) -> None:
        check_switch("strict", strict)
        scheme = plain(scheme) if isinstance(scheme, Scheme) else scheme
        if layers is None:
            refuse_static(scheme_of_plain(scheme))
        self.quant_method = quant_method
        self.scheme, self.include, self.exclude, self.strict = scheme, include, exclude, strict
        self.layers, self.experts, self.mx_form = layers, experts or {}, mx_form
        self.announced: JsonObject | None = None  # what the model was last saved with
        self.deferred = False  # True if the caller checks for missing tensors, and raises first

    def to_dict(self) -> JsonObject:
        """Return the config that is saved: that of a public format once one is announced."""
        said = {key: getattr(self, key) for key in ("include", "exclude", "strict")}
        # functions become text, as models print their config; using the text as patterns raises
        said = {key: _FUNCTION if callable(value) else value for key, value in said.items()}
        own = {"quant_method": self.quant_method, "scheme": self.scheme}
        return self.announced or own | {k: v for k, v in said.items() if v not in (None, False)}


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Quantize one weight as soon as the loader has it."""

    def __init__(self, quantizer: Fp8KitQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], model: Any = None, **_: Any) -> dict[str, Any]:
        """Replace each dense weight of an FP8 layer by its codes and scales."""
        out: dict[str, Any] = {}
        for key, value in input_dict.items():
            dense = value[0] if isinstance(value, list) else value
            module, kind = get_module_from_name(model, key)
            stacked = is_stack(module, kind)
            if not stacked and not (isinstance(module, Fp8Linear) and kind == "weight"):
                out[key] = value
                continue
            if isinstance(getattr(module, kind), DTensor):
                raise UnsupportedError(
                    f"{key} is sharded over several devices.",
                    "Quantizing while loading works on whole weights.",
                    "Save an FP8 checkpoint on one device first.",
                )
            if stacked:
                q = quantize_stack(dense, module.scheme, module.stacks.transposed, [])
            else:
                q = quantize_weight(dense, module.scheme)
            if not is_finite(q):
                self.quantizer.not_finite.append(key)
            for name, tensor in stored_tensors(q, module.scheme, kind).items():
                held = nn.Parameter(tensor, requires_grad=False)
                out[f"{key.removesuffix(kind)}{name}"] = held
        return out


@register_quantizer(saving.METHOD)
class Fp8KitQuantizer(HfQuantizer):  # type: ignore[misc]
    """Swap linear layers for ``Fp8Linear`` before Transformers fills in the weights.

    After loading, ``model.hf_quantizer.report`` says what was converted and what was not, and why.
    """

    is_trainable = True
    is_compileable = True
    quantized_element_size = 1
    report: Report | None = None

    def __init__(self, quantization_config: Fp8KitConfig, **kwargs: Any) -> None:
        if not isinstance(quantization_config, Fp8KitConfig):  # diffusers' class has this name, too
            raise InvalidType(
                f"Got a {type(quantization_config).__module__}.Fp8KitConfig.",
                "Models of Transformers take fp8kit.Fp8KitConfig.",
                "Import it from fp8kit.",
            )
        # a copy, because saving sets ``announced``, which must not reach the user's config
        super().__init__(copy.copy(quantization_config), **kwargs)
        asked = scheme_of_plain(quantization_config.scheme)
        self.scheme, self.form = asked.stored, named_form(asked)
        self.not_finite: list[str] = []
        self.told: list[str] = []
        self.unfilled: list[str] = []

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return True: ``get_state_dict_and_metadata`` raises, with a reason, if it cannot save."""
        return True

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse FP8 layers that the config does not list, and quantizing weights on disk."""
        saving.check_version()
        if self.pre_quantized and self.quantization_config.layers is None:
            raise UnsupportedError(
                f"A config has quant_method {saving.METHOD!r}, which no file has.",
                "It does not say which layers are FP8; loaded as dense, they would be wrong.",
                "Load the checkpoint with fp8kit.load(directory).",
            )
        asked = self.quantization_config
        if not self.pre_quantized and (asked.layers is not None or asked.mx_form is not None):
            raise InvalidValue(
                "Got layers or mx_form for a checkpoint in high precision.",
                "They describe the layers of one that is FP8; here all get one scheme.",
                "Name the form as the scheme, such as Fp8KitConfig('MXFP8_ROW'), and the layers by "
                "include; for several schemes, load the dense model and call fp8kit.convert.",
            )
        refuse_disk(device_map)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Return whether the loader hands this parameter to ``get_quantize_ops``."""
        if self.pre_quantized:
            return False
        module, kind = get_module_from_name(model, param_name)
        return is_stack(module, kind) or (isinstance(module, Fp8Linear) and kind == "weight")

    def get_quantize_ops(self) -> _Quantize:
        """Return the operation by which the loader quantizes."""
        return _Quantize(self)

    def update_weight_conversions(self, weight_conversions: Any, *model: Any) -> list[Any]:
        """Let the model's rules rename scales as they rename weights."""
        rules = super().update_weight_conversions(weight_conversions, *model)
        return with_scales(rules)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        """Keep FP8 codes as they are, whatever dtype the model's rules ask for."""
        found = getattr(param, "dtype", None)
        return None if found in FP8_FORMATS else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        plain_schemes = self.quantization_config.experts
        apart = {name: scheme_of_plain(scheme) for name, scheme in plain_schemes.items()}
        decided = None if self.pre_quantized else decide(model, self.quantization_config)
        hide_stacks(model, chosen_experts(model, apart))
        if self.pre_quantized:
            schemes = self.quantization_config.layers or {}
            kept, _merged = layers_in_model(model, [f"{n}.weight" for n in schemes])
            of = {
                module: scheme_of_plain(schemes[k[: -len(".weight")]]) for k, module in kept.items()
            }
        else:
            assert decided is not None
            self.report = decided
            warn_of_nothing(decided)
            _make_room(model, [r.name for r in self.report.stacks], self.scheme, apart)
            of = {n: self.scheme for r in self.report.linears for n in (r.name, *r.aliases)}
        for name, scheme in of.items():
            layer = model.get_submodule(name)
            if not isinstance(layer, Fp8Linear):  # it may have several names
                layer = become(layer, _placeholder(layer, scheme, self.pre_quantized))
            layer.qualified_name = name

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
        experts: dict[str, ExpertTensors] = {}
        self.unfilled = [n for n, m in layers.items() if m.weight.dtype not in FP8_FORMATS]
        if self.report is not None and not self.quantization_config.deferred:
            self.unfilled = self._keep_new(layers, self.report)
        for name, (module, stack) in stacks_in(model).items():
            if module._parameters[stack] is not None:
                filled = module.codes(stack).dtype in FP8_FORMATS
                self.unfilled += [] if filled else [name]
                module.requires_grad_(False)
                experts[name.removesuffix(f".{stack}")] = module
        if self.unfilled:
            if self.quantization_config.deferred:
                return model
            raise not_quantized(self.unfilled)
        if self.not_finite and not self.quantization_config.deferred:
            raise not_finite(self.not_finite)
        for layer in layers.values():
            layer.requires_grad_(False)
        form = self.quantization_config.mx_form
        self.told = set_forms({**layers, **experts}, Scheme.of(form) if form else self.form)
        groups = self.report.groups if self.report else siblings.find_groups(model, list(layers))
        siblings.share_inputs(model, groups)
        fusion.fuse_producers(model)
        if self.report is not None:  # its size was taken on meta, where tied weights count twice
            grown = self.report.model_bytes_after - self.report.model_bytes_before
            tensors = (*model.parameters(), *model.buffers())
            self.report.model_bytes_before = held_bytes(tensors) - grown
        return model

    def _keep_new(self, layers: dict[str, Fp8Linear], report: Report) -> list[str]:
        """Make layers dense whose weights no file has, such as a new head, which is to be trained.

        Their numbers are those that the model initialized them with. They are removed from
        ``layers``. Returns the layers that were filled, and not with codes.
        """
        of = {name: record for record in report.linears for name in (record.name, *record.aliases)}
        new = [n for n in self.unfilled if not hasattr(layers[n].weight, "_is_hf_initialized")]
        for name in new:
            layer = layers.pop(name)
            become(layer, _dense_again(layer), own_names(Fp8Linear))
            of[name].skip(NEW, warning=True)
        if new:
            warn_of_nothing(report)
            if self.quantization_config.strict:
                report.refuse_blocked()
            report.groups = [g for g in report.groups if not {*g} & {*new}]
        return [n for n in self.unfilled if n in layers]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[Any, dict[str, str]]:
        """Return the tensors that ``save_pretrained`` writes, and set the quantization config.

        Raises ``CheckpointError`` if Transformers could not load the result, or if the
        ``state_dict`` that ``save_pretrained`` got does not belong to the model.
        """
        given = saving.GIVEN.get()
        # only an adapter is saved, or another process has gathered the tensors and saves them
        if getattr(model, "_hf_peft_config_loaded", False) or given == {}:
            return given, {}
        kinds = (Fp8Linear, ExpertTensors)
        if not any(isinstance(m, kinds) for m in model.modules()):  # all were replaced
            self.remove_quantization_config(model)
            return given, {}
        state, self.quantization_config.announced = saving.as_saved(model)
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and hasattr(part.config, "quantization_config"):
                del part.config.quantization_config  # one file announces the whole model
        model.config.quantization_config = self.quantization_config
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        restore_dense(model, dtype if isinstance(dtype, torch.dtype) else None)  # else it is a word
        return model


def patch() -> None:
    """Let ``save_pretrained`` of models with FP8 layers write what ``fp8kit.save`` writes.

    Raises ``UnsupportedError`` if this version of Transformers is too old.
    """
    saving.check_version()
    PreTrainedModel.hf_quantizer = QuantizerOfLayers(
        lambda layer: Fp8KitQuantizer(Fp8KitConfig(plain(layer.scheme), layers={}))
    )
    wrap_once(PreTrainedModel, "_get_resized_lm_head", _resized_as_numbers)
    wrap_once(PreTrainedModel, "save_pretrained", saving.save_what_is_given)
    wrap_once(PreTrainedModel, "_load_pretrained_model", refuse_codes)


def _resized_as_numbers(
    own: Any, model: Any, head: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """Resize an FP8 head as a dense one, of which Transformers copies rows, and quantize it."""
    if not isinstance(head, Fp8Linear):
        return own(model, head, *args, **kwargs)
    dense = head.to_linear(torch.float32)
    grown = own(model, dense, *args, **kwargs)
    if grown is dense:  # the head has this size already
        return head
    layer = Fp8Linear.from_linear(grown, head.scheme, head.input_scale)
    layer.qualified_name = head.qualified_name
    return layer.to(head.compute_dtype).train(head.training)


def not_quantized(layers: Sequence[str]) -> UnsupportedError:
    """Return the error for layers whose weights could not be quantized while loading."""
    return UnsupportedError(
        f"{', '.join(layers[:5])} could not be quantized while loading.",
        "The checkpoint lacks them, or has them and the model class does not split or join them.",
        "Exclude them, or load the model and call fp8kit.convert(model).",
    )


def decide(model: Any, config: Fp8KitConfig) -> Report:
    """Plan as ``fp8kit.plan`` does; on meta, ties are known only by the model's list of names."""
    scheme = scheme_of_plain(config.scheme)
    report = plan_to_load(model, scheme, config.include, config.exclude, config.strict)
    for record in report.linears:
        links = getattr(model, "all_tied_weights_keys", None) or {}
        tied = {n.removesuffix(".weight") for n in (*links, *links.values())}
        if tied & {record.name, *record.aliases}:
            record.skip(TIED, warning=True)
    if config.strict:
        report.refuse_blocked()
    report.groups = siblings.find_groups(model, [r.name for r in report.linears])
    return report


def layers_in_model(model: Any, weights: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Find the linear layers that weights of a checkpoint belong to, by the model's renames.

    Returns the module of each weight that is the weight of a linear layer, and the list of weights
    that the model merges with others, such as single experts, or does not hold in a linear layer.
    Weights that the model does not know are in neither.
    """
    known, rules = model.state_dict(), get_model_conversion_mapping(model)
    kept: dict[str, str] = {}
    merged: list[str] = []
    for key, (name, converted) in renamed(model, rules, weights).items():
        module, _, kind = name.rpartition(".")
        if name not in known:
            continue
        owner = model.get_submodule(module)
        plain = isinstance(owner, nn.Linear) and not unlike_linear(owner)
        if converted is None and kind == "weight" and plain:
            kept[key] = module
        else:
            merged.append(key)
    return kept, merged


def _make_room(model: Any, names: Sequence[str], scheme: Scheme, apart: Iterable[str]) -> None:
    """Turn modules of experts into FP8 ones, with dense stacks on meta for the loader to fill."""
    for name, experts in chosen_experts(model, dict.fromkeys(names, scheme)).items():
        if name not in apart:
            module = model.get_submodule(name)
            dtype = module.get_parameter(experts.stacks.down).dtype
            experts.empty(module, dtype)
            for stack in experts.stacks.names:
                # loaders up to 5.22 cast to the dtype they find here before they quantize
                module._parameters[stack] = frozen(
                    torch.empty_like(module.codes(stack), dtype=dtype)
                )


def _placeholder(dense: Any, scheme: Scheme, pre_quantized: bool) -> Fp8Linear:
    layer = empty_layer(dense, scheme, dense.weight.dtype)
    if not pre_quantized:
        # loaders up to 5.22 cast to the dtype they find here before they quantize
        layer.weight = frozen(torch.empty_like(dense.weight, device="meta"))
    return layer


def _dense_again(layer: Fp8Linear) -> nn.Linear:
    """Return a trainable linear layer with the tensors of one that got no codes."""
    rows, columns = layer.weight.shape
    dense = nn.Linear(columns, rows, layer.bias is not None, device="meta")
    dense.weight, dense.bias = nn.Parameter(layer.weight.detach()), layer.bias
    return dense
