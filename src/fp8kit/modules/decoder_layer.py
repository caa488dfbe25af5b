"""Decoder layers that add, norm and quantize in one pass between attention and feed-forward.

The residual sum before the second norm is an operator in a layer's ``forward``, so no child module
can fuse it. A layer keeps its class, children and hooks, and gets a new ``forward``, if the old and
the new one agree on stub children (random functions): in order of calls, arguments and results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8kit.modules.decorators import redecorated
from fp8kit.modules.fused_producers import FusedGatedMlp, FusedNorm
from fp8kit.modules.joining import MOST_JOINED_ROWS
from fp8kit.modules.layer_replay import LayerReplay, find_replay
from fp8kit.modules.own_forward import ModuleForward, is_unchanged, set_forward, settings
from fp8kit.modules.trials import isolated_copy, on_trial, set_training
from fp8kit.runtime.replay_cache import MOST_KEYS

_PROBE_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Flow:
    """The names of a decoder layer's norms, which say how it computes; ``None`` for no norm there.

    Args:
        before_attention: the norm whose result ``self_attn`` reads.
        after_attention: the norm of the result of ``self_attn``.
        before_mlp: the norm of the first residual sum, whose result ``mlp`` reads.
        after_mlp: the norm of the result of ``mlp``.
    """

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None

    def run(self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Compute a decoder layer: attention and feed-forward, each normed and added to its input.

        ``kwargs`` are all arguments of ``self_attn`` except the hidden states ``x [..., K]``.
        """
        normed = _normed(layer._modules, self.before_attention, x)
        y = self._attended(layer, normed, kwargs)
        return self._sum(layer, self.feed_forward(layer, y, x))

    def replay(
        self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any], found: LayerReplay
    ) -> Tensor | None:
        """Compute ``run`` by recordings; ``None``, with nothing computed, if the first fits not."""
        child = layer._modules.get
        normed = found.normed(child(self.before_attention), x)
        if normed is None:
            return None
        y = self._attended(layer, normed, kwargs)
        of_mlp = found.feed_forward(child(self.before_mlp), child("mlp"), y, x)
        return self._sum(layer, of_mlp or self.feed_forward(layer, y, x))

    def find_replay(self, layer: nn.Module, x: Tensor) -> LayerReplay | None:
        """Return a replay for a layer that has just computed ``x``, if it has recordings."""
        child = layer._modules.get
        return find_replay(child(self.before_attention), child(self.before_mlp), child("mlp"), x)

    def _attended(self, layer: nn.Module, normed: Tensor, kwargs: dict[str, Any]) -> Tensor:
        attention = layer._modules["self_attn"]
        assert attention is not None
        y, _ = attention(hidden_states=normed, **kwargs)
        return _normed(layer._modules, self.after_attention, y)

    def _sum(self, layer: nn.Module, found: list[Tensor]) -> Tensor:
        y, total = found
        return total + _normed(layer._modules, self.after_mlp, y)

    def feed_forward(self, layer: nn.Module, x: Tensor, residual: Tensor) -> list[Tensor]:
        """Return ``mlp(norm(residual + x))`` and the sum, by one recording where permitted."""
        children = layer._modules
        norm, mlp = children[self.before_mlp], children["mlp"]
        assert mlp is not None
        if not isinstance(norm, FusedNorm) or (call := norm.codes_of_sum(x, residual)) is None:
            total = residual + x
        else:
            group = norm.consumers.group
            found = mlp.of_codes(call, group) if isinstance(mlp, FusedGatedMlp) else None
            if found is not None:
                return found
            total = norm.add(call)
        return [mlp(_normed(children, self.before_mlp, total)), total]


FLOWS = (
    Flow("input_layernorm", None, "post_attention_layernorm", None),
    Flow(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)


class ResidualForward(ModuleForward):
    """A ``forward`` for a decoder layer whose class is known to compute a ``Flow``.

    Where nothing can be fused, the ``forward`` of the class computes.
    """

    # for files of older versions, which lack them
    settings: Mapping[str, object] = {}
    _replays: Mapping[torch.Size, LayerReplay] = {}

    def __init__(self, layer: nn.Module, flow: Flow) -> None:
        super().__init__(layer)
        self.flow = flow
        self.defaults = _arguments(layer)
        self.settings = settings(layer)
        self._replays = {}

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer."""
        layer = self._ref() or self.module
        # first, because torch.compile guards on every attribute that is read before this return
        if torch.compiler.is_compiling() or args or not self._may_compute(layer):
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        if not kwargs.keys() <= self.defaults.keys():
            kwargs = _renaming(self.code)(layer, hidden_states, **kwargs)
        passed = {**self.defaults, **kwargs}
        plain = type(hidden_states) is Tensor  # the shape of a traced one may not be hashable
        found = self._replays.get(hidden_states.shape) if plain else None
        y = None if found is None else self.flow.replay(layer, hidden_states, passed, found)
        if y is None:
            norm = layer._modules[self.flow.before_mlp]
            if not isinstance(norm, FusedNorm) or not norm.may_fuse(hidden_states):
                return type(layer).forward(layer, hidden_states, **kwargs)
            y, found = self.flow.run(layer, hidden_states, passed), None
        if plain and (found is None or found.outdated):
            self._keep(layer, hidden_states)
        return y

    def _keep(self, layer: nn.Module, x: Tensor) -> None:
        """Keep what the next call with this shape may replay."""
        if x.numel() > MOST_JOINED_ROWS * x.shape[-1]:
            return
        found = self.flow.find_replay(layer, x)
        if found is not None:
            kept = {**self._replays, x.shape: found}
            self._replays = dict([*kept.items()][-MOST_KEYS:])  # as many as there are recordings

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what replays: addresses belong to the original."""
        return {**super().__getstate__(), "_replays": {}}

    def _may_compute(self, layer: nn.Module) -> bool:
        if layer.training and torch.is_grad_enabled():  # the class may checkpoint activations
            return False
        return type(layer).forward is self.code and is_unchanged(layer, self.settings)


def install_residual_forwards(layers: Iterable[nn.Module]) -> None:
    """Give decoder layers whose second norm is fused a ``forward`` that also fuses the sum.

    Layers that follow no known ``Flow``, or have a ``forward`` of their own, are left alone.
    """
    for layer in layers:
        flow = None if "forward" in vars(layer) else find_flow(layer)
        if flow is not None and isinstance(layer._modules[flow.before_mlp], FusedNorm):
            set_forward(layer, ResidualForward(layer, flow))


def find_flow(layer: nn.Module) -> Flow | None:
    """Find the flow of a decoder layer by running its class on stub children; ``None`` if unknown.

    The layer's own children are neither run nor changed.
    """
    random = torch.Generator().manual_seed(0)
    passed = {name: object() for name in (*_arguments(layer), "another")}
    for flow in FLOWS:
        stubs: dict[str, RandomChild] = {}
        for name in layer._modules:
            stubs[name] = RandomChild(random, name == "self_attn")
        if not {flow.before_attention, flow.before_mlp, "self_attn", "mlp"} <= set(stubs):
            continue
        try:
            with on_trial():
                x = torch.rand(2, 3, _PROBE_WIDTH, generator=random, dtype=torch.float64)
                twin = isolated_copy(layer, _modules=dict(stubs))
                set_training(twin, True)  # a dropout then changes the result
                expected = type(layer).forward(twin, x, **passed)
                bare = type(layer).forward(twin, x)
                called = [stubs["self_attn"].seen.pop() for _ in range(2)][::-1]
                found = flow.run(twin, x, passed)
                flow.run(twin, x, _arguments(layer))
        except Exception:  # a layer that cannot run with stubs does not follow this flow
            continue
        same = called == stubs["self_attn"].seen and isinstance(expected, Tensor)
        if same and torch.equal(expected, found) and torch.equal(bare, found):
            return flow
    return None


class RandomChild(nn.Module):
    """A stub child: a random elementwise function that remembers its keyword arguments.

    If it ``attends``, it returns a second result, as attention does.
    """

    def __init__(self, random: torch.Generator, attends: bool = False) -> None:
        super().__init__()
        factors = torch.rand(2, generator=random, dtype=torch.float64, device="cpu")
        self.factor, self.phase = factors.tolist()
        self.attends = attends
        self.seen: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """Compute an elementwise function of ``[..., K]``."""
        self.seen.append(kwargs)
        y = torch.sin(hidden_states * self.factor + self.phase)
        return (y, None) if self.attends else y


def _normed(children: Mapping[str, nn.Module | None], name: str | None, x: Tensor) -> Tensor:
    norm = None if name is None else children[name]
    return x if norm is None else cast(Tensor, norm(x))


@functools.cache
def _renaming(code: Any) -> Any:
    """Return a function that gives keyword arguments of a ``forward`` the names it computes by.

    Its decorators may take an argument under an old name, too.
    """

    def forward(layer: nn.Module, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
        del layer, hidden_states
        return kwargs

    return redecorated(code, forward)


def _arguments(layer: nn.Module) -> dict[str, Any]:
    named = list(inspect.signature(type(layer).forward).parameters.values())[2:]
    return {p.name: p.default for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
