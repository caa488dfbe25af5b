"""How serving engines learn from a config whether a layer is FP8, stated a second time.

Read in vLLM 0.25 (``should_ignore_layer``, ``get_moe_method``, ``is_layer_skipped``) and SGLang;
nothing of either is used here. The real loaders of vLLM were run over what is asserted with this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def is_listed(config: dict[str, Any], layer: str) -> bool:
    """Return whether a single layer is in the list of what stays dense."""
    names = config.get("ignore") or config.get("ignored_layers") or ()
    patterns = [n[3:] for n in names if n.startswith("re:")] if "ignore" in config else []
    return layer in names or any(re.match(p, layer) for p in patterns)


def is_dense(config: dict[str, Any], layer: str) -> bool:
    """Return whether a linear layer stays dense; one that is fused asks for all its parts."""
    parent, _, last = layer.rpartition(".")
    if is_listed(config, layer):
        return True
    found = {is_listed(config, f"{parent}.{part}") for part in FUSED.get(last, (last,))}
    assert len(found) == 1, f"{layer}: some of its parts are listed, and some are not"
    return found.pop()


def are_dense(config: dict[str, Any], experts: str) -> bool:
    """Return whether a module of experts stays dense."""
    if "ignore" not in config:
        return any("experts" in n and experts in n for n in config["ignored_layers"])
    asked = [f"{experts}.0.{part}_proj" for part in ("gate", "up", "down")]
    found = {is_listed(config, name) for name in asked}
    assert len(found) == 1, f"{experts}: its projections are of several kinds"
    return found.pop()


def modules_of_experts(names: Iterable[str]) -> set[str]:
    """Find the modules of experts among the names of tensors, as engines call them."""
    found = {m[1] for n in names if (m := re.match(r"(.*\.experts)\.", n))}
    stacks = (n.partition(".input_linear")[0] for n in names if n.endswith(".input_linear.weight"))
    return found | {f"{n}.experts" for n in stacks if n.endswith("block_sparse_moe")}
