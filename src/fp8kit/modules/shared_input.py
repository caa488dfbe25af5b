"""Layers that read the same tensor: quantize it once, and multiply once where that is faster.

Siblings are layers that the model calls one after another with the same tensor (q/k/v, gate/up).
With few rows the first call multiplies the joined weights, and the others return their columns of
that result. With many rows the first call only shares the codes, and each layer multiplies its own
weight into a contiguous result: one wide GEMM saves nothing there, and its slices slow down their
readers. A call with any other tensor, or in any other order, computes that layer alone, so a wrong
guess about siblings costs time, never correctness. With gradients every layer computes alone.
Writes that no version counter shows (through ``.data``, NumPy, a custom kernel) are noticed in
inputs in host memory, by comparing values. In inputs on a device, weights and biases they stay
unnoticed until the first sibling is called again. Under ``torch.compile`` siblings share only if
the calling code is known not to change their input; they multiply joined weights if the graph's row
count is known to be small, and share codes otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from fp8kit.modules.hooks import arrives_with_its_call, is_watched
from fp8kit.modules.joining import (
    MOST_JOINED_ROWS,
    are_alike,
    can_join,
    can_share,
    has_few_rows,
    may_move,
)
from fp8kit.modules.kept_weight import follow_original
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import any_trained
from fp8kit.modules.pending import (
    OFFERED,
    Pending,
    Results,
    Waiting,
    check_written,
    input_state,
    keep_for,
    stream_of,
    weight_state,
)
from fp8kit.modules.tracing import constant_in_graphs
from fp8kit.ops import operators
from fp8kit.ops.operators import CodesCall, RowCodes
from fp8kit.ops.transforms import is_transformed
from fp8kit.runtime.joined_memory import as_one
from fp8kit.runtime.replay_cache import (
    Found,
    Operands,
    Operator,
    Options,
    ReplayCache,
    is_traced,
    jit_tracing,
)
from fp8kit.runtime.weight_hazards import invalidate, join

_JOINED_DEVICES = ("cpu", "cuda")  # where DLPack both exports and imports memory
_dlpack: Any = dlpack  # Any: torch has no type declarations for it


class SharedInput:
    """A group of layers with one input; each member holds it as ``layer.shared``.

    The group multiplies the members' weights as one matrix while they are adjacent in one
    allocation. It moves them there on first use and again after a device move, but never after a
    CUDA graph has captured the group: replays of the graph read the weights where they were. Each
    member's part is a storage of its own, so code that looks for shared storage does not take
    siblings for tied weights. The members own the allocation and hold the group. The group refers
    to them weakly: a reference cycle would keep a model's memory until Python's garbage collection.

    ``members`` have equal K, scheme and options, in the order of their calls. ``unchanging`` says
    that the calling code is known not to change their input in between, and to take results of any
    strides. Otherwise results are made contiguous, and inference tensors, whose changes torch does
    not count, are not shared.
    """

    def __init__(self, members: Sequence[Fp8Linear], unchanging: bool = False) -> None:
        self._refs = tuple(map(weakref.ref, members))
        self.unchanging = unchanging
        self._arriving: dict[int, Fp8Linear | None] = {}
        self._forget()
        ends = {0: "first", len(members) - 1: "last"}
        for i, member in enumerate(members):
            member.shared = self
            member.place = ends.get(i, "middle") if unchanging else ""

    @property
    def first(self) -> Fp8Linear:
        """The layer that is called first; ``None`` once it is freed."""
        return self._refs[0]()  # type: ignore[return-value]

    @property
    def members(self) -> list[Fp8Linear]:
        """The layers of the group that are not freed, in the order of their calls."""
        return [member for ref in self._refs if (member := ref()) is not None]

    @property
    def _pending(self) -> Pending | None:
        return self._local.pending

    @_pending.setter
    def _pending(self, pending: Pending | None) -> None:
        self._local.pending = pending

    def __call__(self, member: Fp8Linear, x: Tensor) -> Tensor:
        """Return one member's result for ``x``; the first member's call prepares its siblings'."""
        waiting = self._take(member, x)
        if waiting is not None:
            return waiting
        counted = self.unchanging or (isinstance(x, Tensor) and not x.is_inference())
        leads = self._refs[0]() is member and counted
        # torch.jit.trace would bake the row count of this input into the trace
        members = self.members if leads and not jit_tracing() else []
        leads = bool(members) and not any(map(arrives_with_its_call, members))
        if leads:
            y = self._replay(operators.LINEAR, (x,), member.options(), members)
            if y is not None:
                return self._keep(x, y, members)
        member.check_input(x)
        check_written(x)
        self._watch_capture(x)
        if not leads or is_transformed() or self._trained(x) or not self._alike():
            return member.compute(x)
        few = x.numel() <= MOST_JOINED_ROWS * member.in_features
        if not few or not self._joins():
            return self._quantized_once(member, x)
        return self._keep(x, self._multiply(operators.LINEAR, (x,), member.options()), members)

    def __getstate__(self) -> tuple[int, bool]:
        """Copy and pickle no member: each one that is copied or loaded calls ``adopt`` itself."""
        return len(self.members), self.unchanging

    def __setstate__(self, state: tuple[int | tuple[Fp8Linear, ...], bool]) -> None:
        """Undo ``__getstate__``; files of older versions have the members in place of a count."""
        members, self.unchanging = state
        self._refs = tuple(map(weakref.ref, members)) if isinstance(members, tuple) else ()
        self._arriving = {} if isinstance(members, tuple) else dict.fromkeys(range(members))
        self._forget()

    def adopt(self, index: int, member: Fp8Linear) -> None:
        """Take a member that was copied or loaded; members share again once all have arrived."""
        if index not in self._arriving:  # this group is complete: a single member was copied
            return
        self._arriving[index] = member
        arrived = [m for m in self._arriving.values() if m is not None]
        if len(arrived) == len(self._arriving):
            SharedInput.__init__(self, arrived, self.unchanging)

    def _forget(self) -> None:
        self.replays = ReplayCache()
        self._local = Waiting()
        self._captured = False

    def _take(self, member: Fp8Linear, x: Tensor) -> Tensor | None:
        """Return the result that waits for this call; ``None`` if an operand has changed since."""
        pending = self._pending
        if pending is None or pending.x is not x:
            return None
        if pending.state is not None and pending.state != input_state(x):
            return None
        if pending.values is not None and not torch.equal(pending.values, x):
            return None
        result, weights = pending.results.pop(id(member), (None, None))
        if not pending.results:
            self._pending = None
        stream, codes = stream_of(x), pending.codes
        changed = weights != OFFERED and weights != weight_state(member, stream)
        if result is not None and not changed:
            keep_for(stream, pending, result)
            return result
        if codes is None or (changed and result is None):
            return None
        # codes of a producer are used even if the weight changed: their input was never written
        keep_for(stream, pending, *codes.inputs)
        member.check_input(x)
        self._watch_capture(codes.data)
        return self._multiplied(member, codes)

    def offer(self, stand_in: Tensor, codes: RowCodes) -> None:
        """Keep codes for members that are called with ``stand_in``, which multiply them.

        ``stand_in`` is recognised as an object; its values are not read.
        """
        everyone: Results = {id(m): (None, OFFERED) for m in self.members}
        self._pending = Pending(stand_in, None, everyone, codes, stream=stream_of(stand_in))

    def produce(self, stand_in: Tensor, replays: ReplayCache, call: CodesCall) -> list[Tensor]:
        """Run a call, keep its codes for calls with ``stand_in``, and return its other results.

        With few rows the members' products are kept instead: one recording has call and product.
        """
        found = self.multiply(call)
        if found is None:
            codes, others = call.run(replays)
            self.offer(stand_in, codes)
            return others
        y, *others = found
        self.offer_product(stand_in, y)
        return others

    def offer_product(self, stand_in: Tensor, y: Tensor) -> None:
        """Keep each member's columns of a joined result for its call with ``stand_in``."""
        members = self.members
        parts = zip(members, self._split(y, members), strict=True)
        results: Results = {id(m): (part, OFFERED) for m, part in parts}
        self._pending = Pending(stand_in, None, results, stream=stream_of(stand_in))

    def multiply(self, call: CodesCall, last: Fp8Linear | None = None) -> list[Tensor] | None:
        """Return a call's codes times the joined weights, then its other results: one recording.

        With ``last``, the call includes the joined product and makes codes for the ``last`` layer,
        whose product is returned. ``None`` with many rows, or if the weights cannot be joined.
        """
        members = self.members
        if call.shape.numel() > MOST_JOINED_ROWS * call.shape[-1]:
            return None
        for layer in members if last is None else (*members, last):
            if layer.original_weight is not None:
                follow_original(layer)
        operator, options, after = _of_codes(members, call, last)
        step = (operator, call.inputs, options)
        found: list[Tensor] | None = self._replay(*step, members, call.constants, after)
        if found is None:
            self._watch_capture(call.inputs[0])
            if not self._joins():
                return None
            call.check()
            members[0].check_input(call.inputs[0])
            found = self._multiply(*step, call.constants, after)
        return found

    def recorded(self, call: CodesCall, last: Fp8Linear | None = None) -> Found | None:
        """Return the recording that ``multiply`` would replay; ``None`` if there is none."""
        members = self.members
        operator, options, after = _of_codes(members, call, last)
        guarded = (*call.constants, *all_operands(members), *after)
        return self.replays.find(operator, call.inputs, guarded, options)

    def _quantized_once(self, member: Fp8Linear, x: Tensor) -> Tensor:
        codes = member.quantize_input(x)
        stream = stream_of(x)
        rest: Results = {id(m): (None, weight_state(m, stream)) for m in self.members[1:]}
        self._pending = Pending(x, input_state(x), rest, codes, self._copied(x), stream)
        return self._multiplied(member, codes)

    def _multiplied(self, member: Fp8Linear, codes: RowCodes) -> Tensor:
        """Multiply; where that fails, as without memory, nothing waits and keeps more of it."""
        try:
            return member.multiply(codes)
        except BaseException:
            self._pending = None
            raise

    def _copied(self, x: Tensor) -> Tensor | None:
        host = type(x) is Tensor and x.device.type == "cpu" and not is_traced()
        if not host or (self.unchanging and not is_watched(*self.members)):
            return None  # with hooks a copy is kept: they run even between calls of known code
        return x.clone()

    def _trained(self, x: Tensor) -> bool:
        biases = (m.bias for m in self.members if m.bias is not None)
        return torch.is_grad_enabled() and (x.requires_grad or any(b.requires_grad for b in biases))

    def _alike(self) -> bool:
        members = self.members
        return can_share(members[0].scheme) and are_alike(members)

    def joined_in_graph(self, x: Tensor) -> tuple[tuple[Any, ...], ...] | None:
        """Return each member's operands, to be joined in a graph; ``None`` if rows may be many."""
        if not has_few_rows(x) or not self._may_join_in_graph():
            return None
        members = [ref() for ref in self._refs]  # the compiler traces this, but not the property
        return tuple([member.operands() for member in members if member is not None])

    @constant_in_graphs
    def _may_join_in_graph(self) -> bool:
        """Return whether the weights can be one matrix, and move them together if so.

        Called while a graph is traced. The operator in the graph looks up where the weights are at
        each run; guards of the graph cover whatever else may change.
        """
        if any_trained(*self.members) or is_watched(*self.members):
            return False
        if len(self.members) < len(self._refs) or not self._alike() or not self._joins():
            return False
        for name in self._names():
            self._joined(name)
        return True

    def _joins(self) -> bool:
        """Return whether this call may multiply the joined weights, and move them if necessary.

        Under a mode, tracer or transform it may not: weights must not move into tensors of theirs.
        Weights that a CUDA graph has captured are not moved: its replays read them in place.
        """
        weight = self.members[0].codes
        if is_traced() or weight.device.type not in _JOINED_DEVICES:
            return False
        if not can_join(self.members) or not may_move(self.members):
            return False
        together = (as_one(self._parts(name)) is not None for name in self._names())
        return not self._captured or all(together)

    def _watch_capture(self, x: Tensor) -> None:
        """Remember that a CUDA graph is capturing: its replays read weights where they are now."""
        if self._captured or not x.is_cuda or is_traced():
            return
        if torch.cuda.is_current_stream_capturing():
            self._captured = True

    def _split(self, y: Tensor, members: Sequence[Fp8Linear]) -> tuple[Tensor, ...]:
        # takes half the time of torch.split; parts are no views, so callers may write to them
        sizes = [m.out_features for m in members]
        parts: tuple[Tensor, ...] = y.unsafe_split_with_sizes(sizes, -1)
        return parts if self.unchanging else tuple(p.contiguous() for p in parts)

    def _keep(self, x: Tensor, y: Tensor, members: Sequence[Fp8Linear]) -> Tensor:
        """Return the first member's part of a joined result; keep the others for their calls."""
        first, *rest = self._split(y, members)
        stream = stream_of(x)
        results: Results = {
            id(m): (part, weight_state(m, stream))
            for m, part in zip(members[1:], rest, strict=True)
        }
        self._pending = Pending(x, input_state(x), results, None, self._copied(x), stream)
        return first

    def _replay(
        self,
        operator: Operator,
        inputs: tuple[Tensor, ...],
        options: Options,
        members: Sequence[Fp8Linear],
        before: Operands = (),
        after: Operands = (),
    ) -> Any:
        """Replay an earlier joined product, or return ``None``; arguments as in ``_multiply``."""
        first, *others = members
        same, bound = first.options(), first.scale_ub
        for m in others:
            if m.options() != same or m.scale_ub != bound:
                return None
        guarded = (*before, *all_operands(members), *after)
        return self.replays.replay(operator, inputs, guarded, options)

    def _multiply(
        self,
        operator: Operator,
        inputs: tuple[Tensor, ...],
        options: Options,
        before: Operands = (),
        after: Operands = (),
    ) -> Any:
        """Multiply an input, or the codes that a call makes of it, by the joined weights.

        The joined weight is a new tensor object at every call, and shares its version counter with
        its first part alone. So the recording is guarded by the parts, not by the whole.

        ``options`` are those for the first member. ``before`` and ``after`` are the constants
        around the joined weight: of what makes the codes, and of the layer behind the product.
        """
        weight = join(self._joined("weight"), [m.codes for m in self.members])
        bias = None if self.members[0].bias is None else self._joined("bias")
        constants: list[Tensor | None]
        constants = [*before, weight, self._joined("weight_scale"), bias]
        if operator is operators.LINEAR:
            constants += [None, self.members[0].operands()[4]]
        constants += after
        guarded = (*before, *all_operands(self.members), *after)
        return self.replays.run(operator, inputs, constants, options, guarded)

    def _joined(self, name: str) -> Tensor:
        """Return the members' tensors of a name as one; move them together if necessary."""
        parts = self._parts(name)
        # parts whose changes torch counts stay counted, even if this call is in inference mode
        with torch.inference_mode(parts[0].is_inference()):
            found = as_one(parts)
            if found is not None:
                return found
            bits = [p.detach().view(torch.uint8) for p in parts]  # torch.cat has no FP8 kernel
            whole = torch.cat(bits)
            homes = torch.split(whole, [b.shape[0] for b in bits])
            for part, home in zip(parts, homes, strict=True):
                part.data = _with_own_storage(home).view(part.dtype)
                invalidate(part)  # written just now, at an address that an old mark may call safe
            return whole.view(parts[0].dtype)

    def _names(self) -> list[str]:
        """Return the names of a member's tensors that a product reads; a bias in all or none."""
        bias = [] if self.members[0].bias is None else ["bias"]
        return ["weight", "weight_scale", *bias]

    def _parts(self, name: str) -> list[Tensor]:
        """Return the tensor of a name of each member; every member holds it."""
        return [m.codes if name == "weight" else getattr(m, name) for m in self.members]


def _of_codes(
    members: Sequence[Fp8Linear], call: CodesCall, last: Fp8Linear | None
) -> tuple[Operator, Options, Operands]:
    """Return operator, options and last constants of a call followed by the product of its codes.

    That is the members' joined product, or that of the ``last`` layer.
    """
    if last is None:
        return *call.then_multiply(members[0].options()), ()
    return *call.then_multiply(last.options()), last.operands()[:3]


def all_operands(members: Sequence[Fp8Linear]) -> list[Tensor | None]:
    """Return the operands of layers, on which a recording of their joined product depends."""
    held: list[Tensor | None] = []
    for m in members:
        held += m.operands()
    return held


def _with_own_storage(part: Tensor) -> Tensor:
    """Return a contiguous part with its own storage, which keeps the whole allocation alive."""
    return _dlpack.from_dlpack(_dlpack.to_dlpack(part))
