"""Compile kernels without a GPU, and count their registers, spills and instructions.

``compiled_by`` runs an ``ahead_of_time.py`` of Triton kernels in a process of its own, because in
the tests' process Triton may interpret. ``cuda_resources`` compiles CUDA C++ in this process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fresh

RUN = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_SYSTEM_SHARED = 1024  # bytes that the system keeps per block on Hopper; cuobjdump counts them too


def compiled_by(script: Path, cache: Path) -> dict[str, dict[str, int]]:
    """Run a script that compiles kernels, and return the JSON object of counts that it prints last.

    Args:
        script: file to run.
        cache: an empty directory, for Triton's cache.
    """
    variables = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    out = fresh.run(RUN, script, variables=variables)
    found: dict[str, dict[str, int]] = json.loads(out.stdout.splitlines()[-1])
    return found


def specialized(
    kernel: Any, arguments: Sequence[Any], constants: Mapping[str, Any], free: Sequence[str]
) -> Any:
    """Specialise a kernel as Triton's launcher does: ones are constants, multiples of 16 are known.

    Args:
        kernel: a function under ``triton.jit``.
        arguments: the positional arguments; tensors may be on meta.
        constants: the other arguments, by name; they are compiled in.
        free: names of arguments that are not specialised.
    """
    import torch
    from triton.compiler import ASTSource

    types = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.uint8: "u8",
        torch.int32: "i32",
        torch.int64: "i64",
        torch.float8_e4m3fn: "fp8e4nv",
    }
    signature, compiled_in, known = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[i] if i < len(arguments) else constants[name]
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{types[value.dtype]}"
        elif isinstance(value, float) and i < len(arguments):
            signature[name] = "fp32"
        elif i >= len(arguments) or value is None or (value == 1 and name not in free):
            signature[name], compiled_in[(i,)] = "constexpr", value
        else:
            signature[name] = "i32"
        if isinstance(value, torch.Tensor) or (
            signature[name] == "i32" and name not in free and value % 16 == 0
        ):
            known[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=compiled_in, attrs=known)


def counts(kernel: Any, patterns: Mapping[str, str]) -> dict[str, int]:
    """Count the matches of named patterns in a compiled kernel's PTX, and add ``resources``."""
    text = kernel.asm["ptx"]
    found = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return found | resources(kernel.asm["cubin"])


def compiled_for(
    capability: tuple[int, int],
    source: Any,
    options: Mapping[str, Any],
) -> Any:
    """Compile a source from ``specialized`` for a GPU of a compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = capability
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


def dumped(cubin: bytes, what: str) -> str:
    """Return what Triton's ``cuobjdump`` prints about a device image for the option ``what``."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(tool), what, file.name]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def machine_code(source: str) -> list[str]:
    """Compile CUDA C++ for Hopper and return its SASS instructions, in order."""
    from fp8kit.runtime import nvrtc

    text = dumped(nvrtc.compiled(source, "sm_90a")[0], "-sass")
    return [" ".join(line.split()) for line in re.findall(r"/\*[0-9a-f]{4,5}\*/(.*?);", text)]


def resources(cubin: bytes) -> dict[str, int]:
    """Return a kernel's registers, and its bytes of local (``stack``) and shared memory."""
    out = dumped(cubin, "-res-usage")
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", out)
    return dict(zip(("registers", "stack", "shared"), map(int, found), strict=True))


def without_nvrtc() -> str | None:
    """Return why CUDA C++ cannot be compiled on this machine, ``None`` if it can."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise what their loader raises
        return f"NVRTC is not installed (`pip install nvidia-cuda-nvrtc`): {error}"
    return None


def cuda_resources(source: str, stack: int = 0) -> dict[str, int]:
    """Compile CUDA C++ for Hopper and return the ``resources`` of its one kernel.

    ``shared`` is what the kernel declares, without the part that the system keeps.

    Args:
        source: code of the kernel.
        stack: bytes of local memory that the kernel must take.

    Raises:
        AssertionError: if the compiler prints anything, such as that it serialises wgmma (messages
            C7508 to C7518), or the kernel takes more or less local memory than ``stack``.
        RuntimeError: if the source does not compile, with the compiler's log.
    """
    from fp8kit.runtime import nvrtc

    image, said = nvrtc.compiled(source, "sm_90a")
    assert said == "", f"the compiler says:\n{said}"
    found = resources(image)
    assert found["stack"] == stack, f"{found['stack']} bytes of local memory instead of {stack}"
    found["shared"] -= _SYSTEM_SHARED
    return found
