"""Decide which layers of a model become FP8, then replace them: ``convert`` is ``plan`` applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8kit.conversion import fusion, notes, replacement, siblings, slower_layers
from fp8kit.conversion.decisions import Candidates, Rules
from fp8kit.conversion.eligibility import Eligibility
from fp8kit.conversion.fusion_rules import Link
from fp8kit.conversion.patterns import check_patterns, chosen
from fp8kit.conversion.report import Report
from fp8kit.dispatch.device import capability
from fp8kit.errors import ConversionError, InvalidType, check_choice, check_switch, some_of
from fp8kit.formats import Scheme
from fp8kit.modules import mx_forms
from fp8kit.modules.dense import holds_matrix
from fp8kit.modules.joining import can_share
from fp8kit.modules.parameters import held_bytes, outside_inference_mode
from fp8kit.modules.weight_parts import native_scheme
from fp8kit.ops.validation import check_row_counts

if TYPE_CHECKING:
    from fp8kit.conversion.patterns import LayerFilter


STORAGES = ("discard", "cpu_offload", "keep")


@dataclass(slots=True)
class Plan:
    """Decisions about a model that have not been carried out.

    Args:
        model: the model that was planned.
        scheme: the scheme that its layers would get.
        report: one record per layer; ``print(plan)`` shows it as a table.
        calibrate: runs the model on representative data, or ``None``.
        fuse: as in ``plan``.
        links: the parsed rules of ``fuse``, if it is a mapping.

    Example:
        >>> plan = fp8kit.plan(model, "FP8_BLOCK", exclude=["*.head"])
        >>> print(plan)
        >>> report = plan.apply()
    """

    model: nn.Module
    scheme: Scheme
    report: Report
    calibrate: Callable[[nn.Module], object] | None = None
    fuse: str | Mapping[str, Sequence[str]] = "all"
    links: list[Link] = field(default_factory=list)

    def __str__(self) -> str:
        return str(self.report)

    def apply(self, *, weight_storage: str = "discard") -> Report:
        """Replace the planned layers in place.

        Args:
            weight_storage: what happens to the dense weights: ``"discard"``, ``"cpu_offload"``
                (moved to host memory) or ``"keep"``; kept ones are ``layer.original_weight``.

        Returns:
            The report of what was done.

        Raises:
            ConversionError: if calibration is missing or misses a layer, or a weight is on meta.
            ValueError: for an unknown ``weight_storage``.

        Warns:
            UserWarning: if no layer becomes FP8, and none was FP8 before.
        """
        report = self._carry_out(weight_storage)
        warn_of_nothing(report, self.fuse)
        return report

    def _carry_out(self, weight_storage: str) -> Report:
        remedy = "Pass one of these; 'discard' frees the dense weights."
        check_choice("weight_storage", weight_storage, STORAGES, remedy)
        with outside_inference_mode():
            replacement.replace_layers(
                self.model, self.scheme, self.report, self.calibrate, weight_storage
            )
        siblings.share_inputs(self.model, self.report.groups)
        if fusion.level(self.fuse) > 1:
            self.report.fused = fusion.fuse_producers(self.model, self.links)
        return self.report


def plan(
    model: nn.Module,
    scheme: Scheme | str = "FP8_DYNAMIC",
    *,
    include: Sequence[str] | LayerFilter | None = None,
    exclude: Sequence[str] | LayerFilter | None = None,
    strict: bool = False,
    calibrate: Callable[[nn.Module], object] | None = None,
    fuse: str | Mapping[str, Sequence[str]] = "all",
    m: int | Sequence[int] | None = None,
) -> Plan:
    """Decide which layers become FP8, without changing anything.

    Considered are every ``nn.Linear``, every ``Conv1D`` of Transformers, and every module of
    stacked experts whose ``forward`` is recognised. The safe defaults protect output heads,
    embeddings, MoE routers, time and modulation projections and vision towers. Layers too small to
    gain stay dense, and so do tied weights, layers that the model keeps in float32 or whose weight
    the code around them reads, and subclasses of ``nn.Linear`` that compute something else (which
    a run on random numbers shows) or have methods or attributes of their own.

    Args:
        model: any module; weights may be on the meta device.
        scheme: a preset name or a ``Scheme``.
        include: patterns; only layers that match one are considered. A pattern that is a layer's
            full name lifts the default exclusions for it, also those of small layers and of
            subclasses of ``nn.Linear`` with methods or attributes of their own. Or a function
            ``include(name, module)`` that returns True for layers to consider.
        exclude: patterns, added to the safe defaults; an empty list switches the defaults off. Or
            a function ``exclude(name, module)`` that returns True for layers to leave dense.
        strict: raise, instead of reporting it, if a considered layer cannot be converted, or no
            layer would become FP8.
        calibrate: runs the model on representative data, e.g. ``lambda model: model(batch)``.
            Static schemes take their input scales from it, and layers that it calls one after
            another with the same tensor share one quantization; without it, siblings are known by
            their usual names (q/k/v, gate/up).
        fuse: ``"inputs"`` lets layers with one input quantize it once; ``"all"`` also lets the
            norms and activations before them write FP8, where the model's code is known; ``"none"``
            keeps every layer on its own. For code of your own, a mapping from a pattern of blocks
            to rules: the norm or activation, and the only layers that read it, in call order:
            ``{"layers.*": ["norm -> attn.q attn.k attn.v", "act -> fc2", "cross.k cross.v"]}``;
            a run of ``calibrate`` checks the rules. In a pattern of blocks ``*`` stays within one
            component: ``"layers.*"`` is ``layers.0`` to ``layers.11``, also below a dotted prefix,
            and nothing inside them; an expression after ``"re:"`` must match the whole name.
        m: row counts (tokens in a call) that the layers will serve, e.g. ``[1, 64]`` for decoding,
            ``[1, 4096]`` for decoding and prefill. A layer stays dense if bf16 is faster at any of
            them, by the measured times of its GPU. Without ``m`` a layer stays dense if FP8 is
            faster at no measured row count. Where nothing was measured the report says so.

    A pattern of layers is a glob on the qualified name or on any dotted suffix of it
    (``"*.mlp.*"``, ``"o_proj"``), where ``*`` crosses dots, or ``"re:"`` and a regular expression
    matched from the start.

    Returns:
        A ``Plan``: ``print`` it, or ``apply`` it.

    Raises:
        TypeError: if the model is no module, ``calibrate`` no function, ``strict`` no switch, or a
            row count no integer.
        ValueError: if the scheme or ``fuse`` is unknown, or a row count is not positive.
        ConversionError: if a pattern matches no layer, ``strict`` finds a layer that cannot be
            converted, or a fusion rule does not hold or names a module that does not exist.

    Example:
        >>> print(fp8kit.plan(model, exclude=["*.o_proj"]))
    """
    scheme, rows = Scheme.of(scheme), None if m is None else check_row_counts(m)
    check_switch("strict", strict)
    _check_arguments(model, calibrate)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    asked = native_scheme(scheme, device)
    cores = capability(device)
    scheme = mx_forms.form_on(asked, cores)
    level, candidates = fusion.level(fuse), Candidates.of(model)
    named = candidates.named()
    include = _patterns("include", include, named)
    modules = model.named_modules(remove_duplicate=False)
    dense = [name for name, module in modules if holds_matrix(module)]
    exclude = _patterns("exclude", exclude, named, dense)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    size = held_bytes(tensors.values())
    report = Report(str(asked), model_bytes_before=size)
    report.records = candidates.decide(model, Rules(Eligibility(model), scheme, include, exclude))
    report.notes += notes.mx_numbers(device.type, cores, asked, bool(report.stacks))
    links = [] if isinstance(fuse, str) else fusion.user_links(model, fuse, calibrate)
    if level and can_share(scheme):
        names_to_group = [r.name for r in report.linears]
        report.groups = siblings.find_groups(model, names_to_group, calibrate, links)
    slower_layers.leave_slower(model, scheme, report, rows, include or ())
    for others in siblings.ungrouped(model) if level else ():  # converted or loaded earlier
        report.groups += siblings.find_groups(model, others, calibrate, links)
    report.notes += notes.decoded_weights(report, model, scheme, rows)
    report.notes += notes.own_gates(
        {r.name: candidates.stacks[model.get_submodule(r.name)] for r in report.stacks}
    )
    report.notes += fusion.idle_links(model, links, scheme, [r.name for r in report.linears])
    report.notes += notes.other_schemes(model, asked)
    report.notes += [notes.UNTRIED_RULES] if links and calibrate is None else []
    report.notes += filter(None, [report.nothing()])
    if strict:
        report.refuse_blocked()
    return Plan(model, asked, report, calibrate, fuse, links)


def convert(
    model: nn.Module,
    scheme: Scheme | str = "FP8_DYNAMIC",
    *,
    include: Sequence[str] | LayerFilter | None = None,
    exclude: Sequence[str] | LayerFilter | None = None,
    strict: bool = False,
    calibrate: Callable[[nn.Module], object] | None = None,
    fuse: str | Mapping[str, Sequence[str]] = "all",
    m: int | Sequence[int] | None = None,
    weight_storage: str = "discard",
    copy: bool = False,
) -> Report:
    """Replace the linear layers of a model by FP8 ones, in place or in a copy.

    Args:
        model: any module with weights in memory.
        scheme: a preset name or a ``Scheme``.
        include: as in ``plan``.
        exclude: as in ``plan``.
        strict: as in ``plan``.
        calibrate: as in ``plan``; needed by the static scheme ``FP8``.
        fuse: as in ``plan``.
        m: as in ``plan``.
        weight_storage: as in ``Plan.apply``.
        copy: leave the model as it is and convert a deep copy, which is ``report.model``; dense
            weights that the conversion discards are not copied.

    Returns:
        A ``Report``: what was converted or skipped and why, bytes before and after; the copy.

    Raises:
        TypeError: as ``plan`` raises it, or if ``copy`` is no switch.
        ValueError: if scheme, ``fuse`` or storage is unknown, or a row count is not positive.
        ConversionError: as ``plan`` and ``Plan.apply`` raise it; the model is then unchanged.

    Warns:
        UserWarning: if no layer becomes FP8, and none was FP8 before.

    Example:
        >>> print(fp8kit.convert(model, "FP8_DYNAMIC"))
    """
    check_switch("copy", copy)
    decided = plan(
        model,
        scheme,
        include=include,
        exclude=exclude,
        strict=strict,
        calibrate=calibrate,
        fuse=fuse,
        m=m,
    )
    if copy:
        decided.model = replacement.copied(model, decided.report, weight_storage)
    report = decided._carry_out(weight_storage)
    report.model = decided.model if copy else None  # a report must not keep a user's model alive
    warn_of_nothing(report, fuse)
    return report


def _patterns(
    argument: str,
    given: Sequence[str] | LayerFilter | None,
    linears: Mapping[str, nn.Module],
    dense: Sequence[str] = (),
) -> Sequence[str] | None:
    patterns = chosen(argument, given, linears.items())
    check_patterns(argument, () if patterns is None else patterns, list(linears), dense)
    return patterns


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model with tensors that have no shape yet; raises ``ConversionError``."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, held in tensors if is_lazy(held)]:
        raise ConversionError(
            f"{some_of(lazy)} have no shape yet.",
            "A layer gets it when the model runs for the first time (nn.LazyLinear).",
            "Call the model on one batch first.",
        )


def refuse_static(scheme: Scheme) -> None:
    """Refuse to quantize to a static scheme while loading; raises ``ConversionError``."""
    if scheme.static:
        raise ConversionError(
            f"Got scheme {scheme} for quantization while loading.",
            "Its input scales come from calibration, which needs the loaded model.",
            f"Load the model, then fp8kit.convert(model, {scheme.name!r}, calibrate=...).",
        )


def warn_of_nothing(report: Report, fuse: str | Mapping[str, Sequence[str]] = "all") -> None:
    """Warn, at the caller's caller, that no layer is FP8, or none in the scheme asked for.

    With fusion rules the latter is no reason to warn: the call may be for these alone.
    """
    if nothing := report.nothing():
        warnings.warn(nothing, stacklevel=3)
    elif isinstance(fuse, str) and not (report.converted or report.groups or report.fused):
        for note in report.notes:
            if notes.IN_ANOTHER_SCHEME in note:
                warnings.warn(note, stacklevel=3)


def _check_arguments(model: object, calibrate: object) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"Got a model of type {type(model).__name__}.",
            "It must be an nn.Module with linear layers in it.",
            "Load a checkpoint with fp8kit.load; of a pipeline pass a part, such as "
            "pipeline.transformer.",
        )
    if isinstance(model, nn.Linear):
        raise ConversionError(
            f"Got a bare {type(model).__name__} as the model.",
            "Layers are replaced inside the module that holds them.",
            "Use fp8kit.Fp8Linear.from_linear(layer), or pass the parent module.",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ConversionError(
            f"Got a {type(model).__name__} of TorchScript as the model.",
            "Layers are replaced in the Python module; TorchScript has compiled its code.",
            "Convert the module that was scripted or traced.",
        )
    refuse_lazy(model)
    if calibrate is not None and not callable(calibrate):
        raise InvalidType(
            f"Got calibrate of type {type(calibrate).__name__}.",
            "It must be a function that takes the model and runs it on representative data.",
            "Pass calibrate=lambda model: model(batch).",
        )
