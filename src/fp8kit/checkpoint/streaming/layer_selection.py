"""Which tensors of a checkpoint become FP8, decided without building the model's weights.

The rules are those of ``fp8kit.plan``. What a layer is comes from ``Facts``: from the model's class
where Transformers knows it, else from names and shapes (``facts_by_name``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fp8kit.checkpoint.dialects import JsonObject, text_part
from fp8kit.checkpoint.exporting import AS_CONV1D
from fp8kit.checkpoint.schema import targets
from fp8kit.checkpoint.schema.naming import dense_stacks, experts_of
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.checkpoint.storage.matrices import Matrix, stack_of, stacked_experts
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.conversion import patterns
from fp8kit.conversion.report import TIED, Record, Report
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.formats import BLOCK, FLOATS, Scheme
from fp8kit.modules.parameters import empty_tensors, held_bytes

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.[^.]+$")
_EMBEDDING = re.compile(
    r"(\w*embed|\w*embedding|\w*embeddings|embed_tokens|\w*_emb|emb|wte|wpe|shared|"
    r"relative_attention_bias)$"
)
# GPT-2 and similar models hold these as [K, N] in Conv1D of Transformers
_CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
_OF_ATTENTION = "a layer of nn.MultiheadAttention, which multiplies by the weight itself"


@dataclass(frozen=True, slots=True)
class KnownLayer:
    """What is known about a linear layer; ``names`` are those by which patterns may match it.

    ``obstacle`` is empty if it can become FP8, ``role`` unless the default exclusions keep its role
    dense; ``shape`` is that of its weight, for layers without a weight on disk.
    """

    names: tuple[str, ...]
    obstacle: str = ""
    role: str = ""
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Facts:
    """What the tensors of a checkpoint are, by their names on disk, as told by ``source``.

    ``others`` has a reason for each other two-dimensional weight that stays dense; ``absent`` are
    linear layers of the model without a weight on disk, ``repeated`` second names of a tensor.
    ``modules`` has the name of a layer in the model, where it differs from that on disk.
    """

    source: str
    layers: dict[str, KnownLayer] = field(default_factory=dict)
    embeddings: set[str] = field(default_factory=set)
    others: dict[str, str] = field(default_factory=dict)
    absent: dict[str, KnownLayer] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Selection:
    """What happens to every tensor of a checkpoint.

    The report has one record per layer, ``matrices`` the layers that become FP8, by the name they
    will have, ``copies`` the names of tensors that are not quantized; ``ignore`` names the layers
    that engines must not take for FP8.
    """

    report: Report
    matrices: dict[str, Matrix] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)


def facts_by_name(checkpoint: Checkpoint) -> Facts:
    """Tell linear layers from embeddings by names and shapes, where no model class is known."""
    facts = Facts("names and shapes")
    config = {**checkpoint.config, **text_part(checkpoint.config)}
    tied = config.get("tie_word_embeddings") is True
    conv1d = checkpoint.config.get("model_type") in _CONV1D_MODELS
    for name, info in checkpoint.tensors.items():
        layer, _, kind = name.rpartition(".")
        parent, dot, last = layer.rpartition(".")
        if kind != "weight" or len(info.shape) != 2 or _EXPERT.match(layer):
            continue
        head = last in ("lm_head", "output_head", "embed_out")
        outside = not any(part.isdigit() for part in layer.split("."))
        vocabulary = outside and info.shape[0] == config.get("vocab_size") and not head
        if _EMBEDDING.match(last) or (vocabulary and last != "output"):
            facts.embeddings.add(layer)
        elif conv1d and last in _CONV1D:
            facts.others[layer] = AS_CONV1D
        else:
            obstacle = TIED if tied and head else ""
            beside = (f"{parent}{dot}{part}_proj_weight" for part in ("in", "q"))
            if last == "out_proj" and any(name in checkpoint.tensors for name in beside):
                obstacle = _OF_ATTENTION
            facts.layers[layer] = KnownLayer((layer,), obstacle)
    roles = patterns.roles_by_name(facts.layers)
    facts.layers = {n: replace(f, role=roles.get(n, "")) for n, f in facts.layers.items()}
    return facts


def select_layers(checkpoint: Checkpoint, recipe: Recipe, facts: Facts) -> Selection:
    """Decide for every tensor whether it becomes FP8.

    Raises ``ConversionError`` if a pattern matches nothing, or ``strict`` finds a layer that cannot
    become FP8, and ``CheckpointError`` if the target could not load the result.
    """
    model_type = str(checkpoint.config.get("model_type"))
    stacks, odd = stacked_experts(checkpoint.tensors, model_type)
    dialect = targets.dialect_for(recipe.target, recipe.resolved, checkpoint.config)
    if recipe.target == "transformers" and targets.loads_stacks_alone(model_type, dialect):
        why = f"Transformers loads experts of this model in high precision alone, in {dialect.name}"
        stacks, odd = {}, dict.fromkeys(stacks, why) | odd
    layers = {**_experts(checkpoint), **facts.layers}
    layers |= {name: _expert(name) for stack in stacks.values() for name in stack}
    _check_patterns(checkpoint, recipe, {**layers, **facts.absent})
    choice = Selection(Report(str(recipe.resolved)))
    choice.report.notes.append(f"Layers were identified by {facts.source}.")
    kept = {n: i for n, i in checkpoint.tensors.items() if n not in facts.repeated}
    choice.report.model_bytes_before = sum(i.nbytes for i in kept.values())
    merged = _merged(kept, layers, recipe)
    for name, info in kept.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in layers and len(info.shape) == 2:
            matrix = Matrix.of(info)
            reason, warning = _reason(layer, layers[layer], matrix, recipe, layer in merged)
            _add(choice, layer, matrix, recipe.resolved, reason, warning)
            if not reason:
                continue
            choice.ignore.append(layer)
        elif (experts := stack_of(name)) is not None and len(info.shape) == 3:
            if _decide_stack(choice, info, stacks.get(experts, {}), odd.get(experts, ""), recipe):
                continue
            targets.check_dense_stacks([name], model_type, recipe.target, dialect)
            choice.ignore.append(experts)
        elif kind == "weight" and len(info.shape) == 2 and layer not in facts.embeddings:
            choice.ignore.append(layer)
            if layer in facts.others:
                _add(choice, layer, Matrix.of(info), recipe.resolved, facts.others[layer])
        choice.copies.append(name)
    choice.report.records += _absent(recipe, facts)
    # vLLM runs a model that it has no class for with Transformers' modules, under their names
    modules = (facts.modules[n] for n in choice.ignore if n in facts.modules)
    homes = dense_stacks({n: kept[n].shape for n in choice.copies}, choice.matrices)
    choice.ignore = sorted({*choice.ignore, *modules, *facts.absent, *homes})
    _check(choice, recipe, checkpoint.config)
    return choice


def _check_patterns(checkpoint: Checkpoint, recipe: Recipe, layers: dict[str, KnownLayer]) -> None:
    """Refuse a pattern that matches no layer, stack of experts or module of one."""
    names = [n for disk, known in layers.items() for n in dict.fromkeys((disk, *known.names))]
    stacked = {n: home for n in checkpoint.tensors if (home := stack_of(n))}
    names += [*stacked, *stacked.values()]
    for argument, given in (("include", recipe.include), ("exclude", recipe.exclude)):
        patterns.check_patterns(argument, () if given is None else given, names)


def _absent(recipe: Recipe, facts: Facts) -> Iterator[Record]:
    """Report the layers of the model that the files lack."""
    for name, layer in facts.absent.items():
        excluded = patterns.exclusion([name], recipe.include, recipe.exclude, layer.role)
        reason = "; ".join(filter(None, (excluded, layer.obstacle))) or "not on disk"
        yield Record(name, "Linear", layer.shape, "skip", reason)


def _experts(checkpoint: Checkpoint) -> dict[str, KnownLayer]:
    layers = (n.removesuffix(".weight") for n in checkpoint.tensors if n.endswith(".weight"))
    return {n: _expert(n) for n in layers if _EXPERT.match(n)}


def _expert(name: str) -> KnownLayer:
    """Describe a matrix of one expert; patterns may also name the module of all experts."""
    return KnownLayer((name, experts_of(name)))


def _merged(kept: dict[str, TensorInfo], layers: dict[str, KnownLayer], recipe: Recipe) -> set[str]:
    """Name small layers that engines run as one matrix with a layer that becomes FP8."""
    if recipe.resolved.weight == BLOCK:  # engines cannot cut blocks
        return set()
    held = {n: kept[f"{n}.weight"] for n in layers if f"{n}.weight" in kept}
    matrices = {n: Matrix.of(info) for n, info in held.items() if len(info.shape) == 2}
    taken = {n for n, m in matrices.items() if not _reason(n, layers[n], m, recipe)[0]}
    return {n for n in matrices if not taken.isdisjoint(patterns.merged_siblings(n))}


def _reason(
    name: str, layer: KnownLayer, matrix: Matrix, recipe: Recipe, merged: bool = False
) -> tuple[str, bool]:
    """Return why a layer stays dense, empty if it becomes FP8; and whether to warn of that.

    Exclusions need no warning. A ``merged`` layer may be small: engines join it with an FP8 one.
    """
    names = list(dict.fromkeys((name, *layer.names)))
    if excluded := patterns.exclusion(names, recipe.include, recipe.exclude, layer.role):
        return excluded, False
    if matrix.dtype not in FLOATS:
        own = f"its weight is {matrix.dtype}; FP8 is made from bf16, fp16 or fp32"
    elif merged or not set(recipe.include or ()).isdisjoint(names):
        own = ""
    else:
        own = patterns.size_obstacle((matrix.rows, matrix.cols))
    reason = layer.obstacle or own
    return reason, bool(reason)


def _decide_stack(
    choice: Selection, info: TensorInfo, stack: dict[str, Matrix], odd: str, recipe: Recipe
) -> bool:
    """Record the decision about a stack of experts: all of them become FP8, or none."""
    down = "down_proj" in info.name.rpartition("experts")[2]
    reasons = [_reason(n, _expert(n), m, recipe)[0] for n, m in stack.items()]
    if stack and not any(reasons):
        for n, matrix in stack.items():
            if n.endswith("down_proj") == down:
                _add(choice, n, matrix, recipe.resolved, "")
        return True
    apart = not all(reasons)
    reason = odd or next(filter(None, reasons))
    if apart:
        reason = f"its experts stay together, and of one of them this is true: {reason}"
    size, warning = info.nbytes, bool(odd) or apart
    record = Record(info.name, "experts", info.shape, "skip", reason, size, size, warning=warning)
    choice.report.records.append(record)
    return False


def _add(
    choice: Selection, name: str, matrix: Matrix, scheme: Scheme, reason: str, warning: bool = False
) -> None:
    shape, before = (matrix.rows, matrix.cols), matrix.nbytes
    held = empty_tensors(shape, scheme, "meta")
    action, after = ("skip", before) if reason else ("convert", held_bytes(held.values()))
    choice.report.records.append(
        Record(name, "Linear", shape, action, reason, before, after, warning=warning)
    )
    if not reason:
        choice.matrices[name] = matrix


def _check(choice: Selection, recipe: Recipe, config: JsonObject) -> None:
    if recipe.strict:
        choice.report.refuse_blocked()
    shapes = {name: (m.rows, m.cols) for name, m in choice.matrices.items()}
    if not shapes:
        raise ConversionError(
            f"No layer of this checkpoint would become FP8: {choice.report.reasons()}.",
            "There is at least one linear layer that nothing keeps in high precision.",
            "Exclude less, or include a layer by its full name, which lifts the defaults.",
        )
    targets.check_layers(recipe.target, recipe.resolved, shapes, choice.ignore, config=config)
    found = ((_EXPERT.match(n) for n in names) for names in (shapes, choice.ignore))
    quantized, dense = ({m["experts"] for m in matches if m} for matches in found)
    if mixed := min(quantized & dense, default=""):
        raise CheckpointError(
            f"Of {mixed} some experts are FP8 and some are not.",
            "Every engine runs the experts of one layer as one operation of one kind.",
            "Include or exclude them together, e.g. with the pattern '*.experts.*'.",
        )
