"""Trials: copies of modules run on random numbers, to find out what their classes compute.

Nothing that a trial does reaches the user's model. Copies are deep because a class's own code may
count, observe or cache, which a shallow copy would do in the model's own objects.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import threading
import types
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_COPIED = 2**22  # elements in all: a module may hold the whole model in an attribute
_MOST_READ = 2**14  # bytes: larger tensors are compared by identity, not by value
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_one_trial = threading.RLock()  # a trial sets default dtype and thread count of the process
_AS_THEY_ARE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class CopyError(Exception):
    """A module cannot be tried, because something that it holds cannot be copied."""


class _Bounded(TorchFunctionMode):
    """Raises ``CopyError`` once a copy has more than ``_MOST_COPIED`` elements."""

    copied = 0

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone) and not args[0].is_meta:
            self.copied += args[0].numel()
            if self.copied > _MOST_COPIED:
                raise CopyError(f"it holds tensors of more than {_MOST_COPIED} numbers")
        return func(*args, **(kwargs or {}))


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at collectives: they would wait for other processes, which may not run the trial."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"{func} waits for other processes")
        return func(*args, **(kwargs or {}))


@contextmanager
def on_trial() -> Iterator[None]:
    """Compute in fp32 on the CPU whatever the caller's defaults; restore defaults and seeds.

    Trials run in one thread: tensors are small, and where every process of a machine converts a
    model, their threads would wait for each other's cores.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    # set only if needed: a default device slows every call down
    here = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with (
        _one_trial,
        torch.random.fork_rng(devices),
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(False),  # inference tensors cannot have gradients
        torch.no_grad(),
        here,
    ):
        dtype, state = torch.get_default_dtype(), random.getstate()
        threads = torch.get_num_threads()
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        if threading.active_count() > 1:
            # any thread that first computes now keeps, for good, the count that was set last
            other = threading.Thread(target=torch.set_num_threads, args=(threads,))
            other.start()
            other.join()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            random.setstate(state)


def isolated_copy(module: nn.Module, memo: dict[int, Any] | None = None, **held: Any) -> Any:
    """Copy a module deeply, without its hooks; the copy can change nothing of the original.

    ``memo`` maps ids of objects to their replacements, as in ``copy.deepcopy``. ``held`` are the
    ``_parameters``, ``_buffers`` or ``_modules`` that the copy gets instead of copied ones. Raises
    ``CopyError`` if something cannot be copied, or is as large as a model.
    """
    memo = {} if memo is None else memo
    own = {n: v for n, v in vars(module).items() if n not in _OF_MODULES and n not in held}
    for kind, fresh in held.items():
        for name, tensor in vars(module)[kind].items():
            if tensor is not None and fresh.get(name) is not None:
                memo[id(tensor)] = fresh[name]
    try:
        memo[id(module)] = twin = type(module).__new__(type(module))
        with _Bounded():
            twin.__dict__ |= {**vars(nn.Module()), **copy.deepcopy(own, memo), **held}
    except Exception as error:  # whatever it holds: locks, results of other computations, handles
        raise CopyError(
            f"cannot be copied to be tried: {str(error) or type(error)!s:.200}"
        ) from error
    set_training(twin, module.training)
    return twin


def set_training(module: nn.Module, training: bool) -> None:
    """Set the mode of a module and all inside it, bypassing any ``train`` that they override."""
    for part in module.modules():
        part.training = training


def row_factors(factors: Sequence[float], rows: int, each: int = 1) -> Tensor:
    """Return ``[rows, 1]``: the factors in turn, repeated, each one for ``each`` adjacent rows."""
    return torch.tensor(factors)[torch.arange(rows) // each % len(factors), None]


def contents(module: nn.Module) -> dict[str, Hashable]:
    """Describe what a module holds besides its Parameters, by name, as a key for comparison.

    Two descriptions are equal only if code that sees nothing but the module cannot tell the two
    modules apart. They are valid while the module lives. ``cached_property`` values are left out.
    """
    return {
        name: described(value, {id(module): 0})
        for name, value in {**vars(module), **module._buffers, **module._modules}.items()
        if name not in _OF_MODULES | {"_parameters", "_buffers", "_modules"}
        and not isinstance(
            inspect.getattr_static(type(module), name, None), functools.cached_property
        )
    }


def described(value: Any, seen: dict[int, int] | None = None) -> Hashable:
    """Describe a value by its contents, or by its identity where contents cannot be read."""
    if isinstance(value, _SCALARS):
        return type(value), repr(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        kind = type(value), value.dtype, value.shape
        if value.is_meta or value.is_quantized:
            return *kind, value.is_meta or id(value)
        if value.layout != torch.strided or not value.is_cpu or value.nbytes > _MOST_READ:
            return *kind, id(value), None if value.is_inference() else value._version
        return *kind, bytes(value.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
    if isinstance(value, types.MethodType):
        return value.__func__, described(value.__self__, seen)
    parts: Any = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        parts = value
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        parts = dict(enumerate(value))
    if not isinstance(parts, dict) or isinstance(value, _AS_THEY_ARE):
        return "itself", id(value)
    return type(value), *((described(k), described(v, seen)) for k, v in parts.items())
