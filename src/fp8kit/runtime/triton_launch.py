"""Launch a Triton kernel, and record the launch while a call is being recorded.

Triton's own launch binds, specializes and looks up the kernel at each call, which takes ten
microseconds and more. The compiled kernel is a ``CUfunction`` whose parameters are the arguments
that are not ``constexpr``, then two pointers to scratch memory. If its parameters have these sizes,
the driver bindings repeat the launch. Otherwise Triton's launcher does, which takes all arguments
in order, addresses as plain integers. All of this holds for Triton 3.6 to 3.9.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8kit.runtime.launch_recording import Launch, is_recording, record_launch

try:
    from fp8kit.runtime import cuda_launch
except ImportError:  # without the extra ``cuda``
    cuda_launch = None  # type: ignore[assignment]

_COMPILED_IN = "constexpr"
_SCRATCH_POINTERS = 2  # global and of a profiler; instrumented kernels have more parameters
_SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


class TritonLaunch:
    """A launch that Triton's launcher repeats: a compiled kernel with its grid and arguments.

    ``compiled`` is what a launch of the jitted function returned; ``arguments`` are all those of
    the signature, in order.
    """

    def __init__(self, compiled: Any, blocks: int, arguments: Sequence[Any]) -> None:
        self._compiled = compiled  # unloads the function when it is freed
        self._run, self._function = compiled.run, compiled.function
        self._metadata, self._blocks = compiled.packed_metadata, blocks
        self._at = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
        self._arguments = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        self.addresses = [self._arguments[i] for i in self._at]

    def move(self, position: int, address: int) -> None:
        """Pass another address from now on, aligned to 16 bytes where the first one was."""
        self._arguments[self._at[position]] = address

    def start(self, stream: int) -> None:
        """Launch again, on a stream of the current device, given by its handle."""
        # no metadata and no hooks: profilers that hook into Triton see the first launch only
        self._run(
            self._blocks,
            *(1, 1, stream, self._function, self._metadata, None, None, None),
            *self._arguments,
        )


def launch(kernel: Any, blocks: int, *arguments: Any, **options: Any) -> None:
    """Launch on a one-dimensional grid.

    ``options`` are constants of the kernel and options of the compiler.
    """
    compiled = kernel[(blocks,)](*arguments, **options)
    if is_recording():
        if compiled is None:  # the interpreter
            record_launch(None)
        else:
            named = [options[name] for name in kernel.arg_names[len(arguments) :]]
            every = [*arguments, *named]
            record_launch(_direct(compiled, blocks, every) or TritonLaunch(compiled, blocks, every))


def _direct(compiled: Any, blocks: int, arguments: Sequence[Any]) -> Launch | None:
    """Return a launch for the bindings to repeat, ``None`` if the function is not as expected."""
    metadata = compiled.metadata
    if cuda_launch is None or metadata.target.backend != "cuda":
        return None
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    if scratch or metadata.num_ctas > 1 or metadata.launch_cooperative_grid:
        return None
    passed: list[Any] = []
    for kind, argument in zip(compiled.src.signature.values(), arguments, strict=True):
        if kind.startswith("*"):
            passed.append(cuda_launch.pointer(argument))
        elif kind in _SCALARS:
            passed.append(_SCALARS[kind](argument))
        elif kind != _COMPILED_IN:
            return None
    function = cuda_launch.Function(
        cuda_launch.function_at(compiled.function),
        block=32 * metadata.num_warps,
        cluster=0,
        shared_bytes=metadata.shared,
        device=torch.cuda.current_device(),
        owner=compiled,
    )
    try:
        sizes = function.parameter_bytes()
    except (AttributeError, RuntimeError):  # bindings or a driver from before CUDA 12.4
        return None
    passed += [cuda_launch.pointer(None) for _ in range(_SCRATCH_POINTERS)]
    if sizes != [ctypes.sizeof(argument) for argument in passed]:
        return None
    return cuda_launch.KernelLaunch(function, blocks, passed, metadata.launch_pdl)
