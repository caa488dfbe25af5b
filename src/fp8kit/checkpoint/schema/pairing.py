"""Pair weights with their scales: found by name, checked by dtype and shape."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from fp8kit.checkpoint.dialects import Announcement, Dialect, Format, Kinds, Source, Spec, detect
from fp8kit.checkpoint.schema.layers import (
    Layer,
    given_widths,
    granularity,
    input_scale_problem,
    part_widths,
    scale_problem,
)
from fp8kit.checkpoint.schema.naming import (
    CODES,
    Parts,
    cache_strategy,
    named,
    sort_names,
    standard_names,
)
from fp8kit.errors import CheckpointError, some_of, teach
from fp8kit.formats import FLOATS, ROW, TENSOR, Scheme

_READ = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# tensors with which layers of some exporters compute besides a weight and its scales
_UNSUPPORTED = {
    **dict.fromkeys(  # ModelOpt, msmodelslim
        ("pre_quant_scale", "mul_scale", "div.mul_scale"),
        "multiplies what goes into its layer, before it is quantized",
    ),
    "left_trans": "turns what goes into its layer, before it is quantized",  # FlatQuant
    "weight_g_idx": "sorts the columns of its layer into groups",  # llm-compressor
    "weight_dual_scale": "multiplies the scales of its layer",  # msmodelslim
    "svd_up": "adds to what its layer gives",  # SDNQ
    "svdquant_lora_a": "adds to what its layer gives",  # ModelOpt
}


@dataclass(slots=True)
class Reading:
    """What a checkpoint holds, in the words of this package.

    Without dialect and spec it is in high precision. ``tensors`` maps our names to those on disk,
    ``layers`` are in the order of names, and ``problems`` are damage, one text each.
    """

    dialect: Dialect | None = None
    spec: Spec | None = None
    tensors: dict[str, str] = field(default_factory=dict)
    layers: dict[str, Layer] = field(default_factory=dict)
    kv_scales: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


def interpret(source: Source) -> Reading:
    """Return what a checkpoint holds, and a list of all that does not fit together.

    An announcement that no dialect here understands is a problem, too.
    """
    try:
        dialect = detect(source)
        if dialect is None:
            coded = [n for n, (dtype, _) in sorted(source.kinds.items()) if dtype in CODES]
            problems = [_stray(n, source.kinds) for n in coded]
            problems += _integers(source.kinds, source.kinds)
            return Reading(tensors={n: n for n in source.kinds}, problems=problems)
        announced = dialect.parse(source)
    except CheckpointError as error:
        return Reading(tensors={n: n for n in source.kinds}, problems=[str(error)])
    names = sort_names(source.kinds)
    found = Reading(dialect, tensors={n: n for n in names.plain})
    if dialect.name == "bare" and not any(parts.scales for parts in names.layers.values()):
        coded = [*(parts.weight for parts in names.layers.values()), *names.stray]
        found.problems.append(_unscaled(next(filter(None, coded)), source.kinds))
        return found
    for name in names.stray:
        found.problems.append(_stray(name, source.kinds))
    unscaled = (n for n in names.plain if n.rpartition(".")[0] not in names.layers)
    found.problems += _integers(unscaled, source.kinds)
    unset = [n for n, parts in names.layers.items() if _scales_unset(n, parts, source, announced)]
    if unset:
        announced = _ignoring(announced, "Scales beside weights in high precision", unset)
    if names.outputs:
        announced = _ignoring(announced, "Scales of what layers give", names.outputs)
    for name, parts in names.layers.items():
        if name in unset:
            found.tensors[named(name, "weight")] = named(name, "weight")
        else:
            _add_layer(found, name, parts, source, announced)
    for ours, on_disk in sorted(names.kv_scales.items()):
        _add_cache_scale(found, ours, on_disk, source.kinds)
    cache = cache_strategy(source.kinds[found.tensors[n]][1] for n in found.kv_scales)
    _summarize(found, announced, cache)
    found.problems = [text for text in found.problems if text]
    return found


def _ignoring(announced: Announcement, what: str, names: list[str]) -> Announcement:
    said = f"{what} say nothing here and are ignored: {some_of(names)}."
    return replace(announced, unread=(*announced.unread, said))


def group_repeated(problems: Iterable[str]) -> list[str]:
    """Keep three of the problems that differ only in numbers, and count the others."""
    kinds: dict[str, list[str]] = {}
    for text in problems:
        kinds.setdefault(re.sub(r"\d+", "#", text), []).append(text)
    found = []
    for texts in kinds.values():
        found += texts[:3]
        if len(texts) > 3:
            found[-1] += f" (And {len(texts) - 3} more like this.)"
    return found


def _stray(name: str, kinds: Kinds) -> str:
    dtype, shape = kinds[name]
    layer = name.removesuffix("weight_scale")
    packed = next((n for n in (f"{layer}weight", f"{layer}weight_packed") if n in kinds), "")
    if packed and layer != name and not kinds[packed][0].is_floating_point:
        return teach(
            f"{name} is {dtype} {list(shape)} beside {packed}, {kinds[packed][0]} "
            f"{list(kinds[packed][1])}.",
            "Such scales are those of NVFP4, which is read as bytes [N, K / 2] with scales "
            "[N, K / 16], of ModelOpt also [N, K / 32], and one float32 weight_scale_2 or "
            "weight_global_scale.",
            "Start from the high-precision checkpoint that it was made of.",
        )
    return teach(
        f"{name} is {dtype} and is not the weight of a layer.",
        "Only weights, as X.weight or stacks of experts, are FP8 float8_e4m3fn.",
        "Export the model again with this tensor in high precision.",
    )


def _integers(names: Iterable[str], kinds: Kinds) -> list[str]:
    """Report weights of integers, which loaders would cast to floats without an error."""
    held = ((name, *kinds[name]) for name in names if name.endswith("weight"))
    return [_integer(n, d) for n, d, s in held if not d.is_floating_point and len(s) > 1]


def _integer(name: str, dtype: torch.dtype, beside: str = "") -> str:
    return teach(
        f"{name} is {dtype}{beside}.",
        "Weights are read that are FP8 (float8_e4m3fn), not INT8 or INT4; FP4 in the layouts that "
        "docs/checkpoints.md lists.",
        "Start from the high-precision checkpoint that it was made of.",
    )


def _summarize(found: Reading, announced: Announcement, cache: str) -> None:
    schemes = Counter(layer.scheme for layer in found.layers.values())
    main = schemes.most_common(1)[0][0] if schemes else _announced_scheme(announced)
    others = {n: x.scheme for n, x in found.layers.items() if x.scheme != main}
    bound = announced.scale_ub
    found.spec = Spec(main, announced.ignore, announced.unread, others, cache, bound)


def _announced_scheme(announced: Announcement) -> Scheme:
    try:
        fmt = announced.format_of("")
    except CheckpointError:  # it describes each layer, and there is none
        fmt = Format()
    return fmt.scheme(fmt.weight or TENSOR, False)


def _add_layer(
    found: Reading, name: str, parts: Parts, source: Source, announced: Announcement
) -> None:
    problems = list(_pairing_problems(name, parts, source.kinds))
    held = {
        "weight": [parts.weight] if parts.weight else [],
        "weight_scale": parts.scales,
        "input_scale": parts.input_scales,
    }
    for role, ours in standard_names(name, parts.stack).items():
        taken = [found.tensors[ours]] if held[role] and ours in found.tensors else []
        if taken and not problems:
            said = teach(
                f"{taken[0]} and {held[role][0]} are both the tensor {ours}.",
                "A layer has one weight, and a weight one scale.",
                "Remove the one that does not belong, or export the model again.",
            )
            problems.append(said)
        for on_disk in held[role][:1]:
            found.tensors[ours] = on_disk
    for kind, does in _UNSUPPORTED.items():
        # msmodelslim writes what it wraps as X.linear
        names = {named(name, kind), named(name.removesuffix(".linear"), kind)}
        for other in names & source.kinds.keys():
            said = teach(
                f"{other} {does}.",
                "Layers here compute with a weight and one scale for each of its groups: every "
                "number would be wrong.",
                "Export it without AWQ, SmoothQuant, FlatQuant, SVDQuant, dual scales or "
                "actorder='group', or with these scales in the norms before.",
            )
            problems.append(said)
    found.problems += problems
    if parts.weight:
        found.layers[name] = _layer(found, name, parts, source, announced, not problems)


def _unscaled(weight: str, kinds: Kinds) -> str:
    layer = weight.removesuffix("weight")
    beside = [n for n in kinds if n.startswith(layer) and "scal" in n.removeprefix(layer)]
    if beside and layer.endswith("."):
        return teach(
            f"{weight} is {kinds[weight][0]} and has {some_of(beside)} beside it.",
            "Scales are read under the names that docs/checkpoints.md lists; the checkpoints of "
            "TensorRT-LLM are not read.",
            "Start from the checkpoint that it was made of.",
        )
    return teach(
        f"None of the FP8 tensors, such as {weight}, has a scale (X.weight_scale).",
        "FP8 weights are codes with scales. If these are numbers that were cast, as in "
        "flux1-dev-fp8 and t5xxl_fp8_e4m3fn, no scale was divided out of them.",
        "Start from the checkpoint in bf16; or cast every tensor of a plain cast to bfloat16, "
        "save that, and quantize it. Else a shard may be missing.",
    )


def _layer(
    found: Reading, name: str, parts: Parts, source: Source, announced: Announcement, sound: bool
) -> Layer:
    ours, kinds = standard_names(name, parts.stack), source.kinds
    dtype, shape = kinds[parts.weight]
    try:
        fmt = announced.format_of(name)
        if _has_k_first(parts.weight, kinds):
            fmt = replace(fmt, transposed=True)
        if name in source.made:  # scales of a small weight fit several granularities
            fmt = replace(fmt, weight=source.made[name])
    except CheckpointError as error:
        found.problems.append(str(error))
        fmt, sound = Format(), False
    if fmt.unscaled and parts.input_scales:
        parts.input_scales.clear()
        del found.tensors[ours["input_scale"]]
    widths: tuple[int, ...] = ()
    if sound:
        scale = kinds[parts.scales[0]]
        if fmt.weight in (None, TENSOR) and len(scale[1]) == 1 and scale[0] in FLOATS:
            try:
                widths = given_widths(name, shape, scale[1][0], source.widths)
            except CheckpointError as error:
                found.problems.append(str(error))
            widths = widths or part_widths(name, shape, scale[1][0], source.config)
        said = fmt.weight is not None
        fmt = replace(fmt, weight=ROW if widths else granularity(fmt, shape, scale))
        if not widths:
            found.problems.append(scale_problem(parts.scales[0], scale, shape, fmt, said))
    scheme = fmt.scheme(fmt.weight or TENSOR, bool(parts.input_scales))
    if sound:
        first = next(iter(parts.input_scales), "")
        beside = (first, kinds[first]) if first else None
        found.problems.append(
            input_scale_problem(ours["input_scale"], beside, shape, scheme, len(widths))
        )
    transposed = fmt.transposed and len(shape) == 3
    return Layer(
        name,
        scheme,
        (shape[0], shape[2], shape[1]) if transposed else shape,
        ours["weight"],
        ours["weight_scale"],
        ours["input_scale"] if parts.input_scales else None,
        codes=dtype,
        swizzled=fmt.swizzled,
        transposed=transposed,
        widths=widths,
    )


def _scales_unset(name: str, parts: Parts, source: Source, announced: Announcement) -> bool:
    """Return whether scales belong to a weight that Transformers could not cut into blocks.

    It leaves a weight with ragged sides dense, and saves uninitialized memory as its scales.
    """
    dtype, shape = source.kinds.get(named(name, "weight"), (None, ()))
    if parts.weight or source.method != "fp8" or dtype not in FLOATS or len(shape) != 2:
        return False
    group = announced.format_of(name).weight or TENSOR
    return group.rows > 1 and (shape[0] % group.rows != 0 or shape[1] % group.cols != 0)


def _has_k_first(name: str, kinds: Kinds) -> bool:
    """Return whether a stack of experts has K before N, as Llama 4 and GPT-OSS multiply.

    Exporters that keep the model's own stacks do not announce it; the shapes of both stacks tell:
    ``[E, H, 2 I]`` and ``[E, I, H]``, where others have ``[E, 2 I, H]`` and ``[E, H, I]``.
    """
    pair = [kinds.get(name.replace(*w)) for w in (("down_", "gate_up_"), ("gate_up_", "down_"))]
    if not all(kind is not None and kind[0] in CODES and len(kind[1]) == 3 for kind in pair):
        return False
    (_, first, width), (_, inner, last) = (kind[1] for kind in pair if kind is not None)
    return (first, width) == (last, 2 * inner)


def _pairing_problems(name: str, parts: Parts, kinds: Kinds) -> Iterator[str]:
    weight = named(name, "weight")
    if not parts.weight:
        packed = next((n for n in (weight, named(name, "_weight_qdata")) if n in kinds), "")
        if packed and not kinds[packed][0].is_floating_point:
            yield _integer(packed, kinds[packed][0], ", with scales beside it")
            return
        held = kinds[weight][0] if weight in kinds else None
        beside = f", but one of {held}" if held else ""
        remedy = "A shard may be missing or mixed up: get the checkpoint again."
        if held in FLOATS:
            remedy = (
                "Transformers saves this of a model that it loaded in FP8 and decoded: take the "
                "FP8 checkpoint, and save what fp8kit.load makes of it."
            )
        for scale in (*parts.scales, *parts.input_scales):
            yield teach(
                f"{scale} has no FP8 {weight} beside it{beside}.",
                "A scale belongs to an FP8 weight.",
                f"{remedy} Rename it if it is a parameter of the model itself.",
            )
        return
    dtype, shape = kinds[parts.weight]
    if dtype not in _READ or len(shape) not in (2, 3):
        yield teach(
            f"{parts.weight} is {dtype} of shape {list(shape)}.",
            "FP8 weights are float8_e4m3fn matrices [N, K], or stacks of them [E, N, K].",
            "Export the model again.",
        )
        return
    if not parts.scales:
        scale = standard_names(name, parts.stack)["weight_scale"]
        yield teach(
            f"{parts.weight} is {dtype} and has no {scale}.",
            "The codes mean nothing without their scales.",
            "A shard may be missing: get the checkpoint again.",
        )
    for scales in (parts.scales, parts.input_scales):
        if len(scales) > 1:
            yield teach(
                f"{parts.weight} has {' and '.join(scales)} beside it.",
                "A weight has one scale; two leave open which one counts.",
                "Remove the one that does not belong, or export the model again.",
            )


def _add_cache_scale(found: Reading, ours: str, on_disk: list[str], kinds: Kinds) -> None:
    found.tensors[ours] = on_disk[0]
    found.kv_scales += (ours,)
    dtype, shape = kinds[on_disk[0]]
    heads = len(shape) == 3 and shape[1:] == (1, 1)
    if len(on_disk) > 1:
        what, wanted = " and ".join(on_disk), "one scale"
    elif dtype not in FLOATS or not (shape in ((), (1,), (1, 1)) or heads):
        what, wanted = f"{on_disk[0]} ({dtype} {list(shape)})", "one number, or one per head"
    else:
        return
    found.problems.append(
        teach(
            f"The KV cache has {what} for {ours}.",
            f"It has {wanted} for keys and {wanted} for values.",
            "Export the model again. Rename it if it is a parameter of the model itself.",
        )
    )
