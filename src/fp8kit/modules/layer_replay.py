"""Replay a decoder layer of few tokens by two recordings, each behind one check.

Around attention such a layer is two recordings: norm and joined projections; residual sum, norm and
feed-forward. Module by module, each call would find its recording anew and ask again whether
modules, hooks, settings, weights and modes are as they were, which takes the host longer than the
launches. A ``LayerReplay`` knows the recordings, and asks once for each, just before it runs.
Attention itself runs in between as in any call: its projections find their results waiting.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fp8kit.modules.fused_producers import FusedGatedMlp, FusedNorm
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.pending import make_stand_in
from fp8kit.modules.shared_input import all_operands
from fp8kit.ops.operators import CodesCall
from fp8kit.runtime.replay_cache import Found, guards

Layers = Sequence[Fp8Linear]


class Replay:
    """A recording of a norm and of the FP8 layers behind it, and what it depends on.

    It holds modules and tensors weakly or by address: what was replaced must not keep its memory.

    Args:
        norm: the norm.
        layers: the layers, in the order in which every call names them.
        found: the recording, for whose inputs norm and layers may be fused.
    """

    def __init__(self, norm: FusedNorm, layers: Layers, found: Found) -> None:
        self._norm = weakref.ref(norm)
        self._options = [layer.options() for layer in layers]
        self._guards = guards(_constants(norm, layers))
        self._found = found

    def __call__(self, norm: FusedNorm, layers: Layers, *inputs: Tensor) -> list[Tensor] | None:
        """Replay for other inputs; ``None`` if the recording does not fit, or anything changed."""
        if self._norm() is not norm or not self._found.fits(*inputs):
            return None
        if [layer.options() for layer in layers] != self._options or self._guards is None:
            return None
        same = guards(_constants(norm, layers)) == self._guards
        return self._found.recording(*inputs) if same else None


class LayerReplay:
    """The two recordings of one decoder layer for inputs of one shape."""

    def __init__(self, first: Replay, last: Replay, mlp: FusedGatedMlp) -> None:
        self._first, self._last, self._mlp = first, last, weakref.ref(mlp)
        self.outdated = False  # whether a call could not be replayed to its end

    def normed(self, norm: nn.Module | None, x: Tensor) -> Tensor | None:
        """Return a stand-in for ``norm(x)``, for which its readers' results wait."""
        if not isinstance(norm, FusedNorm) or (layers := _readers(norm, x)) is None:
            return None
        found = self._first(norm, layers, x)
        if found is None:
            return None
        stand_in = make_stand_in(x.shape, x.device, x.dtype)
        norm.consumers.group.offer_product(stand_in, found[0])
        return stand_in

    def feed_forward(
        self, norm: nn.Module | None, mlp: nn.Module | None, x: Tensor, residual: Tensor
    ) -> list[Tensor] | None:
        """Return ``mlp(norm(residual + x))`` and the sum."""
        found = None
        if isinstance(norm, FusedNorm) and isinstance(mlp, FusedGatedMlp) and mlp is self._mlp():
            layers = _behind(norm, mlp, x)
            found = None if layers is None else self._last(norm, layers, x, residual)
        self.outdated = self.outdated or found is None
        return found


def find_replay(
    norm: nn.Module | None, sum_norm: nn.Module | None, mlp: nn.Module | None, x: Tensor
) -> LayerReplay | None:
    """Return a replay for a layer that has just computed ``x``, ``None`` if it has no recordings.

    ``norm`` is the one before attention, ``sum_norm`` the one before the feed-forward ``mlp``.
    """
    if not isinstance(norm, FusedNorm) or not isinstance(sum_norm, FusedNorm):
        return None
    if not isinstance(mlp, FusedGatedMlp):
        return None
    groups = norm.consumers.group, sum_norm.consumers.group
    # the cheapest reasons come first: a layer that is never replayed looks at every call
    if not all(group.replays.has_recordings() for group in groups):
        return None
    first = _readers(norm, x)
    last = None if first is None else _behind(sum_norm, mlp, x)
    if first is None or last is None:
        return None
    of_first = groups[0].recorded(_codes(norm, x))
    gated = None if of_first is None else mlp.gated(_codes(sum_norm, x, x), groups[1])
    of_last = None if gated is None else groups[1].recorded(*gated)
    if of_first is None or of_last is None:
        return None
    return LayerReplay(Replay(norm, first, of_first), Replay(sum_norm, last, of_last), mlp)


def _readers(norm: FusedNorm, x: Tensor) -> Layers | None:
    """Return the layers that read a norm of ``x`` if they may get its codes."""
    layers = _followed(norm.consumers.group.members)
    return layers if layers is not None and norm.may_offer(x) else None


def _behind(norm: FusedNorm, mlp: FusedGatedMlp, x: Tensor) -> Layers | None:
    """Return the layers of a feed-forward if it may be fused with a norm of tensors like ``x``."""
    layers: Any = None if is_watched(mlp) or not mlp.is_unaltered() else mlp.known_layers()
    return None if layers is None or not norm.may_offer(x) else _followed(layers)


def _followed(layers: Layers) -> Layers | None:
    """Return the layers unless one must first look whether its kept weight was changed."""
    return layers if all(layer.original_weight is None for layer in layers) else None


def _constants(norm: FusedNorm, layers: Layers) -> list[Tensor | None]:
    """Return the tensors whose addresses a recording passes."""
    return [*norm._parameters.values(), *all_operands(layers)]


def _codes(norm: FusedNorm, *inputs: Tensor) -> CodesCall:
    return norm.formula.codes(inputs, norm, norm.consumers.scheme)
