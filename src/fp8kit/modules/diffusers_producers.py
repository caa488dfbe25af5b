"""Adaptive norms and feed-forwards of diffusers that write FP8."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.formats import Scheme
from fp8kit.modules.activation_formula import activation_codes, activation_kind
from fp8kit.modules.consumers import Consumers, can_multiply
from fp8kit.modules.deferred import Deferred, DeferredNorm
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.fused_producers import Producer
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.joining import has_few_rows
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.parameters import any_trained
from fp8kit.modules.tracing import constant_in_graphs

_FIRST_LAYERS = ("GELU", "GEGLU", "SwiGLU", "LinearActivation")


@dataclass(frozen=True, slots=True)
class Modulation:
    """How an adaptive norm splits the result of its projection into equal parts.

    Args:
        parts: number of parts.
        shift: index of the part that is added to the norm.
        scale: index of the part that, plus one, multiplies the norm.
        returned: indices of the parts that follow the norm in a tuple; if empty, no tuple is made.
    """

    parts: int
    shift: int
    scale: int
    returned: tuple[int, ...] = ()


class FusedAdaptiveNorm(Producer):
    """``norm(x) * (1 + scale) + shift`` of diffusers' adaptive layer norms, quantized.

    The replaced norm has children ``silu``, ``linear``, ``norm``, and perhaps ``emb``; ``eps`` is
    added to the variance.
    """

    scheme: Scheme | None = None  # of the consumers, as graphs guard each step to theirs

    def __init__(
        self, norm: nn.Module, eps: float, modulation: Modulation, consumers: Consumers
    ) -> None:
        super().__init__(norm, consumers, norm.norm)
        self.scheme = consumers.scheme
        self.formula = NormFormula("layer_norm", eps)
        self.modulation = modulation
        names = list(inspect.signature(norm.forward).parameters)
        self.embedding = "emb" if "emb" in names else names[1]
        self.positional = names[1] == self.embedding

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Norm ``[B, S, K]`` by the embedding; arguments are those of the replaced module."""
        emb = args[0] if args and self.positional else kwargs.get(self.embedding)
        if not isinstance(emb, Tensor) or len(args) + len(kwargs) != 1:
            return self.unfused(x, *args, **kwargs)
        scheme = self.scheme if torch.compiler.is_compiling() else None
        offers = self.may_offer(x, emb) if scheme is None else self._may_defer(x, emb)
        if not (offers and self._is_plain(x, emb)):
            return self.unfused(x, *args, **kwargs)
        cut = self.modulation
        parts = self.linear(self.silu(emb)).chunk(cut.parts, dim=1)
        scale, shift = parts[cut.scale], parts[cut.shift]
        inputs = (x, scale, shift)
        y: Tensor | Deferred
        if scheme is None:
            call = self.formula.codes(inputs, self.norm, self.consumers.scheme)
            (y,) = self.consumers.produce(self.replays, call)
        else:
            codes = self.formula.codes(inputs, self.norm, scheme).traced()
            y = DeferredNorm(self.norm(x) * (1 + scale[:, None]) + shift[:, None], codes, scheme)
        return (y, *(parts[i] for i in cut.returned)) if cut.returned else y

    def _may_defer(self, *inputs: Tensor) -> bool:
        # layers of few rows are joined in graphs, and quantize their input themselves
        return self.may_compute(*inputs) and not has_few_rows(inputs[0]) and self._hands_over()

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether only the consumers read the result, which no hook sees."""
        return not is_watched(self) and self.consumers.are_ready()

    def _is_plain(self, x: Tensor, emb: Tensor) -> bool:
        shapes = x.dim() == 3 and emb.dim() == 2
        projection = self.linear
        dtypes = emb.dtype == x.dtype == getattr(projection, "weight", x).dtype
        trained = any_trained(projection, self.norm)
        same = self.norm.eps == self.formula.eps
        return shapes and dtypes and same and not trained and not is_watched(self.norm)


class FusedFeedForward(Fused):
    """diffusers' ``FeedForward``: projection, activation, dropout, projection.

    ``kind`` is ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``. If ``gated``, the columns of the first
    projection are values, then as many of their gate.
    """

    def __init__(self, feed_forward: nn.Module, kind: str, gated: bool) -> None:
        first = feed_forward.get_submodule("net.0")
        super().__init__(feed_forward, first, getattr(first, "activation", None))
        self.kind = kind
        self.gated = gated

    def is_converted(self) -> bool:
        """Return whether the last projection takes codes."""
        return can_multiply(self.get_submodule("net.2"))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute ``[..., K]`` from ``[..., K]``."""
        x = hidden_states
        if args or kwargs or not self.may_compute(x):
            return self.unfused(x, *args, **kwargs)
        first, dropout, down, *rest = self.net
        same_kind = first_kind(first) == (self.kind, self.gated)
        idle = all(type(d) is nn.Dropout and not (d.training and d.p) for d in (dropout, *rest))
        known = same_kind and idle and self._hands_over()
        if not known or any_trained(first.proj, down):
            return self.unfused(x)
        h, up = first.proj(x), None
        if self.gated:
            up, h = h.chunk(2, dim=-1)
        y = down.multiply(activation_codes(self.kind, h, up, down.scheme))
        for module in rest:
            y = module(y)
        return y

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether the last projection takes codes, and no hook sees what it reads."""
        first, dropout, down, *_ = self.net
        activation = first._modules.get("activation", first)
        return can_multiply(down) and not is_watched(self.net, first, activation, dropout)


def first_kind(first: nn.Module) -> tuple[str | None, bool]:
    """Name the activation in the first layer of a feed-forward, and say whether it is gated."""
    name, module = type(first).__name__, type(first).__module__
    kind = None
    if name in _FIRST_LAYERS and module.startswith("diffusers."):
        kind = activation_kind(getattr(first, "activation", None))
        if name in ("GELU", "GEGLU"):
            kind = "gelu_tanh" if getattr(first, "approximate", "none") == "tanh" else "gelu"
    return kind, name in ("GEGLU", "SwiGLU")
