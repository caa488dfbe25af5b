"""Loading code of a model's own, which runs in ``load_state_dict`` alone: try it, and refuse it.

A model is filled tensor by tensor, past hooks of ``load_state_dict`` and past overrides of
``_load_from_state_dict``. Where these change values the model would get other ones.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys, _WrappedHook

from fp8kit.checkpoint.exporting import is_copy
from fp8kit.checkpoint.schema.naming import named
from fp8kit.errors import CheckpointError, some_of, teach
from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.trials import Alone, on_trial

# their loading code changes no values but those of older versions of torch
_KNOWN = ("torch", "fp8kit")
_WHOLE, _OWN_WHOLE = 2**14, 2**24  # numbers of a tensor that has memory for each on a trial
_CONTAINERS = (dict, OrderedDict, list, set)


@dataclass(frozen=True, slots=True)
class _OwnCode:
    """Loading code of one module that is neither torch's nor this package's."""

    override: bool
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    def run(self, module: nn.Module, state: dict[str, Tensor], prefix: str) -> None:
        """Run it as ``load_state_dict`` does; raises ``RuntimeError`` for what it reports."""
        errors: list[str] = []
        # assigned: nothing is written, and no memory is needed to write to
        rest: Any = (prefix, {"assign_to_params_buffers": True}, True, [], [], errors)
        if self.override:
            module._load_from_state_dict(state, *rest)
        else:
            for hook in self.before:
                hook(state, *rest)
        for hook in self.after:
            hook(module, _IncompatibleKeys([], []))
        if errors:
            raise RuntimeError(errors[0])

    def __str__(self) -> str:
        hooks = (getattr(_function(h), "__qualname__", "") for h in (*self.before, *self.after))
        names = ["_load_from_state_dict"] * self.override + [f"the hook {n}" for n in hooks]
        return " and ".join(names)


def refuse_own_loading(model: nn.Module) -> None:
    """Refuse a model with loading code of its own that changes values.

    Code that renames, casts or copies passes. Code that raises cannot be tried: a warning says so.
    Nothing is written to the model.
    """
    for name, module in list(model.named_modules()):  # a trial refills what this iterates over
        code = _own_code(module)
        if code is None:
            continue
        what = f"{code} of {name or 'the model'} ({type(module).__name__})"
        try:
            with on_trial(), Alone():  # type: ignore[no-untyped-call]
                changed = _changed(name, module, code)
        except Exception as error:  # whatever code of users raises
            warnings.warn(
                teach(
                    f"fp8kit does not run {what}, which raised {error!r:.200} on a trial.",
                    "What is loaded must be as the module holds it.",
                    "If this code changes values, use model.load_state_dict.",
                ),
                stacklevel=2,
            )
            continue
        if changed:
            raise CheckpointError(
                f"load_state_dict runs {what}, which changes {some_of(changed)}.",
                "fp8kit puts tensors into a model as they arrive, and does not run this code.",
                "Use model.load_state_dict, of the dense model before fp8kit.convert, or of the "
                "converted one; or remove this code, if what arrives is as the module holds it.",
            )


def _own_code(module: nn.Module) -> _OwnCode | None:
    def own(hooks: dict[int, Any]) -> tuple[Any, ...]:
        return tuple(hook for hook in hooks.values() if _is_foreign(hook))

    found = _OwnCode(
        _is_foreign(module._load_from_state_dict),
        own(module._load_state_dict_pre_hooks),
        own(module._load_state_dict_post_hooks),
    )
    return found if found.override or found.before or found.after else None


def _is_foreign(code: Any) -> bool:
    return str(_function(code).__module__).partition(".")[0] not in _KNOWN


def _function(code: Any) -> Any:
    """Return what a partial, or torch's wrapper of a hook, calls."""
    while isinstance(code, functools.partial | _WrappedHook):
        code = code.func if isinstance(code, functools.partial) else code.hook
    return code


class _StandIn:
    """Stands for a tensor on a trial, with its shape and dtype, on the CPU; bf16 stands for FP8.

    It has random numbers; integers, single numbers and what does not arrive keep their values, by
    which code may decide. A tensor of more than ``whole`` numbers has memory for the sum of its
    extents: ``x[i, j]`` is ``memory[i + 2 * j]``, so that it is another one when transposed.
    """

    def __init__(self, like: Tensor, whole: int, arrives: bool = True) -> None:
        count, steps = like.numel(), torch.empty(like.shape, device="meta").stride()
        if count > whole:
            steps = tuple(range(1, like.dim() + 1))
            count = 1 + sum((n - 1) * step for n, step in zip(like.shape, steps, strict=True))
        self.has_values = like.numel() <= _WHOLE and not like.is_meta
        perturbed = arrives and like.numel() > 1 and _has_fractions(like.dtype)
        if self.has_values and not perturbed:
            self._memory = like.detach().to("cpu", copy=True).reshape(-1)
        else:
            # code that computes takes dense weights, which FP8 layers accept too
            dense = like.dtype in FP8_FORMATS
            self._memory = _numbers(count, torch.bfloat16 if dense else like.dtype)
        self._was, self._shape, self._steps = self._memory.clone(), like.shape, steps
        self.tensor = self._memory.as_strided(like.shape, steps)
        if isinstance(like, nn.Parameter):
            self.tensor = nn.Parameter(self.tensor, requires_grad=False)

    def is_in(self, arrived: object) -> bool:
        """Return whether something is this tensor as it was, or a copy or cast of it."""
        if not isinstance(arrived, Tensor):
            return True
        if arrived.dtype == self.tensor.dtype and arrived.is_set_to(self.tensor):
            return torch.equal(self._memory, self._was)
        return is_copy(arrived, self._was.as_strided(self._shape, self._steps))


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    if _has_fractions(dtype):
        return torch.randn(count).to(dtype)
    return torch.randint(2 if dtype is torch.bool else 60, (count,), dtype=torch.uint8).to(dtype)


def _changed(name: str, module: nn.Module, code: _OwnCode) -> list[str]:
    """Name the tensors of a module, and of those inside it, that its loading code changes."""
    held = [
        _Held(named(part_name, kind), part, store, kind, tensor)
        for part_name, part in module.named_modules(prefix=name, remove_duplicate=False)
        for store in ("_parameters", "_buffers")
        for kind, tensor in vars(part).get(store, {}).items()  # none in a ScriptModule
        if tensor is not None and tensor.layout == torch.strided and not tensor.is_quantized
    ]
    given = {id(t.tensor): _StandIn(t.tensor, _WHOLE, t.saved) for t in held}
    state = {t.name: given[id(t.tensor)].tensor.detach() for t in held if t.saved}
    own = {
        id(t.tensor): _StandIn(t.tensor, _OWN_WHOLE)
        for t in held
        if code.override and t.part is module and t.saved
    }
    arriving, found = dict(state), []
    with _restored(module, held):
        for t in held:
            t.put((own.get(id(t.tensor)) or given[id(t.tensor)]).tensor)
        code.run(module, arriving, named(name, ""))
        for t in held:
            now, stand_in = vars(t.part)[t.store].get(t.kind), given[id(t.tensor)]
            kept = stand_in.is_in(now) or (id(t.tensor) in own and own[id(t.tensor)].is_in(now))
            if not (kept and stand_in.is_in(arriving.get(t.name)) if t.saved else kept):
                found += [t.name] if t.saved or stand_in.has_values else []
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of the model, and where it is: a Parameter or a buffer of a module."""

    name: str
    part: nn.Module
    store: str
    kind: str
    tensor: Tensor

    @property
    def saved(self) -> bool:
        """Whether it is in the ``state_dict``."""
        return self.kind not in self.part._non_persistent_buffers_set

    def put(self, tensor: Tensor) -> None:
        """Put another tensor, or this one again, into its place."""
        vars(self.part)[self.store][self.kind] = tensor


@contextmanager
def _restored(module: nn.Module, tensors: Iterable[_Held]) -> Iterator[None]:
    """Undo what code sets on a module and on those inside it, also in their dicts and lists."""
    held = {part: vars(part).copy() for part in module.modules()}
    contents = [
        (value, value.copy())
        for own in held.values()
        for value in own.values()
        if type(value) in _CONTAINERS
    ]
    try:
        yield
    finally:
        for part, own in held.items():
            vars(part).clear()
            vars(part).update(own)
        for value, kept in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)
        for tensor in tensors:  # where a library has its own class of dict
            tensor.put(tensor.tensor)
