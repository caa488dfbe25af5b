"""Compile CUDA C++ at run time with NVIDIA's own bindings, and keep the result on disk.

Needs ``cuda-bindings`` from PyPI (the extra ``cuda``) and no toolkit. A compiled kernel is a file
in the cache directory, named by a hash of everything it depends on, so a second process loads it
in milliseconds. A damaged file is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch
from cuda.bindings import nvrtc

from fp8kit.runtime import settings
from fp8kit.runtime.atomic_files import write_whole

_DIGEST_BYTES = hashlib.sha256().digest_size
_OPTIONS = (b"--std=c++17",)


@functools.cache
def missing() -> str | None:
    """Return why kernels cannot be compiled on this machine, ``None`` if they can."""
    if not torch.cuda.is_available():
        return None  # nothing would be launched here: only the decision is asked for
    try:
        checked(nvrtc.nvrtcVersion())
    except Exception as error:  # a loader of libraries may raise anything
        return f"NVRTC is not usable: {error}"
    return None


def joined(constants: Mapping[str, int | str], *files: str) -> str:
    """Return the source of one variant of a kernel: its macros, then files."""
    texts = [resources.files("fp8kit").joinpath(name).read_text() for name in files]
    return "".join(f"#define {k} {v}\n" for k, v in constants.items()) + "\n".join(texts)


def cubin(source: str, architecture: str) -> bytes:
    """Compile, or read what an earlier process compiled.

    The source has no includes; an architecture is e.g. ``"sm_90a"``. Raises ``RuntimeError`` if the
    source does not compile, with the compiler's log.
    """
    version = ".".join(map(str, checked(nvrtc.nvrtcVersion())))
    identity = "\0".join((source, architecture, version, *map(str, _OPTIONS)))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    path = settings.CACHE_DIR / "cubin" / f"{digest}.cubin"
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    check, image = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if image and hashlib.sha256(image).digest() == check:
        return image
    image, _ = compiled(source, architecture)
    # several processes may compile at once: files appear whole, whichever wins; a read-only home
    # costs only a compilation per process
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, hashlib.sha256(image).digest() + image)
    return image


def compiled(source: str, architecture: str) -> tuple[bytes, str]:
    """Compile on any machine with NVRTC; no GPU and no driver are needed.

    Returns the device image and the compiler's messages. Raises ``RuntimeError`` if the source does
    not compile, with the compiler's log.
    """
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"fp8kit.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), *_OPTIONS]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        # NVRTC writes into this object, so it must not be of length one: Python shares those
        log = bytes(1 + checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode().rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC could not compile for {architecture}:\n{said}")
        image = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return image, said


def checked(result: tuple[Any, ...]) -> Any:
    """Return the values of a call of the bindings without its status; raise if that is an error."""
    status, *values = result
    if status.value:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
