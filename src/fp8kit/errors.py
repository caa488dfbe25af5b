"""The package's exceptions, the three parts of every user-facing error, and the plainest checks."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

_INTEGERS = (int, numbers.Integral, torch.SymInt)  # `int` is found fastest


class _InParts(Exception):
    """An error whose text has three parts: what arrived, what is required, what to do.

    Each is a sentence or more: what the caller passed, with its shape, dtype or path; what would
    have been accepted; and what to try next, in the imperative. One text may hold all three parts.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__(" ".join(parts))


class InvalidValue(_InParts, ValueError):
    """An argument has a value that is not accepted."""


class InvalidType(_InParts, TypeError):
    """An argument has a type that is not accepted."""


class UnsupportedError(_InParts, RuntimeError):
    """What was asked for is not supported here, such as a gradient for an FP8 weight.

    A ``RuntimeError``. Where no backend computes a product, the text lists each with its reason.
    """


class ConversionError(_InParts, ValueError):
    """A model cannot be converted as asked: a pattern matches nothing, or ``strict`` finds a layer.

    A ``ValueError``; the model is as it was before.
    """


class CheckpointError(_InParts, ValueError):
    """A checkpoint is damaged, incomplete or of an unknown kind, or cannot be written as asked.

    A ``ValueError``; the text says which file or tensor, what is required, and what to do.
    """


def teach(arrived: str, required: str, remedy: str) -> str:
    """Join the three parts into one text, for warnings and for exceptions of other classes."""
    return f"{arrived} {required} {remedy}"


def as_path(value: object, what: str) -> Path:
    """Return ``value`` as a ``Path``, or raise an error that names its purpose, ``what``."""
    if isinstance(value, str) and not value:  # Path("") would be the working directory
        raise InvalidValue(
            f"Got an empty path as {what}.",
            "It must be the path of a directory or a file.",
            "Pass it, such as 'model-fp8'.",
        )
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidValue(
                f"Got {value!r:.80} as {what}.",
                "A path has no null character.",
                "Look at what made it: bytes that were read as a name, for example.",
            )
        return Path(value)
    raise InvalidType(
        f"Got {value!r:.80} as {what}.",
        "It must be a path: a str or a pathlib.Path.",
        "Pass the path of a directory, such as 'model-fp8'.",
    )


def check_choice(
    name: str, value: object, known: Iterable[str], remedy: str = "Pass one of these words."
) -> None:
    """Raise ``InvalidValue`` unless an argument is one of the known words."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise InvalidValue(
            f"Got {name}={value!r}.",
            f"It must be one of {', '.join(map(str, words))}.",
            remedy + did_you_mean(value, words),
        )


def check_switch(name: str, value: object) -> None:
    """Raise ``InvalidType`` unless an argument is ``True`` or ``False``; ``"no"`` is neither."""
    if not isinstance(value, bool):
        raise InvalidType(
            f"Got {name}={value!r:.80}.",
            "It must be True or False.",
            "Pass one of these; name another argument that was meant, as in scheme='FP8_BLOCK'.",
        )


def check_number(name: str, value: object) -> None:
    """Raise ``InvalidValue`` unless an argument is a finite number."""
    # compared, because compilers trace no ``isfinite``; a comparison with NaN is false
    finite = isinstance(value, int | float) and -math.inf < value < math.inf
    if not finite or isinstance(value, bool):
        raise InvalidValue(
            f"Got {name}={value!r:.80}.",
            "It must be a finite number.",
            "Pass a float.",
        )


def check_shape(shape: object) -> None:
    """Raise ``TypeError`` unless ``shape`` is a tuple or list of sizes."""
    if isinstance(shape, torch.Size):
        return
    size = torch.SymInt | numbers.Integral | Tensor  # sizes are tensors while TorchScript traces
    if not isinstance(shape, tuple | list) or not all(isinstance(n, size) for n in shape):
        raise InvalidType(
            f"Got {shape!r:.80} as a shape.",
            "It must be a tuple or list of integers, K last.",
            "Pass the shape of a tensor, such as x.shape.",
        )


def check_strided(name: str, tensor: Tensor) -> None:
    """Refuse a nested or sparse tensor."""
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InvalidType(
            f"Got {name} as a {'nested tensor' if tensor.is_nested else tensor.layout}.",
            "It must be one dense tensor.",
            "Pass .to_dense() of a sparse tensor, .values() of a nested one.",
        )


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, also of a compiler; ``True`` is none."""
    return isinstance(value, _INTEGERS) and not isinstance(value, bool)


def counted(count: int, noun: str) -> str:
    """Return a count and its noun, with a plural "s" unless the count is 1."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """List the first few names for a message; "none" for an empty list."""
    shown = ", ".join(names[:most]) or "none"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Suggest the known word that is closest to a mistyped one, as the end of an error text.

    Returns a sentence with a leading space, or an empty string if no word is close.
    """
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.7)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
