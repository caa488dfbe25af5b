"""The tensors that a model will hold with its FP8 layers, and whether a checkpoint has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from fp8kit.checkpoint.cache_scales import has_home
from fp8kit.checkpoint.exporting import refuse_changed
from fp8kit.checkpoint.loading import expert_modules
from fp8kit.checkpoint.schema.merged_names import fit
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.patterns import matches
from fp8kit.errors import CheckpointError
from fp8kit.formats import FLOATS, Scheme
from fp8kit.modules.expert_tensors import FROZEN_KINDS
from fp8kit.modules.hooks import LAYER_TENSORS
from fp8kit.modules.linear import Fp8Linear


@dataclass(slots=True)
class NewLayers:
    """New FP8 layers by every name they will have, and the layers that share an input.

    ``read`` names layers and experts that stay dense because other code reads their weight or runs
    in place of their own, each with the reason.
    """

    made: dict[str, Fp8Linear] = field(default_factory=dict)
    experts: dict[str, expert_modules.Experts] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    ties: list[list[str]] = field(default_factory=list)
    form: Scheme | None = None  # of MXFP8 layers; by default the fastest on their device
    read: dict[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()  # patterns of layers that keep their values


def expected_state(model: nn.Module, layers: NewLayers) -> dict[str, Tensor]:
    """Return the tensors that the model will hold once its layers are swapped.

    A bias is still that of the dense layer: another module may hold it, too.
    """
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    refuse_changed(model, state)
    parts = {n: n.rpartition(".") for n in state}
    kept = {
        n: t
        for n, t in state.items()
        if parts[n][0] not in layers.made or parts[n][2] not in LAYER_TENSORS - {"bias"}
    }
    for name, layer in layers.made.items():
        for kind, tensor in layer.state_dict(keep_vars=True).items():
            kept.setdefault(named(name, kind), tensor)
    for name, experts in layers.experts.items():
        held = experts.tensors(model.get_submodule(name))
        for alias in expert_modules.by_every_name(model, {name: experts}):
            kept |= {named(alias, kind): tensor for kind, tensor in held.items()}
    return kept


def shapes_of(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by their names."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def check_fit(
    model: nn.Module, checkpoint: Checkpoint, layers: NewLayers, strict: bool
) -> list[str]:
    """Compare names and shapes before anything changes; list tensors the model does not use."""
    wanted = expected_state(model, layers)
    tensors = {n: i.shape for n, i in checkpoint.tensors.items()}
    coded = {layer.weight: layer.shape for layer in checkpoint.layers.values()}
    tensors = {**expert_modules.stored_shapes(model, layers.experts, tensors), **coded}
    scales = {
        scale: layer.weight
        for layer in checkpoint.layers.values()
        for kind, scale in layer.tensors.items()
        if kind != "weight"
    }
    modules = model.named_modules(remove_duplicate=False)
    turned = {n for n, m in modules if isinstance(m, Fp8Linear) and m.transposed}
    dense = {named(n, "weight") for n in turned} - coded.keys()
    shapes = {n: s[::-1] if n in dense else s for n, s in shapes_of(wanted).items()}
    found = fit(tensors, shapes, scales)
    problems = list(found.problems)
    tied = {name: group for group in ties(wanted) for name in group}
    here = found.covered | _made_here(model, layers, found.covered)
    absent = [n for n in wanted if here.isdisjoint(tied.get(n, (n,)))]
    absent = [
        n for n in absent if not any(matches(p, n.rpartition(".")[0]) for p in layers.missing)
    ]
    problems += [f"{n}: not on disk" for n in absent]
    names = {n.rpartition(".")[0] for n in wanted}
    idle = (p for p in layers.missing if not any(matches(p, name) for name in names))
    problems += [f"missing: {pattern!r} matches no layer of the model" for pattern in idle]
    quantized = {named(n, "weight") for n in layers.made.keys() - checkpoint.layers.keys()}
    for weight in sorted(quantized & checkpoint.tensors.keys()):
        if (held := checkpoint.tensors[weight].dtype) not in FLOATS:
            problems.append(f"{weight}: {held} on disk; FP8 is made from bf16, fp16 or fp32")
    if strict:
        unknown = (n for n in sorted(found.unused) if not has_home(model, checkpoint, n))
        problems += [f"{name}: not in the model" for name in unknown]
    lost = [n for n, b in model.named_buffers() if b.is_meta and n not in wanted]
    problems += [f"{n}: a buffer on meta that checkpoints do not hold" for n in lost]
    if problems:
        listed = "\n  ".join(problems[:20])
        raise CheckpointError(
            f"{checkpoint.path} does not fit {type(model).__name__}:\n  {listed}\n",
            f"All tensors must match; {len(problems)} do not.",
            _remedy(bool(lost), len(problems) > len(lost), absent, tensors.keys()),
        )
    return sorted(found.unused)


def _remedy(lost: bool, others: bool, absent: Sequence[str], on_disk: Collection[str]) -> str:
    """Return what to do about buffers that get values when a model is built, and the rest."""
    said = ["Pass the model the files are of, or none for a directory of Transformers."] * others
    if absent and (renamed := other_beginning(absent, on_disk)):
        said = [renamed]
    elif absent:
        new = absent[0].rpartition(".")[0]
        said.append(f"To keep what the model has, such as a new head, pass missing=['{new}'].")
    if lost:
        said.append(
            "Buffers that are not saved get their values when a model is built: build it within "
            "accelerate.init_empty_weights(include_buffers=False) instead of torch.device('meta') "
            "(then model.tie_weights(), if it ties any), or set these buffers before loading. For a"
            " Transformers directory leave the model out: fp8kit.load builds it."
        )
    return " ".join(said)


def other_beginning(absent: Sequence[str], given: Collection[str]) -> str:
    """Return what to do if most absent names were given with another prefix; else empty."""
    name = absent[0]
    for other in given:
        prefix = other.removesuffix(name)
        if other.endswith(f".{name}") and _most(f"{prefix}{n}" in given for n in absent):
            return (
                f"The names that came begin with {prefix!r}: rename them, or pass a module that "
                f"holds this one as {prefix[:-1]!r}."
            )
    parts = name.split(".")
    for at in range(1, len(parts)):
        prefix = ".".join(parts[:at]) + "."
        if _most(n.startswith(prefix) and n.removeprefix(prefix) in given for n in absent):
            return (
                f"The names that came lack {prefix!r}: rename them, or pass "
                f"model.get_submodule({prefix[:-1]!r})."
            )
    return ""


def _most(found: Iterable[bool]) -> bool:
    known = list(found)
    return 2 * sum(known) >= len(known)  # scales of weights to quantize never come


def _made_here(model: nn.Module, layers: NewLayers, covered: set[str]) -> set[str]:
    """Name the tensors that need not be on disk: scales of weights that are quantized here."""
    fp8 = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)} | layers.made
    names = set()
    for name, held in expert_modules.stacks_by_name(model, layers.experts).items():
        for stack in held.names:
            if named(name, stack) in covered:
                names |= {named(name, stack + kind) for kind in FROZEN_KINDS[1:]}
    for name, layer in fp8.items():
        if named(name, "weight") in covered:
            names |= {named(name, kind) for kind in ("weight_scale", "weight_exponents")}
            if layer.input_scale is not None and not layer.input_scale.is_meta:
                names.add(named(name, "input_scale"))
    return names


def ties(state: dict[str, Tensor]) -> list[list[str]]:
    """Group the names that share one tensor, which a checkpoint may hold under any one of them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    return [group for group in names.values() if len(group) > 1]
