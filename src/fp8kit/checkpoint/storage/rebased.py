"""Read rebased MX weights, as savers of libraries write them, back as MX weights.

diffusers and others write the tensors of a model as they are: codes, a scale for each row or block,
and the exponents of the groups beside them, also of stacks of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.formats import BLOCK, MX, ROW, GroupShape, QTensor, scale_shape
from fp8kit.quantizers.rebase import restore


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredCodes(TensorInfo):
    """Codes of a rebased weight that reading turns into MX codes again.

    ``scales`` are those of the codes on disk, powers of two per ``group``; ``exponents`` are E8M0
    bytes of the MX groups.
    """

    scales: TensorInfo
    exponents: TensorInfo
    group: GroupShape


def as_mx(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors with rebased weights replaced by the MX weights that reading makes of them."""
    found = dict(tensors)
    for name, exponents in tensors.items():
        weight = name.removesuffix("_exponents")
        codes, scales = tensors.get(weight), tensors.get(f"{weight}_scale")
        if weight == name or codes is None or scales is None or len(codes.shape) not in (2, 3):
            continue
        group = next((g for g in (ROW, BLOCK) if scale_shape(codes.shape, g) == scales.shape), None)
        whole = exponents.shape == scale_shape(codes.shape, MX)
        kinds = (codes.dtype, scales.dtype, exponents.dtype)
        if group and whole and kinds == (torch.float8_e4m3fn, torch.float32, torch.uint8):
            found[weight] = RestoredCodes(
                codes.name, codes.shard, codes.dtype, codes.shape, codes.offset,
                scales=scales, exponents=exponents, group=group,
            )  # fmt: skip
            found[f"{weight}_scale"] = found.pop(name)
    return found


def codes_of(part: RestoredCodes, read: Callable[[TensorInfo], Tensor]) -> Tensor:
    """Return the codes that a weight had before it was rebased."""
    held = QTensor(read(part), read(part.scales), part.group)
    return restore(held, read(part.exponents), part.name).data
