"""The package's exceptions, and the three-part pattern that every user-facing error follows."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """No backend can compute the problem; the text lists every backend with its reason."""


class ConversionError(ValueError):
    """A model cannot be converted as asked (``strict``, or a pattern without a match)."""


class CheckpointError(ValueError):
    """A checkpoint on disk is damaged, incomplete or of a kind that is not understood."""


def teach(arrived: str, required: str, remedy: str) -> str:
    """Join the three parts of an error text: what arrived, what is required, what to do.

    Args:
        arrived: what the caller passed, with its shape, dtype or path.
        required: what would have been accepted.
        remedy: the next thing to try, in the imperative.

    Returns:
        One text of three sentences.

    Example:
        >>> teach("Got K = 256.", "The weight has K = 128.", "Pass x with 128 columns.")
        'Got K = 256. The weight has K = 128. Pass x with 128 columns.'
    """
    return f"{arrived} {required} {remedy}"
