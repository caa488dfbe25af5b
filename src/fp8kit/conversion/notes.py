"""Sentences for the notes of a ``Report``, about the whole model or many of its layers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from fp8kit.conversion.report import Report
from fp8kit.dispatch.backends import choose
from fp8kit.errors import some_of, teach
from fp8kit.formats import MX, SCHEMES, Scheme
from fp8kit.matmul.problem import DECODING, MATMUL_BACKENDS, TIMED_DTYPES, linear_problem
from fp8kit.modules.dense import linear_at
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.mx_forms import MX_CORES, form_on

UNTRIED_RULES = (
    "The rules of fuse= were not tried: calibrate= runs the model and checks them. A layer "
    "that one forgets meets NaN on a GPU."
)
IN_ANOTHER_SCHEME = "layers stay as they are, FP8 already, in the scheme"
_FP8 = (Fp8Linear, ExpertTensors)
_FEW_AND_MANY = (16, 4096)  # rows for which a backend may decode weights


def mx_numbers(
    place: str, capability: tuple[int, int] | None, asked: Scheme, experts: bool = False
) -> Iterator[str]:
    """Say in which number formats MX layers compute on a device, and if its cores multiply MX.

    ``capability`` is ``None`` for devices other than CUDA; ``asked`` is the scheme that was named.
    """
    if asked.stored != SCHEMES["MXFP8"]:
        return
    forms = {"layers": form_on(asked, capability)}
    if experts and (own := form_on(asked, capability, experts=True)) not in forms.values():
        forms["experts"] = own
    for which, form in forms.items():
        if form.rebased:
            how = "rebasing keeps nearly all values, and the report tells how many change"
        elif form.activation is None:
            how = "weights are decoded as they are multiplied"
        elif capability is not None and capability >= MX_CORES:
            how = "tensor cores multiply both natively"
        else:
            how = "no tensor core multiplies both, so products are emulated, which saves no time"
        yield f"On {place} {asked} {which} compute as {form.numbers}; {how}."


def decoded_weights(
    report: Report, model: nn.Module, scheme: Scheme, rows: Sequence[int] | None
) -> Iterator[str]:
    """Say which layers decode their weights for every matmul.

    ``rows`` are the row counts that the layers will serve, ``None`` if unknown.
    """
    rows = rows or _FEW_AND_MANY
    slow: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for record in report.linears:
        dense = linear_at(model, record.name)
        if dense.weight.device.type == "meta":
            continue
        shape = (dense.out_features, dense.in_features)
        kind = (scheme, dense.weight.dtype, dense.weight.device, dense.bias is not None)
        decoded = tuple(
            m
            for m in rows
            if choose(MATMUL_BACKENDS, linear_problem(shape, *kind, m)).backend in DECODING
        )
        if decoded:
            slow[dense.weight.device.type, decoded].append(record.name)
    for (device_type, decoded), names in slow.items():
        at = "" if len(decoded) == len(rows) else f" at m={', '.join(map(str, decoded))}"
        yield (
            f"On {device_type}{at} FP8 saves memory, not time, for {some_of(names)}: "
            "their weights are decoded for every matmul (fp8kit.explain says why)."
        )


def not_measured(device: str, dtype: torch.dtype, names: Sequence[str]) -> str:
    """Say which layers become FP8 although no measured times show whether they gain."""
    dense, remedy = "bf16", "`fp8kit tune` measures them on a GPU."
    if dtype not in TIMED_DTYPES:
        dense = str(dtype).removeprefix("torch.")
        remedy = "Times are measured of 16-bit layers alone: see model.bfloat16()."
    return (
        f"Whether FP8 is faster than {dense} on {device} was not measured for {some_of(names)}: "
        f"they are converted. {remedy}"
    )


def slower_at(counts: Sequence[int], names: Sequence[str]) -> str:
    """Say at which row counts layers become slower by FP8."""
    return (
        f"At m={', '.join(map(str, counts))} bf16 is faster than FP8 for {some_of(names)}. "
        "Name the row counts that you serve (m=[1, 64]) to leave out what is slower there."
    )


def other_schemes(model: nn.Module, scheme: Scheme) -> list[str]:
    """Say which layers are FP8 in another scheme than the one that was asked for."""
    held = Counter(m.scheme for m in model.modules() if isinstance(m, _FP8))
    return [
        teach(
            f"{count} {IN_ANOTHER_SCHEME} {other}.",
            f"{scheme} is made from dense weights, and nothing is quantized twice.",
            f"To have {scheme}, convert the dense model, or load its checkpoint with scheme=.",
        )
        for other, count in held.items()
        if other != scheme and not (scheme.weight == MX and other.rebased)
    ]


def own_gates(stacks: Mapping[str, ExpertStacks]) -> list[str]:
    """Say which modules of experts compute with their own gate, between two products."""
    names = [name for name, held in stacks.items() if held.activation is None]
    if not names:
        return []
    return [
        f"The gate of {some_of(names)} is none that is known: its own code runs between two "
        "products, expert by expert, and nothing is fused with them."
    ]
