"""Attention of Transformers whose rotary embedding is one launch.

The embedding is a function in the module of a model's code, which its attention's ``forward`` calls
by name. An attention keeps its class, and gets a copy of that ``forward`` in which the name stands
for ours: nothing that other models see is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.fused import operators
from fp8kit.modules import fused_producers
from fp8kit.modules.hooks import ClassForward
from fp8kit.runtime.replay_cache import ReplayCache

FUNCTION = "apply_rotary_pos_emb"


class RotaryForward(ClassForward):
    """The ``forward`` of an attention that calls ``apply_rotary_pos_emb``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own: Callable[..., Any] | None = None
        self._fused: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the class computes."""
        if torch.compiler.is_compiling():  # a compiler fuses the embedding with what is around it
            return type(self.module).forward(self.module, *args, **kwargs)
        return self._copied()(self.module, *args, **kwargs)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        """Rotate heads as ``forward`` does; arguments as of ``reference.rotated``."""
        rotary: _Rotary = self._copied().__globals__[FUNCTION]
        return rotary(q, k, cos, sin)

    def _copied(self) -> Any:
        own = type(self.module).forward
        if self._own is not own:  # the first call, or somebody has changed the class
            self._own, self._fused = own, _with_rotary(own)
        return self._fused

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the module alone: functions that are made here have no name."""
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start anew."""
        self.__init__(state["module"])  # type: ignore[misc]


class _Rotary:
    """Stands for a model's ``apply_rotary_pos_emb``, and calls it for what our kernel cannot."""

    def __init__(self, own: Callable[..., Sequence[Tensor]]) -> None:
        self._own = own
        self._replays = ReplayCache()

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Sequence[Tensor]:
        """Rotate the heads of queries and keys."""
        if args or kwargs or not _fits(q, k, cos, sin):
            return self._own(q, k, cos, sin, *args, **kwargs)
        found: Sequence[Tensor] = self._replays.call(operators.ROTATED, (q, k, cos, sin), (), ())
        return found


def calls_rotary(forward: object) -> bool:
    """Return whether a function calls ``apply_rotary_pos_emb``, by the names in its code."""
    return isinstance(forward, types.FunctionType) and FUNCTION in forward.__code__.co_names


def _with_rotary(forward: Any) -> Callable[..., Any]:
    """Copy a function, with our rotary embedding under the name of the model's."""
    if not calls_rotary(forward):
        return forward  # type: ignore[no-any-return]
    names = {**forward.__globals__, FUNCTION: _Rotary(forward.__globals__[FUNCTION])}
    made = types.FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether these are heads on a GPU, with angles of each token for all of them."""
    fusible = q.device.type in fused_producers.FUSED_DEVICES
    if not fusible or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return False
    batch, _, tokens, width = q.shape
    same = all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, cos, sin))
    sizes = (k.shape[0], *k.shape[2:]) == (batch, tokens, width) and width % 2 == 0
    angles = cos.shape[0] in (1, batch) and cos.shape[1:] == (tokens, width)
    alike = cos.shape == sin.shape and cos.stride() == sin.stride()
    return same and sizes and angles and alike and q.numel() > 0
