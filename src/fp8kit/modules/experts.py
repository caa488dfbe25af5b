"""``Fp8Experts``: the experts of a layer as FP8 codes and scales, all plain Parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fp8kit.errors import teach
from fp8kit.formats import QTensor, Scheme, scale_dtype, stack_scale_shape
from fp8kit.modules.entries import quantize_weight
from fp8kit.modules.expert_tensors import ExpertStacks, ExpertTensors
from fp8kit.modules.parameters import frozen
from fp8kit.moe.activation import Activation
from fp8kit.moe.arguments import stacked_scale
from fp8kit.moe.functional import experts
from fp8kit.moe.routing import tokens_per_expert
from fp8kit.ops import validation

Routing = Callable[[Tensor], tuple[Tensor, Tensor]]
_SWIGLU = Activation()


class Fp8Experts(ExpertTensors):
    """The experts of a layer: ``sum_j weight_j * (act(x @ gate_up[e_j].T) @ down[e_j].T)``.

    It holds ``gate_up_proj`` (FP8 ``[E, 2 I, H]``; ``up_proj`` ``[E, I, H]`` without a gate) and
    ``down_proj`` (FP8 ``[E, H, I]``), for each a ``_scale`` (``stack_scale_shape``), with biases a
    ``_bias`` and for static schemes an ``_input_scale`` (fp32 ``[1, 1]``). All are frozen
    Parameters, so ``state_dict()`` is the checkpoint. Casts such as ``.half()`` change biases and
    ``compute_dtype``, never codes or scales. Gradients flow to the input and the router's weights.

    A new layer is uninitialized, like ``torch.empty``; make a filled one with ``from_dense`` or
    ``from_quantized``, or load a ``state_dict``. These attributes may be set at any time:
    ``routing``, a function from logits to ids and weights, such as
    ``functools.partial(fp8kit.moe.route, top_k=2)``; ``router_weight_on_input`` (Llama-4);
    ``batch_invariant``; ``shared``, how many experts at the end of the stack every token takes.

    Args:
        num_experts: E, shared ones included.
        hidden_size: H.
        intermediate_size: I.
        activation: what stands between the products.
        scheme: a preset name or a ``Scheme``.
        bias: whether to hold biases of ``compute_dtype``.
        device: where the Parameters live; ``"meta"`` allocates nothing.
        dtype: the compute dtype.

    Raises:
        ValueError: if the scheme is unknown.

    Example:
        >>> layer = fp8kit.Fp8Experts.from_dense(gate_up, down)  # [8, 2 I, H] and [8, H, I]
        >>> layer(x, *fp8kit.moe.route(logits, 2)).shape
        torch.Size([5, 256])
    """

    routing: Routing | None = None
    router_weight_on_input = False
    batch_invariant = False
    shared = 0
    expert_map: Tensor | None
    tokens: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation = _SWIGLU,
        scheme: Scheme | str = "FP8_DYNAMIC",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        first = "gate_up_proj" if activation.gated else "up_proj"
        self.stacks = ExpertStacks(first, "down_proj", activation)
        self.scheme, self.originals = Scheme.of(scheme), {}
        self.compute_dtype = dtype or torch.get_default_dtype()
        group, kind = self.scheme.weight, scale_dtype(self.scheme.weight)
        for name, (n, k) in self._matrices().items():
            shape = (num_experts, n, k)
            scales = stack_scale_shape(shape, group)
            self._hold(name, torch.empty(shape, dtype=self.scheme.dtype, device=device))
            self._hold(f"{name}_scale", torch.empty(scales, dtype=kind, device=device))
            biases = torch.empty(num_experts, n, dtype=self.compute_dtype, device=device)
            self._hold(f"{name}_bias", biases if bias else None)
            static = torch.empty(1, 1, dtype=torch.float32, device=device)
            self._hold(f"{name}_input_scale", static if self.scheme.static else None)
        self.register_buffer("expert_map", None)
        self.register_buffer("tokens", None, persistent=False)

    @classmethod
    def from_dense(
        cls,
        gate_up: Tensor | Iterable[Tensor],
        down: Tensor | Iterable[Tensor],
        scheme: Scheme | str = "FP8_DYNAMIC",
        *,
        activation: Activation = _SWIGLU,
        biases: tuple[Tensor, Tensor] | None = None,
        input_scales: tuple[Tensor, Tensor] | None = None,
        transposed: bool = False,
    ) -> Fp8Experts:
        """Quantize dense experts one by one; they are left untouched.

        Args:
            gate_up: bf16, fp16 or fp32 ``[E, 2 I, H]`` (``[E, I, H]`` without a gate), or one
                matrix after the other.
            down: ``[E, H, I]``, or one matrix after the other.
            scheme: a preset name or a ``Scheme``.
            activation: what stands between the products, and how gate and up rows lie.
            biases: of both products, ``[E, 2 I]`` and ``[E, H]``; Parameters are shared.
            input_scales: of both products, fp32 ``[1, 1]``, needed by static schemes.
            transposed: matrices are ``[H, 2 I]`` and ``[I, H]`` (GPT-OSS, Llama-4).

        Raises:
            TypeError: if a weight is no float tensor.
            ValueError: if shapes, scheme or scales do not fit.

        Example:
            >>> layer = Fp8Experts.from_dense(gate_up, down, "FP8_BLOCK")
        """
        scheme = Scheme.of(scheme)
        dtypes: list[torch.dtype] = []
        w13 = _quantized(gate_up, scheme, transposed, dtypes)
        w2 = _quantized(down, scheme, transposed, dtypes)
        return cls.from_quantized(
            w13, w2, scheme, activation=activation, biases=biases, input_scales=input_scales,
            dtype=dtypes[0],
        )  # fmt: skip

    @classmethod
    def from_quantized(
        cls,
        gate_up: QTensor,
        down: QTensor,
        scheme: Scheme | str = "FP8_DYNAMIC",
        *,
        activation: Activation = _SWIGLU,
        biases: tuple[Tensor, Tensor] | None = None,
        input_scales: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Fp8Experts:
        """Wrap codes and scales, without copying them.

        Args:
            gate_up: codes ``[E, 2 I, H]`` (``[E, I, H]`` without a gate).
            down: codes ``[E, H, I]``.
            scheme: a preset name or a ``Scheme``.
            activation: what stands between the products, and how gate and up rows lie.
            biases: as in ``from_dense``.
            input_scales: as in ``from_dense``.
            dtype: the compute dtype.

        Raises:
            ValueError: if shapes, granularity, devices or scales do not fit the scheme.

        Example:
            >>> layer = Fp8Experts.from_quantized(w13, w2, "FP8_BLOCK")
        """
        scheme = Scheme.of(scheme)
        count, hidden, intermediate = _extents(down)
        layer = cls(count, hidden, intermediate, activation, scheme, False, "meta", dtype)
        scales = input_scales or (None, None)
        for name, q, bias, input_scale in zip(
            layer._matrices(), (gate_up, down), biases or (None, None), scales, strict=True
        ):
            validation.check_codes(name, q.data.dtype, scheme)
            validation.activation_format(q.group, scheme, input_scale)
            if input_scale is not None:
                validation.check_input_scale(input_scale, q.shape, q.device, wait=True)
            layer._hold(name, q.data)
            layer._hold(f"{name}_scale", stacked_scale(q).contiguous())
            layer._hold(f"{name}_bias", bias)
            layer._hold(f"{name}_input_scale", input_scale)
        return layer

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Compute ``[..., H]`` from ``[..., H]``, in the dtype of the input (or autocast's).

        Args:
            hidden_states: bf16, fp16 or fp32 ``[..., H]``.
            top_k_index: int32 or int64 ``[..., k]``.
            top_k_weights: float ``[..., k]``.
            logits: float ``[..., E]`` for ``routing``, instead of ids and weights.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if logits is not None:
            ids, weights = self.route(logits)
        else:
            ids, weights = _flat(top_k_index, top_k_weights)
        if self.tokens is not None:
            self.tokens += tokens_per_expert(ids, self.tokens.shape[0])
        ids, weights = self._with_shared(ids, weights)
        w13, w2 = self._operands()
        y = experts(
            x, w13[0], w2[0], ids, weights, activation=self.activation, scheme=self.scheme,
            bias13=w13[1], bias2=w2[1], input_scale13=w13[2], input_scale2=w2[2],
            expert_map=self.expert_map, router_weight_on_input=self.router_weight_on_input,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return y.view(*hidden_states.shape[:-1], y.shape[-1])

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give ids and weights by ``routing``; raises ``ValueError`` if there is none."""
        if self.routing is None:
            raise ValueError(
                teach(
                    "Got logits for a layer without a routing.",
                    "routing is a function from logits to ids and weights.",
                    "Set layer.routing = functools.partial(fp8kit.moe.route, top_k=2), or pass ids "
                    "and weights.",
                )
            )
        return self.routing(logits.reshape(-1, logits.shape[-1]))

    def _with_shared(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if not self.shared:
            return ids, weights
        first = self.num_experts - self.shared
        every = torch.arange(first, self.num_experts, device=ids.device, dtype=ids.dtype)
        ones = weights.new_ones(ids.shape[0], self.shared)
        return torch.cat([ids, every.expand(ids.shape[0], -1)], 1), torch.cat([weights, ones], 1)

    def extra_repr(self) -> str:
        """Describe the layer in ``print(model)``."""
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, {self.activation}, scheme={self.scheme}, dtype={self.compute_dtype}"

    def _matrices(self) -> dict[str, tuple[int, int]]:
        columns = self.activation.columns(self.intermediate_size)
        hidden = self.hidden_size
        return {self.stacks.up: (columns, hidden), "down_proj": (hidden, self.intermediate_size)}

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            tensor = frozen(tensor)
        self.register_parameter(name, tensor)

    def _operands(self) -> list[tuple[QTensor, Tensor | None, Tensor | None]]:
        found = []
        for name in self._matrices():
            held = [getattr(self, name + end) for end in ("", "_scale", "_bias", "_input_scale")]
            q = QTensor(held[0], held[1], self.scheme.weight)
            found.append((q, held[2], held[3]))
        return found


def _quantized(
    dense: Tensor | Iterable[Tensor], scheme: Scheme, transposed: bool, dtypes: list[torch.dtype]
) -> QTensor:
    """Quantize matrix by matrix into one stack; ``dtypes`` gets what they had."""
    matrices: Sequence[Tensor] | Tensor = dense if isinstance(dense, Tensor) else list(dense)
    data: Tensor | None = None
    scale: Tensor | None = None
    for i, matrix in enumerate(matrices):
        matrix = matrix.detach()
        q = quantize_weight(matrix.t() if transposed else matrix, scheme)
        if data is None or scale is None:
            data = q.data.new_empty(len(matrices), *q.data.shape)
            scale = q.scale.new_empty(len(matrices), *q.scale.shape)
            dtypes.append(matrix.dtype)
        data[i].copy_(q.data)
        scale[i].copy_(q.scale)
    if data is None or scale is None:
        raise ValueError(
            teach("Got no experts.", "A layer has at least one.", "Pass [E, N, K] with E >= 1.")
        )
    return QTensor(data, scale, scheme.weight)


def _extents(down: QTensor) -> tuple[int, int, int]:
    validation.check_quantized("down", down)
    if len(down.shape) != 3:
        raise ValueError(
            teach(
                f"Got down of shape {tuple(down.shape)}.",
                "The experts' second weights are [E, H, I].",
                "Stack them.",
            )
        )
    count, hidden, intermediate = down.shape
    return count, hidden, intermediate


def _flat(ids: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    if ids is None or weights is None:
        raise TypeError(
            teach(
                "Got no routing for the tokens.",
                "Experts take ids and weights, or logits.",
                "Pass what fp8kit.moe.route gives, or logits= with layer.routing set.",
            )
        )
    return ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, weights.shape[-1])
