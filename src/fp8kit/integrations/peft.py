"""LoRA and DoRA on FP8 layers: adapters that merge, and unmerge to the same bytes.

An unmerged adapter runs beside its layer, and needs nothing of this module. Where PEFT computes
with the layer's weight, it gets the dequantized weight, or an error.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch
from peft.tuners.adaption_prompt.layer import _BaseAdaptedAttention
from peft.tuners.lora import layer as lora_layer
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.tuners.unilora.layer import UniLoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.errors import InvalidValue, UnsupportedError, some_of
from fp8kit.formats import FP8_FORMATS, QTensor, scale_dtype
from fp8kit.modules import refusals
from fp8kit.modules.entries import quantize_weight, stored_tensors
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.libraries import wrap_once
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import written_together
from fp8kit.modules.weight_parts import recode
from fp8kit.runtime.weight_hazards import version

OLDEST = (0, 21)
_DORA = ("use_dora",)
_INITS = (True, False, "gaussian", "eva")  # initializations that do not read the weight


@dataclass(frozen=True, slots=True)
class _Unmerged:
    """The tensors of a layer before adapters were merged into it; codes and scales as uint8."""

    weight: dict[str, Tensor]  # uint8 copies of codes, scales and, if rebased, exponents
    encoding: torch.dtype  # of the codes
    bias: Tensor | None  # if a merged adapter has one
    original_weight: Tensor | None
    version: int | None  # of ``original_weight``

    @classmethod
    def of(cls, layer: Fp8Linear) -> _Unmerged:
        layer.quantized_weight()  # follows a kept weight that was changed
        codes, kept = {n: _bytes(t) for n, t in _held(layer).items()}, layer.original_weight
        count = None if kept is None else version(kept)
        return cls(codes, layer.scheme.dtype, None, kept, count)

    def quantized(self, layer: Fp8Linear) -> QTensor:
        """Return codes and scales, in the encoding that the layer has by now (``recode``)."""
        device, scheme = layer.codes.device, layer.scheme
        codes = self.weight["weight"].to(device).view(self.encoding)
        scale = self.weight["weight_scale"].to(device).view(scale_dtype(scheme.weight))
        return recode(QTensor(codes, scale, scheme.weight), scheme.dtype)

    @torch.no_grad()
    def restore(self, layer: Fp8Linear) -> None:
        own, q = _held(layer), self.quantized(layer)
        before = {**self.weight, "weight": q.data, "weight_scale": q.scale}
        with written_together(layer, ("weight",)):
            for name, tensor in own.items():
                tensor.copy_(before[name])
        if self.bias is not None:
            layer.bias.copy_(self.bias)
        if self.original_weight is not None:
            layer.keep(self.original_weight)
            if version(self.original_weight) != self.version:  # changed while adapters were merged
                layer._quantized_from = None


class Fp8LoraLinear(lora_layer.Linear):  # type: ignore[misc]
    """The LoRA layer around an ``Fp8Linear``; ``get_peft_model`` makes it.

    ``merge`` adds the adapters' updates to the dequantized weight, in fp32, and quantizes the sum,
    once for all merged adapters, into the storage of the layer. ``unmerge`` restores the bytes
    that the layer held before. If ``base_layer`` was replaced by its ``to_linear()``, adapters are
    those of PEFT on a dense layer.

    Example:
        >>> tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        >>> tuned.merge_adapter()
        >>> tuned.unmerge_adapter()
    """

    _unmerged: _Unmerged | None = None
    merged_adapters: list[str]

    @property
    def restored_by_unmerge(self) -> tuple[str, ...]:
        """The tensors of the base layer that ``unmerge`` will write; none unless merged."""
        if self._unmerged is None:
            return ()
        return ("weight",) if self._unmerged.bias is None else ("weight", "bias")

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Return PEFT's variants, with a DoRA variant that reads FP8 weights."""
        return {**super().lora_variants, _DORA: _DoraVariant}

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        """Add an adapter; refuse one whose initialization would use codes as numbers."""
        of_codes = isinstance(self.get_base_layer(), Fp8Linear)
        if of_codes and config.init_lora_weights not in _INITS:
            raise _made_from_codes(f"init_lora_weights={config.init_lora_weights!r}")
        # would read the weight, on meta only in forward
        if of_codes and getattr(config, "kasa_config", None):
            raise _made_from_codes("kasa_config")
        _explaining_fp8_errors(super().update_layer, adapter_name, *args, config=config, **kwargs)

    def merge(
        self,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> None:
        """Merge adapters into the weight, by default the active ones.

        Raises ``ValueError`` if a merged value is not finite, with or without ``safe_merge``, and
        ``UnsupportedError`` for an adapter other than LoRA and DoRA, or with a bias for a layer
        without, or if the layer became dense with others merged. The layer is then unchanged.
        """
        if self._is_dense():
            super().merge(safe_merge, adapter_names)
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) or [] if n in self.lora_A]
        if not names:
            return
        layer = self.get_base_layer()
        held = self._unmerged or _Unmerged.of(layer)
        if held.bias is None and layer.bias is not None and any(map(self.lora_bias.get, names)):
            held = replace(held, bias=layer.bias.detach().clone())
        merged = [*self.merged_adapters, *names]
        with torch.no_grad():
            weight, bias = self._summed(held, merged)
            q = quantize_weight(weight.to(layer.codes.device), layer.scheme)
            stored, own = stored_tensors(q, layer.scheme), _held(layer)
            if held.original_weight is not None:
                weight = weight.to(held.original_weight.device)
            # from here on only numbers are copied; if that is interrupted, unmerge() restores them
            self._unmerged, self.merged_adapters = held, merged
            with written_together(layer, ("weight",)):
                for name, tensor in own.items():
                    tensor.copy_(stored[name])
            if bias is not None:
                layer.bias.copy_(bias)
            if held.original_weight is not None:
                layer.keep(weight)

    def unmerge(self) -> None:
        """Unmerge all adapters: restore the bytes that the layer held before.

        Raises ``UnsupportedError`` if the layer became dense meanwhile.
        """
        if self._is_dense():
            super().unmerge()
            return
        if self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self._unmerged.restore(self.get_base_layer())
        self.merged_adapters.clear()
        self._unmerged = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Refuse a new base weight while adapters are merged: unmerging would discard it."""
        for kind in self.restored_by_unmerge:
            if (name := f"{prefix}base_layer.{kind}") in state_dict:
                rest[-1].append(str(refusals.merged(name, self.merged_adapters)))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _is_dense(self) -> bool:
        """Return whether the base layer became dense; refuse one that held merged codes before."""
        base = self.get_base_layer()
        if isinstance(base, Fp8Linear):
            return False
        if self._unmerged is not None:
            raise UnsupportedError(
                f"{', '.join(self.merged_adapters)} were merged into an Fp8Linear, and base_layer "
                f"is a {type(base).__name__} now.",
                "Adapters are merged and unmerged in the same layer.",
                "Assign the Fp8Linear to base_layer again and unmerge before to_linear(); or keep "
                "the merged weight: model.unload().",
            )
        return True

    def _summed(self, held: _Unmerged, adapters: list[str]) -> tuple[Tensor, Tensor | None]:
        """Compute weight and bias with adapters, in fp32, from the layer's unmerged tensors.

        They are rounded once, to the dtypes in which the layer keeps them.
        """
        layer, fp32 = self.get_base_layer(), torch.float32
        before = _dense(layer, held)
        weight = before
        bias = None if held.bias is None else held.bias.to(layer.codes.device, fp32)
        for name in adapters:
            variant = self.lora_variant.get(name)
            if not isinstance(variant, _DoraVariant | None):
                raise UnsupportedError(
                    f"Adapter {name} is a {type(variant).__name__}.",
                    "Into an FP8 weight, plain LoRA and DoRA can be merged.",
                    "Leave it unmerged, or merge it into the dense model and convert that.",
                )
            delta = self.get_delta_weight(name).to(weight.device, fp32)
            weight = weight + delta
            if variant is not None:
                magnitude = self.lora_magnitude_vector[name]
                norm = magnitude.get_weight_norm(before, delta, scaling=1)
                weight = weight * (magnitude.weight.to(fp32) / norm).view(-1, 1)
            if self.lora_bias[name]:
                if bias is None:
                    raise UnsupportedError(
                        f"Adapter {name} has a bias, and the layer has none.",
                        "What is merged into a layer has a place in it.",
                        "Train the adapter with lora_bias=False, or leave it unmerged.",
                    )
                bias = bias + self.lora_B[name].bias.to(fp32) * self.scaling[name]
        if held.original_weight is not None:
            weight = weight.to(held.original_weight.dtype)
        bias = None if bias is None else bias.to(layer.bias.dtype)
        for part in (weight, bias):
            if part is not None and not torch.isfinite(part).all():
                raise InvalidValue(
                    f"With {', '.join(adapters)}, the merged weight has NaN or infinities.",
                    f"Adapters are finite, and so is their sum with the weight in {part.dtype}.",
                    "Train or load the adapter again; the layer is as it was.",
                )
        return weight, bias


def _made_from_codes(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Got {what} on an Fp8Linear.",
        "It computes with the weight of the layer, changes it, or takes its dtype.",
        "Use LoRA or DoRA with init_lora_weights True, 'gaussian' or 'eva'; or attach the "
        "adapter to the dense model; of layers that others are merged into, call to_linear().",
    )


def _explaining_fp8_errors(own: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function; replace torch's error for FP8 arithmetic by one that says what to do."""
    try:
        return own(*args, **kwargs)
    except NotImplementedError as error:
        if "Float8" not in str(error):
            raise
        raise _made_from_codes(f"an adapter that needs numbers ({error})") from error


class _DoraLayer(DoraLinearLayer):  # type: ignore[misc]
    """DoRA's norms and results, from the weight that is dequantized at each call."""

    def update_layer(self, *, base_layer: nn.Linear, **kwargs: Any) -> None:
        super().update_layer(base_layer=_with_numbers(base_layer), **kwargs)

    def forward(self, x: Tensor, *, base_layer: nn.Linear, **kwargs: Any) -> Any:
        return super().forward(x, base_layer=_with_numbers(base_layer), **kwargs)


def _with_numbers(layer: nn.Linear) -> nn.Linear:
    return layer.to_linear() if isinstance(layer, Fp8Linear) else layer


class _DoraVariant(DoraLinearVariant):  # type: ignore[misc]
    """DoRA on an FP8 layer."""

    @staticmethod
    def init(module: Fp8LoraLinear, adapter_name: str, **_: Any) -> None:
        """Add a magnitude to an adapter."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        magnitude = _DoraLayer(fan_in_fan_out=False)
        magnitude.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = magnitude


def patch() -> None:
    """Let PEFT put ``Fp8LoraLinear`` around FP8 layers.

    Raises ``UnsupportedError`` if this version of PEFT is too old.
    """
    if tuple(int(p) for p in peft.__version__.split(".")[:2]) < OLDEST:
        raise UnsupportedError(
            f"PEFT is {peft.__version__}.",
            f"The integration is written for {OLDEST[0]}.{OLDEST[1]} and later.",
            "Upgrade with pip install -U peft.",
        )
    lora_model.dispatch_default = _dispatch
    wrap_once(_BaseAdaptedAttention, "__init__", _explaining_fp8_errors)
    for method in ("inject_adapter", "merge_adapter", "_unload_and_optionally_merge"):
        wrap_once(BaseTuner, method, _explaining_fp8_errors)
    wrap_once(UniLoraLayer, "update_scaling", _scale_in_high_precision)
    wrap_once(ModulesToSaveWrapper, "check_module", _refuse_fp8)


def _refuse_fp8(own: Any, wrapper: Any) -> None:
    """Refuse ``modules_to_save`` with FP8 layers; the error of a later backward names no layer."""
    own(wrapper)
    modules = wrapper.original_module.modules()
    found = [m for m in modules if isinstance(m, Fp8Linear | ExpertTensors)]
    if found:
        names = [getattr(m, "qualified_name", "") or type(m).__name__ for m in found]
        raise UnsupportedError(
            f"modules_to_save asks for FP8 layers: {some_of(names)}.",
            "PEFT trains a copy of such a module, and FP8 weights get no gradient.",
            "Name it in target_modules, or exclude it from conversion.",
        )


def _scale_in_high_precision(own: Any, layer: Any, adapter_name: str, *scales: Tensor) -> None:
    """Cast UniLora's scales to the compute dtype: UniLora casts them to the weight's, FP8."""
    own(layer, adapter_name, *scales)
    base = layer.get_base_layer()
    held = layer.unilora_scales_A, layer.unilora_scales_B
    for kept, given in zip(held, scales, strict=True) if isinstance(base, Fp8Linear) else ():
        if adapter_name in kept:
            kept[adapter_name] = given.to(base.codes.device, base.compute_dtype)


def _dispatch(target: Any, adapter_name: str, config: Any, **kwargs: Any) -> Any:
    """Make the LoRA layer around a module, in place of PEFT's ``dispatch_default``."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    parameter = kwargs.get("parameter_name")
    if parameter is not None:
        if getattr(getattr(base, parameter, None), "dtype", None) in FP8_FORMATS:
            raise UnsupportedError(
                f"An adapter is asked of {parameter} of {type(base).__name__}, which is FP8: "
                "by target_parameters, or by target_modules that PEFT takes for experts, such "
                "as 'all-linear'.",
                "PEFT adds such an adapter to the weight itself, and codes are no numbers: "
                "rounded to them, it would vanish.",
                "Name other layers, as target_modules=['q_proj', 'v_proj'], or exclude the "
                "experts from conversion.",
            )
    elif isinstance(base, Fp8Linear):
        kwargs.pop("parameter_name", None)
        wrapped = Fp8LoraLinear(target, adapter_name, config=config, **kwargs)
        wrapped.fan_in_fan_out = False  # codes are [N, K], also if the layer was a Conv1D
        return wrapped
    return lora_layer.dispatch_default(target, adapter_name, config=config, **kwargs)


def _dense(layer: Fp8Linear, held: _Unmerged) -> Tensor:
    """Return the unmerged weight of a layer, in fp32 on its device."""
    if held.original_weight is not None:
        return held.original_weight.detach().to(layer.codes.device, torch.float32)
    return functional.dequantize(held.quantized(layer), torch.float32)


def _held(layer: Fp8Linear) -> dict[str, Tensor]:
    """Return the tensors that hold the weight of a layer, by name."""
    found = {"weight": layer.codes, "weight_scale": layer.weight_scale}
    if layer.scheme.rebased:
        found["weight_exponents"] = layer.weight_exponents
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """Copy a tensor as uint8, which any pickle can store."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
