"""Fill a module of any kind from a checkpoint: check every name first, then stream."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from fp8kit.checkpoint.cache_scales import keep_cache_scales
from fp8kit.checkpoint.exporting import AS_CONV1D, is_distributed
from fp8kit.checkpoint.loading.expected import NewLayers, check_fit, expected_state, shapes_of, ties
from fp8kit.checkpoint.loading.expert_modules import Experts, experts_in_checkpoint
from fp8kit.checkpoint.loading.held_schemes import read_as_held
from fp8kit.checkpoint.loading.merged_weights import holds, joined_scheme, other_scheme
from fp8kit.checkpoint.loading.own_loading import refuse_own_loading
from fp8kit.checkpoint.loading.placement import Placement
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.merged_names import Shapes, find
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion import fusion
from fp8kit.conversion import siblings as conversion_siblings
from fp8kit.conversion.eligibility import of_call, of_instance
from fp8kit.conversion.experts import stacks_of
from fp8kit.conversion.patterns import LayerFilter
from fp8kit.conversion.plan import plan, refuse_lazy, refuse_static, warn_of_nothing
from fp8kit.conversion.readers.held import read_elsewhere
from fp8kit.conversion.replacement import refuse_empty_weights
from fp8kit.conversion.report import Report, tied_to
from fp8kit.errors import CheckpointError, some_of
from fp8kit.formats import FP8_FORMATS, Scheme
from fp8kit.modules import mx_forms
from fp8kit.modules.dense import is_conv1d, unlike_linear
from fp8kit.modules.expert_stacks import rearranged
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.experts import Fp8Experts
from fp8kit.modules.hooks import become
from fp8kit.modules.linear import Fp8Linear


@dataclass(slots=True)
class PlanOptions:
    """Which layers of a high-precision checkpoint become FP8, as ``fp8kit.plan`` has it."""

    scheme: Scheme | str
    include: Sequence[str] | LayerFilter | None = None
    exclude: Sequence[str] | LayerFilter | None = None
    strict: bool = False


@dataclass(slots=True)
class Filled:
    """What to know about a load.

    ``unused`` names tensors that the model does not use, ``decoded`` layers that are FP8 in the
    checkpoint and dense in the model; ``read`` is as in ``NewLayers``; ``told`` has further
    sentences.
    """

    unused: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    read: Mapping[str, str] = field(default_factory=dict)

    def notes(self, source: str) -> list[str]:
        """Return this as sentences about ``source``, which is the subject of each."""
        found = []
        if self.unused:
            found.append(
                f"{source} holds tensors that the model does not use: {some_of(self.unused)}."
            )
        if self.decoded:
            found.append(
                f"{source} holds {len(self.decoded)} FP8 layers for which the model has no FP8 "
                f"layer; they were decoded to high precision: {some_of(self.decoded)}."
                + "".join(f" {name}: {reason}." for name, reason in [*self.read.items()][:1])
            )
        return found + self.told


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    options: PlanOptions | None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    form: Scheme | None = None,
    missing: Sequence[str] = (),
) -> Filled:
    """Load a checkpoint into a module, in place; linear layers become FP8 on the way.

    Parameters on meta are made, others overwritten. ``options`` is for a checkpoint in high
    precision alone. By default the model stays where it is and meta goes to the CPU; tensors in
    memory keep their dtype, and those on meta take the checkpoint's. ``strict`` raises for tensors
    that the model does not use, ``form`` is as in ``mx_forms.set_forms``, ``missing`` as in
    ``fp8kit.load``. Raises ``CheckpointError`` if names or shapes do not match; nothing has been
    changed then. Raises ``ConversionError`` if a layer cannot be quantized.
    """
    refuse_lazy(model)
    refuse_empty_weights()
    checkpoint = read_as_held(model, checkpoint)
    high = dtype or checkpoint.dtype
    if options is None:
        layers = _layers_on_disk(model, checkpoint, high)
    else:
        layers = layers_by_plan(model, options, high)
    layers.form, layers.missing = form or layers.form, missing
    unused = check_fit(model, checkpoint, layers, strict)
    placement = begin(model, layers, checkpoint.layers, device=device, dtype=dtype, high=high)
    for name in _in_order(checkpoint, set(checkpoint.tensors) - set(unused), placement.shapes):
        placement.put(name, checkpoint.read(name))
    told = end(model, layers, placement)
    if device is not None:
        model.to(device)
    kept = keep_cache_scales(model, checkpoint, {n: n for n in unused})
    return Filled(sorted(set(unused) - kept), sorted(placement.decoded), told, layers.read)


def _in_order(checkpoint: Checkpoint, names: set[str], shapes: Shapes) -> list[str]:
    """Order tensors as they lie on disk, but keep parts and scales of one weight together.

    Otherwise all weights whose other parts or scales are in a later file would wait in memory.
    """

    def place(name: str) -> tuple[str, int]:
        return checkpoint.tensors[name].shard, checkpoint.tensors[name].offset

    together: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=place):
        layer, _, kind = name.rpartition(".")
        route = find(layer, kind, shapes)
        together[route.target if route and route.target else layer].append(name)
    return [name for group in together.values() for name in group]


def begin(
    model: nn.Module,
    layers: NewLayers,
    sources: Mapping[str, Layer] | None = None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    high: torch.dtype = torch.bfloat16,
    owned: bool = True,
) -> Placement:
    """Put new FP8 layers into a model, and return the ``Placement`` for its tensors.

    ``layers.ties`` is set here. The rest is as in ``fill`` and ``Placement``.
    """
    for name, module in model.named_modules():
        if isinstance(module, Fp8Experts):
            if reason := rearranged(module.expert_map, module.num_experts, name):
                raise CheckpointError(reason)
    wanted = expected_state(model, layers)
    if sharded := [name for name, tensor in wanted.items() if is_distributed(tensor)]:
        raise CheckpointError(
            f"{some_of(sharded)} of {type(model).__name__} are sharded over several processes.",
            "Tensors are loaded whole.",
            "Load the model first, and shard it then.",
        )
    refuse_own_loading(model)
    layers.ties = ties(wanted)
    shapes = shapes_of(wanted)
    for name, layer in layers.made.items():
        dense = model.get_submodule(name)
        if not isinstance(dense, Fp8Linear):  # it may have several names
            layer.qualified_name = name
            become(dense, layer)
        layers.made[name] = cast(Fp8Linear, dense)
    for name, experts in layers.experts.items():
        experts.empty(model.get_submodule(name), high)
    if dtype is not None:
        model.to(dtype)
    return Placement(model, shapes, sources, device=device, dtype=dtype, high=high, owned=owned)


def end(model: nn.Module, layers: NewLayers, placement: Placement) -> list[str]:
    """Check that all has arrived, tie tensors, and let siblings (q/k/v, gate/up) share their input.

    Returns sentences about the forms of MXFP8 layers. Raises ``CheckpointError`` if a weight is
    incomplete, or a tensor is still on meta.
    """
    placement.finish()
    for group in layers.ties:
        tie(model, group, placement.placed)
    # in no variable, which would hold the weights that are rebased below
    held = itertools.chain(model.named_parameters(), model.named_buffers())
    if absent := [name for name, t in held if t.is_meta]:
        raise CheckpointError(
            f"{some_of(absent)} did not arrive and have no values.",
            "A model on the meta device gets all its tensors.",
            "Pass them too, or create them before loading.",
        )
    experts = {n: cast(ExpertTensors, model.get_submodule(n)) for n in layers.experts}
    told = mx_forms.set_forms({**layers.made, **experts}, layers.form)
    rebased = (n for n, layer in layers.made.items() if layer.scheme.rebased)
    placement.placed.update(named(name, "weight_exponents") for name in rebased)
    for name, module in experts.items():
        placement.placed.update(named(name, tensor) for _, tensor in module.tensors())
    if layers.made:  # FP8 layers of an earlier conversion keep its sharing and fusion
        conversion_siblings.share_inputs(model, layers.groups)
        fusion.fuse_producers(model)
    return told


def _layers_on_disk(model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype) -> NewLayers:
    found = NewLayers()
    modules = dict(model.named_modules(remove_duplicate=False))
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in modules.items():
        names[module].append(name)
    state = expected_state(model, found)
    shapes, tied = shapes_of(state), {name: group for group in ties(state) for name in group}
    read = read_elsewhere(model) if checkpoint.layers else {}
    for name, experts in experts_in_checkpoint(model, checkpoint, shapes).items():
        if reason := read.get(modules[name], "") or of_call(modules[name]):
            found.read[name] = reason  # decoded, as layers below
        else:
            found.experts[name] = experts
    routes = {name: find(name, "weight", shapes) for name in checkpoint.layers}
    targets = (t for route in routes.values() if route for t in route.split or (route.target,))
    filled = {named(t, "weight") for t in targets} | checkpoint.tensors.keys()
    for name, source in checkpoint.layers.items():
        route = routes[name]
        if route is None or route.expert is not None or source.weight == name:
            continue  # unused and reported with the others, or decoded
        siblings = {checkpoint.layers[n].scheme for n in route.sources if n in checkpoint.layers}
        if len(siblings) > 1 or not checkpoint.layers.keys() >= set(route.sources):
            continue  # a joined layer of one kind cannot hold them: decoded
        scheme = source.scheme if route.split or route.whole else joined_scheme(source.scheme)
        for target in route.split or (route.target,):
            module = modules.get(target)
            if not isinstance(module, nn.Linear):
                continue  # an embedding, say, or renamed by a hook of state_dict: decoded
            own = isinstance(module, Fp8Linear)
            foreign = "" if own else read.get(module, "") or of_instance(module)
            aliases = {named(alias, "weight") for alias in names[module]}
            others = (n for n in tied.get(named(target, "weight"), ()) if n not in aliases)
            if not own and (absent := [n for n in others if n not in filled]):
                foreign = tied_to(absent[0])  # which would be without a weight
            if foreign and module.weight.dtype not in FP8_FORMATS:
                found.read[target] = foreign  # other code would not run, or take codes for numbers
                continue
            if isinstance(module, Fp8Linear):
                stored, joined = module.scheme.stored, len(route.sources) > 1
                if stored == scheme or (joined and stored.activation == scheme.activation):
                    continue
                if not checkpoint.names_schemes and holds(stored, scheme):
                    continue
            if isinstance(module, Fp8Linear) or foreign or unlike_linear(module) or not target:
                held = module.scheme if own else f"({module.weight.dtype})"
                kind = f"{type(module).__name__} {held}"
                raise other_scheme(target or "The model itself", scheme, kind)
            if target not in found.made:
                layer = empty_layer(module, scheme, dtype)
                found.made.update(dict.fromkeys(names[module], layer))
    fp8 = [n for n, m in model.named_modules() if isinstance(m, Fp8Linear) or n in found.made]
    found.groups = conversion_siblings.find_groups(model, fp8)
    return found


def plan_to_load(
    model: nn.Module,
    scheme: Scheme,
    include: Sequence[str] | LayerFilter | None,
    exclude: Sequence[str] | LayerFilter | None,
    strict: bool,
) -> Report:
    """Plan as ``fp8kit.plan`` does, without ``Conv1D``, which becomes FP8 in memory only."""
    report = plan(model, scheme, include=include, exclude=exclude, strict=strict).report
    for record in report.linears:
        if is_conv1d(model.get_submodule(record.name)):
            record.skip(AS_CONV1D, warning=True)
    if strict:
        report.refuse_blocked()
    return report


def layers_by_plan(model: nn.Module, options: PlanOptions, dtype: torch.dtype) -> NewLayers:
    """Make empty FP8 layers for the layers that a plan selects.

    Raises ``ConversionError`` if the scheme is static, and as ``fp8kit.plan`` raises it.
    """
    scheme = Scheme.of(options.scheme)
    refuse_static(scheme)
    report = plan_to_load(model, scheme, options.include, options.exclude, options.strict)
    warn_of_nothing(report)
    found = NewLayers(groups=report.groups, form=mx_forms.named_form(scheme))
    scheme = scheme.stored
    stacks = stacks_of(model, (r.name for r in report.stacks))
    found.experts = {name: Experts(held, scheme) for name, held in stacks.items()}
    for record in report.linears:
        module = model.get_submodule(record.name)
        assert isinstance(module, nn.Linear)
        layer = empty_layer(module, scheme, dtype)
        found.made.update(dict.fromkeys((record.name, *record.aliases), layer))
    return found


def empty_layer(dense: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> Fp8Linear:
    """Make the FP8 layer that a dense one becomes, on meta, with a compute dtype."""
    rows, cols = dense.weight.shape  # in_features and out_features may be tensors
    layer = Fp8Linear(cols, rows, dense.bias is not None, scheme, device="meta", dtype=dtype)
    if dense.bias is not None:
        layer.bias.requires_grad_(dense.bias.requires_grad)
    return layer


def tie(model: nn.Module, names: Sequence[str], loaded: Collection[str]) -> None:
    """Let all names of one tensor share the tensor that was loaded under one of them."""
    source = next((n for n in names if n in loaded), names[0])
    owner, _, kind = source.rpartition(".")
    tensor = getattr(model.get_submodule(owner), kind)
    for name in names:
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, tensor)
