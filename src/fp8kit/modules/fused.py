"""Norms, activations and feed-forwards whose result goes straight into FP8.

A fused producer writes codes and scales and nothing else. What it returns stands for the tensor
that was never written: a NaN, expanded to its shape. The layers behind it know it by identity and
take the codes instead; anything else that read it would see NaN at once, not a wrong number. Where
that could happen, because a layer was wrapped or a hook looks on, and where gradients are wanted,
the input is not on a GPU, or a compiler fuses by itself, the module that was replaced computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit import fused
from fp8kit.formats import GROUP128, ROW, QTensor, Scheme
from fp8kit.modules.hooks import carry_hooks, is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared import SharedInput
from fp8kit.quantizers.layout import product_layout
from fp8kit.unchecked import RowCodes

FUSED_DEVICES = ("cuda",)
_FUSABLE = (ROW, GROUP128)


class Consumers:
    """The layers behind a producer, and what must stay as it was for them to be all its readers.

    Args:
        group: what these layers share.
        unchanged: ``(module, attribute, value)``: the path from the known block to each layer, and
            settings that would make the code in between read the tensor.
    """

    def __init__(
        self, group: SharedInput, unchanged: Iterable[tuple[nn.Module, str, object]]
    ) -> None:
        self.group = group
        self.unchanged = tuple(unchanged)
        path = dict.fromkeys(m for m, _, _ in self.unchanged if not isinstance(m, nn.ModuleList))
        self.modules = (*list(path)[1:], *group.members)  # a hook of the block itself sees nothing

    @property
    def scheme(self) -> Scheme:
        """The scheme of the layers."""
        return self.group.members[0].scheme

    def are_ready(self) -> bool:
        """Say whether nothing but these layers would see what stands for their input."""
        return (
            takes_codes(self.scheme)
            and all(getattr(m, name, None) is value for m, name, value in self.unchanged)
            and not any(is_watched(m) for m in self.modules)
        )

    def hand_over(self, q: QTensor, x: Tensor) -> Tensor:
        """Offer codes, and give the stand-in for the tensor like ``x`` that they were made from."""
        stand_in = _nan(x.device, x.dtype).expand(x.shape)
        self.group.offer(stand_in, row_codes(q, x.dtype))
        return stand_in


class Fused(nn.Module):
    """A module that computes what another did, in one pass where it may.

    It shares the dictionaries of Parameters, buffers and children with the module it replaces, so
    names, moves, casts and loading reach both, and where it may not fuse it calls that module.

    Args:
        replaced: the module it stands for.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._parameters = replaced._parameters
        self._buffers = replaced._buffers
        self._modules = replaced._modules
        self.training = replaced.training
        self.replaced = (replaced,)  # inside a tuple, it is not registered as a child
        carry_hooks(replaced, self)

    def __getattr__(self, name: str) -> Any:
        """Look up what this module lacks in the one it replaces."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "replaced":  # a copy that is still empty
                raise
            return getattr(self.replaced[0], name)

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module that was replaced does."""
        return self.replaced[0].forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the module in ``print(model)``."""
        return f"replaces {type(self.replaced[0]).__name__}"

    def may_fuse(self, *inputs: Tensor) -> bool:
        """Say whether device and modes permit codes instead of a result of these inputs."""
        if torch.compiler.is_compiling():
            return False
        place = inputs[0].device.type
        if place not in FUSED_DEVICES or torch.is_autocast_enabled(place):
            return False
        tensors = (*inputs, *self._parameters.values())
        trained = any(t is not None and t.requires_grad for t in tensors)
        return not (trained and torch.is_grad_enabled())


class Producer(Fused):
    """A module whose result is read by known layers alone.

    Args:
        replaced: the module it stands for.
        consumers: these layers.
    """

    def __init__(self, replaced: nn.Module, consumers: Consumers) -> None:
        super().__init__(replaced)
        self.consumers = consumers

    def may_offer(self, *inputs: Tensor) -> bool:
        """Say whether codes may be offered instead of a result of these inputs."""
        return self.may_fuse(*inputs) and not is_watched(self) and self.consumers.are_ready()


@dataclass(frozen=True, slots=True)
class NormFormula:
    """What a norm computes: see ``quantizers/fused_reference.py`` for the roundings.

    Args:
        kind: ``"rms_norm"`` or ``"layer_norm"``.
        eps: added to the mean square or the variance.
        weight_offset: added to the weight of an RMS norm.
        rounding: ``"stepwise"`` or ``"once"``.
    """

    kind: str
    eps: float
    weight_offset: float = 0.0
    rounding: str = "stepwise"

    def quantize(
        self,
        x: Tensor,
        norm: nn.Module,
        scheme: Scheme,
        modulation: tuple[Tensor, Tensor] | None = None,
    ) -> QTensor:
        """Quantize the norm of ``x`` as the layers of a scheme read it."""
        weight = norm._parameters.get("weight")
        if self.kind == "layer_norm":
            bias, how = norm._parameters.get("bias"), target(scheme)
            return fused.layer_norm_quantize(
                x, weight, bias, self.eps, modulation=modulation, **how
            )
        assert weight is not None
        return fused.rms_norm_quantize(
            x,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            **target(scheme),
        )

    def add_quantize(
        self, x: Tensor, residual: Tensor, norm: nn.Module, scheme: Scheme
    ) -> tuple[QTensor, Tensor]:
        """Quantize the RMS norm of ``residual + x``, and give that sum."""
        weight = norm._parameters.get("weight")
        assert weight is not None
        return fused.add_rms_norm_quantize(
            x,
            residual,
            weight,
            self.eps,
            weight_offset=self.weight_offset,
            rounding=self.rounding,
            **target(scheme),
        )

    def takes(self, x: Tensor, norm: nn.Module) -> bool:
        """Say whether the dtypes of input and weight are those the formula holds for."""
        return self.kind == "layer_norm" or x.dtype == norm.weight.dtype


class FusedNorm(Producer):
    """A norm that quantizes for the layers behind it.

    Args:
        norm: the norm it replaces.
        formula: what that computes.
        consumers: the layers behind it.
    """

    def __init__(self, norm: nn.Module, formula: NormFormula, consumers: Consumers) -> None:
        super().__init__(norm, consumers)
        self.formula = formula
        self._prepared: tuple[Tensor, QTensor] | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm ``[..., K]``: the normed tensor, or what stands for it and its offered codes."""
        x, prepared, self._prepared = hidden_states, self._prepared, None
        if prepared is not None and prepared[0] is x:
            return self.consumers.hand_over(prepared[1], x)
        if not (self.may_offer(x) and self.formula.takes(x, self)):
            normed: Tensor = self.unfused(x)
            return normed
        return self.consumers.hand_over(self.formula.quantize(x, self, self.consumers.scheme), x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add two tensors whose sum this norm is called with next, unchanged.

        The norm of the sum is quantized in the same pass, and waits for that call.
        """
        alike = (x.shape, x.dtype, x.device) == (residual.shape, residual.dtype, residual.device)
        fusable = self.formula.kind == "rms_norm" and self.formula.takes(x, self) and alike
        if not (fusable and self.may_offer(x, residual)):
            return residual + x
        q, total = self.formula.add_quantize(x, residual, self, self.consumers.scheme)
        self._prepared = (total, q)
        return total


class FusedActivation(Producer):
    """An activation that quantizes for the layer behind it.

    Args:
        activation: the module it replaces.
        kind: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        consumers: the layers behind it.
    """

    def __init__(self, activation: nn.Module, kind: str, consumers: Consumers) -> None:
        super().__init__(activation, consumers)
        self.kind = kind

    def forward(self, input: Tensor) -> Tensor:
        """Activate ``[..., K]``: the result, or what stands for it and its offered codes."""
        if not self.may_offer(input):
            y: Tensor = self.unfused(input)
            return y
        q = activation_codes(self.kind, input, None, self.consumers.scheme)
        return self.consumers.hand_over(q, input)


class FusedGatedMlp(Fused):
    """``down(act(gate(x)) * up(x))`` with activation, product and quantization in one pass.

    Args:
        mlp: the feed-forward it replaces.
        kind: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        names: its children that are the gate, up and down projections.
    """

    def __init__(
        self,
        mlp: nn.Module,
        kind: str,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__(mlp)
        self.kind = kind
        self.names = names

    def is_converted(self) -> bool:
        """Say whether the last projection takes codes."""
        return can_multiply(self.get_submodule(self.names[2]))

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[..., K]`` from ``[..., K]``."""
        if not self.may_fuse(x):
            same: Tensor = self.unfused(x)
            return same
        gate_proj, up_proj, down = (self.get_submodule(name) for name in self.names)
        if not can_multiply(down) or any_trained(gate_proj, up_proj):
            y: Tensor = self.unfused(x)
            return y
        gate, up = gate_proj(x), up_proj(x)
        q = activation_codes(self.kind, gate, up, down.scheme)
        return down.compute(row_codes(q, gate.dtype))


def takes_codes(scheme: Scheme) -> bool:
    """Say whether layers of a scheme quantize per row or per 1x128 group, from the data."""
    return scheme.activation in _FUSABLE and not scheme.static


def can_multiply(layer: nn.Module) -> TypeGuard[Fp8Linear]:
    """Say whether codes can be handed to a layer past its ``forward``."""
    return isinstance(layer, Fp8Linear) and takes_codes(layer.scheme) and not is_watched(layer)


def target(scheme: Scheme) -> fused.QuantizeOptions:
    """Give the keywords of ``fp8kit.fused`` that quantize as the layers of a scheme do."""
    assert scheme.activation is not None
    rounding = "up" if scheme.ue8m0 else None
    return {
        "group": scheme.activation,
        "dtype": scheme.dtype,
        "scale_rounding": rounding,
        "scale_layout": product_layout(scheme.activation),
    }


def activation_codes(kind: str, gate: Tensor, up: Tensor | None, scheme: Scheme) -> QTensor:
    """Quantize ``act(gate) * up``, or ``act(gate)``, as the layers of a scheme read it."""
    if kind == "silu":
        return fused.silu_mul_quantize(gate, up, **target(scheme))
    approximate = "tanh" if kind == "gelu_tanh" else "none"
    if up is None:
        return fused.gelu_quantize(gate, approximate, **target(scheme))
    return fused.gelu_mul_quantize(gate, up, approximate, **target(scheme))


def row_codes(q: QTensor, dtype: torch.dtype) -> RowCodes:
    """View codes ``[..., K]`` as the rows that ``Fp8Linear.compute`` takes."""
    rows = math.prod(q.shape[:-1])
    data = q.data.reshape(rows, q.shape[-1])
    return RowCodes(data, q.scale.reshape(rows, q.scale.shape[-1]), q.group, q.shape, dtype)


def activation_kind(act_fn: object) -> str | None:
    """Name the activation of a feed-forward, ``None`` if no kernel has it."""
    name = type(act_fn).__name__
    if type(act_fn) is nn.SiLU or act_fn is F.silu or name == "SiLUActivation":
        return "silu"
    if type(act_fn) is nn.GELU:
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    return "gelu_tanh" if name in ("GELUTanh", "PytorchGELUTanh") else None


def any_trained(*layers: nn.Module | None) -> bool:
    """Say whether a Parameter of these modules collects gradients now."""
    return torch.is_grad_enabled() and any(
        p.requires_grad for m in layers if m is not None for p in m.parameters()
    )


@functools.cache
def _nan(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, device=device, dtype=dtype)
