"""Find siblings, layers that read the same tensor, by their names or by watching one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.conversion.calibration import watching
from fp8kit.conversion.fusion_rules import Link, family_links
from fp8kit.conversion.model_families import CROSS_SIBLINGS, SIBLINGS
from fp8kit.formats import Scheme
from fp8kit.modules.dense import as_linear, linear_at
from fp8kit.modules.joining import can_share, joined_shape, would_join
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared_input import SharedInput

# libraries whose attention and feed-forward code never changes an input between siblings
_UNCHANGING = ("transformers.models.", "diffusers.models.")
_CROSS = ("cross", "encoder_attn", "enc_dec", "attn2")


def find_groups(
    model: nn.Module,
    names: Sequence[str],
    run: Callable[[nn.Module], object] | None = None,
    links: Iterable[Link] = (),
) -> list[tuple[str, ...]]:
    """Group layers that read one tensor: by links, then by watching ``run``, else by their names.

    ``links`` are users' fusion rules; those of known families are added. Returns groups of two or
    more names, in call order; no layer is in two groups.
    """
    known = [link.layers for link in (*links, *family_links(model))]
    others = sibling_groups(model, names) if run is None else traced_groups(model, names, run)
    groups: list[tuple[str, ...]] = []
    allowed, taken = set(names), set[str]()
    for group in (*known, *others):
        if len(group) > 1 and set(group) <= allowed and taken.isdisjoint(group):
            groups.append(tuple(group))
            taken |= set(group)
    return groups


def share_inputs(model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
    """Give each group of FP8 layers a ``SharedInput``, which quantizes their input once.

    Names are in call order.
    """
    for group in groups:
        members = [model.get_submodule(name) for name in group]
        parent = type(model.get_submodule(group[0].rpartition(".")[0]))
        unchanging = parent.__module__.startswith(_UNCHANGING)
        SharedInput([m for m in members if isinstance(m, Fp8Linear)], unchanging)


def ungrouped(model: nn.Module) -> list[list[str]]:
    """Return the names of FP8 layers that may share inputs and have no group, one list a scheme."""
    found: dict[Scheme, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear) and module.shared is None and can_share(module.scheme):
            found.setdefault(module.scheme, []).append(name)
    return list(found.values())


def sibling_groups(model: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group layers by the usual names of siblings: q/k/v and gate/up.

    In cross attention only keys and values are siblings: queries read another tensor. Returns
    groups of two or more names with equal K, in call order.
    """
    allowed, groups = set(names), []
    for parent, module in model.named_modules():
        whose = f"{parent} {type(module).__name__}".lower()
        crossed = any(word in whose for word in _CROSS)
        for siblings in CROSS_SIBLINGS if crossed else SIBLINGS:
            found = [f"{parent}.{s}" if parent else s for s in siblings]
            if set(found) <= allowed and _same_inputs(model, found):
                groups.append(tuple(found))
    return groups


def joined_shapes(shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> list[tuple[int, int]]:
    """Return ``(N, K)`` of the joined weights by which siblings multiply few rows.

    ``shapes`` are ``(N, K)`` by name; siblings are recognised by their usual names.
    """
    tree = tree_of(shapes)
    groups = sibling_groups(tree, shapes) if can_share(scheme) else []
    teams = [[linear_at(tree, name) for name in group] for group in groups]
    return [joined_shape(team) for team in teams if would_join(scheme, team)]


def tree_of(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Make a model of bf16 layers without bias, on meta, from their names and ``(N, K)``."""
    # not add_module: names in files may be empty, or those of attributes of modules
    root = nn.Module()
    for name, (n, k) in shapes.items():
        *path, last = name.split(".")
        children: dict[str, Any] = root._modules
        for part in path:
            children = children.setdefault(part, nn.Module())._modules
        layer = nn.Linear(k, n, False, device="meta", dtype=torch.bfloat16)
        if last in children:
            layer._modules.update(children[last]._modules)
        children[last] = layer
    return root


def traced_groups(
    model: nn.Module, names: Iterable[str], run: Callable[[nn.Module], object]
) -> list[tuple[str, ...]]:
    """Group layers that one run called one after another with the same tensor object.

    Returns groups of two or more names, in call order; a layer that was seen in two different
    groups is in none.
    """
    calls: list[list[str]] = []
    latest: list[Tensor] = []

    def see(name: str, x: Tensor, _: Tensor) -> None:
        if latest and x is latest[0]:
            calls[-1].append(name)
        else:
            latest[:] = [x]
            calls.append([name])

    with torch.no_grad(), watching(model, names, see):
        run(model)
    seen: dict[str, set[tuple[str, ...]]] = {}
    for group in {tuple(c) for c in calls}:
        for name in group:
            seen.setdefault(name, set()).add(group)
    steady = {group for groups in seen.values() for group in groups if len(groups) == 1}
    return sorted(
        group
        for group in steady
        if len(group) > 1
        and len(set(group)) == len(group)
        and all(seen[name] == {group} for name in group)
        and _same_inputs(model, group)
    )


def _same_inputs(model: nn.Module, names: Sequence[str]) -> bool:
    return len({as_linear(model.get_submodule(n)).in_features for n in names}) == 1
