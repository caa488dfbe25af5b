"""Carry out a plan: turn each planned layer of a model into an FP8 layer, in place."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.conversion import calibration
from fp8kit.conversion.experts import recognize, stacks_of
from fp8kit.conversion.report import Report
from fp8kit.errors import ConversionError, some_of
from fp8kit.formats import Scheme
from fp8kit.modules import mx_forms
from fp8kit.modules.dense import is_conv1d, is_linear, linear_at
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.hooks import become, drop_restored
from fp8kit.modules.library_experts import convert_experts
from fp8kit.modules.linear import Fp8Linear


def replace_layers(
    model: nn.Module,
    scheme: Scheme,
    report: Report,
    calibrate: Callable[[nn.Module], object] | None,
    weight_storage: str,
) -> None:
    """Turn the planned layers of a model into FP8 layers, after all checks and calibration.

    Records get the form of MX weights as reason. Raises ``ConversionError`` before any change.
    """
    experts = _unchanged_experts(model, report)
    _check_values(model, report)
    scales = _input_scales(model, scheme, report, calibrate)
    form, scheme = mx_forms.named_form(scheme), scheme.stored  # set_forms() rebases below
    for module in model.modules():
        drop_restored(module)
    for module, stacks in experts:
        convert_experts(module, stacks, scheme, weight_storage)
    made: dict[str, Fp8Linear | ExpertTensors] = {}
    for record in report.linears:
        module = model.get_submodule(record.name)
        dense = linear_at(model, record.name)
        layer = Fp8Linear.from_linear(dense, scheme, scales.get(record.name))
        if weight_storage != "discard":
            kept = dense.weight.detach()
            layer.keep(kept.to("cpu") if weight_storage == "cpu_offload" else kept)
        layer.transposed = is_conv1d(module)
        layer.qualified_name = record.name
        mx_forms.set_forms({record.name: layer}, form)  # before become(): an interrupt is harmless
        made[record.name] = become(module, layer)
    for record in report.stacks:
        held = model.get_submodule(record.name)
        assert isinstance(held, ExpertTensors)
        mx_forms.set_forms({record.name: held}, form)
        made[record.name] = held
    for record in (*report.linears, *report.stacks):
        record.reason = made[record.name].form_note


def copied(model: nn.Module, report: Report, weight_storage: str) -> nn.Module:
    """Copy a model for conversion, without copying dense weights that will be discarded."""
    memo: dict[int, object] = {}
    if weight_storage == "discard":
        names = [f"{r.name}.weight" for r in report.linears]
        for name, stacks in stacks_of(model, (r.name for r in report.stacks)).items():
            names += [f"{name}.{stack}" for stack in stacks.names]
        memo = {id(w): w for w in map(model.get_parameter, names)}
    return deepcopy(model, memo)


def _unchanged_experts(model: nn.Module, report: Report) -> list[tuple[nn.Module, ExpertStacks]]:
    """Check that layers are as planned; return the modules of experts with their stacks."""
    linears = {r.name: model.get_submodule(r.name) for r in report.linears}
    changed = [n for n, m in linears.items() if isinstance(m, Fp8Linear) or not is_linear(m)]
    experts, tried = [], dict[Any, Any]()
    for record in report.stacks:
        module = model.get_submodule(record.name)
        stacks = recognize(module, tried)
        if isinstance(module, ExpertTensors) or not isinstance(stacks, ExpertStacks):
            changed.append(record.name)
        else:
            experts.append((module, stacks))
    if changed:
        raise ConversionError(
            f"Layers that changed since the plan was made: {some_of(changed)}.",
            "A plan is applied once, to the model it was made for.",
            "Make a new plan: fp8kit.plan(model).",
        )
    return experts


def refuse_empty_weights() -> None:
    """Refuse to convert under ``init_empty_weights``, where new Parameters lose their values."""
    probe = nn.Module()
    probe.register_parameter("made", nn.Parameter(torch.empty(0, device="cpu")))
    if probe.get_parameter("made").is_meta:
        raise ConversionError(
            "Code moves every new parameter to the meta device, as accelerate.init_empty_weights.",
            "Layers are made FP8 with their values.",
            "Build the model in that block, and convert or load it after the block.",
        )


def _check_values(model: nn.Module, report: Report) -> None:
    refuse_empty_weights()
    weights = {r.name: [linear_at(model, r.name).weight] for r in report.linears}
    weights |= {r.name: [*model.get_submodule(r.name).parameters()] for r in report.stacks}
    on_meta = [name for name, held in weights.items() if any(w.is_meta for w in held)]
    if on_meta:
        raise ConversionError(
            f"The weights of {some_of(on_meta)} are on the meta device.",
            "Quantization needs their values.",
            "Load the weights first, or use fp8kit.load(dir, scheme=...).",
        )


def _input_scales(
    model: nn.Module,
    scheme: Scheme,
    report: Report,
    calibrate: Callable[[nn.Module], object] | None,
) -> dict[str, Tensor]:
    if not scheme.static:
        return {}
    if calibrate is None:
        raise ConversionError(
            f"Scheme {scheme} got no calibration data.",
            "Its activations use one static scale per layer.",
            "Pass calibrate=lambda model: model(batch), or use FP8_DYNAMIC.",
        )
    seen = calibration.observe_amax(model, [r.name for r in report.linears], calibrate)
    return {n: calibration.input_scale(a, scheme.dtype) for n, a in seen.items()}
