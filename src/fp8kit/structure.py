"""Find layers that read the same tensor, by the names models give them or by watching one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fp8kit.errors import teach
from fp8kit.modules.fused import FusedGatedMlp, FusedRMSNorm, activation_kind, takes_codes
from fp8kit.modules.hooks import carry_hooks
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared import SharedInput

# children of one module, in the order it calls them with one tensor
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
# libraries whose attention and feed-forward code never changes an input between siblings
_UNCHANGING = ("transformers.models.", "diffusers.models.")
_LEVELS = ("none", "inputs", "all")
_PLAIN = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
_SANDWICH = (("input_layernorm", "self_attn"), ("pre_feedforward_layernorm", "mlp"))
# per family: which norm of a decoder layer is read by whose projections, and by nothing else
_DECODERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _PLAIN),
    **dict.fromkeys(("gemma2", "gemma3"), _SANDWICH),
}
_CROSS = ("cross", "encoder_attn", "enc_dec", "attn2")


def find_groups(
    model: nn.Module, names: Sequence[str], run: Callable[[nn.Module], object] | None = None
) -> list[tuple[str, ...]]:
    """Group layers that read one tensor: by watching ``run``, or by their names without it.

    Args:
        model: the model, dense or converted.
        names: qualified names of the layers that may be grouped.
        run: calls the model on representative data.

    Returns:
        Groups of two or more names, in call order.

    Example:
        >>> find_groups(model, ["mlp.gate_proj", "mlp.up_proj"])
        [('mlp.gate_proj', 'mlp.up_proj')]
    """
    return sibling_groups(model, names) if run is None else traced_groups(model, names, run)


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


def level(fuse: str) -> int:
    """Rank how much is fused: 0 for ``"none"``, 1 for ``"inputs"``, 2 for ``"all"``.

    Raises:
        ValueError: for any other word.
    """
    if fuse not in _LEVELS:
        raise ValueError(
            teach(
                f"Got fuse={fuse!r}.",
                f"It is one of {', '.join(_LEVELS)}.",
                "Pass one of these words; 'none' keeps every layer on its own.",
            )
        )
    return _LEVELS.index(fuse)


def fuse_producers(model: nn.Module) -> list[str]:
    """Let norms and feed-forward activations write FP8 where the model's code is known.

    Known are the decoder layers of Transformers' Llama, Mistral, Qwen2, Qwen3 and Gemma families:
    there the norm's result is read by the layers behind it and by nothing else.

    Args:
        model: a converted model whose layers share their inputs.

    Returns:
        Names of the modules that were replaced.

    Example:
        >>> fuse_producers(model)
        ['model.layers.0.input_layernorm', 'model.layers.0.post_attention_layernorm', ...]
    """
    replaced: list[str] = []
    for prefix, layer in list(model.named_modules()):
        pairs = _known_pairs(layer)
        for norm_name, holder_name in pairs:
            norm, holder = getattr(layer, norm_name), getattr(layer, holder_name)
            fused = _fused_norm(norm, holder)
            if fused is not None:
                setattr(layer, norm_name, fused)
                replaced.append(f"{prefix}.{norm_name}".lstrip("."))
        mlp = layer.get_submodule("mlp") if pairs else None
        kind = activation_kind(getattr(mlp, "act_fn", None))
        if kind is not None and isinstance(getattr(mlp, "down_proj", None), Fp8Linear):
            _replace_mlp(layer, pairs, kind)
            replaced.append(f"{prefix}.mlp".lstrip("."))
    return replaced


def _known_pairs(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    where, _, kind = f"{type(layer).__module__}.{type(layer).__name__}".rpartition(".")
    family = where.removeprefix("transformers.models.").partition(".")[0]
    if not where.startswith("transformers.models.") or not kind.endswith("DecoderLayer"):
        return ()
    return _DECODERS.get(family, ())


def _fused_norm(norm: nn.Module, holder: nn.Module) -> FusedRMSNorm | None:
    kind = type(norm).__name__
    first = getattr(holder, "q_proj", None) or getattr(holder, "gate_proj", None)
    group = first.shared if isinstance(first, Fp8Linear) else None
    if not kind.endswith("RMSNorm") or not isinstance(group, SharedInput):
        return None
    names = tuple(n for m in group.members for n, child in holder.named_children() if child is m)
    if len(names) != len(group.members) or not takes_codes(group.members[0]):
        return None
    gemma = kind.startswith("Gemma")
    eps = float(getattr(norm, "eps" if gemma else "variance_epsilon"))
    fused = FusedRMSNorm(norm, eps, gemma, (holder, names), group)
    fused.train(norm.training)
    carry_hooks(norm, fused)
    return fused


def _replace_mlp(layer: nn.Module, pairs: tuple[tuple[str, str], ...], kind: str) -> None:
    mlp = layer.get_submodule("mlp")
    fused = FusedGatedMlp(mlp, kind)
    fused.train(mlp.training)
    carry_hooks(mlp, fused)
    for norm_name, holder_name in pairs:
        norm = getattr(layer, norm_name)
        if holder_name == "mlp" and isinstance(norm, FusedRMSNorm):
            norm.consumers = (fused, norm.consumers[1])
    layer.mlp = fused


def sibling_groups(model: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group layers by the usual names of siblings: q/k/v and gate/up.

    Cross attention is left out, whose keys and values read another tensor.

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
        if any(word in whose for word in _CROSS):
            continue
        for siblings in _SIBLINGS:
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
    return len({model.get_submodule(n).in_features for n in names}) == 1
