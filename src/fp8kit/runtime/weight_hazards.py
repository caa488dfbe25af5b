"""Which weights a kernel may prefetch before the previous kernel has ended.

With programmatic dependent launch (PDL) a kernel starts while the previous kernel of its stream
still runs, and waits (``griddepcontrol.wait``) before it reads what that kernel writes. Weights are
not written by kernels of a forward pass, so the Hopper GEMM loads them before it waits. That is a
read-after-write hazard if a kernel that writes the weight (a load, a copy, an optimizer's step) is
still in flight. ``safe_to_prefetch`` rules that out.

Claim: if ``safe_to_prefetch(w)`` is true when a kernel R is launched, every write to ``w`` that was
enqueued before R has completed when R starts.

Proof. A launch that reads ``w`` calls ``mark_synchronized(w)``, which stores the version of ``w``
(torch raises it with every write) and its address. Let S be the launch that set the present mark
first. ``w`` was not safe then, so S was launched without overlap.

1. The mark matches, so no write was enqueued between S and R: it would have raised the version, and
   other memory would have another address. Each write in question was enqueued before S.
2. On the stream of S, the kernel S started when everything before it had completed, writes of other
   streams included: whoever reads ``w`` on a stream has ordered it behind its writer by an event.
3. R on the stream of S: overlapping kernels still start in the order of their stream, so R starts
   after S has started, when the writes had completed.
4. R on another stream: by the same rule an event orders it behind the writer. No kernel starts
   before an event that precedes it in its stream, and that event waits for the write.

What the proof assumes, and how it is kept:

* Every write raises the version. Torch does not count writes to inference tensors (``version``
  returns ``UNCOUNTED``: never safe), nor writes past the counter, such as ``p.data = other``
  (caught by the address) and code that puts memory in place by itself, which calls ``invalidate``.
* Same version and address mean the same write. The mark is an attribute of the tensor object: a
  new Parameter has none, even where the allocator gives it the address of an old one.
* Each part of a joined weight has a counter of its own: the whole is safe if all parts are, and a
  launch that reads the whole marks each part (``join``).
* A write that torch cannot see at all (another process, a raw address) must be complete before the
  next call. The documents say so.

A recording repeats its launches as they were, so a recording with a prefetch is valid only as long
as the weight is safe: this is one of the guards of ``replay_cache``. CUDA graphs replay without
Python: a captured prefetch reads early at every replay, and the capture began behind S.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp8kit.runtime import compile_ahead

UNCOUNTED = -1  # version of a tensor whose changes are not counted
MARK = "_fp8kit_synchronized"  # attribute of a weight: version and address when a launch waited
_PARTS = "_fp8kit_parts"  # attribute of a joined weight


def version(tensor: Tensor) -> int:
    """Return the counter of a tensor's changes, ``UNCOUNTED`` where torch does not count them."""
    if tensor.is_inference():
        return UNCOUNTED
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, and given the data of another tensor since
        return UNCOUNTED


def safe_to_prefetch(weight: Tensor) -> bool:
    """Return whether no kernel that may still write this weight is in flight."""
    mark: object = getattr(weight, MARK, None)
    if mark is not None:
        return mark == (version(weight), weight.data_ptr())
    parts: Sequence[Tensor] | None = getattr(weight, _PARTS, None)
    return parts is not None and all(map(safe_to_prefetch, parts))


def mark_synchronized(weight: Tensor) -> None:
    """Note that a launch reads this weight: the first one, without overlap, synchronizes with it.

    A change that torch counts, or another address, ends the mark. A launch that ``compile_ahead``
    only collects leaves no mark.
    """
    if compile_ahead.collected() is not None:
        return
    for part in getattr(weight, _PARTS, (weight,)):
        count = version(part)
        if count != UNCOUNTED:
            setattr(part, MARK, (count, part.data_ptr()))


def invalidate(weight: Tensor) -> None:
    """Forget the mark of a weight that was written or moved without raising its version."""
    if hasattr(weight, MARK):
        delattr(weight, MARK)  # not set to None: attributes are pickled with the weight


def join(whole: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return a joined weight, from now on safe to prefetch if all its parts are.

    Each part has a version of its own.
    """
    setattr(whole, _PARTS, tuple(parts))
    return whole
