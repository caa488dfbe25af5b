"""Environment variables, read once at import and validated here and nowhere else.

``FP8KIT_DISABLE``: comma-separated names of backends that dispatch must not choose.
``FP8KIT_ACCUM``: ``precise`` or ``fast``, the default accumulation of layers and functions.
``FP8KIT_BATCH_INVARIANT``: ``1`` gives a row the same bits whatever other rows there are, unless
    a layer or a call says otherwise; ``0`` is the default.
``FP8KIT_CACHE_DIR``: where compiled kernels and tuned times are kept; by default below the
    user's cache directory.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from fp8kit.errors import InvalidValue, did_you_mean, teach

_PREFIX = "FP8KIT_"
BACKEND_NAMES = (
    "hopper_gemm",
    "torch_native",
    "triton_gemm",
    "deep_gemm",
    "dequantized",
    "hopper_experts",
    "triton_experts",
    "by_expert",
    "triton",
    "cpu",
    "reference",
)


def _backend_names(variable: str) -> frozenset[str]:
    names = frozenset(n.strip() for n in os.environ.get(variable, "").split(",") if n.strip())
    if not names <= set(BACKEND_NAMES):
        raise InvalidValue(
            f"The environment variable {variable} names {sorted(names - set(BACKEND_NAMES))}.",
            f"Backends are {', '.join(BACKEND_NAMES)}.",
            "Correct or unset the variable.",
        )
    return names


def _cache_dir() -> Path:
    chosen = os.environ.get("FP8KIT_CACHE_DIR")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # ~name of a user that is not known here
            raise InvalidValue(
                f"The environment variable FP8KIT_CACHE_DIR is {chosen!r}.",
                "It must be the path of a directory; ~ stands for a home directory known here.",
                "Correct or unset the variable.",
            ) from error
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "fp8kit"
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()) / f"fp8kit-{os.getuid()}"


def _word(variable: str, known: tuple[str, ...]) -> str:
    """Return the value of a variable, which is one of ``known``; the first is the default."""
    found = os.environ.get(variable, "").strip() or known[0]
    if found not in known:
        raise InvalidValue(
            f"The environment variable {variable} is {found!r}.",
            f"It must be {' or '.join(known)}.",
            "Correct or unset the variable.",
        )
    return found


def _warn_of_misspelt() -> None:
    known = ("FP8KIT_ACCUM", "FP8KIT_BATCH_INVARIANT", "FP8KIT_CACHE_DIR", "FP8KIT_DISABLE")
    words = [name.removeprefix(_PREFIX) for name in known]
    for name in os.environ:
        word = name.removeprefix(_PREFIX)
        # only what looks like one of these: other programs may have the prefix, too
        if name.startswith(_PREFIX) and name not in known and (meant := did_you_mean(word, words)):
            arrived = f"The environment variable {name} is set, and nothing reads it."
            required = f"Variables are {', '.join(known)}."
            warnings.warn(teach(arrived, required, f"Correct or unset it.{meant}"), stacklevel=2)


DISABLED_BACKENDS: frozenset[str] = _backend_names("FP8KIT_DISABLE")
CACHE_DIR: Path = _cache_dir()
ACCUM: str = _word("FP8KIT_ACCUM", ("precise", "fast"))
BATCH_INVARIANT: bool = _word("FP8KIT_BATCH_INVARIANT", ("0", "1")) == "1"
_warn_of_misspelt()
