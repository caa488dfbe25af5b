"""Register an operator of the package with ``torch.library``."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from fp8kit.errors import UnsupportedError

_frames: Any = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
_profiling = torch._C._autograd._profiler_enabled
library: Any = torch.library.Library("fp8kit", "DEF")  # type: ignore[no-untyped-call]


def register(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Register an operator: one implementation for every device, run outside autocast.

    ``fake`` gives empty results of the same shapes, dtypes and device. Returns the qualified name.
    """
    # operators take any strides; without the tag Inductor recomputes an input for each reader
    library.define(schema, tags=torch.Tag.flexible_layout)
    name = schema.partition("(")[0]
    library.impl(name, untraced(impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8kit::{name}", untraced(fake), lib=library)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, untraced(_outside_autocast(name, device_type)), key)
    return f"fp8kit::{name}"


def register_backward(
    name: str, backward: Callable[..., Any], save: Callable[..., Any] | None = None
) -> None:
    """Differentiate the operator ``name`` by ``backward``, with what ``save`` stores for it.

    Both have the arguments that ``torch.library.register_autograd`` asks for.
    """
    save = None if save is None else untraced(save)
    torch.library.register_autograd(name, untraced(backward), setup_context=save, lib=library)


def refuse_backward(name: str, *said: str) -> None:
    """Make a backward through the operator ``name`` raise an error of three sentences."""

    def backward(*_: Any) -> None:
        raise UnsupportedError(*said)

    register_backward(name, backward)


def replay_before_dispatch(name: str, replay: Callable[..., Any]) -> None:
    """Repeat recorded launches before torch's dispatcher, which takes as long as they do.

    Compiled graphs call the overload of the operator ``name``. ``replay`` has its arguments. It
    returns ``None`` where no recording fits, which includes all that needs the dispatcher:
    gradients, autocast, modes, tracers, transforms and subclasses.
    """
    overload = getattr(torch.ops.fp8kit, name.removeprefix("fp8kit::")).default
    overload._op = untraced(_Replaying(replay, overload))


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a kernel and of all that it calls.

    Behind a graph break operators run where Dynamo watches, and it would trace their Python as the
    user's. ``torch.compiler.disable`` does the same, and would import Dynamo for every process.
    """
    called = kernel if isinstance(kernel, FunctionType) else type(kernel).__call__
    _frames.set_code_exec_strategy(called.__code__, _SKIP)
    return kernel


class _Replaying:
    """Stands for the dispatcher's entry of an overload."""

    __slots__ = ("_defaults", "_dispatch", "_replay", "_required")

    def __init__(self, replay: Callable[..., Any], overload: Any) -> None:
        self._replay, self._dispatch = replay, overload._op
        arguments = overload._schema.arguments
        self._defaults = tuple(a.default_value for a in arguments if a.has_default_value())
        self._required = len(arguments) - len(self._defaults)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a profiler lists what the dispatcher calls
        if not kwargs and len(args) >= self._required and not _profiling():
            # the dispatcher omits defaults, so recordings have keys without them
            given = args[: self._required] if args[self._required :] == self._defaults else args
            result = self._replay(*given)
            if result is not None:
                return result
        return self._dispatch(*args, **kwargs)


def _outside_autocast(name: str, device_type: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        # autocast would run the implementation's fp32 matmuls in 16 bit, where bare codes overflow
        with torch.autocast(device_type, enabled=False):
            return getattr(torch.ops.fp8kit, name)(*args)

    return kernel
