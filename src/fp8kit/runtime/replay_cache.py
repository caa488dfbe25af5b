"""Replay the launches of an earlier call that differs only in its input.

An ``Operator`` is one computation in two forms. Its *registered* form is what compilers, tracers,
autograd, autocast, modes and subclasses see. Its *body* is the Python function that launches
kernels. Where none of these is active, the body is called directly: this is the package's only
bypass of ``torch.library``.

A ``ReplayCache`` remembers calls that took the bypass, by ``key``. The first call with a key runs
the body. The second one runs the body and records its launches. From the third on they are
replayed, if the ``guards`` still hold; a call whose guards fail counts as a first one again. A call
that does more than launch kernels of this package cannot be recorded, and runs the body.

Layers own a cache, as do groups of joined layers, fused norms and activations, and routers;
functions and compiled graphs use one that is stored on the weight. Operators without a weight,
such as quantizers, have one each (``replayed``).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit.runtime.compile_ahead import collected
from fp8kit.runtime.launch_recording import Recording, have_own_addresses, is_recording, record
from fp8kit.runtime.weight_hazards import MARK, version

RECORDED_DEVICES = ("cuda",)
MOST_KEYS = 64  # of one cache; the oldest goes first
# how often choices of backends have changed: a recording holds for one count
generation = 0

_CACHE = "_fp8kit_replays"  # attribute of a weight
_PLAIN = {Tensor, nn.Parameter}  # a subclass, such as a distributed tensor, has its own meaning
_ALIGN = 16  # bytes; what kernels specialize on
_strided = torch.strided
# bound once: looking the names up through torch costs more than calling them
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
jit_tracing = torch._C._get_tracing_state  # of torch.jit.trace; ``None`` elsewhere
_autocast, _grad_enabled = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
Operands = Sequence[Tensor | None]
Options = tuple[Any, ...]  # hashable
Key = tuple[Any, ...]
Guards = list[object]


class Operator:
    """One computation, called with its inputs, then its constants, then its options.

    ``body`` launches the kernels; ``registered`` computes the same as operators of torch, which
    compilers, tracers and autograd can follow.
    """

    __slots__ = ("body", "registered")

    def __init__(self, body: Callable[..., Any], registered: Callable[..., Any]) -> None:
        self.body = body
        self.registered = registered

    def __call__(self, *arguments: Any) -> Any:
        """Compute, by the body where ``form`` allows it; nothing is recorded."""
        return self.form(arguments)(*arguments)

    def form(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the body, or the registered form where compilers, tracers or autograd need it."""
        if torch.compiler.is_compiling():
            return self.registered
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        plain = tensors[0].device.type in RECORDED_DEVICES and are_plain(tensors)
        return self.body if plain else self.registered


@dataclass(slots=True)
class Entry:
    """What is known of a key.

    ``guards`` are what its last full call found, and that was ``recorded``, or tried to be;
    ``recording`` is ``None`` if its launches do not tell all that it did. ``single`` if it gave one
    tensor, and not several.
    """

    guards: Guards
    recorded: bool
    recording: Recording | None
    single: bool


class ReplayCache(dict[Key, Entry]):
    """Calls of one owner, by key; copies and pickles of it are empty."""

    def call(
        self,
        operator: Operator,
        inputs: Sequence[Tensor],
        constants: Operands,
        options: Options,
        check: Callable[[], object] | None = None,
    ) -> Any:
        """Compute, by a recording if there is one that fits.

        ``inputs`` are tensors that are others at every call, ``constants`` those that stay, as a
        rule: weights, scales and biases; ``options`` are whatever else the result depends on. Where
        no recording fits, ``check`` raises for arguments that do not fit.
        """
        result = self.replay(operator, inputs, constants, options)
        if result is not None:
            return result
        if check is not None:
            check()
        return self.run(operator, inputs, constants, options)

    def replay(
        self, operator: Operator, inputs: Sequence[Tensor], constants: Operands, options: Options
    ) -> Any:
        """Repeat an earlier call, arguments as in ``call``; ``None`` if no recording fits."""
        if not self or not are_plain(inputs):
            return None
        entry = self.get(key(operator, inputs, options))
        if entry is None or entry.recording is None or entry.guards != guards(constants):
            return None
        results = entry.recording(*inputs)
        return results[0] if entry.single else results

    def run(
        self,
        operator: Operator,
        inputs: Sequence[Tensor],
        constants: Operands,
        options: Options,
        guarded: Operands | None = None,
    ) -> Any:
        """Compute in full, arguments as in ``call``; the second call of a key is recorded.

        ``guarded`` is what ``replay`` gets for constants that are put together at every call.
        """
        arguments = (*inputs, *constants, *options)
        watched = constants if guarded is None else guarded
        x = inputs[0]
        bypasses = x.device.type in RECORDED_DEVICES and x.numel() and are_plain(inputs)
        now = guards(watched) if bypasses else None
        if now is None:
            return operator.registered(*arguments)
        if is_recording() or collected() is not None or not have_own_addresses(inputs):
            return operator.body(*arguments)
        at = key(operator, inputs, options)
        entry = self.get(at)
        if entry is None or entry.guards != now:
            result = operator.body(*arguments)
            # asked again: this call may have synchronized with the weights
            self._keep(at, Entry(guards(watched) or now, False, None, False))
        elif not entry.recorded:
            body = functools.partial(operator.body, *arguments)
            result, recording = record(body, inputs, constants)
            self._keep(at, Entry(now, True, recording, isinstance(result, Tensor)))
        else:
            result = operator.body(*arguments)
        return result

    def launches(self, shape: torch.Size) -> int | None:
        """Return how many launches repeat a call with a first input of a shape, if any do."""
        for (_, _, _, first, *_), entry in list(self.items()):
            if first == shape and entry.recording is not None:
                return len(entry.recording.steps)
        return None

    def _keep(self, at: Key, entry: Entry) -> None:
        self[at] = entry
        for oldest in list(self)[:-MOST_KEYS]:  # a list at once: other threads keep theirs
            self.pop(oldest, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayCache:
        """Return an empty one: addresses belong to the original."""
        return type(self)()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle an empty one."""
        return ReplayCache, ()


class _OfWeight(ReplayCache):
    """One that hangs on a weight, with which it may be saved."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle an empty one of a type that ``torch.load`` takes for weights."""
        return OrderedDict, ()


def call_on(
    weight: Tensor,
    operator: Operator,
    inputs: Sequence[Tensor],
    constants: Operands,
    options: Options,
) -> Any:
    """Compute as ``ReplayCache.call`` does, with the cache that hangs on a weight.

    A weight that is another tensor at every call, a fresh view for one, never has a recording.
    """
    if torch.compiler.is_compiling():
        return operator.registered(*inputs, *constants, *options)
    return cache_on(weight).call(operator, inputs, constants, options)


def cache_on(weight: Tensor) -> ReplayCache:
    """Return the cache that hangs on a weight, a new one if it has none."""
    cache: object = getattr(weight, _CACHE, None)
    if type(cache) is _OfWeight:
        return cache
    cache = _OfWeight()
    if type(weight) in _PLAIN and weight.device.type in RECORDED_DEVICES:
        setattr(weight, _CACHE, cache)
    return cache


def replayed(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes as ``body``, and repeats the launches of earlier calls.

    All of its tensors are inputs, wherever they stand among the arguments: for operators without a
    weight, whose registered implementation it is, too.
    """

    def arranged(*arguments: Any) -> Any:
        *inputs, places = arguments
        given = iter(inputs)
        return body(*(next(given) if place is Tensor else place for place in places))

    operator, replays = Operator(arranged, arranged), ReplayCache()

    @functools.wraps(body)
    def call(*arguments: Any) -> Any:
        inputs = [a for a in arguments if isinstance(a, Tensor)]
        places = tuple(Tensor if isinstance(a, Tensor) else hashable(a) for a in arguments)
        return replays.call(operator, inputs, (), (places,))

    return call


def hashable(option: Any) -> Any:
    """Return an option of an operator, to which torch gives lists, as a key holds it."""
    return tuple(option) if isinstance(option, list) else option


def key(operator: Operator, inputs: Sequence[Tensor], options: Options) -> Key:
    """Return what makes two calls the same: all but addresses and constants.

    Kernels, tiles and grids follow from these, and from the choices of dispatch, whose times may
    be measured anew (``generation``). A contiguous input has the strides of its shape; where an
    extent is 1, its stride may be any number, which nothing reads.
    """
    made: Key = (operator, options, generation)
    for x in inputs:
        made += x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device
    return made


def guards(constants: Operands) -> Guards | None:
    """Return what a recording takes for granted of its constants, ``None`` if it may not.

    Compared at every call, each for a reason: a move or a new Parameter changes an address; a view
    may lie at an old address in another shape, a cast in another dtype; and launches that prefetch
    a weight may be repeated only while that is safe (``weight_hazards``). Values are not compared:
    kernels read them anew.

    Subclasses and gradients are for the registered form. What is not contiguous is
    copied before each launch, to an address that does not come back.
    """
    grad = _grad_enabled()
    found: Guards = []
    for t in constants:
        if t is None:
            continue
        if type(t) not in _PLAIN or not t.is_contiguous() or (grad and t.requires_grad):
            return None
        if t.is_neg():  # its values are not in memory
            return None
        address, mark = t.data_ptr(), getattr(t, MARK, None)
        found.append(address)  # one by one is faster than a tuple of them
        found.append(t.shape)
        found.append(t.dtype)
        if mark is not None:  # what safe_to_prefetch returns, with the address at hand
            found.append(mark == (version(t), address))
    return found


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels can be passed these tensors directly, and nothing traces the call.

    Modes, autocast, tracers, transforms, gradients and subclasses would miss the registered form.
    Recorded kernels are compiled for aligned addresses, and read what is in memory: neither sparse
    tensors nor those that are negated lazily have their values there.
    """
    # a transform wraps tensors that then have no address, so it is asked for first
    if _function_modes() or _autocast() or _dispatch_modes() or jit_tracing():
        return False
    if _transforms() is not None or forward_ad._current_level >= 0:
        return False
    for t in tensors:
        if type(t) not in _PLAIN or t.layout is not _strided or t.is_neg():
            return False
        if t.data_ptr() % _ALIGN or (t.requires_grad and _grad_enabled()):
            return False
    return True


def is_traced() -> bool:
    """Return whether a mode, tracer or transform may have other tensors than ordinary ones."""
    return bool(_dispatch_modes() or jit_tracing()) or _transforms() is not None


def forget_choices() -> None:
    """End every recording: the choices of dispatch that it was made by may have changed."""
    global generation
    generation += 1
