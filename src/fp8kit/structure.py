"""Find layers that read the same tensor, by the names models give them or by watching one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8kit.errors import ConversionError, teach
from fp8kit.formats import Scheme
from fp8kit.links import Link, family_links, given_links, verify_links
from fp8kit.modules.dense import as_linear
from fp8kit.modules.formulas import takes_codes
from fp8kit.modules.fused import Consumers, Fused, Producer
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.residual import install_residual_forwards
from fp8kit.modules.shared import SharedInput, can_share
from fp8kit.producers import can_produce, fuse_feed_forward, is_feed_forward, make_producer
from fp8kit.selection import some_of

# children of one module, in the order it calls them with one tensor
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
# the same in cross attention, where queries read another tensor than keys and values
_CROSS_SIBLINGS = (
    ("k_proj", "v_proj"),
    ("to_k", "to_v"),
    ("add_k_proj", "add_v_proj"),
)
# libraries whose attention and feed-forward code never changes an input between siblings
_UNCHANGING = ("transformers.models.", "diffusers.models.")
_LEVELS = ("none", "inputs", "all")
_CROSS = ("cross", "encoder_attn", "enc_dec", "attn2")


def find_groups(
    model: nn.Module,
    names: Sequence[str],
    run: Callable[[nn.Module], object] | None = None,
    links: Iterable[Link] = (),
) -> list[tuple[str, ...]]:
    """Group layers that read one tensor: by links, then by watching ``run``, else by their names.

    Args:
        model: the model, dense or converted.
        names: qualified names of the layers that may be grouped.
        run: calls the model on representative data.
        links: what users say of their model; those of known families are added.

    Returns:
        Groups of two or more names, in call order; no layer is in two of them.

    Example:
        >>> find_groups(model, ["mlp.gate_proj", "mlp.up_proj"])
        [('mlp.gate_proj', 'mlp.up_proj')]
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
    """Let each group of FP8 layers quantize its one input once.

    Args:
        model: the converted model.
        groups: qualified names of ``Fp8Linear`` layers, in call order.

    Example:
        >>> share_inputs(model, [("mlp.gate_proj", "mlp.up_proj")])
    """
    for group in groups:
        members = [model.get_submodule(name) for name in group]
        parent = type(model.get_submodule(group[0].rpartition(".")[0]))
        unchanging = parent.__module__.startswith(_UNCHANGING)
        SharedInput([m for m in members if isinstance(m, Fp8Linear)], unchanging)


def level(fuse: str | Mapping[str, Sequence[str]]) -> int:
    """Rank how much is fused: 0 for ``"none"``, 1 for ``"inputs"``, 2 for ``"all"`` or a mapping.

    Raises:
        ValueError: for any other word.
    """
    if isinstance(fuse, Mapping):
        return _LEVELS.index("all")
    if fuse not in _LEVELS:
        raise ValueError(
            teach(
                f"Got fuse={fuse!r}.",
                f"It is one of {', '.join(_LEVELS)}.",
                "Pass one of these words, or a mapping from blocks to rules for code of your own.",
            )
        )
    return _LEVELS.index(fuse)


def user_links(
    model: nn.Module,
    rules: Mapping[str, Sequence[str]],
    run: Callable[[nn.Module], object] | None = None,
) -> list[Link]:
    """Read what a user says about a dense model, and check it as far as that goes.

    Args:
        model: the model.
        rules: patterns of blocks to rules, as in ``links``.
        run: calls the model on representative data; with it the rules are tried out.

    Raises:
        ConversionError: if a rule names what does not exist or a producer that has no fused form,
            names a layer of another group, or does not hold in the run.
    """
    links = given_links(model, rules)
    _check_apart(links)
    for link in links:
        producer = model.get_submodule(link.name(link.producer or ""))
        known = isinstance(producer, Fused) or can_produce(producer)
        if link.producer is not None and not known:
            raise ConversionError(
                teach(
                    f"Got {link.name(link.producer)} ({type(producer).__name__}) before an arrow.",
                    "RMS norms with a weight and layer norms, of one tensor each and along one "
                    "dimension, SiLU and GELU can write FP8.",
                    "Name one of these, or only the layers, which then share their input.",
                )
            )
    if run is not None:
        verify_links(model, links, run)
    return links


def _check_apart(links: Sequence[Link]) -> None:
    seen: dict[str, Link] = {}
    for link in links:
        for name in link.layers:
            other = seen.setdefault(name, link)
            if other.layers != link.layers:
                raise ConversionError(
                    teach(
                        f"Got {name} together with {some_of(other.layers)}, and in another rule "
                        f"together with {some_of(link.layers)}.",
                        "A layer shares its input with one group of layers.",
                        "Name all layers that read one tensor in one rule.",
                    )
                )


def ungrouped(model: nn.Module) -> list[list[str]]:
    """Name the FP8 layers of a model that could share their inputs and do not yet, by scheme."""
    found: dict[Scheme, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear) and module.shared is None and can_share(module.scheme):
            found.setdefault(module.scheme, []).append(name)
    return list(found.values())


def idle_links(
    model: nn.Module, links: Iterable[Link], scheme: Scheme, converted: Sequence[str]
) -> list[str]:
    """Say of each link why it changes nothing: an unfit scheme, or layers that stay dense."""
    notes = []
    for link in links:
        layers = {name: model.get_submodule(name) for name in link.layers}
        becomes = {n: layer.scheme for n, layer in layers.items() if isinstance(layer, Fp8Linear)}
        becomes |= dict.fromkeys(set(layers) & set(converted), scheme)
        dense = [name for name in layers if name not in becomes]
        what = " ".join(link.layers) if link.producer is None else link.name(link.producer)
        fits = can_share if link.producer is None else takes_codes
        unfit = [str(becomes[n]) for n in layers if n in becomes and not fits(becomes[n])]
        if dense:
            notes.append(f"Not fused: {what}, because {some_of(dense)} is not converted.")
        elif unfit:
            notes.append(
                f"Not fused: {what}, because {unfit[0]} quantizes inputs in another way than per "
                "token or in groups of 128, each from its data."
            )
    return notes


def fuse_producers(model: nn.Module, links: Iterable[Link] = ()) -> list[str]:
    """Let norms, activations and feed-forwards write FP8 where it is known who reads them.

    Known are the blocks of ``links.FAMILIES``, diffusers' ``FeedForward`` wherever it is used, and
    what users say of their own models.

    Args:
        model: a converted model whose layers share their inputs.
        links: what users say.

    Returns:
        Names of the modules that were replaced.

    Example:
        >>> fuse_producers(model)
        ['model.layers.0.mlp', 'model.layers.0.input_layernorm', ...]
    """
    replaced: list[str] = []
    families = family_links(model)
    blocks = {link.block for link in families}
    for name, module in list(model.named_modules()):
        parent = name.rpartition(".")[0]
        if isinstance(module, (Fused, nn.ModuleList)) or not name:
            continue
        in_block = parent in blocks and name.endswith("mlp")
        fused = fuse_feed_forward(module) if in_block or is_feed_forward(module) else None
        if fused is not None and fused.is_converted():
            model.set_submodule(name, fused)
            replaced.append(name)
    for link in (*links, *families):
        fused_producer = _producer(model, link)
        if fused_producer is not None and link.producer is not None:
            model.set_submodule(link.name(link.producer), fused_producer)
            replaced.append(link.name(link.producer))
    install_residual_forwards(model.get_submodule(name) for name in sorted(blocks))
    return replaced


def _producer(model: nn.Module, link: Link) -> Producer | None:
    module = model.get_submodule(link.name(link.producer or ""))
    members = [model.get_submodule(name) for name in link.layers]
    layers = [m for m in members if isinstance(m, Fp8Linear) and takes_codes(m.scheme)]
    if link.producer is None or isinstance(module, Fused) or len(layers) < len(members):
        return None
    if len(layers) == 1 and layers[0].shared is None:
        share_inputs(model, [link.layers])
    group = layers[0].shared
    if not isinstance(group, SharedInput) or list(group.members) != layers:
        return None
    return make_producer(module, Consumers(group, link.unchanged(model)))


def sibling_groups(model: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group layers by the usual names of siblings: q/k/v and gate/up.

    In cross attention these are keys and values alone, which read another tensor.

    Args:
        model: the model.
        names: qualified names of the layers that may be grouped.

    Returns:
        Groups of two or more names with equal K, in call order.

    Example:
        >>> sibling_groups(model, ["mlp.gate_proj", "mlp.up_proj"])
        [('mlp.gate_proj', 'mlp.up_proj')]
    """
    allowed, groups = set(names), []
    for parent, module in model.named_modules():
        whose = f"{parent} {type(module).__name__}".lower()
        crossed = any(word in whose for word in _CROSS)
        for siblings in _CROSS_SIBLINGS if crossed else _SIBLINGS:
            found = [f"{parent}.{s}" if parent else s for s in siblings]
            if set(found) <= allowed and _same_inputs(model, found):
                groups.append(tuple(found))
    return groups


def traced_groups(
    model: nn.Module, names: Iterable[str], run: Callable[[nn.Module], object]
) -> list[tuple[str, ...]]:
    """Group layers that one run called one after another with the same tensor object.

    Args:
        model: the model.
        names: qualified names of the layers that may be grouped.
        run: calls the model on representative data.

    Returns:
        Groups of two or more names, in call order; a layer that was seen in two different groups
        is in none.

    Example:
        >>> traced_groups(model, ["a", "b"], lambda m: m(x))
        [('a', 'b')]
    """
    calls: list[list[str]] = []
    latest: list[Tensor] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else kwargs["input"]
            if latest and x is latest[0]:
                calls[-1].append(name)
            else:
                latest[:] = [x]
                calls.append([name])

        return hook

    handles = [
        model.get_submodule(n).register_forward_pre_hook(watch(n), with_kwargs=True) for n in names
    ]
    try:
        with torch.no_grad():
            run(model)
    finally:
        for handle in handles:
            handle.remove()
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
