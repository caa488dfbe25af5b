"""Record the kernels that a call launches, and launch them again without the Python in between.

An eager layer spends its host time on deciding: validation, dispatch, tiles, argument packing. For
one shape the decisions never change, only addresses do. ``record`` runs a function once and keeps
its launches and allocations. A ``Recording`` repeats them with new inputs: one allocation for each
result, one for all other memory of the call (scratch), and the same kernels in the same order. On
the default stream a thread's calls share small scratch: a fixed address is passed only once.

A call can be recorded if all it does on the device is launch kernels of this package, and if every
address that it passes is inside a known tensor: an input, a constant operand, or one that the call
allocated. Any other operation of torch makes ``record`` give up, and the caller goes on as before.
Launching code calls ``record_launch`` (``cuda_launch.Kernel``, ``runtime.triton_launch``).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALIGN = 256  # bytes, to which fresh CUDA allocations are aligned, too
_MOST_SHARED = 1 << 17  # bytes of scratch that calls share: enough for one token in an 8B model
_SCRATCH = -1  # slots number the tensors of a call: inputs, then results, last any scratch memory
_aten = torch.ops.aten
_ALLOCATIONS = (
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
# what Inductor's generated code calls: allocates on the current device in a third of the time of
# torch.empty, and respects inference mode as well
_guards: Any = torch._C._dynamo.guards
_EMPTY: dict[str, Callable[..., Tensor]] = {
    "cpu": _guards._empty_strided_cpu,
    "cuda": _guards._empty_strided_cuda,
}
# builds without CUDA lack these two; where there is a CUDA tensor, CUDA is initialized already
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
_address = Tensor.data_ptr
_is_alias_of: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_local = threading.local()
_Span = tuple[int, int, int | None, int]  # first address, end, slot or None, offset there
Result = TypeVar("Result", bound="Tensor | Sequence[Tensor]")


class Launch(Protocol):
    """One launch as data: the kernel, its grid, and its arguments, whose addresses may change.

    A launch belongs to one recording, which lets one thread at a time move addresses and start it.
    """

    @property
    def addresses(self) -> Sequence[int]:
        """Every address among the arguments, as recorded."""

    def move(self, position: int, address: int) -> None:
        """Pass another address from now on.

        The new address is aligned to 16 bytes if the recorded one is.
        """

    def start(self, stream: int) -> None:
        """Launch again, on a stream of the current device, given by its handle."""


def is_recording() -> bool:
    """Return whether launches of this thread are being recorded."""
    return getattr(_local, "launches", None) is not None


def record_launch(launch: Launch | None) -> None:
    """Add a launch to the recording being made; ``None`` for one that cannot be repeated."""
    _local.launches.append(launch)


class AllocationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect the tensors that are allocated, and notice operations that a recording would miss."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[Tensor] = []
        self.foreign = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif not _shares_memory(func, result, args):
            self.foreign = str(func)
        return result


class Recording:
    """The launches of one call, to be repeated with other inputs; threads may share it.

    Args:
        steps: launches, each with (slot, offset) of its addresses; slot ``None`` is a constant.
        inputs: the number of inputs.
        results: what the recorded call returned, each with the allocation that contains it.
        scratch: bytes of the other allocations together, 0 if there were none.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Launch, Sequence[tuple[int | None, int]]]],
        inputs: int,
        results: Sequence[tuple[Tensor, Tensor]],
        scratch: int,
    ) -> None:
        self.device = results[0][0].device
        self.index = self.device.index
        self.steps = [launch for launch, _ in steps]
        layouts = [_layouts(*pair) for pair in results]
        self._memory = [memory for memory, _ in layouts]
        self._views = [(i, view) for i, (_, view) in enumerate(layouts) if view is not None]
        self._scratch = scratch
        self._empty = _EMPTY[self.device.type]
        self._starts = [launch.start for launch in self.steps]
        slots = inputs + len(results) + (scratch > 0)
        self._moves: list[list[tuple[Callable[[int, int], None], int, int]]]
        self._moves = [[] for _ in range(slots)]
        for launch, places in steps:
            for position, (slot, offset) in enumerate(places):
                if slot is not None:
                    self._moves[slot].append((launch.move, position, offset))
        self._bases: tuple[int, ...] = (-1,) * slots
        self._lock = threading.Lock()

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Repeat the call with other inputs of the same shapes, dtypes, strides and alignment."""
        index, stream = self.index, 0
        if index is not None:
            if _current_device() != index:
                with torch.cuda.device(index):
                    return self(*inputs)
            stream = _current_stream(index)
        results = [*itertools.starmap(self._empty, self._memory)]
        bases = (*map(_address, inputs), *map(_address, results))
        if self._scratch:
            scratch = self._scratch_on(stream)  # kept alive until all kernels are launched
            bases += (scratch.data_ptr(),)
        with self._lock:  # between a move and its start no other thread may move
            if bases != self._bases:  # allocators hand the same blocks out again and again
                self._move(bases)
            for start in self._starts:
                start(stream)
        for slot, view in self._views:
            results[slot] = results[slot].as_strided(*view)
        return results

    def _scratch_on(self, stream: int) -> Tensor:
        """Return scratch memory; on the default stream, this thread's calls share it.

        Calls on the default stream run one after the other, and no CUDA graph is captured there.
        Elsewhere graphs are, and Inductor warms up for one in memory that it then considers free.
        """
        if stream or self._scratch > _MOST_SHARED:
            return self._empty((self._scratch,), (1,), torch.uint8)
        shared: dict[int | None, Tensor] = vars(_local).setdefault("scratch", {})
        if self.index not in shared:
            shared[self.index] = self._empty((_MOST_SHARED,), (1,), torch.uint8)
        return shared[self.index]

    def _move(self, bases: tuple[int, ...]) -> None:
        # a move may raise halfway, so until all have succeeded every address counts as outdated
        last, self._bases = self._bases, (-1,) * len(bases)
        for moves, before, base in zip(self._moves, last, bases, strict=True):
            if base != before:
                for move, position, offset in moves:
                    move(position, base + offset)
        self._bases = bases


def record(
    function: Callable[[], Result], inputs: Sequence[Tensor], constants: Sequence[Tensor | None]
) -> tuple[Result, Recording | None]:
    """Run a function and record what it launches.

    ``function`` computes one tensor or several from ``inputs`` and ``constants``; the addresses of
    constants stay as they are. The recording takes other inputs of the same shapes, dtypes and
    strides, aligned to 16 bytes. It is ``None`` if the function did more than its launches.
    """
    assert not is_recording(), "one recording at a time"
    _local.launches = []
    try:
        with AllocationWatch() as watch:
            y = function()
        launches: list[Launch | None] = _local.launches
    finally:
        _local.launches = None
    return y, _recording(y, launches, watch, inputs, constants)


def _recording(
    y: Tensor | Sequence[Tensor],
    launches: Sequence[Launch | None],
    watch: AllocationWatch,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor | None],
) -> Recording | None:
    results: Sequence[Tensor] = [y] if isinstance(y, Tensor) else y
    if watch.foreign or not launches or not have_own_addresses(inputs, constants):
        return None
    spans: list[_Span] = [_span(x, slot, 0) for slot, x in enumerate(inputs)]
    spans += [_span(t, None, t.data_ptr()) for t in constants if t is not None]
    slots = {y.data_ptr(): slot for slot, y in enumerate(results, len(inputs))}
    memory: dict[int, Tensor] = {}
    scratch = 0
    for tensor in watch.allocated:
        slot = slots.get(tensor.data_ptr())
        if slot is None:
            spans.append(_span(tensor, _SCRATCH, scratch))
            start, end, *_ = spans[-1]
            scratch += -(-(end - start) // _ALIGN) * _ALIGN
        elif slot in memory:
            return None
        else:
            memory[slot] = tensor
            spans.append(_span(tensor, slot, 0))
    steps = []
    for launch in launches:
        if launch is None:
            return None
        places = [_slot_of(address, spans) for address in launch.addresses]
        known = [p for p in places if p is not None]
        if len(known) < len(places):
            return None
        steps.append((launch, known))
    # a result whose address was passed to no launch has been written by an unrecorded kernel
    written = {slot for _, known in steps for slot, _ in known}
    if len(memory) < len(results) or not written.issuperset(memory):
        return None
    pairs = [(y, memory[slot]) for slot, y in enumerate(results, len(inputs))]
    if any(not _is_whole(*pair) and pair[0].dtype != pair[1].dtype for pair in pairs):
        return None
    return Recording(steps, len(inputs), pairs, scratch)


def have_own_addresses(inputs: Sequence[Tensor], constants: Sequence[Tensor | None] = ()) -> bool:
    """Return whether no input shares its address, so that the address identifies the input."""
    starts = [x.data_ptr() for x in inputs]
    others = {t.data_ptr() for t in constants if t is not None}
    return len({*starts} - others) == len(starts)


def _shares_memory(func: Any, result: Any, args: Any) -> bool:
    """Return whether an operation returned views, not a copy as ``reshape`` sometimes does."""
    if not func.is_view and func is not _aten._unsafe_view.default:
        return False
    views = result if isinstance(result, (list, tuple)) else (result,)
    return all(_is_alias_of(args[0], view) for view in views)


def _is_whole(result: Tensor, memory: Tensor) -> bool:
    return result.is_contiguous() and result.nbytes == memory.nbytes


def _layouts(result: Tensor, memory: Tensor) -> tuple[Any, Any]:
    """Return the layout to allocate for a result, and the result's view unless it is all of it."""
    layout = tuple(result.shape), result.stride()
    if _is_whole(result, memory):
        return (*layout, result.dtype), None
    return (tuple(memory.shape), memory.stride(), memory.dtype), layout


def _span(tensor: Tensor, slot: int | None, offset: int) -> _Span:
    start = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)  # an expanded tensor spans < nbytes
    last = sum((extent - 1) * step for extent, step in steps) if tensor.numel() else -1
    return start, start + (last + 1) * tensor.itemsize, slot, offset


def _slot_of(address: int, spans: Sequence[_Span]) -> tuple[int | None, int] | None:
    if address == 0:
        return None, 0
    exact = [span for span in spans if span[0] == address]
    around = exact or [span for span in spans if span[0] <= address < span[1]]
    found = {(slot, offset + address - start) for start, _, slot, offset in around}
    return found.pop() if len(found) == 1 else None  # inputs may be strided views of one buffer
