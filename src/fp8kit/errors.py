"""The package's exceptions, and the three-part pattern that every user-facing error follows."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from pathlib import Path


class _InParts(Exception):
    """An error whose text has three parts: what arrived, what is required, what to do.

    Each is one sentence or more: what the caller passed, with its shape, dtype or path; what would
    have been accepted; and the next thing to try, in the imperative. Or one text has all of them.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__(" ".join(parts))


class InvalidValue(_InParts, ValueError):
    """An argument has a value that cannot be taken."""


class InvalidType(_InParts, TypeError):
    """An argument has a type that cannot be taken."""


class UnsupportedError(_InParts, RuntimeError):
    """No backend can compute the problem; the text lists every backend with its reason."""


class ConversionError(_InParts, ValueError):
    """A model cannot be converted as asked (``strict``, or a pattern without a match)."""


class CheckpointError(_InParts, ValueError):
    """A checkpoint on disk is damaged, incomplete or of a kind that is not understood."""


def teach(arrived: str, required: str, remedy: str) -> str:
    """Join the three parts of a text that no exception of this module carries."""
    return f"{arrived} {required} {remedy}"


def as_path(value: object, what: str) -> Path:
    """Return a path as one object, or raise an error that says what was meant by it."""
    if isinstance(value, str) and not value:  # Path takes it for the working directory
        raise InvalidValue(
            f"Got an empty path as {what}.",
            "It must be the path of a directory or a file.",
            "Pass it, such as 'model-fp8', or '.' for the working directory.",
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
    """Refuse an argument whose value is none of a few words; raises ``InvalidValue``."""
    words = list(known)
    if not isinstance(value, str) or value not in words:
        raise InvalidValue(
            f"Got {name}={value!r}.",
            f"It must be one of {', '.join(map(str, words))}.",
            remedy + did_you_mean(value, words),
        )


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither ``True`` nor ``False``, such as ``"no"``; raises ``InvalidType``."""
    if not isinstance(value, bool):
        raise InvalidType(
            f"Got {name}={value!r:.80}.",
            "It must be True or False.",
            "Pass one of these, and other arguments by name, such as scheme='FP8_BLOCK'.",
        )


def check_number(name: str, value: object) -> None:
    """Refuse what is no number, or none that is finite; raises ``InvalidValue``."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValue(
            f"Got {name}={value!r:.80}.",
            "It must be a finite number.",
            "Pass a float.",
        )


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is one."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Offer the known word that is closest to a mistyped one, as the end of an error text.

    That is a sentence with a leading space, or an empty text if nothing is close.
    """
    by_lower = {k.lower(): k for k in known}
    close = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.7)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""
