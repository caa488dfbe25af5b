"""The rules by which serving engines read from a config whether a layer is FP8, written again.

The source are vLLM 0.25 (``should_ignore_layer``, ``get_moe_method``, ``is_layer_skipped``) and
SGLang; their code is not used. What tests assert with this was also run by vLLM's real loaders.

Compared on 2026-11-24 with vLLM 0.25.0: ``should_ignore_layer`` and ``is_layer_skipped``, cut out
of its wheel by ``ast`` and run with ``FUSED``, for the 2896 names of Transformers' models in
``docs/zoo.json`` and the names of the layers that they are fused to, in both dialects, once with
the dense layers of that file listed and once with a random half of all layers: 26964 answers, of
which two differ. vLLM replaces ``qkv_proj`` wherever it stands in a name, as in Zaya's
``self_attn.qkv_proj.qkv_proj``; this module replaces only the last word of a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def is_listed(config: dict[str, Any], layer: str) -> bool:
    """Return whether a single layer is in the config's list of dense layers."""
    names = config.get("ignore") or config.get("ignored_layers") or ()
    patterns = [n[3:] for n in names if n.startswith("re:")] if "ignore" in config else []
    return layer in names or any(re.match(p, layer) for p in patterns)


def linear_is_dense(config: dict[str, Any], layer: str) -> bool:
    """Return whether a linear layer stays dense; the parts of a fused layer must agree."""
    parent, _, last = layer.rpartition(".")
    if is_listed(config, layer):
        return True
    if last not in FUSED and "experts" in layer and "ignore" not in config:
        return experts_are_dense(config, layer)  # vLLM looks up shared experts like routed ones
    found = {is_listed(config, f"{parent}.{part}") for part in FUSED.get(last, (last,))}
    assert len(found) == 1, f"{layer}: some of its parts are listed, and some are not"
    return found.pop()


def experts_are_dense(config: dict[str, Any], experts: str) -> bool:
    """Return whether a module of experts stays dense."""
    if "ignore" not in config:
        return any("experts" in n and experts in n for n in config["ignored_layers"])
    asked = [f"{experts}.0.{part}_proj" for part in ("gate", "up", "down")]
    found = {is_listed(config, name) for name in asked}
    assert len(found) == 1, f"{experts}: its projections are of several kinds"
    return found.pop()


def disagreements(config: dict[str, Any], dense: dict[str, bool]) -> list[str]:
    """Return the layers that an engine would take for FP8 though they are dense, or vice versa.

    Args:
        config: the quantization config, as it was saved.
        dense: whether each layer is dense, by its name on disk; experts are layers, too.
    """
    modules = modules_of_experts(f"{name}." for name in dense)
    asked = {
        module: {v for n, v in dense.items() if n.startswith(f"{module}.")} for module in modules
    }
    for layer, kind in dense.items():
        parent, _, last = layer.rpartition(".")
        whole = next((name for name, parts in FUSED.items() if last in parts), last)
        fused = {f"{parent}.{part}" for part in FUSED.get(whole, ())} <= set(dense)
        if not any(layer.startswith(f"{module}.") for module in modules):
            asked.setdefault(f"{parent}.{whole}".lstrip(".") if fused else layer, set()).add(kind)
    wrong = []
    for name, kinds in asked.items():
        try:
            found = (experts_are_dense if name in modules else linear_is_dense)(config, name)
        except AssertionError as error:
            wrong.append(str(error))
            continue
        if kinds != {found}:
            wrong.append(f"{name} is taken for {'dense' if found else 'FP8'}")
    return wrong


def modules_of_experts(names: Iterable[str]) -> set[str]:
    """Find the modules of experts among the names of tensors, as engines call them."""
    found = {m[1] for n in names if (m := re.match(r"(.*\.experts)\.", n))}
    stacks = (n.partition(".input_linear")[0] for n in names if n.endswith(".input_linear.weight"))
    return found | {f"{n}.experts" for n in stacks if n.endswith("block_sparse_moe")}
