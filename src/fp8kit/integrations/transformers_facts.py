"""Facts about a checkpoint's tensors for streaming, from its Transformers model, built on meta."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping

from fp8kit.checkpoint.dialects.by_layer import plain
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.streaming.layer_selection import Facts, KnownLayer
from fp8kit.conversion.patterns import size_obstacle
from fp8kit.conversion.report import tied_to
from fp8kit.conversion.roles import layer_roles
from fp8kit.formats import Scheme
from fp8kit.integrations.transformers import skeleton
from fp8kit.integrations.transformers_quantizer import Fp8KitConfig, decide
from fp8kit.integrations.transformers_trial import renamed
from fp8kit.modules.dense import is_linear


def facts(checkpoint: Checkpoint, scheme: Scheme) -> Facts:
    """Find linear layers, embeddings and other tensors of a checkpoint, by their names on disk.

    Raises ``CheckpointError`` if Transformers has no such model.
    """
    model = skeleton(checkpoint)
    found = Facts(f"{type(model).__name__} of Transformers")
    report = decide(model, Fp8KitConfig(plain(scheme), exclude=[]))
    linears = {n for n, m in model.named_modules() if is_linear(m)}
    roles = layer_roles(model)
    known: dict[str, KnownLayer] = {}
    for record in report.records:
        if record.name in linears:
            names = (record.name, *record.aliases)
            role = next((roles[n] for n in names if n in roles), "")
            small = record.reason == size_obstacle(record.shape)  # streaming checks each matrix
            reason = "" if small else record.reason
            known |= dict.fromkeys(names, KnownLayer(names, reason, role, record.shape))
    modules = dict(model.named_modules(remove_duplicate=False))
    met: set[str] = set()
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    repeated = {n for n, other in ties.items() if {n, other} <= set(checkpoint.tensors)}
    found.repeated = repeated
    named = renamed(model, get_model_conversion_mapping(model), checkpoint.tensors)
    for name, (in_model, converted) in named.items():
        if converted is not None:  # merged with other tensors, as experts are
            continue
        layer, _, kind = name.rpartition(".")
        owner = in_model.rpartition(".")[0]
        module = modules.get(owner)
        met |= set() if name in repeated else {owner}
        if kind != "weight" or len(checkpoint.tensors[name].shape) != 2:
            continue
        if owner != layer:
            found.modules[layer] = owner
        if owner in known:
            found.layers[layer] = known[owner]
        elif isinstance(module, nn.Embedding):
            found.embeddings.add(layer)
        elif module is not None:
            found.others[layer] = f"a parameter of {type(module).__name__}, not an nn.Linear"
        else:
            found.others[layer] = f"{type(model).__name__} does not use it"
    found.absent = {n: known[n] for n in linears if n not in met}
    for n, absent in found.absent.items():
        if (other := ties.get(f"{n}.weight")) is not None:
            found.absent[n] = replace(absent, obstacle=tied_to(other))
    return found
