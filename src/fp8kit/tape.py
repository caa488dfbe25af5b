"""Record the kernels that a call launches, and launch them again without the Python in between.

An eager layer spends its host time on deciding: validation, dispatch, tiles, argument packing. For
one shape the decisions never change, only addresses do. ``record`` runs a function once and notes
its launches and allocations; ``Tape`` then repeats them with a new input: one allocation for the
result, one for everything the call allocated besides, and the same kernels in the same order.

A call can be taped if all it does on the device is launch kernels of this package, and if every
address it passes lies in a tensor that is known: the input, a constant operand, or one that was
allocated inside. Any other operation of torch makes ``record`` give up, and the caller goes on as
before. Kernels take part by noting their launches (``nvrtc.Kernel``, ``quantizers.triton_launch``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALIGN = 256  # what a fresh CUDA allocation has, at least
_X, _Y, _SCRATCH = range(3)
_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_local = threading.local()


class Launch(Protocol):
    """One launch as data: the kernel, its grid, and arguments of which the addresses may change."""

    @property
    def addresses(self) -> Sequence[int]:
        """Every address among the arguments."""

    def replay(self, addresses: Sequence[int], stream: int) -> None:
        """Launch again.

        Args:
            addresses: in the order of ``self.addresses``.
            stream: handle of a stream of the current device.
        """


def recording() -> bool:
    """Say whether launches of this thread are being noted."""
    return getattr(_local, "launches", None) is not None


def note(launch: Launch | None) -> None:
    """Add a launch to the tape being recorded; ``None`` for one that cannot be repeated."""
    _local.launches.append(launch)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what is allocated, and notice operations that a tape would miss."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[Tensor] = []
        self.foreign = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif not func.is_view:
            self.foreign = str(func)
        return result


class Tape:
    """The launches of one call, for inputs of one shape and dtype.

    Args:
        steps: launches, each with (slot, offset) of its addresses; slot ``None`` is a constant.
        result: shape and dtype of the result.
        scratch: bytes of the other allocations together.
        device: where it runs.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Launch, Sequence[tuple[int | None, int]]]],
        result: tuple[torch.Size, torch.dtype],
        scratch: int,
        device: torch.device,
    ) -> None:
        self.device, self.scratch = device, scratch
        self.shape, self.dtype = result
        self.steps = [
            (
                launch,
                [0 if slot is not None else offset for slot, offset in places],
                [(i, slot, offset) for i, (slot, offset) in enumerate(places) if slot is not None],
            )
            for launch, places in steps
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Repeat the call with another input of the same shape, dtype and alignment."""
        y = x.new_empty(self.shape, dtype=self.dtype)  # torch.empty parses its device for longer
        scratch = x.new_empty(self.scratch, dtype=torch.uint8)
        bases = (x.data_ptr(), y.data_ptr(), scratch.data_ptr())
        stream = 0
        index = self.device.index
        if index is not None:
            if torch.cuda.current_device() != index:
                with torch.cuda.device(index):
                    self._launch(bases, torch._C._cuda_getCurrentRawStream(index))
                return y
            stream = torch._C._cuda_getCurrentRawStream(index)
        self._launch(bases, stream)
        return y

    def _launch(self, bases: tuple[int, int, int], stream: int) -> None:
        for launch, constants, moving in self.steps:
            addresses = constants.copy()
            for i, slot, offset in moving:
                addresses[i] = bases[slot] + offset
            launch.replay(addresses, stream)


def record(
    function: Callable[[], Tensor], x: Tensor, constants: Sequence[Tensor | None]
) -> tuple[Tensor, Tape | None]:
    """Run a function and tape what it launches.

    Args:
        function: computes from ``x`` and ``constants``, whose addresses stay what they are.
        x: the input; a tape wants others of its shape, dtype and strides, 16-byte aligned.
        constants: the other operands.

    Returns:
        The result, and the tape; ``None`` if the call cannot be repeated from its launches.
    """
    assert not recording(), "one tape at a time"
    _local.launches = []
    try:
        with _Watch() as watch:
            y = function()
        launches: list[Launch | None] = _local.launches
    finally:
        _local.launches = None
    return y, _tape(y, launches, watch, x, constants)


def _tape(
    y: Tensor,
    launches: Sequence[Launch | None],
    watch: _Watch,
    x: Tensor,
    constants: Sequence[Tensor | None],
) -> Tape | None:
    if watch.foreign or not launches:
        return None
    spans: list[tuple[int, int, int | None, int]] = [_span(x, _X, 0)]
    spans += [_span(t, None, t.data_ptr()) for t in constants if t is not None]
    scratch = results = 0
    for tensor in watch.allocated:
        if tensor.data_ptr() == y.data_ptr() and tensor.nbytes == y.nbytes and y.is_contiguous():
            results += 1
            spans.append(_span(tensor, _Y, 0))
        else:
            spans.append(_span(tensor, _SCRATCH, scratch))
            scratch += -(-tensor.nbytes // _ALIGN) * _ALIGN
    steps = []
    for launch in launches:
        if launch is None:
            return None
        places = [_place(address, spans) for address in launch.addresses]
        known = [p for p in places if p is not None]
        if len(known) < len(places):
            return None
        steps.append((launch, known))
    written = any(slot == _Y for _, known in steps for slot, _ in known)
    if results != 1 or not written:  # else a kernel that was not noted has filled the result
        return None
    return Tape(steps, (y.shape, y.dtype), scratch, y.device)


def _span(tensor: Tensor, slot: int | None, offset: int) -> tuple[int, int, int | None, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes, slot, offset


def _place(
    address: int, spans: Sequence[tuple[int, int, int | None, int]]
) -> tuple[int | None, int] | None:
    if address == 0:
        return None, 0
    for start, end, slot, offset in spans:
        if start <= address < end:
            return slot, offset + address - start
    return None
