"""Norms and gated feed-forwards whose result goes straight into FP8.

A fused norm writes codes and scales and nothing else. What it returns stands for the tensor that
was never written: a NaN, expanded to its shape. The layers behind it know it by identity and take
the codes instead; anything else that read it would see NaN at once, not a wrong number. Where that
could happen, because a layer was wrapped or a hook looks on, and where gradients are wanted or
the input is not on a GPU, these modules compute what they replaced.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8kit import fused
from fp8kit.formats import GROUP128, ROW, QTensor
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared import SharedInput
from fp8kit.unchecked import RowCodes

FUSED_DEVICES = ("cuda",)
_FUSABLE = (ROW, GROUP128)


class FusedRMSNorm(nn.Module):
    """An RMS norm that quantizes for the layers behind it; its ``state_dict`` is that of the norm.

    Args:
        norm: the norm it replaces, with a ``weight``.
        eps: added to the mean square.
        gemma: ``(1 + weight)`` in fp32, rounded once; else Llama's order of roundings.
        consumers: the module that holds the layers behind it, and their names in it.
        group: what these layers share.
    """

    def __init__(
        self,
        norm: nn.Module,
        eps: float,
        gemma: bool,
        consumers: tuple[nn.Module, tuple[str, ...]],
        group: SharedInput,
    ) -> None:
        super().__init__()
        weight = norm.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.variance_epsilon = eps
        self.gemma = gemma
        self.consumers = consumers  # inside a tuple, the module is not registered as a child
        self.group = group

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm ``[..., K]``: the normed tensor, or what stands for it and its offered codes."""
        x = hidden_states
        if not self._can_offer(x):
            return self.unfused(x)
        scheme = self.group.members[0].scheme
        assert scheme.activation is not None
        q = fused.rms_norm_quantize(
            x,
            self.weight,
            self.variance_epsilon,
            weight_offset=1.0 if self.gemma else 0.0,
            rounding="once" if self.gemma else "stepwise",
            group=scheme.activation,
            dtype=scheme.dtype,
            scale_rounding="up" if scheme.ue8m0 else None,
        )
        stand_in = _nan(x.device, x.dtype).expand(x.shape)
        self.group.offer(stand_in, row_codes(q, x.dtype))
        return stand_in

    def unfused(self, x: Tensor) -> Tensor:
        """Norm ``[..., K]`` as the module that was replaced does."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.gemma:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        """Describe the norm in ``print(model)``."""
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}, gemma={self.gemma}"

    def _can_offer(self, x: Tensor) -> bool:
        holder, names = self.consumers
        members = self.group.members
        trained = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        return (
            x.device.type in FUSED_DEVICES
            and not trained
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled(x.device.type)
            and x.dtype == self.weight.dtype
            and takes_codes(members[0])
            and all(getattr(holder, n) is m for n, m in zip(names, members, strict=True))
            and not any(is_watched(m) for m in (self, holder, *members))
        )


class FusedGatedMlp(nn.Module):
    """``down(act(gate(x)) * up(x))`` with activation, product and quantization in one pass.

    Args:
        mlp: the feed-forward it replaces, with ``gate_proj``, ``up_proj``, ``down_proj`` and
            ``act_fn``, which keep their names.
        kind: ``"silu"`` or ``"gelu_tanh"``.
    """

    def __init__(self, mlp: nn.Module, kind: str) -> None:
        super().__init__()
        self.gate_proj = mlp.get_submodule("gate_proj")
        self.up_proj = mlp.get_submodule("up_proj")
        self.down_proj = mlp.get_submodule("down_proj")
        self.act_fn = mlp.get_submodule("act_fn")
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[..., K]`` from ``[..., K]``."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        down = self.down_proj
        trained = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        if (
            gate.device.type not in FUSED_DEVICES
            or trained
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(gate.device.type)
            or not isinstance(down, Fp8Linear)
            or not takes_codes(down)
            or is_watched(down)
        ):
            y: Tensor = down(self.act_fn(gate) * up)
            return y
        scheme = down.scheme
        assert scheme.activation is not None
        fuse = fused.silu_mul_quantize if self.kind == "silu" else fused.gelu_mul_quantize
        q = fuse(
            gate,
            up,
            group=scheme.activation,
            dtype=scheme.dtype,
            scale_rounding="up" if scheme.ue8m0 else None,
        )
        return down.multiply(row_codes(q, gate.dtype))


def takes_codes(layer: Fp8Linear) -> bool:
    """Say whether a layer quantizes its input per row or per 1x128 group, from the data."""
    return layer.scheme.activation in _FUSABLE and not layer.scheme.static


def row_codes(q: QTensor, dtype: torch.dtype) -> RowCodes:
    """View codes ``[..., K]`` as the rows that ``Fp8Linear.multiply`` takes."""
    rows = math.prod(q.shape[:-1])
    data = q.data.reshape(rows, q.shape[-1])
    return RowCodes(data, q.scale.reshape(rows, q.scale.shape[-1]), q.group, q.shape, dtype)


def activation_kind(act_fn: object) -> str | None:
    """Name the activation of a feed-forward, ``None`` if no kernel has it."""
    if isinstance(act_fn, nn.SiLU) or act_fn is F.silu or type(act_fn).__name__ == "SiLUActivation":
        return "silu"
    tanh = isinstance(act_fn, nn.GELU) and act_fn.approximate == "tanh"
    if tanh or type(act_fn).__name__ in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh"
    return None


@functools.cache
def _nan(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, device=device, dtype=dtype)
