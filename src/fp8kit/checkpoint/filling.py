"""Fill a module of any kind from a checkpoint: check every name first, then stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8kit import structure
from fp8kit.checkpoint.pairing import named
from fp8kit.checkpoint.reader import Checkpoint
from fp8kit.conversion import plan
from fp8kit.errors import CheckpointError, ConversionError, teach
from fp8kit.formats import FP8_FORMATS, Scheme
from fp8kit.modules.linear import Fp8Linear, quantize_weight

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


@dataclass(slots=True)
class Selection:
    """Which layers of a high-precision checkpoint become FP8.

    Args:
        scheme: a preset name or a ``Scheme``.
        include: as in ``fp8kit.plan``.
        exclude: as in ``fp8kit.plan``.
        strict: as in ``fp8kit.plan``.
    """

    scheme: Scheme | str
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    strict: bool = False


@dataclass(slots=True)
class _Layers:
    """New FP8 layers by every name they will have, and the layers that share an input."""

    made: dict[str, Fp8Linear] = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    selection: Selection | None,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
) -> list[str]:
    """Load a checkpoint into a module, in place; linear layers become FP8 on the way.

    Args:
        model: any module; parameters on the meta device are made, others overwritten.
        checkpoint: one that has been opened.
        selection: what to quantize of a high-precision checkpoint; ``None`` for an FP8 one.
        device: where the model goes; by default it stays, and meta goes to the CPU.
        dtype: its high precision; by default tensors in memory keep theirs, those on meta take the
            checkpoint's.
        strict: raise for tensors that the model does not use.

    Returns:
        The names of the tensors that the model does not use.

    Raises:
        CheckpointError: if names or shapes do not match; nothing has been changed then.
        ConversionError: if a layer cannot be quantized.

    Example:
        >>> fill(model, open_checkpoint("dir"), None)
    """
    high = dtype or checkpoint.dtype
    if selection is None:
        layers = _layers_in_checkpoint(model, checkpoint, high)
    else:
        layers = _layers_by_plan(model, selection, high)
    unused = _check(model, checkpoint, layers, strict)
    ties = _ties(_state(model, layers))
    for name, layer in layers.made.items():
        model.set_submodule(name, layer)
    if dtype is not None:
        model.to(dtype)
    names = set(checkpoint.tensors) - set(unused)
    for name, tensor in checkpoint.stream(names):
        _place(model, name, tensor, device, dtype)
    for group in ties:
        _tie(model, group, names)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if device is not None:
        model.to(device)
    structure.share_inputs(model, layers.groups)
    structure.fuse_producers(model)
    return unused


def _layers_in_checkpoint(model: nn.Module, checkpoint: Checkpoint, dtype: torch.dtype) -> _Layers:
    found = _Layers()
    if checkpoint.spec is None:
        return found
    scheme = checkpoint.spec.scheme
    names = _names_of_linears(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in checkpoint.layers:
        module = modules.get(name)
        if module is None:  # an unused tensor; reported with the others
            continue
        if isinstance(module, Fp8Linear) and module.scheme == scheme:
            continue
        if type(module) is not nn.Linear or not name:
            raise CheckpointError(
                teach(
                    f"{name or 'The model itself'} is {scheme} in the checkpoint and "
                    f"{_described(module)} in the model.",
                    "FP8 weights load into nn.Linear layers inside a model, or into Fp8Linear "
                    "layers of the same scheme.",
                    "Pass a dense model, built as before its conversion.",
                )
            )
        layer = _empty(module, scheme, dtype)
        found.made.update(dict.fromkeys(names[module], layer))
    found.groups = _groups(model, found)
    return found


def _layers_by_plan(model: nn.Module, selection: Selection, dtype: torch.dtype) -> _Layers:
    scheme = Scheme.of(selection.scheme)
    if scheme.static:
        raise ConversionError(
            teach(
                f"Got scheme {scheme} for quantization while loading.",
                "Its input scales come from calibration, which needs the loaded model.",
                f"Load the model, then fp8kit.convert(model, {scheme.name!r}, calibrate=...).",
            )
        )
    report = plan(
        model,
        scheme,
        include=selection.include,
        exclude=selection.exclude,
        strict=selection.strict,
    ).report
    found = _Layers(groups=report.groups)
    for record in report.converted:
        module = model.get_submodule(record.name)
        assert isinstance(module, nn.Linear)
        layer = _empty(module, scheme, dtype)
        found.made.update(dict.fromkeys((record.name, *record.aliases), layer))
    return found


def _names_of_linears(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names[module].append(name)
    return names


def _groups(model: nn.Module, layers: _Layers) -> list[tuple[str, ...]]:
    found = [n for n, m in model.named_modules() if isinstance(m, Fp8Linear) or n in layers.made]
    return structure.find_groups(model, found)


def _described(module: nn.Module) -> str:
    scheme = f" {module.scheme}" if isinstance(module, Fp8Linear) else ""
    return f"{type(module).__name__}{scheme}"


def _empty(dense: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> Fp8Linear:
    shape = (dense.in_features, dense.out_features)
    layer = Fp8Linear(*shape, dense.bias is not None, scheme, device="meta", dtype=dtype)
    layer.train(dense.training)
    for hooks in _HOOKS:
        setattr(layer, hooks, getattr(dense, hooks))
    return layer


def _state(model: nn.Module, layers: _Layers) -> dict[str, Tensor]:
    """Give the tensors that the model will hold once its layers are swapped."""
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    kept = {n: t for n, t in state.items() if n.rpartition(".")[0] not in layers.made}
    for name, layer in layers.made.items():
        for kind, tensor in layer.state_dict(keep_vars=True).items():
            kept[named(name, kind)] = tensor
    return kept


def _check(model: nn.Module, checkpoint: Checkpoint, layers: _Layers, strict: bool) -> list[str]:
    """Compare names and shapes before anything changes; list tensors the model has no use for."""
    wanted, problems = _state(model, layers), []
    scales = {named(n, kind) for n in checkpoint.layers for kind in ("weight_scale", "input_scale")}
    for name, info in checkpoint.tensors.items():
        if name in wanted and name not in scales and info.shape != wanted[name].shape:
            found, shape = list(info.shape), list(wanted[name].shape)
            problems.append(f"{name}: {found} on disk, {shape} in the model")
    tied = {name: group for group in _ties(wanted) for name in group}
    made = _made_here(model, checkpoint, layers)
    for name in wanted:
        if not made.union(checkpoint.tensors).intersection(tied.get(name, (name,))):
            problems.append(f"{name}: not on disk")
    unused = sorted(n for n in checkpoint.tensors if n not in wanted)
    if strict:
        problems += [f"{name}: not in the model" for name in unused]
    lost = [n for n, b in model.named_buffers() if b.is_meta and n not in wanted]
    problems += [f"{n}: a buffer on meta that checkpoints do not hold" for n in lost]
    if problems:
        listed = "\n  ".join(problems[:20])
        raise CheckpointError(
            teach(
                f"{checkpoint.path} does not fit {type(model).__name__}:\n  {listed}\n",
                f"All tensors must match; {len(problems)} do not.",
                "Pass the model that the checkpoint was made from.",
            )
        )
    return unused


def _made_here(model: nn.Module, checkpoint: Checkpoint, layers: _Layers) -> set[str]:
    """Name the tensors that need not be on disk: scales of weights that are quantized here."""
    fp8 = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)} | layers.made
    names = set()
    for name, layer in fp8.items():
        if name not in checkpoint.layers:
            names.add(named(name, "weight_scale"))
            if layer.input_scale is not None and not layer.input_scale.is_meta:
                names.add(named(name, "input_scale"))
    return names


def _ties(state: dict[str, Tensor]) -> list[list[str]]:
    """Group the names that share one tensor, which a checkpoint may hold under any one of them."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    return [group for group in names.values() if len(group) > 1]


def _place(
    model: nn.Module,
    name: str,
    tensor: Tensor,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> None:
    owner, _, kind = name.rpartition(".")
    module = model.get_submodule(owner)
    if kind == "_extra_state":
        module.set_extra_state(tensor)
        return
    held = getattr(module, kind)
    tensor = tensor.to(device or (torch.device("cpu") if held.is_meta else held.device))
    entries = {kind: tensor}
    if isinstance(module, Fp8Linear) and kind == "weight":
        if tensor.dtype not in FP8_FORMATS:
            entries = _quantized(module, name, tensor)
        elif module.original_weight is not None:
            module.original_weight = None  # it is not what these codes were made from
    elif dtype is not None and tensor.is_floating_point() and not kind.endswith("_scale"):
        entries = {kind: tensor.to(dtype)}
    for key, value in entries.items():
        _set(module, key, value)


def _quantized(layer: Fp8Linear, name: str, dense: Tensor) -> dict[str, Tensor]:
    q = quantize_weight(dense, layer.scheme)
    if not q.scale.isfinite().all():
        raise ConversionError(
            teach(
                f"{name} holds NaN or infinities.",
                "Weights are finite.",
                "Repair the checkpoint, or exclude this layer.",
            )
        )
    if layer.original_weight is not None:
        layer.original_weight.copy_(dense)
    return {"weight": q.data, "weight_scale": q.scale}


def _set(module: nn.Module, key: str, value: Tensor) -> None:
    held = getattr(module, key)
    if not held.is_meta and held.device == value.device:
        with torch.no_grad():
            held.copy_(value)
    elif isinstance(held, nn.Parameter):
        setattr(module, key, nn.Parameter(value, requires_grad=held.requires_grad))
    else:
        setattr(module, key, value)


def _tie(model: nn.Module, names: Sequence[str], loaded: set[str]) -> None:
    """Let all names of one tensor share what was loaded under one of them."""
    source = next((n for n in names if n in loaded), names[0])
    owner, _, kind = source.rpartition(".")
    tensor = getattr(model.get_submodule(owner), kind)
    for name in names:
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, tensor)
