"""Launch a jitted kernel, and note the launch where a tape is recorded.

Triton's own launch binds, specializes and looks up the kernel at each call, ten microseconds and
more. Its result, the compiled kernel, takes all arguments of the signature in order and addresses
as plain integers; that much is the same in Triton 3.6 to 3.9.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fp8kit import tape


class TritonLaunch:
    """A compiled kernel with its grid and arguments.

    Args:
        compiled: what a launch of the jitted function returned.
        blocks: grid size along x.
        arguments: every argument of the signature, in order.
    """

    def __init__(self, compiled: Any, blocks: int, arguments: Sequence[Any]) -> None:
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

    Args:
        kernel: a function under ``triton.jit``.
        blocks: grid size.
        arguments: the positional arguments.
        options: constants of the kernel and options of the compiler.
    """
    compiled = kernel[(blocks,)](*arguments, **options)
    if tape.recording():
        if compiled is None:  # the interpreter
            tape.note(None)
        else:
            named = [options[name] for name in kernel.arg_names[len(arguments) :]]
            tape.note(TritonLaunch(compiled, blocks, [*arguments, *named]))
