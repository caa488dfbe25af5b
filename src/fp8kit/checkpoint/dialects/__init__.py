"""The dialects in which FP8 checkpoints are written: one file and one row each.

A dialect reads and writes the quantization config (``parse``, ``render``) and names the tensors
beside a weight when it is written (``suffixes``). Everything else in the package uses the names
``weight``, ``weight_scale`` and ``input_scale``, in the shapes of ``formats.scale_shape``.
"""

from __future__ import annotations

import torch

from fp8kit.checkpoint.dialects import base
from fp8kit.checkpoint.dialects.autofp8 import AUTOFP8 as AUTOFP8
from fp8kit.checkpoint.dialects.bare import BARE as BARE
from fp8kit.checkpoint.dialects.base import Announcement as Announcement
from fp8kit.checkpoint.dialects.base import Dialect as Dialect
from fp8kit.checkpoint.dialects.base import Format as Format
from fp8kit.checkpoint.dialects.base import JsonObject as JsonObject
from fp8kit.checkpoint.dialects.base import Kinds as Kinds
from fp8kit.checkpoint.dialects.base import Source as Source
from fp8kit.checkpoint.dialects.base import Spec as Spec
from fp8kit.checkpoint.dialects.base import quantization_config as quantization_config
from fp8kit.checkpoint.dialects.base import scheme_of as scheme_of
from fp8kit.checkpoint.dialects.base import text_part as text_part
from fp8kit.checkpoint.dialects.by_layer import BY_LAYER
from fp8kit.checkpoint.dialects.comfyui import COMFYUI
from fp8kit.checkpoint.dialects.compressed_tensors import COMPRESSED_TENSORS as COMPRESSED_TENSORS
from fp8kit.checkpoint.dialects.fbgemm import FBGEMM as FBGEMM
from fp8kit.checkpoint.dialects.mistral import MISTRAL
from fp8kit.checkpoint.dialects.modelopt import MODELOPT
from fp8kit.checkpoint.dialects.mxfp4 import MXFP4
from fp8kit.checkpoint.dialects.mxfp8 import MXFP8_INVERSE as MXFP8_INVERSE
from fp8kit.checkpoint.dialects.mxfp8 import MXFP8_PLAIN
from fp8kit.checkpoint.dialects.quark import QUARK
from fp8kit.checkpoint.dialects.torchao import TORCHAO
from fp8kit.checkpoint.dialects.transformers_fp8 import TRANSFORMERS_FP8 as TRANSFORMERS_FP8
from fp8kit.errors import CheckpointError, check_choice

# in the order in which they are tried; tensors that show another dialect outweigh a config
DIALECTS: tuple[Dialect, ...] = (
    COMPRESSED_TENSORS,
    BY_LAYER,
    TORCHAO,
    MISTRAL,
    COMFYUI,
    MODELOPT,
    QUARK,
    FBGEMM,
    MXFP4,
    MXFP8_INVERSE,
    MXFP8_PLAIN,
    TRANSFORMERS_FP8,
    AUTOFP8,
    BARE,
)


def detect(source: Source) -> Dialect | None:
    """Return which dialect a checkpoint is written in: by its tensors first, then by its config.

    ``None`` stands for a checkpoint in high precision. Raises ``CheckpointError`` if it announces a
    quantization that no dialect here understands, or rotations of the inputs of layers.
    """
    named = source.method == "quanto" or "quanto_qmap.json" in source.documents
    if named or source.has(".weight._data"):
        raise CheckpointError(
            "The checkpoint was written by quanto, as its tensors or quanto_qmap.json say.",
            "Its scales and packed weights have no dialect that is read here.",
            "Start from the high-precision checkpoint that it was made of.",
        )
    packed = [n for n, (kind, _) in source.kinds.items() if kind == torch.uint32]
    if packed and source.has(".scales"):
        raise CheckpointError(
            f"{packed[0]} is torch.uint32, and scales lie beside it: so MLX packs weights.",
            "They have no dialect that is read here.",
            "Start from the high-precision checkpoint that it was made of.",
        )
    found = source.quantization
    # of a model of diffusers, its config.json has no entry
    beside = source.documents.get("quantization_config.json", {})
    compressed = any({"fp8_config", "scale_method"} <= said.keys() for said in (found, beside))
    if compressed or source.has(".quant_input.scale_inv"):
        raise CheckpointError(
            "The checkpoint was written by Intel Neural Compressor, as fp8_config in its "
            "quantization config or tensors named quant_input.scale_inv say.",
            "Its weights lie as [K, N], and those that are read as [N, K].",
            "Save the model with its format='vllm', which turns them.",
        )
    base.check_transforms(found)
    rotated = [key for key in ("rotation_config", "spinquant_config") if found.get(key)]
    algorithms = found.get("algo_config") or ()
    for algorithm in algorithms if isinstance(algorithms, list) else ():
        wanted = ("r4", "online_r1_rotation")  # rotations that the model computes at run time
        if isinstance(algorithm, dict):
            rotated += [f"algo_config: {key}" for key in wanted if algorithm.get(key)]
    if rotated:
        raise base.rotated_inputs(f"The quantization config has {rotated[0]}")
    for dialect in DIALECTS:
        if dialect.detect(source):
            return dialect
    if not found:
        return None
    raise CheckpointError(
        f"config.json says quant_method = {found.get('quant_method')!r}.",
        f"This version reads {', '.join(d.name for d in DIALECTS)}.",
        "Export the model to one of these, or start from its high-precision checkpoint.",
    )


def dialect_named(name: str) -> Dialect:
    """Return the dialect of this name, to write in.

    Raises ``ValueError`` for an unknown name, or one that is only read.
    """
    writable = {d.name: d for d in DIALECTS if d.writable}
    remedy = "Name one of these, which are written, or name a target instead."
    check_choice("dialect", name, sorted(writable), remedy)
    return writable[name]
