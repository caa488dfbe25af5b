"""How a checkpoint is quantized: every option that the bytes of the result depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.schema.targets import dialect_for
from fp8kit.checkpoint.storage.layout import MAX_SHARD_BYTES
from fp8kit.errors import InvalidValue, check_switch
from fp8kit.formats import FLOATS, Scheme


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a high-precision checkpoint becomes an FP8 one.

    Args:
        scheme: a preset name or a ``Scheme``, none that needs calibration.
        target: who will load the result, one of ``TARGETS``.
        include: patterns, as in ``fp8kit.plan``; they are matched with single experts.
        exclude: patterns, as in ``fp8kit.plan``.
        strict: raise if a considered layer cannot be quantized.
        dtype: dtype of floating-point tensors that are not quantized: bf16, fp16 or fp32; ``None``
            leaves every tensor as it is. Weights are quantized from the values on disk.
        max_shard_bytes: start a new file before this size is exceeded.

    Raises:
        TypeError: if ``strict`` is neither ``True`` nor ``False``.
        ValueError: for an unknown scheme or target, a scheme that needs calibration, a scheme that
            the target cannot load, or a dtype that is none of the three.

    Example:
        >>> Recipe("FP8_BLOCK", target="sglang", exclude=["*.o_proj"])
    """

    scheme: Scheme | str = "FP8_DYNAMIC"
    target: str = "vllm"
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    strict: bool = False
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        scheme = self.resolved
        check_switch("strict", self.strict)
        if scheme.static:
            raise InvalidValue(
                f"Scheme {scheme} needs calibration data.",
                "Its activations have one scale per layer, found by running the model; a "
                "checkpoint that is streamed is quantized from its weights alone.",
                "Use FP8_DYNAMIC or FP8_TENSOR, or load the model and call "
                "fp8kit.convert(model, calibrate=...), then fp8kit.save.",
            )
        dialect_for(self.target, scheme)
        if self.dtype is not None and not (
            isinstance(self.dtype, torch.dtype) and self.dtype in FLOATS
        ):
            raise InvalidValue(
                f"Got dtype {self.dtype!s:.80} for what stays in high precision.",
                f"It must be one of {', '.join(str(d) for d in FLOATS)}.",
                "Pass one of these, or None to keep what is on disk.",
            )

    @property
    def resolved(self) -> Scheme:
        """The scheme of the files, as a ``Scheme``; every form of MXFP8 is stored as MXFP8."""
        return Scheme.of(self.scheme).stored

    def to_dict(self) -> JsonObject:
        """Return everything as plain data, equal for equal recipes."""
        return {
            "scheme": repr(self.resolved),
            "target": self.target,
            "include": None if self.include is None else list(self.include),
            "exclude": None if self.exclude is None else list(self.exclude),
            "strict": self.strict,
            "dtype": str(self.dtype),
            "max_shard_bytes": self.max_shard_bytes,
        }
