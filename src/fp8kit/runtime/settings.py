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
_variables: list[str] = []  # all that are read here


def _read(variable: str) -> str:
    _variables.append(variable)
    return os.environ.get(variable, "")


def _backend_names(variable: str) -> frozenset[str]:
    names = frozenset(n.strip() for n in _read(variable).split(",") if n.strip())
    if not names <= set(BACKEND_NAMES):
        raise InvalidValue(
            f"The environment variable {variable} names {sorted(names - set(BACKEND_NAMES))}.",
            f"Backends are {', '.join(BACKEND_NAMES)}.",
            "Correct or unset the variable.",
        )
    return names


def _cache_dir(variable: str) -> Path:
    if chosen := _read(variable):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # ~name of a user that is not known here
            raise InvalidValue(
                f"The environment variable {variable} is {chosen!r}.",
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
    found = _read(variable).strip() or known[0]
    if found not in known:
        raise InvalidValue(
            f"The environment variable {variable} is {found!r}.",
            f"It must be {' or '.join(known)}.",
            "Correct or unset the variable.",
        )
    return found


def _warn_of_misspelt() -> None:
    words = [name.removeprefix(_PREFIX) for name in _variables]
    for name in os.environ:
        word = name.removeprefix(_PREFIX)
        # only what looks like one of these: other programs may have the prefix, too
        if word != name and word not in words and (meant := did_you_mean(word, words)):
            arrived = f"The environment variable {name} is set, and nothing reads it."
            required = f"Variables are {', '.join(_variables)}."
            warnings.warn(teach(arrived, required, f"Correct or unset it.{meant}"), stacklevel=2)


ACCUM: str = _word("FP8KIT_ACCUM", ("precise", "fast"))
BATCH_INVARIANT: bool = _word("FP8KIT_BATCH_INVARIANT", ("0", "1")) == "1"
CACHE_DIR: Path = _cache_dir("FP8KIT_CACHE_DIR")
DISABLED_BACKENDS: frozenset[str] = _backend_names("FP8KIT_DISABLE")
_warn_of_misspelt()
