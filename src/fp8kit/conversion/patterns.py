"""Patterns that select layers by name, and the defaults that protect sensitive layers."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor, nn

from fp8kit.conversion.model_families import MERGED_BY_ENGINES
from fp8kit.errors import ConversionError, InvalidType, did_you_mean, some_of

LayerFilter = Callable[[str, nn.Module], bool]

SMALLEST_SIDE = 64
SMALLEST_WEIGHT = 128 * 128
TOWERS = ("vision tower", "audio tower")
_ROUTER = "MoE router"
# beside a layer of these names, `gate` is the gate of a gated layer, not a router
_GATED = ("up", "fc1", "value", "v_proj", "to_v", "wv", "qkv")
_PROTECTED = (
    (
        # numbered blocks below such a name are no head
        r"(\w+_)?(lm_heads?|audio_heads|class_head|classifier)(?!\.\w*[a-z]\w*\.\d+\.\w)|to_logits|"
        r"(mlp|linear|logits?)_head|output_head|logits_dense|score|"
        r"embed_out|lm_loss|qa_outputs|cls_score|(\w+_)?class_embed|(enc|dec)_score_head|cls_branches|"
        r"bbox_pred|aux_head|aux\d|AuxLogits|"
        r"predictions\.decoder|pred_layer\.proj|heads?(_dist)?\.(head|fc|linear|l)|joint\.head|"
        r"downstream_head\d|"
        # of speech recognition
        r"ctc_(lo|lin|output)|(\w+_)?decoder\.output_layer|joiner\.output_linear",
        "output head",
    ),
    # boxes, and where deformable attention looks
    (
        r"(\w+_)?bbox_(embed|head|predictor)(\.\d+)?\.layers\.\d+|box_head\.(dense|layer)\d|"
        r"reg_branches|sampling_offsets",
        "coordinates",
    ),
    (r"(text|visual|vision|image|audio)_projection", "output projection"),
    (
        r"(\w+_)?embed_tokens\w*|word_embeddings|pos_embed\w*|label_emb|"
        # numbered blocks below such a name are a model of their own
        r"(\w+_)?patch_(to_)?(embed|proj)\w*(?!\.\w*[a-z]\w*\.\d+\.\w)|"
        # what engines look up as a table
        r"(embed(_positions)?|((word|token|tok|position|token_type)_)?embeddings?|wte|wpe)$|"
        r"(\w+_)?x_embedders?|(img|txt|cond)_in|caption_projection|(\w+_)?text_embeddings?|"
        r"(context|condition|caption|cap|label|class|speaker|genre)_embedder|context_embed|"
        r"input_embed(ding)?",
        "embedding",
    ),
    (
        r"(\w+_)?router(_\w+)?|gat(e|ing)_network|mlp\.gate|(gate|to_gates|wg|shared_expert_gate)$",
        _ROUTER,
    ),
    (
        r"(\w+_)?(time_?steps?|timestep_\w+|time_(emb|fc|mlp|cond|token|hidden)\w*|time_(step_)?proj)|"
        r"time_text_embed|time_(in|mod)(_proj)?|(aug|mapping_cond)_in_proj|time_pos_embed|"
        r"sinu_pos_emb|temb(_\w+)?|tmlp|tproj|t_embedd(er|ing)|t_block|diffusion_(step|emb|proj)\w*|"
        r"fourier_to_single|fps_embedd(er|ing)|vector_in|guidance_in|add_embedding",
        "time embedding",
    ),
    (
        r"(?i:(\w+_)?(ada_?(ln|norm)\w*|film|modulation|scale_shift\w*))|(?!_orig_mod)\w+_mod|"
        r"\w*norm\w*\.linear(_\d+)?|\w+_modulation_\w+|distilled_guidance_layer|emb_layers|"
        r"cond_embeds_mapper",
        "modulation",
    ),
    (r"\w*hyper_connection\w*", "mixing of residual streams"),
    # decay of a state; engines merge these layers, which have too few rows for 128x128 blocks
    (r"linear_attn\.in_proj_(a|b|ba)", "gate of linear attention"),
    (r"(\w+_)?(vision_tower|vision_model|visual)", TOWERS[0]),
    (r"(\w+_)?projector|language_projection", "projector"),
    (r"(\w+_)?audio_tower|audio_proj\w*", TOWERS[1]),
    (
        r"img_emb|image_embedder|cond_proj|conditioning_emb|global_(proj|cond_embedder)|to_global_embed",
        "conditioning projection",
    ),
    (r"lora_([ABab]|down|up)|lora_embedding\w*", "adapter"),
)
# words match whole components of a name: `scores` is no `score`
DEFAULT_EXCLUDE: tuple[tuple[str, str], ...] = (
    *((f"re:(.*\\.)?({words})(\\.|$)", role) for words, role in _PROTECTED),
    ("re:proj_in$", "embedding"),
    # in numbered blocks, attention ends in a layer of this name
    (
        r"re:(?!.*\.\d+\..*output_projection)(.*\.)?output_projection(_point|_quantiles)?(\.|$)",
        "output head",
    ),
    (
        "re:((_orig_mod|module|model)\\.)*(proj_out(_\\d+)?|(all_)?final_layer.*|final_linear|"
        "last\\.linear|out_layer(\\..*)?|proj_to_clip_embeddings|head|output|_heads\\..*)$",
        "final projection",
    ),
    (
        "re:((_orig_mod|module|model)\\.)*((heads?|output)\\.\\d+|output_layer|predictor)$",
        "output head",
    ),
)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern selects a qualified name (see ``plan`` for the rules)."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")


def names_block(pattern: str, name: str) -> bool:
    """Return whether a pattern of a fusion rule selects a qualified name.

    A ``*`` does not cross dots here: the names of modules inside a block start with the block's, so
    it would select these, too. Each component of a glob matches one component of the name, counted
    from the end; an expression after ``re:`` must match the whole name. The pattern ``""`` is the
    model itself.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) <= len(parts) and all(
        fnmatch.fnmatchcase(part, glob)
        for part, glob in zip(parts[-len(wanted) :], wanted, strict=True)
    )


def chosen(
    argument: str,
    given: Sequence[str] | LayerFilter | None,
    layers: Iterable[tuple[str, nn.Module]],
) -> Sequence[str] | None:
    """Return given patterns, or patterns for the layers that a given function chooses.

    Raises ``ConversionError`` if the function chooses no layer, ``TypeError`` for a class or a
    module.
    """
    required = "It must be a list of patterns, or a function of a layer's name and the layer."
    if isinstance(given, type):
        raise InvalidType(
            f"Got the class {given.__name__} as {argument}.",
            required,
            f"Pass {argument}=lambda name, layer: isinstance(layer, {given.__name__}).",
        )
    if isinstance(given, nn.Module):
        raise InvalidType(
            f"Got a module of the class {type(given).__name__} as {argument}.",
            required,
            "Pass the names that model.named_modules() gives to the layers that you mean.",
        )
    if given is None or not callable(given):
        return given
    layers = list(layers)
    found = [name for name, module in layers if given(name, module)]
    if not found:
        raise ConversionError(
            f"The {argument} function chooses no linear layer.",
            f"It is asked with each name and layer, such as {some_of([n for n, _ in layers])}.",
            "Return True for the layers that are meant.",
        )
    # expressions, because full names would lift the default exclusions
    return [_OfFunction(f"re:{re.escape(name)}$") for name in found]


class _OfFunction(str):
    """A pattern for a layer that a function chose; in reports it reads "the function"."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "the function"


def check_patterns(
    argument: str, patterns: Sequence[str], names: list[str], dense: Sequence[str] = ()
) -> None:
    """Refuse a string or a function instead of a list, and a pattern that matches no name.

    ``names`` are those of layers. Patterns may also match ``dense``, modules that stay dense.
    """
    if callable(patterns):
        raise InvalidType(
            f"Got a function as {argument}.",
            "Where there is no model, only names of tensors, layers are chosen by patterns.",
            f"Pass {argument}=[...]; fp8kit.plan and convert take functions.",
        )
    # an iterator would be empty after this, and a tensor has no truth value
    if not isinstance(patterns, Collection) or isinstance(patterns, Tensor):
        raise InvalidType(
            f"Got {argument}={patterns!r:.80}.",
            "It must be a list of patterns over the names of layers.",
            f"Pass {argument}=['*.o_proj'], for example.",
        )
    if isinstance(patterns, str):
        raise InvalidType(
            f"Got {argument}={patterns!r}.",
            "It must be a list of patterns; a string would be read letter by letter.",
            f"Pass {argument}=[{patterns!r}].",
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidType(
                f"Got a pattern of type {type(pattern).__name__} in {argument}.",
                "Patterns are strings over the names of layers.",
                "Pass names, such as those that print(fp8kit.plan(model)) lists.",
            )
        check_expression(argument, pattern)
        if not any(matches(pattern, name) for name in (*names, *dense)):
            raise ConversionError(
                f"The {argument} pattern {pattern!r} matches no linear layer.",
                f"The model's linear layers are {some_of(names)}.",
                "Correct the pattern or remove it; patterns match whole names or suffixes."
                + _closest(pattern, names),
            )


def check_expression(argument: str, pattern: str) -> None:
    """Raise a ``ConversionError`` if what follows ``re:`` is not a regular expression."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ConversionError(
            f"The {argument} pattern {pattern!r} is not a regular expression: {error}.",
            "What follows 're:' is matched against names as a regular expression.",
            "Correct it, or leave out 're:' for a glob.",
        ) from error


def roles_by_name(names: Iterable[str]) -> dict[str, str]:
    """Return the roles of layers that the defaults keep in high precision, as far as names tell.

    ``names`` are those of all linear layers of one model; layers without such a role are left out.
    A tower is protected where it feeds another model. If every layer outside towers is protected as
    well, the tower is the model itself, and only layers with another role inside it are kept.
    """
    names = dict.fromkeys(names)
    found = {
        name: [
            r
            for p, r in DEFAULT_EXCLUDE
            if matches(p, name) and not (r == _ROUTER and _beside_gated(name, names))
        ]
        for name in names
    }
    alone = all(found.values())
    kept = ((n, [r for r in roles if not (alone and r in TOWERS)]) for n, roles in found.items())
    return {name: roles[0] for name, roles in kept if roles}


def _beside_gated(name: str, names: Collection[str]) -> bool:
    parent, dot, last = name.rpartition(".")
    return last == "gate" and any(f"{parent}{dot}{other}" in names for other in _GATED)


def exclusion(
    names: Sequence[str], include: Sequence[str] | None, exclude: Sequence[str] | None, role: str
) -> str:
    """Return why patterns or the defaults (by ``role``) leave a layer out; empty if they do not."""
    if include is not None and not any(matches(p, n) for p in include for n in names):
        return "not in include"
    for pattern in exclude or ():
        if any(matches(pattern, n) for n in names):
            return f"excluded by {pattern!r}"
    defaults_apply = exclude is None or len(exclude) > 0
    if role and defaults_apply and not set(include or ()) & set(names):
        return f"{role}: kept in high precision by default"
    return ""


def size_obstacle(shape: tuple[int, ...]) -> str:
    """Return why a weight of this shape is too small to gain from FP8; empty if it is not."""
    if min(shape) < SMALLEST_SIDE or math.prod(shape) < SMALLEST_WEIGHT:
        return f"too small to gain: a side under {SMALLEST_SIDE} or under {SMALLEST_WEIGHT} weights"
    return ""


def merged_siblings(name: str) -> list[str]:
    """Return the names of the layers that engines merge with a layer, such as q, k and v."""
    parent, dot, last = name.rpartition(".")
    return [f"{parent}{dot}{other}" for other in MERGED_BY_ENGINES.get(last, ()) if other != last]


def _closest(pattern: str, names: Sequence[str]) -> str:
    """Return a hint for a pattern that matches nothing: a similar name, or last part of one."""
    if pattern.startswith("re:"):
        return ""
    if "," in pattern:  # no name has a comma
        return " Give each pattern by itself."
    bare = pattern.strip("*.")
    endings = dict.fromkeys(n.rpartition(".")[2] for n in names)
    return did_you_mean(bare, names if "." in bare else endings)
