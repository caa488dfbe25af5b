"""The quantization method ``fp8kit`` of diffusers, for loading and saving models.

Importing this module enters it in two dictionaries of diffusers, which has no function for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_utils import ModelMixin
from diffusers.quantizers import auto
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.dialects.by_layer import METHOD, plain, scheme_of_plain, schemes_of
from fp8kit.checkpoint.exporting import refuse_adapters, refuse_transposed
from fp8kit.checkpoint.loading.into_module import empty_layer, plan_to_load
from fp8kit.checkpoint.loading.merged_weights import is_finite, not_finite
from fp8kit.conversion import fusion, siblings
from fp8kit.conversion.patterns import LayerFilter
from fp8kit.conversion.plan import refuse_static, warn_of_nothing
from fp8kit.conversion.report import Report
from fp8kit.errors import CheckpointError, UnsupportedError, some_of
from fp8kit.formats import SCHEMES, Scheme
from fp8kit.integrations.diffusers_bfl import bundled, is_bundle, parts_of
from fp8kit.integrations.quantizer_of_layers import (
    QuantizerOfLayers,
    misfit,
    refuse_disk,
    restore_dense,
)
from fp8kit.modules import mx_forms
from fp8kit.modules.entries import quantize_weight, stored_tensors
from fp8kit.modules.hooks import become
from fp8kit.modules.libraries import wrap_once
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import frozen

_HELD = ("weight", "weight_scale", "weight_exponents", "input_scale")


class _Method(StrEnum):  # diffusers reads its value
    FP8KIT = METHOD


class Fp8KitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` for a model of diffusers or a part of a pipeline.

    Args:
        scheme: name of a preset without calibration, e.g. ``"FP8_DYNAMIC"``, or another scheme: a
            ``Scheme``, or its fields as in a saved config.
        include: as in ``fp8kit.plan``.
        exclude: as in ``fp8kit.plan``.
        strict: as in ``fp8kit.plan``.
        layers: the layers that are FP8 in a saved model, with their schemes; read from config.json,
            not passed by users.
        experts: ignored; pipelines require the signature of Transformers' config.
        mx_form: likewise.

    Raises:
        ValueError: if the scheme is unknown, or needs calibration.
        CheckpointError: if ``layers`` has an invalid scheme.

    Example:
        >>> config = Fp8KitConfig("FP8_DYNAMIC", exclude=["*.ff_context.*"])
        >>> FluxTransformer2DModel.from_pretrained(
        ...     "dir", quantization_config=config, dtype=torch.bfloat16
        ... )
    """

    def __init__(
        self,
        scheme: Scheme | str | JsonObject = "FP8_DYNAMIC",
        include: Sequence[str] | LayerFilter | None = None,
        exclude: Sequence[str] | LayerFilter | None = None,
        strict: bool = False,
        layers: Mapping[str, str | JsonObject] | None = None,
        experts: Mapping[str, str | JsonObject] | None = None,  # noqa: ARG002
        quant_method: str = METHOD,
        mx_form: str | None = None,  # noqa: ARG002
    ) -> None:
        scheme = plain(scheme) if isinstance(scheme, Scheme) else scheme
        if layers is None:
            refuse_static(scheme_of_plain(scheme))
        self.quant_method = _Method(quant_method)
        self.scheme, self.include, self.exclude, self.strict = scheme, include, exclude, strict
        self.layers = layers
        self.schemes = schemes_of(layers or {})

    def to_dict(self) -> JsonObject:
        """Return the entry of config.json."""
        said = {key: getattr(self, key) for key in ("scheme", "include", "exclude", "layers")}
        found = {key: value for key, value in said.items() if value is not None}
        return {"quant_method": METHOD, **found, **({"strict": True} if self.strict else {})}

    def to_diff_dict(self) -> JsonObject:
        """Return what diffusers prints of this config: all of it."""
        return self.to_dict()


class Fp8KitQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """Swap linear layers for ``Fp8Linear`` before diffusers fills in the weights.

    After loading, ``model.hf_quantizer.report`` says what was converted and what was not, and why.
    The config may be that of Transformers, which has the same fields. For a single file diffusers
    does not pass ``pre_quantized``.
    """

    use_keep_in_fp32_modules = True
    is_trainable = True
    is_compileable = True
    report: Report | None = None
    model: Any = None

    def __init__(self, quantization_config: Fp8KitConfig, **kwargs: Any) -> None:
        self.single_file = "pre_quantized" not in kwargs
        if not isinstance(quantization_config, Fp8KitConfig):  # that of Transformers
            names = ("scheme", "include", "exclude", "strict", "layers")
            quantization_config = Fp8KitConfig(*(getattr(quantization_config, n) for n in names))
        super().__init__(quantization_config, **kwargs)
        self.dtype = torch.float32
        self.not_finite: list[str] = []
        self.form: Scheme | None = None

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse to quantize weights that a device map keeps on disk: they would stay dense."""
        if not self.pre_quantized:
            refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Set the compute dtype: the given one, or fp32 as in diffusers without quantization."""
        self.dtype = torch_dtype or torch.float32
        return self.dtype

    def adjust_target_dtype(self, _: torch.dtype) -> torch.dtype:
        """Return a dtype of one byte, by which diffusers sizes weights for a device map."""
        return torch.float8_e4m3fn

    def update_missing_keys(self, _: Any, missing_keys: list[str], **__: Any) -> list[str]:
        """Remove scales and exponents from the missing keys if quantization makes them."""
        made = () if self.pre_quantized else ("weight_scale", "weight_exponents")
        return [k for k in missing_keys if k.rpartition(".")[2] not in made]

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Find out whether a single file is FP8 of Black Forest Labs, and bundle its scales."""
        if not self.single_file:
            return state_dict
        self.pre_quantized = any(name.endswith(".weight_scale") for name in state_dict)
        return bundled(state_dict) if self.pre_quantized else state_dict

    def _process_model_before_weight_loading(
        self,
        model: Any,
        keep_in_fp32_modules: Sequence[str] = (),
        state_dict: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        for name, scheme in self._schemes(model, keep_in_fp32_modules, state_dict or {}).items():
            layer = _linear(model, name)
            if not isinstance(layer, Fp8Linear):  # it may have several names
                become(layer, empty_layer(layer, scheme, self.dtype))
            layer.qualified_name = name

    def _schemes(
        self, model: Any, in_fp32: Sequence[str], state_dict: Mapping[str, Any]
    ) -> dict[str, Scheme]:
        """Return the layers that become FP8, by name, with their schemes."""
        config = self.quantization_config
        if not self.pre_quantized:
            scheme = scheme_of_plain(config.scheme)
            wanted = (config.include, config.exclude, config.strict)
            self.report = plan_to_load(model, scheme, *wanted)
            warn_of_nothing(self.report)
            self.report.groups = siblings.find_groups(
                model, [r.name for r in self.report.converted]
            )
            self.form = mx_forms.named_form(scheme)
            return {n: scheme.stored for r in self.report.converted for n in (r.name, *r.aliases)}
        if not self.single_file:
            return dict(config.schemes)
        names = [n.removesuffix(".weight") for n, value in state_dict.items() if is_bundle(value)]
        coded = [n for n in names if not set(n.split(".")) & set(in_fp32)]
        return dict.fromkeys(coded, SCHEMES["FP8_DYNAMIC"])

    def check_if_quantized_param(
        self, model: Any, _: Any, param_name: str, *__: Any, **___: Any
    ) -> bool:
        """Return whether a tensor belongs to an FP8 layer and must not be cast on the way."""
        owner, _dot, kind = param_name.rpartition(".")
        return kind in _HELD and isinstance(model.get_submodule(owner), Fp8Linear)

    def check_quantized_param_shape(self, name: str, wanted: Tensor, found: Tensor) -> bool:
        """Refuse a tensor of the wrong shape; diffusers leaves this check to quantizers."""
        if wanted.shape != found.shape:
            raise misfit(name, found.shape, wanted.shape, "The model")
        return True

    def create_quantized_param(
        self,
        model: Any,
        _: Tensor,
        param_name: str,
        target_device: torch.device,
        state_dict: Mapping[str, Any],
        *__: Any,
        **___: Any,
    ) -> None:
        """Set a tensor of an FP8 layer; a dense weight is quantized on the target device."""
        owner, _dot, kind = param_name.rpartition(".")
        layer = model.get_submodule(owner)
        given = state_dict[param_name]  # not the argument, which is cast even if it is a scale
        if is_bundle(given):
            parts = parts_of(given)
        elif self.pre_quantized:
            parts = {kind: given}
        else:
            q = quantize_weight(given.to(target_device), layer.scheme)
            if not is_finite(q):
                self.not_finite.append(param_name)
            parts = stored_tensors(q, layer.scheme)
        for part, tensor in parts.items():
            wanted = getattr(layer, part)
            if tensor.dtype != wanted.dtype:
                raise CheckpointError(
                    f"{owner}.{part} is {tensor.dtype}.",
                    f"config.json says that the layer is {layer.scheme}: {wanted.dtype}.",
                    "Save the model again: config.json and tensors do not belong together.",
                )
            setattr(layer, part, frozen(tensor.to(target_device)))

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        layers = _layers(model)
        if self.not_finite:
            raise not_finite(self.not_finite)
        held = {n: [getattr(m, k, None) for k in _HELD] for n, m in layers.items()}
        absent = [n for n, ts in held.items() if any(t is not None and t.is_meta for t in ts)]
        if absent:
            raise CheckpointError(
                f"{some_of(absent)} did not get codes and scales.",
                "An FP8 layer needs both.",
                "Save the model again, or exclude layers that the file does not have.",
            )
        for layer in layers.values():
            layer.requires_grad_(False)
        for sentence in mx_forms.set_forms(layers, self.form):
            warnings.warn(sentence, stacklevel=2)
        groups = self.report.groups if self.report else siblings.find_groups(model, list(layers))
        siblings.share_inputs(model, groups)
        fusion.fuse_producers(model)
        self.model = model
        return model

    @property
    def is_serializable(self) -> bool:
        """Enter the FP8 layers in the model's config, which diffusers writes after this call.

        Raises ``CheckpointError`` if the model has adapters, or layers that no loader reads.
        """
        layers = _layers(self.model)
        remedy = "Save what peft.get_peft_model_state_dict(model) gives, then unload_lora."
        refuse_adapters(layers, remedy)
        refuse_transposed(layers)
        _forget(self.model)
        if layers:
            schemes = {n: plain(m.scheme) for n, m in layers.items()}
            said = Fp8KitConfig(layers=schemes, scheme=next(iter(schemes.values()))).to_dict()
            self.model.register_to_config(quantization_config=said)
        return True

    def dequantize(self, model: Any) -> Any:
        """Turn FP8 layers into dense ones, and remove the quantization from the config."""
        restore_dense(model)
        _forget(model)
        model.__dict__.pop("hf_quantizer", None)
        model.is_quantized = False
        return model


class _QuantizerOfModel(QuantizerOfLayers):
    """Finds a quantizer for models that were converted after they were made."""

    def __get__(self, model: Any, owner: type) -> Any:
        found = super().__get__(model, owner)
        if found is not self:
            found.model = model
        return found


def patch() -> None:
    """Let diffusers save models with FP8 layers so that ``from_pretrained`` reads them."""
    ModelMixin.hf_quantizer = _QuantizerOfModel(
        lambda _: Fp8KitQuantizer(Fp8KitConfig(layers={}), pre_quantized=True)
    )
    for base in (Attention, AttentionModuleMixin):
        _join_dense_alone(base)
        base.__init_subclass__ = classmethod(_join_dense_alone)


def _join_dense_alone(kind: Any, /, **_: Any) -> None:
    """Make ``fuse_projections`` of an attention class and its subclasses refuse FP8 layers."""
    for subclass in kind.__subclasses__():
        _join_dense_alone(subclass)
    if "fuse_projections" in vars(kind):
        wrap_once(kind, "fuse_projections", _fuse_projections)


def _fuse_projections(own: Any, attention: Any, *args: Any, **kwargs: Any) -> None:
    inside = (c.modules() for c in attention.children() if not isinstance(c, nn.ModuleList))
    parts = [m for modules in inside for m in modules if isinstance(m, Fp8Linear)]
    if parts:
        raise UnsupportedError(
            f"fuse_qkv_projections got FP8 layers, such as {parts[0].qualified_name}.",
            "It joins dense weights; fp8kit quantizes the input of q, k and v once, and "
            "with few rows multiplies them as one matrix, without it.",
            "Leave the call out, or call it before the model is converted.",
        )
    own(attention, *args, **kwargs)


def _layers(model: nn.Module) -> dict[str, Fp8Linear]:
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, Fp8Linear)}


def _linear(model: nn.Module, name: str) -> Any:
    """Return the linear layer of a name; raise ``CheckpointError`` if the model has none."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Linear):
        raise CheckpointError(
            f"The checkpoint has FP8 codes for {name}.",
            f"{type(model).__name__} has {'no such layer' if found is None else 'no linear'}.",
            "Load it with the class and the config.json that it was saved with.",
        )
    return found


def _forget(model: Any) -> None:
    """Remove the quantization from a model's config."""
    kept = {k: v for k, v in model.config.items() if k != "quantization_config"}
    model._internal_dict = FrozenDict(kept)


auto.AUTO_QUANTIZER_MAPPING[METHOD] = Fp8KitQuantizer
auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Fp8KitConfig
