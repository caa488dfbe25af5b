"""Replay the launches of an earlier call that differs only in its input.

An ``Operator`` is one computation in two forms. Its *registered* form is what compilers, tracers,
autograd, autocast, modes and subclasses see. Its *body* is the Python function that launches
kernels. Where none of these is active, the body is called directly: this is the package's only
bypass of ``torch.library``.

A ``ReplayCache`` remembers calls that took the bypass, by ``key``. The first call with a key runs
the body. The second one runs the body and records its launches. From the third on they are
replayed, if the ``guards`` still hold; a call whose guards fail counts as a first one again. A call
that does more than launch kernels of this package cannot be recorded, so it runs the body.

Each layer, group of joined layers, fused norm or activation, and router owns a cache. Functions
and compiled graphs use the cache that is stored on the weight. Operators without a weight, such as
quantizers, have one each (``Replayed``).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit.runtime.compile_ahead import collected
from fp8kit.runtime.launch_recording import Recording, have_own_addresses, is_recording, record
from fp8kit.runtime.weight_hazards import MARK, version

RECORDED_DEVICES = ("cuda",)
MOST_KEYS = 64  # of one cache; the oldest is dropped first
# counts changes of the choices of backends: a recording is valid for one generation
generation = 0

_CACHE = "_fp8kit_replays"  # attribute of a weight
_PLAIN = {Tensor, nn.Parameter}  # a subclass, such as a distributed tensor, has its own meaning
_ALIGN = 16  # bytes; kernels are specialized for addresses that are aligned so
_strided = torch.strided
# bound once: looking the names up through torch costs more than calling them
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # of tracers with a stack of their own
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
        """Compute by the form that ``form`` returns, without a recording."""
        return self.form(arguments)(*arguments)

    def form(self, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the body, or the registered form where compilers, tracers or autograd need it."""
        if torch.compiler.is_compiling():
            return self.registered
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        plain = tensors[0].device.type in RECORDED_DEVICES and are_plain(tensors)
        return self.body if plain else self.registered


# the weight whose cache to use, then the arguments of ``ReplayCache.replay``
Call = tuple[Tensor, Operator, Sequence[Tensor], Operands, Options]


@dataclass(slots=True)
class Entry:
    """What a cache knows about the calls of one key.

    ``guards`` are those of the last full call; ``recorded`` says that this call was recorded, or
    that recording it was tried. ``recording`` is ``None`` if there is none, or if the call did more
    than its launches. ``single`` says that the call returned one tensor, not several.
    """

    guards: Guards
    recorded: bool
    recording: Recording | None
    single: bool


class Found(NamedTuple):
    """A recording of ``operator`` with ``options``, and the key that it is found by."""

    operator: Operator
    options: Options
    key: Key
    recording: Recording

    def fits(self, *inputs: Tensor) -> bool:
        """Return whether the recording takes these inputs, if the guards of its constants hold."""
        return are_plain(inputs) and key(self.operator, inputs, self.options) == self.key


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
        """Replay a recording that fits, or compute in full.

        ``inputs`` are the tensors that differ from call to call. ``constants`` usually stay the
        same: weights, scales and biases. ``options`` are everything else that the result depends
        on. ``check`` runs before a full computation, and raises for arguments that are invalid.
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
        """Replay an earlier call, arguments as in ``call``; ``None`` if no recording fits."""
        if not self or not are_plain(inputs):
            return None
        entry = self.get(key(operator, inputs, options))
        if entry is None or entry.recording is None or entry.guards != guards(constants):
            return None
        results = entry.recording(*inputs)
        return results[0] if entry.single else results

    def find(
        self, operator: Operator, inputs: Sequence[Tensor], constants: Operands, options: Options
    ) -> Found | None:
        """Return what ``replay`` would replay, for a caller that checks the guards by itself."""
        at = key(operator, inputs, options)
        entry = self.get(at)
        if entry is None or entry.recording is None or entry.guards != guards(constants):
            return None
        return Found(operator, options, at, entry.recording)

    def run(
        self,
        operator: Operator,
        inputs: Sequence[Tensor],
        constants: Operands,
        options: Options,
        guarded: Operands | None = None,
    ) -> Any:
        """Compute in full, arguments as in ``call``; the second call of a key is recorded.

        ``guarded`` replaces ``constants`` in the guards where these are assembled at every call.
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
            # computed again: this call may have marked the weights as safe to prefetch
            self._keep(at, Entry(guards(watched) or now, False, None, False))
        elif not entry.recorded:
            body = functools.partial(operator.body, *arguments)
            result, recording = record(body, inputs, constants)
            self._keep(at, Entry(now, True, recording, isinstance(result, Tensor)))
        else:
            result = operator.body(*arguments)
        return result

    def has_recordings(self) -> bool:
        """Return whether any call can be replayed."""
        return any(entry.recording is not None for entry in list(self.values()))

    def launches(self, shape: torch.Size) -> int | None:
        """Return the number of launches recorded for a first input of a shape; ``None`` if none."""
        for (_, _, _, first, *_), entry in list(self.items()):
            if first == shape and entry.recording is not None:
                return len(entry.recording.steps)
        return None

    def _keep(self, at: Key, entry: Entry) -> None:
        self[at] = entry
        for oldest in list(self)[:-MOST_KEYS]:  # a copy, since other threads add keys
            self.pop(oldest, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayCache:
        """Return an empty cache: addresses belong to the original."""
        return type(self)()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle an empty cache."""
        return ReplayCache, ()


class _OfWeight(ReplayCache):
    """A cache that is stored on a weight, and may be pickled with it."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle an empty dict of a type that ``torch.load`` accepts with ``weights_only=True``."""
        return OrderedDict, ()


def call_on(
    weight: Tensor,
    operator: Operator,
    inputs: Sequence[Tensor],
    constants: Operands,
    options: Options,
) -> Any:
    """Compute as ``ReplayCache.call`` does, with the cache that is stored on a weight.

    A weight that is a new tensor object at every call, such as a fresh view, never has a recording.
    """
    if torch.compiler.is_compiling():
        return operator.registered(*inputs, *constants, *options)
    return cache_on(weight).call(operator, inputs, constants, options)


def replay_on(
    weight: Tensor,
    operator: Operator,
    inputs: Sequence[Tensor],
    constants: Operands,
    options: Options,
) -> Any:
    """Replay as ``ReplayCache.replay`` does, with the cache that is stored on a weight."""
    cache: object = getattr(weight, _CACHE, None)
    if type(cache) is not _OfWeight:
        return None
    return cache.replay(operator, inputs, constants, options)


class ReplayedOnWeight:
    """The implementation of an operator with a weight, whose cache it replays earlier calls from.

    ``arranged`` has the arguments of the operator, and returns those of ``call_on``.
    """

    def __init__(self, arranged: Callable[..., Call]) -> None:
        functools.update_wrapper(self, arranged)
        self._arranged = arranged

    def __call__(self, *arguments: Any) -> Any:
        """Replay a recording that fits, or compute in full."""
        return call_on(*self._arranged(*arguments))

    def replay(self, *arguments: Any) -> Any:
        """Replay an earlier call; ``None`` if no recording fits."""
        return replay_on(*self._arranged(*arguments))


def cache_on(weight: Tensor) -> ReplayCache:
    """Return the cache that is stored on a weight, a new one if it has none."""
    cache: object = getattr(weight, _CACHE, None)
    if type(cache) is _OfWeight:
        return cache
    cache = _OfWeight()
    if type(weight) in _PLAIN and weight.device.type in RECORDED_DEVICES:
        setattr(weight, _CACHE, cache)
    return cache


class Replayed:
    """The body of an operator without a weight, which replays earlier calls.

    All tensors are inputs, wherever they stand among the arguments. Its call also is the operator's
    registered implementation.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        def arranged(*arguments: Any) -> Any:
            *inputs, places = arguments
            given = iter(inputs)
            return body(*(next(given) if place is Tensor else place for place in places))

        functools.update_wrapper(self, body)
        self._operator, self._replays = Operator(arranged, arranged), ReplayCache()

    def __call__(self, *arguments: Any) -> Any:
        """Replay a recording that fits, or compute in full."""
        return self._replays.call(*self._call(arguments))

    def replay(self, *arguments: Any) -> Any:
        """Replay an earlier call; ``None`` if no recording fits."""
        return self._replays.replay(*self._call(arguments)) if self._replays else None

    def _call(
        self, arguments: Sequence[Any]
    ) -> tuple[Operator, Sequence[Tensor], Operands, Options]:
        inputs = [a for a in arguments if isinstance(a, Tensor)]
        places = tuple(Tensor if isinstance(a, Tensor) else hashable(a) for a in arguments)
        return self._operator, inputs, (), (places,)


def hashable(option: Any) -> Any:
    """Return an option as a key can hold it: torch passes lists, which become tuples."""
    return tuple(option) if isinstance(option, list) else option


def key(operator: Operator, inputs: Sequence[Tensor], options: Options) -> Key:
    """Return the key of a call: everything its launches depend on but addresses and constants.

    Kernels, tiles and grids follow from the key, and from the choices of dispatch, which change
    when times are measured anew (``generation``). A contiguous input needs no strides in the key:
    they follow from its shape, except where an extent is 1, whose stride no kernel reads.
    """
    made: Key = (operator, options, generation)
    for x in inputs:
        made += x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device
    return made


def guards(constants: Operands) -> Guards | None:
    """Return what a recording assumes about its constants, ``None`` if there can be no recording.

    Each part is compared at every call: a move or a new Parameter changes the address; a view may
    be at an old address with another shape, a cast with another dtype; and launches that prefetch
    a weight may be repeated only while that is safe (``weight_hazards``). Values are not compared:
    kernels read them anew.

    Subclasses, gradients and tensors without memory need the registered form. A tensor that is not
    contiguous is copied before each launch, each time to another address.
    """
    grad = _grad_enabled()
    found: Guards = []
    for t in constants:
        if t is None:  # noted, since the next optional constant may be given in its place
            found.append(None)
            continue
        if type(t) not in _PLAIN or not t.is_contiguous() or (grad and t.requires_grad):
            return None
        if t.is_neg():  # its values are not in memory
            return None
        address, mark = t.data_ptr(), getattr(t, MARK, None)
        if not address:
            return None
        found.append(address)  # one by one is faster than a tuple of them
        found.append(t.shape)
        found.append(t.dtype)
        if mark is not None:  # as safe_to_prefetch returns, without another data_ptr()
            found.append(mark == (version(t), address))
    return found


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels can take these tensors directly, and nothing traces the call.

    Modes, autocast, tracers, transforms, gradients and subclasses need the registered form.
    Recorded kernels are compiled for aligned addresses and read the memory there, which does not
    hold the values of sparse tensors and of lazily negated ones. Autograd's zeros and the tensors
    of functionalization are plain by type, and have no address.
    """
    # before the loop: under a transform, tensors are wrapped and have no address
    if _function_modes() or _autocast() or _dispatch_modes() or jit_tracing():
        return False
    if _transforms() is not None or forward_ad._current_level >= 0 or _is_included(_PRE_DISPATCH):
        return False
    for t in tensors:
        if type(t) not in _PLAIN or t.layout is not _strided or t.is_nested or t.is_neg():
            return False
        try:
            address = t.data_ptr()
        except RuntimeError:  # a wrapper that has outlived its transform
            return False
        if not address or address % _ALIGN or (t.requires_grad and _grad_enabled()):
            return False
    return True


def is_traced() -> bool:
    """Return whether a mode, tracer or transform is active, whose tensors may not be ordinary."""
    return bool(_dispatch_modes() or jit_tracing()) or _transforms() is not None


def forget_choices() -> None:
    """Invalidate every recording, because the choices of dispatch may have changed."""
    global generation
    generation += 1
