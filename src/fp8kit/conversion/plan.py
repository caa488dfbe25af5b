"""Decide which layers of a model become FP8, then replace them: ``convert`` is ``plan`` applied."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8kit.conversion import calibration, fusion, profitability, siblings
from fp8kit.conversion.eligibility import Eligibility, bypassed
from fp8kit.conversion.experts import decide_experts, names_to_match, own_gates, recognize
from fp8kit.conversion.fusion_rules import Link
from fp8kit.conversion.linear_records import decide_linear
from fp8kit.conversion.patterns import check_patterns, chosen, some_of
from fp8kit.conversion.report import Report
from fp8kit.conversion.roles import layer_roles
from fp8kit.dispatch.backends import choose
from fp8kit.dispatch.device import capability
from fp8kit.errors import ConversionError, teach
from fp8kit.formats import Scheme
from fp8kit.matmul.problem import BACKENDS, DECODING, linear_problem
from fp8kit.modules import mx_forms
from fp8kit.modules.dense import is_conv1d, is_linear
from fp8kit.modules.expert_tensors import ExpertStacks, ExpertTensors
from fp8kit.modules.hooks import carry_hooks
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared_input import can_share
from fp8kit.modules.stacked_experts import convert_experts
from fp8kit.modules.weight_parts import native_scheme
from fp8kit.ops.validation import check_row_counts

if TYPE_CHECKING:
    from fp8kit.conversion.patterns import Choice

STORAGES = ("discard", "cpu_offload", "keep")
_FEW_AND_MANY = (16, 4096)  # rows for which a backend may decode weights


@dataclass(slots=True)
class Plan:
    """Decisions about a model that have not been carried out.

    Args:
        model: the model they are about.
        scheme: what its layers would become.
        report: one record per layer; ``print(plan)`` shows it as a table.
        calibrate: runs the model on representative data, or ``None``.
        fuse: as in ``plan``.
        links: what ``fuse`` says about this model, if it is a mapping.

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
                (kept in host memory) or ``"keep"``; kept ones are ``layer.original_weight``.

        Returns:
            The report of what was done.

        Raises:
            ConversionError: if calibration is missing or misses a layer, or a weight is on meta.
            ValueError: for an unknown ``weight_storage``.

        Warns:
            UserWarning: if no layer becomes FP8, and none was before.
        """
        report = self._carry_out(weight_storage)
        _warn_of_nothing(report)
        return report

    def _carry_out(self, weight_storage: str) -> Report:
        if weight_storage not in STORAGES:
            raise ValueError(
                teach(
                    f"Got weight_storage={weight_storage!r}.",
                    f"It is one of {', '.join(STORAGES)}.",
                    "Pass one of these; 'discard' frees the dense weights.",
                )
            )
        names = [r.name for r in self.report.linears]
        modules = {n: self.model.get_submodule(n) for n in names}
        experts = {r.name: self.model.get_submodule(r.name) for r in self.report.stacks}
        stacks = {n: recognize(m) for n, m in experts.items()}
        changed = [n for n, m in modules.items() if isinstance(m, Fp8Linear) or not is_linear(m)]
        changed += [n for n, m in experts.items() if isinstance(m, ExpertTensors) or not stacks[n]]
        if changed:
            raise ConversionError(
                teach(
                    f"Layers that changed since the plan was made: {some_of(changed)}.",
                    "A plan is applied once, to the model it was made for.",
                    "Make a new plan: fp8kit.plan(model).",
                )
            )
        on_meta = [n for n in names if profitability.linear_at(self.model, n).weight.is_meta]
        on_meta += [n for n, m in experts.items() if any(p.is_meta for p in m.parameters())]
        if on_meta:
            raise ConversionError(
                teach(
                    f"The weights of {some_of(on_meta)} are on the meta device.",
                    "Quantization needs their values.",
                    "Load the weights first, or use fp8kit.load(dir, scheme=...).",
                )
            )
        scales: dict[str, Tensor] = {}
        if self.scheme.static:
            if self.calibrate is None:
                raise ConversionError(
                    teach(
                        f"Scheme {self.scheme} got no calibration data.",
                        "Its activations use one static scale per layer.",
                        "Pass calibrate=lambda model: model(batch), or use FP8_DYNAMIC.",
                    )
                )
            seen = calibration.observe_amax(self.model, names, self.calibrate)
            scales = {n: calibration.input_scale(a, self.scheme.dtype) for n, a in seen.items()}
        for name, found in stacks.items():
            assert isinstance(found, ExpertStacks)
            convert_experts(experts[name], found, self.scheme, weight_storage)
        for record in self.report.linears:
            dense = profitability.linear_at(self.model, record.name)
            layer = _converted(dense, self.scheme, scales.get(record.name), weight_storage)
            layer.transposed = is_conv1d(modules[record.name])
            carry_hooks(modules[record.name], layer)
            layer.qualified_name = record.name
            for name in (record.name, *record.aliases):
                self.model.set_submodule(name, layer)
        made = {n: self.model.get_submodule(n) for n in names}
        layers = {n: m for n, m in made.items() if isinstance(m, Fp8Linear)}
        made_fp8: dict[str, Fp8Linear | ExpertTensors] = {**layers}
        made_fp8 |= {n: m for n, m in experts.items() if isinstance(m, ExpertTensors)}
        mx_forms.settle(made_fp8)
        for record in (*self.report.linears, *self.report.stacks):
            record.reason = made_fp8[record.name].form_note
        siblings.share_inputs(self.model, self.report.groups)
        if fusion.level(self.fuse) > 1:
            self.report.fused = fusion.fuse_producers(self.model, self.links)
        return self.report


def plan(
    model: nn.Module,
    scheme: Scheme | str = "FP8_DYNAMIC",
    *,
    include: Sequence[str] | Choice | None = None,
    exclude: Sequence[str] | Choice | None = None,
    strict: bool = False,
    calibrate: Callable[[nn.Module], object] | None = None,
    fuse: str | Mapping[str, Sequence[str]] = "all",
    m: int | Sequence[int] | None = None,
) -> Plan:
    """Decide which layers become FP8, without changing anything.

    Every ``nn.Linear``, every ``Conv1D`` of Transformers, and every module of stacked experts whose
    ``forward`` computes what its form says, is considered, except what the safe defaults protect:
    output heads, embeddings, MoE routers, time and modulation projections, vision towers, layers
    too small to gain, tied weights, layers that the model keeps in float32 or whose weight the code
    around them casts, and subclasses of ``nn.Linear`` that compute something else, which a run on
    random numbers shows, or have methods or attributes of their own.

    Args:
        model: any module; weights may be on the meta device.
        scheme: a preset name or a ``Scheme``.
        include: patterns; only layers that match one are considered. A pattern that names a layer
            in full lifts the default exclusions for it, and asks for a subclass of ``nn.Linear``
            that has methods or attributes of its own. Or a function of a name and a module.
        exclude: patterns, added to the safe defaults; an empty list switches the defaults off. Or
            a function ``exclude(name, module)`` that returns True for layers to leave alone.
        strict: raise if a considered layer cannot be converted, or no layer would become FP8,
            instead of reporting it.
        calibrate: runs the model on representative data, e.g. ``lambda model: model(batch)``.
            Static schemes take their input scales from it, and layers that it calls one after
            another with the same tensor share one quantization; without it, siblings are known by
            their usual names (q/k/v, gate/up).
        fuse: ``"inputs"`` lets layers with one input quantize it once; ``"all"`` also lets the
            norms and activations before them write FP8, where the model's code is known; ``"none"``
            keeps every layer on its own. For code of your own, a mapping from a pattern of blocks
            to what is read by which layers in them, and by nothing else, in call order:
            ``{"layers.*": ["norm -> attn.q attn.k attn.v", "act -> fc2", "cross.k cross.v"]}``;
            ``calibrate`` then shows whether it is true. In a pattern of blocks ``*`` stays within
            one component: ``"layers.*"`` is ``layers.0`` to ``layers.11``, also below a dotted
            prefix, and nothing inside them; what follows ``"re:"`` is the whole name.
        m: row counts (tokens in a call) that the layers will serve, e.g. ``[1, 64]`` for decoding,
            ``[1, 4096]`` for decoding and prefill. A layer that bf16 serves faster at any of them,
            by the measured times of its GPU, is left alone. Without ``m`` only layers that FP8
            makes faster at no row count are. Where nothing was measured the report says so.

    A pattern of layers is a glob on the qualified name or on any dotted suffix of it
    (``"*.mlp.*"``, ``"o_proj"``), where ``*`` crosses dots, or ``"re:"`` and a regular expression
    matched from the start.

    Returns:
        A ``Plan``: ``print`` it, or ``apply`` it.

    Raises:
        TypeError: if the model is no module, ``calibrate`` no function, or a row count no integer.
        ValueError: if the scheme or ``fuse`` is unknown, or a row count is not positive.
        ConversionError: if a pattern matches no layer, ``strict`` finds a layer that cannot be
            converted, or a fusion rule names what does not exist or does not hold.

    Example:
        >>> print(fp8kit.plan(model, exclude=["*.o_proj"]))
    """
    scheme, rows = Scheme.of(scheme), None if m is None else check_row_counts(m)
    _check_arguments(model, calibrate)
    scheme = native_scheme(scheme, next(model.parameters(), torch.empty(0)).device)
    level = fusion.level(fuse)
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    linears = {n: module for module, found in names.items() if is_linear(module) for n in found}
    stacks = {m: s for m in names if not is_linear(m) and (s := recognize(m)) is not None}
    held = {m: s for m, s in stacks.items() if isinstance(s, ExpertStacks)}
    linears |= {n: m for m, s in held.items() for n in names_to_match(names[m], m, s)}
    include = _patterns("include", include, linears)
    exclude = _patterns("exclude", exclude, linears)
    report = Report(str(scheme), model_bytes_before=_model_bytes(model))
    asked, scheme = scheme, _form(model, scheme, report)
    obstacles, roles = Eligibility(model), layer_roles(model)
    for module, found in names.items():
        if is_linear(module):
            role = next((roles[n] for n in found if n in roles), "")
            report.records.append(
                decide_linear(module, found, role, obstacles, scheme, include, exclude)
            )
        elif module in held:
            report.records.append(
                decide_experts(module, found, held[module], obstacles, scheme, include, exclude)
            )
        else:
            report.records.extend(bypassed(module, found[0], str(stacks.get(module, ""))))
    links = [] if isinstance(fuse, str) else fusion.user_links(model, fuse, calibrate)
    if level and can_share(scheme):
        names_to_group = [r.name for r in report.linears]
        report.groups = siblings.find_groups(model, names_to_group, calibrate, links)
    profitability.leave_slower(model, scheme, report, rows, include or ())
    for others in siblings.ungrouped(model) if level else ():  # converted or loaded earlier
        report.groups += siblings.find_groups(model, others, calibrate, links)
    _add_notes(report, model, scheme, rows or _FEW_AND_MANY)
    report.notes += own_gates({r.name: held[model.get_submodule(r.name)] for r in report.stacks})
    converted = [r.name for r in report.linears]
    report.notes += fusion.idle_links(model, links, scheme, converted)
    if links and calibrate is None:
        report.notes.append(
            "The rules of fuse= were not tried: calibrate= runs the model and checks them. A layer "
            "that one forgets meets NaN on a GPU."
        )
    report.notes += filter(None, [report.nothing()])
    if strict:
        report.refuse_blocked()
    return Plan(model, asked, report, calibrate, fuse, links)


def convert(
    model: nn.Module,
    scheme: Scheme | str = "FP8_DYNAMIC",
    *,
    include: Sequence[str] | Choice | None = None,
    exclude: Sequence[str] | Choice | None = None,
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
            weights that the copy would discard are not copied.

    Returns:
        What was converted, what was skipped and why, the bytes before and after; and the copy.

    Raises:
        TypeError: as ``plan`` raises it.
        ValueError: if scheme, ``fuse`` or storage is unknown.
        ConversionError: as ``plan`` and ``Plan.apply`` raise it; the model is then unchanged.

    Warns:
        UserWarning: if no layer becomes FP8, and none was before.

    Example:
        >>> print(fp8kit.convert(model, "FP8_DYNAMIC"))
    """
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
        decided.model = _copied(model, decided.report, weight_storage)
    report = decided._carry_out(weight_storage)
    report.model = decided.model if copy else None  # it shall not keep alive what others drop
    _warn_of_nothing(report)
    return report


def _copied(model: nn.Module, report: Report, weight_storage: str) -> nn.Module:
    """Copy a model whose dense weights are about to be discarded, without copying these."""
    memo: dict[int, object] = {}
    if weight_storage == "discard":
        weights = [model.get_submodule(r.name).get_parameter("weight") for r in report.converted]
        memo = {id(w): w for w in weights}
    return deepcopy(model, memo)


def _patterns(
    argument: str, given: Sequence[str] | Choice | None, linears: Mapping[str, nn.Module]
) -> Sequence[str] | None:
    patterns = chosen(argument, given, linears.items())
    check_patterns(argument, () if patterns is None else patterns, list(linears))
    return patterns


def _form(model: nn.Module, scheme: Scheme, report: Report) -> Scheme:
    """Return the scheme that layers will compute with where the model is, and tell it."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    form = mx_forms.form_on(scheme, capability(device))
    if form != scheme:
        report.notes.append(
            f"On {device.type} {scheme} weights are rebased, which keeps nearly all values: one "
            "power of two for each row, and activations quantized per token."
        )
    return form


def _warn_of_nothing(report: Report) -> None:
    if nothing := report.nothing():
        warnings.warn(nothing, stacklevel=3)


def _check_arguments(model: object, calibrate: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            teach(
                f"Got a model of type {type(model).__name__}.",
                "It is an nn.Module with linear layers in it.",
                "Load a checkpoint with fp8kit.load; of a pipeline pass a part, such as "
                "pipeline.transformer.",
            )
        )
    if isinstance(model, nn.Linear):
        raise ConversionError(
            teach(
                f"Got a bare {type(model).__name__} as the model.",
                "Layers are replaced inside the module that holds them.",
                "Use fp8kit.Fp8Linear.from_linear(layer), or pass the parent module.",
            )
        )
    if calibrate is not None and not callable(calibrate):
        raise TypeError(
            teach(
                f"Got calibrate of type {type(calibrate).__name__}.",
                "It is a function that runs the model, which it gets, on representative data.",
                "Pass calibrate=lambda model: model(batch).",
            )
        )


def _converted(
    dense: nn.Linear, scheme: Scheme, input_scale: Tensor | None, weight_storage: str
) -> Fp8Linear:
    layer = Fp8Linear.from_linear(dense, scheme, input_scale)
    layer.train(dense.training)
    if weight_storage != "discard":
        kept = dense.weight.detach()
        layer.keep(kept.to("cpu") if weight_storage == "cpu_offload" else kept)
    return layer


def _model_bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _add_notes(report: Report, model: nn.Module, scheme: Scheme, rows: Sequence[int]) -> None:
    slow: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for record in report.linears:
        dense = profitability.linear_at(model, record.name)
        if dense.weight.device.type == "meta":
            continue
        shape = (dense.out_features, dense.in_features)
        kind = (scheme, dense.weight.dtype, dense.weight.device, dense.bias is not None)
        decoded = tuple(
            m for m in rows if choose(BACKENDS, linear_problem(shape, *kind, m)).backend in DECODING
        )
        if decoded:
            slow[dense.weight.device.type, decoded].append(record.name)
    for (device_type, decoded), names in slow.items():
        at = "" if len(decoded) == len(rows) else f" at m={', '.join(map(str, decoded))}"
        report.notes.append(
            f"On {device_type}{at} FP8 saves memory, not time, for {some_of(names)}: "
            "their weights are decoded for every matmul (fp8kit.explain says why)."
        )
