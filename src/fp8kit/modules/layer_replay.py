"""Replay a decoder layer of few tokens behind one check of everything that it depends on.

Around attention such a layer is two recordings: norm and joined projections; residual sum, norm and
feed-forward. Module by module, each call would ask again whether modules, hooks, settings, weights
and modes are as they were, which takes the host longer than the launches. A ``LayerReplay`` asks
once. Attention's own code runs in between, unchanged, on a twin of its module: an instance with the
same attributes, except that a projection of the norm's result returns what is computed already.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp8kit.modules.fused_producers import FusedGatedMlp, FusedNorm
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.pending import make_stand_in
from fp8kit.modules.rotary import RotaryForward
from fp8kit.modules.shared_input import all_operands
from fp8kit.runtime.replay_cache import Found, Guards, guards

_ABSENT = object()
_CONTENTS = ("_modules", "_parameters", "_buffers")
Children = Mapping[str, nn.Module | None]


class LayerParts(NamedTuple):
    """The modules of a decoder layer that follows a ``Flow``; ``mlp`` is its feed-forward.

    Args:
        norm: the norm before attention.
        attention: the module whose code runs between the recordings.
        sum_norm: the norm of the residual sum before the feed-forward.
        projections: the layers that read ``norm``: queries, keys and values.
        others: gate, up and down projection.
    """

    norm: FusedNorm
    attention: nn.Module
    sum_norm: FusedNorm
    mlp: FusedGatedMlp
    projections: list[Fp8Linear]
    others: list[Fp8Linear]

    @property
    def modules(self) -> list[nn.Module]:
        """All of them."""
        return [*self[:4], *self.projections, *self.others]

    def options(self) -> list[object]:
        """Return what the layers compute by besides their tensors."""
        return [(m.options(), m.scale_ub) for m in (*self.projections, *self.others)]

    def constants(self) -> list[Tensor | None]:
        """Return the tensors whose addresses the recordings pass."""
        norms = (*self.norm._parameters.values(), *self.sum_norm._parameters.values())
        return [*norms, *all_operands(self.projections), *all_operands(self.others)]


def parts_of(children: Children, norms: tuple[str, str], x: Tensor) -> LayerParts | None:
    """Return the parts among a layer's children if each may be fused for ``x``, else ``None``.

    ``norms`` are the names of the norms before attention and before the feed-forward.
    """
    norm, sum_norm = map(children.get, norms)
    attention, mlp = children.get("self_attn"), children.get("mlp")
    if not isinstance(norm, FusedNorm) or not isinstance(sum_norm, FusedNorm) or attention is None:
        return None
    if not isinstance(mlp, FusedGatedMlp) or is_watched(mlp):
        return None
    if not (norm.may_offer(x) and sum_norm.may_offer(x)):
        return None
    others: Any = mlp.layers(x)
    projections = norm.consumers.group.members
    if others is None or any(m.original_weight is not None for m in (*projections, *others)):
        return None
    return LayerParts(norm, attention, sum_norm, mlp, projections, [*others])


class LayerReplay:
    """The recordings of one decoder layer for inputs of one shape, and what they depend on.

    It holds modules and tensors weakly or by address: what was replaced must not keep its memory.
    """

    def __init__(self, parts: LayerParts, first: Found, last: Found, x: Tensor) -> None:
        self._refs = [*map(weakref.ref, parts.modules)]
        self._options = parts.options()
        self._guards: Guards | None = guards(parts.constants())
        self._first, self._last = first, last
        self._stand_in = make_stand_in(x.shape, x.device, x.dtype)
        names = {id(child): name for name, child in parts.attention._modules.items()}
        self._names = [names[id(m)] for m in parts.projections]
        self._of_thread = threading.local()

    def fits(self, parts: LayerParts | None, x: Tensor) -> bool:
        """Return whether nothing has changed, and the recordings take ``x``."""
        if parts is None or not self._first.fits(x):
            return False
        same = all(map(is_, parts.modules, [ref() for ref in self._refs]))
        same = same and parts.options() == self._options
        return same and self._guards is not None and guards(parts.constants()) == self._guards

    def attention(self, parts: LayerParts, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the attention of the norm of ``x [..., K]``."""
        module = parts.attention
        y = self._first.recording(x)[0]
        results = parts.norm.consumers.group.split(y, parts.projections)
        before = {**vars(module)}
        held = {**before}
        for name, layer, result in zip(self._names, parts.projections, results, strict=True):
            held[name] = _Computed(layer, self._stand_in, result)
        twin = self._twin(type(module))
        object.__setattr__(twin, "__dict__", held)
        forward, code = before.get("forward"), type(module).forward
        if isinstance(forward, RotaryForward):
            code = forward.function(module)
        try:
            attended, _ = code(twin, hidden_states=self._stand_in, **kwargs)
        finally:
            for name in self._names:
                held.pop(name, None)
            _carry_over(module, before, held)
            for name in _CONTENTS:  # they would keep the memory of a module that is replaced
                held.pop(name, None)
        return attended

    def feed_forward(self, x: Tensor, residual: Tensor) -> list[Tensor] | None:
        """Return ``mlp(norm(residual + x))`` and the sum; ``None`` if no recording fits."""
        return self._last.recording(x, residual) if self._last.fits(x, residual) else None

    def _twin(self, kind: type[nn.Module]) -> nn.Module:
        # kept, because code may remember something for each module that attends
        twin: nn.Module | None = getattr(self._of_thread, "twin", None)
        if type(twin) is not kind:
            self._of_thread.twin = twin = object.__new__(kind)
        return twin


def _carry_over(module: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Give a module what its code has changed in the attributes of the twin."""
    if len(after) == len(before) and all(map(is_, after.values(), before.values())):
        return
    for name, value in after.items():
        if before.get(name, _ABSENT) is not value:
            setattr(module, name, value)
    for name in before.keys() - after.keys():
        delattr(module, name)


class _Computed:
    """A projection in a twin, whose result for the stand-in is computed already."""

    __slots__ = ("_layer", "_result", "_stand_in")

    def __init__(self, layer: Fp8Linear, stand_in: Tensor, result: Tensor) -> None:
        self._layer, self._stand_in, self._result = layer, stand_in, result

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if not kwargs and args[0] is self._stand_in:
            return self._result
        y: Tensor = self._layer(*args, **kwargs)
        return y

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def find_replay(children: Children, norms: tuple[str, str], x: Tensor) -> LayerReplay | None:
    """Return a replay for the layer that has just computed ``x``, ``None`` if it has no recordings.

    Arguments are those of ``parts_of``.
    """
    parts = parts_of(children, norms, x)
    if parts is None or not set(parts.projections) <= set(parts.attention._modules.values()):
        return None
    norm, sum_norm = parts.norm, parts.sum_norm
    codes = norm.formula.codes((x,), norm, norm.consumers.scheme)
    first = norm.consumers.group.recorded(codes)
    if first is None:
        return None
    group = sum_norm.consumers.group
    of_sum = sum_norm.formula.codes((x, x), sum_norm, sum_norm.consumers.scheme)
    gated = parts.mlp.gated(of_sum, group)
    last = None if gated is None else group.recorded(*gated)
    return None if last is None else LayerReplay(parts, first, last, x)
