"""An FP8 layer of a checkpoint, and checks that tensors can be the scales of its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8kit.checkpoint.dialects import Format, JsonObject, text_part
from fp8kit.conversion.patterns import matches
from fp8kit.errors import CheckpointError, teach
from fp8kit.formats import BLOCK, FLOATS, MX, ROW, TENSOR, GroupShape, Scheme, scale_shape
from fp8kit.quantizers.scale_layout import E8M0_DTYPES

Shape = tuple[int, ...]
Kind = tuple[torch.dtype, Shape]


@dataclass(frozen=True, slots=True)
class Layer:
    """One FP8 layer of a checkpoint, or one stack of experts, in the words of this package.

    ``shape`` is that of its codes once read, ``(N, K)`` or ``(E, N, K)``; ``codes`` their dtype on
    disk. ``weight``, ``scale`` and ``input_scale`` are our names of its tensors. ``swizzled`` MX
    scales lie in 128x4 tiles, ``transposed`` codes have K before N on disk; ``widths`` are the rows
    of each part of a fused matrix that has one scale per part.
    """

    name: str
    scheme: Scheme
    shape: Shape
    weight: str
    scale: str
    input_scale: str | None = None
    codes: torch.dtype = torch.float8_e4m3fn
    swizzled: bool = False
    transposed: bool = False
    widths: tuple[int, ...] = ()

    @property
    def tensors(self) -> dict[str, str]:
        """Our names of its codes and scales, by kind (``weight``, ``weight_scale``...)."""
        scales = {"weight_scale": self.scale, "input_scale": self.input_scale}
        return {"weight": self.weight, **{kind: name for kind, name in scales.items() if name}}

    @property
    def group(self) -> GroupShape:
        """Granularity of the scales once read: in a stack, one per matrix becomes one per row."""
        stacked = len(self.shape) == 3 and self.scheme.weight == TENSOR
        return ROW if stacked else self.scheme.weight


def given_widths(
    name: str, shape: Shape, count: int, widths: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the rows of each part of a fused matrix, as a user gave them; empty if nobody did.

    ``widths`` maps patterns of names, as in ``fp8kit.plan``, to rows. Raises ``CheckpointError`` if
    they do not add up to the rows of the weight, or are not one for each of ``count`` scales.
    """
    for pattern, rows in widths.items():
        if matches(pattern, name):
            if len(rows) == count and sum(rows) == shape[0] and all(n > 0 for n in rows):
                return tuple(rows)
            raise CheckpointError(
                f"Got widths {list(rows)} for {name}, a weight of {list(shape)} with {count} "
                "scales.",
                "Widths are the rows of each part; there is one scale for each, and together "
                "they are the rows of the weight.",
                f"Correct widths={{{pattern!r}: ...}}.",
            )
    return ()


def part_widths(name: str, shape: Shape, count: int, config: JsonObject) -> tuple[int, ...]:
    """Return the rows of each part of a fused matrix; empty if it is not one of ``count`` parts.

    Known names end in ``qkv_proj`` or ``gate_up_proj``; ``config.json`` has the number of heads.
    """
    last, rows = name.rpartition(".")[2], shape[0]
    if len(shape) == 2 and last == "gate_up_proj" and count == 2 and rows % 2 == 0:
        return rows // 2, rows // 2
    if len(shape) == 2 and last == "qkv_proj" and count == 3:
        text = text_part(config)
        heads = text.get("num_attention_heads")
        keys = text.get("num_key_value_heads", heads)
        if isinstance(heads, int) and isinstance(keys, int) and heads > 0 and keys > 0:
            size, rest = divmod(rows, heads + 2 * keys)
            fits = rest == 0 and text.get("head_dim") in (None, size)  # else v has another size
            return (heads * size, keys * size, keys * size) if fits else ()
    return ()


def accepted_shapes(shape: Shape, group: GroupShape, fmt: Format) -> tuple[Shape, ...]:
    """List the shapes in which exporters write the scales of codes of this shape on disk."""
    *stack, rows, cols = shape
    if fmt.transposed and stack and group == MX:
        return (scale_shape((*stack, cols, rows), MX),)
    if fmt.transposed and stack and group == ROW:
        return (*stack, 1, cols), (*stack, cols, 1)
    if fmt.transposed and stack and group.rows != group.cols:
        return ()
    if fmt.swizzled and group == MX:
        down, across = -(-rows // 128), -(-cols // 128)
        return (32 * down, 16 * across), (128 * down, 4 * across)
    if group == TENSOR:
        one: tuple[Shape, ...] = ((1,), (), (1, 1), (1,) * len(shape))
        e = tuple(stack)
        halves = ((*e, 2),) if rows % 2 == 0 else ()
        return (*one, e, (*e, 1), *halves, (*e, 1, 1)) if stack else one
    if group == ROW:
        return (*stack, rows, 1), (*stack, rows), (*stack, 1, rows)
    wanted = scale_shape(shape, group)
    if group.rows == 1 or stack:
        return (wanted,) if stack else (wanted, (*wanted, 1))  # kohya's scripts keep the last axis
    whole: tuple[Shape, ...] = ((), (1,)) if wanted == (1, 1) else ()  # ModelOpt drops its sides
    return wanted, (wanted[0], 1, wanted[1], 1), *whole


def granularity(fmt: Format, shape: Shape, scale: Kind) -> GroupShape:
    """Return the granularity of a weight's scales: as announced, else by their dtype and shape.

    If none fits, it is the likeliest one, and ``scale_problem`` will report it.
    """
    if fmt.weight is not None:
        return fmt.weight
    if len(shape) == 2 and len(scale[1]) == 3 and scale[1][1] and shape[1] % scale[1][1] == 0:
        return GroupShape(1, shape[1] // scale[1][1])
    candidates = (MX, BLOCK) if scale[0] in E8M0_DTYPES else (TENSOR, ROW, BLOCK, MX)
    fitting = [g for g in candidates if scale[1] in accepted_shapes(shape, g, fmt)]
    if fitting == [ROW, BLOCK]:  # [1, N] is a row of blocks before it is a row of scales
        return BLOCK
    return fitting[0] if fitting else candidates[0]


def scale_problem(name: str, scale: Kind, shape: Shape, fmt: Format, announced: bool) -> str:
    """Return what is wrong with scales of codes of this shape on disk; empty if nothing is.

    A granularity that is not ``announced`` was guessed from the scales.
    """
    group = fmt.weight
    assert group is not None
    shapes = accepted_shapes(shape, group, fmt)
    dtypes: tuple[torch.dtype, ...] = E8M0_DTYPES if group == MX else FLOATS
    if group.rows > 1:  # DeepSeek V4 stores powers of two so
        dtypes = (*FLOATS, torch.float8_e8m0fnu)
    if scale[0] in dtypes and scale[1] in shapes:
        return ""
    kind = "E8M0 bytes (uint8 or float8_e8m0fnu)" if group == MX else "float32 (or 16 bit)"
    listed = " or ".join(str(list(s)) for s in shapes[:3]) or "none in this dialect"
    remedy = "Correct the config if it names another scheme, or export again."
    if scale[0] not in dtypes:
        remedy = "Export again with scales in one of these dtypes."
        if group == MX or scale[0] in E8M0_DTYPES:
            remedy = "Exponent bytes and numbers are not cast into each other: export again."
    elif len(scale[1]) == 1 and len(shape) == 2 and group.rows < 2:
        remedy += " If each part of a fused layer has one: fp8kit.load(dir, widths={name: rows})."
    elif len(shape) == 3:
        remedy = (
            "Start from the checkpoint that it was made from, or export one matrix per expert. Of "
            "the stacks that ModelOpt writes for GPT-OSS and Llama 4, read are those of its FP8."
        )
    elif not announced and len(shape) == 2:
        known = ((g, accepted_shapes(shape, g, fmt)[0]) for g in (TENSOR, ROW, BLOCK, MX))
        return teach(
            f"{name} is {scale[0]} of shape {list(scale[1])}, and no config says how fine it is.",
            f"Scales of a weight of {list(shape)} are known without one by their shapes: "
            + ", ".join(f"{group} {list(sides)}" for group, sides in known)
            + ".",
            'Say it in config.json: "quantization_config": {"quant_method": "fp8", '
            '"weight_block_size": [rows, columns]}.',
        )
    return teach(
        f"{name} is {scale[0]} of shape {list(scale[1])}.",
        f"{group} scales of a weight of {list(shape)} are {kind} of shape {listed}.",
        remedy,
    )


def input_scale_problem(
    wanted: str, scale: tuple[str, Kind] | None, shape: Shape, scheme: Scheme, parts: int
) -> str:
    """Return what is wrong with the scale of a layer's activations; empty if nothing is.

    ``wanted`` is our name of it, ``scale`` its name, dtype and shape on disk, ``None`` if there is
    none. Each of the ``parts`` of a fused matrix may have one.
    """
    if scale is None:
        return scheme.static * teach(
            f"An FP8 weight has no {wanted}.",
            f"{scheme} needs it: its activations are scaled by a fixed number.",
            "A shard may be missing: get the checkpoint again.",
        )
    name, (dtype, found) = scale
    if not scheme.static:
        return teach(
            f"{name} is there, and the config says {scheme}.",
            "Its activations are scaled by their own amax.",
            "Correct the config to the scheme of the tensors.",
        )
    shapes: tuple[Shape, ...] = ((1,), (), (1, 1))
    if len(shape) == 3:
        shapes = (*shapes, shape[:1], (shape[0], 1), (shape[0], 2))
    if dtype in FLOATS and (found in shapes or (parts and found == (parts,))):
        return ""
    return teach(
        f"{name} is {dtype} of shape {list(found)}.",
        "A static input scale is one number, float32 (or 16 bit).",
        "Export the model again.",
    )
