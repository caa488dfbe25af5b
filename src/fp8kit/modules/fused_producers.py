"""Norms, activations and feed-forwards that write FP8.

A producer is a norm or activation whose result only known layers read, its consumers. A fused norm
writes codes and scales alone. In place of the unwritten result it returns a stand-in: one NaN,
expanded to the result's shape. The consumers recognise the stand-in by identity and take the codes;
any other reader would see NaN, not a plausible wrong number. The replaced module computes instead
where another reader is possible (a layer was wrapped or has a hook), gradients are needed, the
input is not on a GPU, or a compiler traces. The codes of an activation never leave the layer that
multiplies them, so activations and feed-forwards are fused under ``torch.compile``, too; so are
adaptive norms, which in a graph compute their result beside the codes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.modules.activation_formula import activation_codes, activation_kind, gated_codes
from fp8kit.modules.consumers import Consumers, can_multiply
from fp8kit.modules.deferred import Deferred, DeferredActivation
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.parameters import any_trained, deepcopied
from fp8kit.modules.shared_input import SharedInput
from fp8kit.modules.tracing import constant_in_graphs
from fp8kit.ops.operators import CodesCall


class Producer(Fused):
    """A fused module whose result is read by its ``consumers`` alone."""

    def __init__(self, replaced: nn.Module, consumers: Consumers, *inner: object) -> None:
        super().__init__(replaced, *inner)
        self.consumers = consumers

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the replaced module alone, unless its block is copied: readers would be unknown."""
        if id(self.consumers.path[0].ref()) not in memo:
            return copy.deepcopy(self.replaced[0], memo)
        return deepcopied(self, memo)

    def may_offer(self, *inputs: Tensor) -> bool:
        """Return whether codes may be offered instead of a result of these inputs."""
        return self.may_fuse(*inputs) and not is_watched(self) and self.consumers.are_ready()


class FusedNorm(Producer):
    """A norm that quantizes its result for its consumers."""

    def __init__(self, norm: nn.Module, formula: NormFormula, consumers: Consumers) -> None:
        super().__init__(norm, consumers)
        self.formula = formula
        # at most one (sum, stand-in); a list, as setting a module's attribute takes microseconds
        self._prepared: list[tuple[Tensor, Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Norm ``[..., K]``: return the normed tensor, or its stand-in once codes are offered."""
        # first, because torch.compile guards on every attribute that is read before this return
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return self.unfused(*args, **kwargs)
        (x,) = args
        if self._prepared:
            prepared = self._prepared[:]  # a copy, as another thread may clear the list meanwhile
            self._prepared.clear()
            for total, stand_in in prepared:
                if total is x:
                    return stand_in
        if not (self.may_offer(x) and self.formula.takes(x, self)):
            return self.unfused(x)
        call = self.formula.codes((x,), self, self.consumers.scheme)
        return self.consumers.produce(self.replays, call)[0]

    def add(self, call: CodesCall) -> Tensor:
        """Run a call of ``codes_of_sum`` and return its sum; this norm is called with it next.

        The same pass quantizes the norm of the sum, which is kept for that next call.
        """
        stand_in, total = self.consumers.produce(self.replays, call)
        self._prepared[:] = [(total, stand_in)]
        return total

    def codes_of_sum(self, x: Tensor, residual: Tensor) -> CodesCall | None:
        """Return the call that adds, norms and quantizes in one pass; ``None`` if not permitted."""
        alike = (x.shape, x.dtype, x.device) == (residual.shape, residual.dtype, residual.device)
        fusable = self.formula.kind == "rms_norm" and self.formula.takes(x, self) and alike
        if not (fusable and self.may_offer(x, residual)):
            return None
        return self.formula.codes((x, residual), self, self.consumers.scheme)


class FusedActivation(Producer):
    """An activation that the layer behind it computes and quantizes; ``kind`` as FusedGatedMlp's.

    If ``gated``, the input has the gate's columns, then as many that the gate multiplies. If
    ``concatenated``, the layer reads it behind other columns, as many as the layer's output has.
    """

    gated = concatenated = False  # for files of older versions, which lack them

    def __init__(
        self, activation: nn.Module, kind: str, consumers: Consumers, concatenated: bool = False
    ) -> None:
        gate = activation._modules.get("gate_fn")
        super().__init__(activation, consumers, gate)
        self.kind, self.gated, self.concatenated = kind, gate is not None, concatenated

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | Deferred:
        """Activate ``[..., K]``: return the result, or a ``Deferred`` that waits to be read."""
        if kwargs or len(args) != 1 or not self._may_defer(*args):
            return self.unfused(*args, **kwargs)
        (x,) = args
        return DeferredActivation(self.kind, *(x.chunk(2, -1) if self.gated else (x,)))

    def _may_defer(self, x: Tensor) -> bool:
        # requires_grad even without grad mode: custom autograd code computes gradients itself
        plain = type(x) is Tensor and not x.is_nested and not x.requires_grad
        same = not self.gated or activation_kind(self._modules.get("gate_fn")) == self.kind
        return plain and same and self.may_compute(x) and self._hands_over()

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether only the consumers read the result: no hook, no unknown child."""
        inner = [m for m in self._modules.values() if m is not None]
        alone = len(inner) == self.gated
        return alone and not is_watched(self, *inner) and self.consumers.are_ready()


class FusedGatedMlp(Fused):
    """``down(act(gate(x)) * up(x))``: one pass activates, multiplies, and quantizes for ``down``.

    ``kind`` is ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
    """

    def __init__(self, mlp: nn.Module, kind: str) -> None:
        super().__init__(mlp, getattr(mlp, "act_fn", None))
        self.kind = kind

    def is_converted(self) -> bool:
        """Return whether the last projection takes codes."""
        return can_multiply(self.get_submodule("down_proj"))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute ``[..., K]`` from ``[..., K]``."""
        layers = None if kwargs or len(args) != 1 else self.layers(*args)
        if layers is None:
            return self.unfused(*args, **kwargs)
        gate_proj, up_proj, down = layers
        gate, up = gate_proj(*args), up_proj(*args)
        return down.multiply(activation_codes(self.kind, gate, up, down.scheme))

    def of_codes(self, call: CodesCall, group: SharedInput) -> list[Tensor] | None:
        """Return ``[..., K]`` for a call's codes, which ``group`` reads, then its other results.

        All launches are one recording; ``None`` where that is not permitted.
        """
        found = self.gated(call, group)
        return None if found is None else group.multiply(*found)

    def gated(self, call: CodesCall, group: SharedInput) -> tuple[CodesCall, Fp8Linear] | None:
        """Return a call that makes codes of ``call``'s, and the layer that reads them.

        ``None`` if the formula may not hold, or ``group`` is not that of the other layers.
        """
        layers = None if is_watched(self) else self.layers(*call.inputs)
        if layers is None or group.members != [*layers[:2]]:
            return None
        gate, down = group.members[0], layers[2]
        width, options = gate.out_features, gate.options()
        return gated_codes(self.kind, call, width, options, down.scheme), down

    def layers(self, *inputs: Tensor) -> tuple[nn.Module, nn.Module, Fp8Linear] | None:
        """Return the gate, up and down projections; ``None`` if the formula may not hold."""
        return self.known_layers() if self.may_compute(*inputs) else None

    def known_layers(self) -> tuple[nn.Module, nn.Module, Fp8Linear] | None:
        """Return ``layers`` for inputs and modes in which the fused pass may compute."""
        child: Any = self._modules.get
        gate, up, down, act_fn = map(child, ("gate_proj", "up_proj", "down_proj", "act_fn"))
        known = activation_kind(self.act_fn if act_fn is None else act_fn) == self.kind
        if not known or not self._hands_over() or any_trained(gate, up, down):
            return None
        return gate, up, down

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether the last projection takes codes, and no hook sees what it reads."""
        down, act_fn = map(self._modules.get, ("down_proj", "act_fn"))
        return can_multiply(down) and (act_fn is None or not is_watched(act_fn))
