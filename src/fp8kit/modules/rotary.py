"""Attention of Transformers whose rotary embedding is one launch.

The embedding is a global function in a model's Python file, which the attention's ``forward`` calls
by name. An attention keeps its class, and gets a copy of that ``forward`` with globals of its own:
this one name is bound to our function, and all others are looked up in the file's, unchanged.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8kit.fused import operators, reference
from fp8kit.modules import fused_module
from fp8kit.modules.decorators import copied, innermost, redecorated
from fp8kit.modules.hooks import ClassForward
from fp8kit.modules.own_forward import ModuleForward
from fp8kit.modules.trials import on_trial
from fp8kit.runtime.replay_cache import ReplayCache

FUNCTION = "apply_rotary_pos_emb"


class RotaryForward(ModuleForward, ClassForward):
    """A ``forward`` for an attention whose class calls ``apply_rotary_pos_emb``."""

    _fused: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the class computes."""
        module = self._ref() or self.module
        if torch.compiler.is_compiling():  # a compiler fuses the embedding with its neighbours
            return type(module).forward(module, *args, **kwargs)
        return self._copied(module)(module, *args, **kwargs)

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        """Rotate heads as ``forward`` does; arguments are those of ``reference.rotated``."""
        rotary = innermost(self._copied(self.module)).__globals__.get(FUNCTION)
        return (q, k) if rotary is None else rotary(q, k, cos, sin)

    def _copied(self, module: nn.Module) -> Any:
        own = type(module).forward
        if self._fused is None or self.code is not own:  # new, or the class's forward was changed
            self._fused, self.code = _with_rotary(own), own  # in this order, for other threads
        return self._fused

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the copied function, which pickle cannot find by name."""
        return {n: v for n, v in super().__getstate__().items() if n != "_fused"}


class _Rotary:
    """Replaces a model's ``apply_rotary_pos_emb``, and calls it where our kernel does not apply.

    ``names`` are the globals of the model's module, where other code may rebind the function.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._known = names, names[FUNCTION]
        self._replays = ReplayCache()

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any
    ) -> Sequence[Tensor]:
        """Rotate the heads of queries and keys."""
        own = self._names[FUNCTION]
        if own is not self._known or args or kwargs or not _fits(q, k, cos, sin):
            return own(q, k, cos, sin, *args, **kwargs)
        return self._replays.call(operators.ROTATED, (q, k, cos, sin), (), ())


class _Names(dict[str, Any]):
    """Globals for the copied function: ours for one name, ``outer`` for all others."""

    outer: dict[str, Any]

    def __missing__(self, name: str) -> Any:
        return self.outer[name]


def calls_rotary(forward: object) -> bool:
    """Return whether a function calls an ``apply_rotary_pos_emb`` that our kernel can replace."""
    inner = innermost(forward)
    if not isinstance(inner, types.FunctionType) or FUNCTION not in inner.__code__.co_names:
        return False
    return _rotates(inner.__globals__.get(FUNCTION))


@functools.cache
def _rotates(function: Any) -> bool:
    """Try whether a function rotates heads bit-equal to ``reference.rotated``."""
    random = torch.Generator().manual_seed(0)
    try:
        with on_trial():
            for dtype, batch in itertools.product((torch.bfloat16, torch.float32), (1, 2)):
                shapes = ((2, 4, 3, 8), (2, 2, 3, 8), (batch, 3, 8), (batch, 3, 8))
                given = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
                pairs = zip(function(*given), reference.rotated(*given), strict=True)
                if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                    return False
    except Exception:  # it takes other arguments, or needs a GPU
        return False
    return True


def _with_rotary(forward: Any) -> Callable[..., Any]:
    """Copy a function, with ``apply_rotary_pos_emb`` bound to our rotary embedding."""
    if not calls_rotary(forward):
        return forward
    inner = innermost(forward)
    outer = inner.__globals__
    # Python reads __package__, __builtins__ and the like without calling __missing__
    names = _Names({name: outer[name] for name in outer if name.startswith("__")})
    names.outer, names[FUNCTION] = outer, _Rotary(outer)
    return cast(Callable[..., Any], redecorated(forward, copied(inner, names, inner.__closure__)))


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether ``q`` and ``k`` are heads on a GPU, and all heads share a token's angles."""
    fusible = q.device.type in fused_module.FUSED_DEVICES
    if not fusible or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return False
    batch, _, tokens, width = q.shape
    same = all(x.dtype == q.dtype and x.stride(-1) == 1 for x in (q, k, cos, sin))
    sizes = (k.shape[0], *k.shape[2:]) == (batch, tokens, width) and width % 2 == 0
    angles = cos.shape[0] in (1, batch) and cos.shape[1:] == (tokens, width)
    alike = cos.shape == sin.shape and cos.stride() == sin.stride()
    return same and sizes and angles and alike and q.numel() > 0
