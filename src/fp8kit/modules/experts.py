"""``Fp8Experts``: the package's own FP8 experts; ``library_experts`` has those of libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import InvalidValue, check_switch
from fp8kit.formats import QTensor, Scheme
from fp8kit.modules import expert_stacks, layer_options, refusals
from fp8kit.modules.entries import stored_tensors
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.parameters import empty_tensors, frozen, written_together
from fp8kit.moe.activation import Activation
from fp8kit.moe.arguments import check_activation, check_rows, flat_routes, stacked_scale
from fp8kit.moe.functional import experts
from fp8kit.moe.routing import pair_of, tokens_per_expert
from fp8kit.ops import scale_validation, validation

Routing = Callable[[Tensor], tuple[Tensor, Tensor]]
_SWIGLU = Activation()


class Fp8Experts(ExpertTensors):
    """The experts of a layer: ``sum_j weight_j * (act(x @ gate_up[e_j].T) @ down[e_j].T)``.

    It holds ``gate_up_proj`` (FP8 ``[E, 2 I, H]``; ``up_proj`` ``[E, I, H]`` without a gate) and
    ``down_proj`` (FP8 ``[E, H, I]``), each with ``<name>_scale`` (``stack_scale_shape``), with
    biases ``<name>_bias``, and for static schemes ``<name>_input_scale`` (fp32 ``[1, 1]``). All are
    frozen Parameters: ``state_dict()`` is the checkpoint. Casts such as ``.half()`` change biases
    and ``compute_dtype``, never codes or scales. Gradients reach the input and router weights.

    A new layer is uninitialized, like ``torch.empty``; make a filled one with ``from_dense`` or
    ``from_quantized``, or load a ``state_dict``. These attributes may be set at any time:
    ``routing``, a function from logits to ids and weights, such as
    ``functools.partial(fp8kit.moe.route, top_k=2)``; ``router_weight_on_input`` (Llama-4);
    ``batch_invariant``; ``shared``, how many experts at the end of the stack every token takes.

    Args:
        num_experts: E, shared ones included.
        hidden_size: H.
        intermediate_size: I.
        activation: what is computed between the two products.
        scheme: a preset name or a ``Scheme``.
        bias: whether to hold biases of ``compute_dtype``.
        device: where the Parameters live; ``"meta"`` allocates nothing.
        dtype: the compute dtype: bf16, fp16 or fp32.

    Raises:
        TypeError: if ``activation``, ``bias`` or ``dtype`` is of another type.
        ValueError: for a size, scheme, device or ``dtype`` that a layer cannot have.

    Example:
        >>> layer = fp8kit.Fp8Experts.from_dense(gate_up, down)  # [8, 2 I, H] and [8, H, I]
        >>> layer(x, *fp8kit.moe.route(logits, 2)).shape
        torch.Size([5, 256])
    """

    routing: Routing | None = None
    router_weight_on_input = False
    batch_invariant = False
    shared = 0
    down_proj: nn.Parameter
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
        check_activation(activation)
        layer_options.check_new(self, hidden_size, intermediate_size, bias, device, dtype)
        validation.check_size("num_experts", num_experts)
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size, self.activation = intermediate_size, activation
        first = "gate_up_proj" if activation.gated else "up_proj"
        self.stacks = ExpertStacks(first, "down_proj", activation)
        self.scheme, self.originals = Scheme.of(scheme), {}
        self.compute_dtype = dtype or torch.get_default_dtype()
        for name, (n, k) in self._matrices().items():
            held = empty_tensors((num_experts, n, k), self.scheme, device, name)
            for key, tensor in held.items():
                self._hold(key, tensor)
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
        """Quantize dense experts one by one; the dense tensors are left untouched.

        Args:
            gate_up: bf16, fp16 or fp32 ``[E, 2 I, H]`` (``[E, I, H]`` without a gate), or an
                iterable of E matrices.
            down: ``[E, H, I]``, or an iterable of E matrices.
            scheme: a preset name or a ``Scheme``.
            activation: what is computed between the products, and the order of gate and up rows.
            biases: of both products, ``[E, 2 I]`` and ``[E, H]``; Parameters are shared.
            input_scales: of both products, fp32 ``[1, 1]``, needed by static schemes.
            transposed: matrices are ``[H, 2 I]`` and ``[I, H]`` (GPT-OSS, Llama-4).

        Raises:
            TypeError: if a weight is no float tensor, or another argument is of the wrong type.
            ValueError: if shapes, scheme or scales do not fit.

        Example:
            >>> layer = Fp8Experts.from_dense(gate_up, down, "FP8_BLOCK")
        """
        scheme = Scheme.of(scheme)
        check_switch("transposed", transposed)
        dtypes: list[torch.dtype] = []
        w13 = expert_stacks.quantize_stack(gate_up, scheme, transposed, dtypes)
        w2 = expert_stacks.quantize_stack(down, scheme, transposed, dtypes)
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
            gate_up: codes ``[E, 2 I, H]`` (``[E, I, H]`` without a gate), with scales of the
                scheme's weight granularity; for a rebased scheme MX scales, and codes are copied.
            down: codes ``[E, H, I]``, likewise.
            scheme: a preset name or a ``Scheme``.
            activation: what is computed between the products, and the order of gate and up rows.
            biases: as in ``from_dense``.
            input_scales: as in ``from_dense``.
            dtype: the compute dtype.

        Raises:
            TypeError: if a weight is no ``QTensor``, or another argument is of the wrong type.
            ValueError: if shapes, granularity, devices or scales do not fit the scheme.

        Example:
            >>> layer = Fp8Experts.from_quantized(w13, w2, "FP8_BLOCK")
        """
        scheme = Scheme.of(scheme)
        expert_stacks.check_pair("biases", biases)
        expert_stacks.check_pair("input_scales", input_scales)
        count, hidden, intermediate = expert_stacks.stack_extents(down)
        layer = cls(count, hidden, intermediate, activation, scheme, False, "meta", dtype)
        scales = input_scales or (None, None)
        for name, q, bias, input_scale in zip(
            layer._matrices(), (gate_up, down), biases or (None, None), scales, strict=True
        ):
            validation.check_quantized(name, q)
            expert_stacks.check_extents(name, q, (count, *layer._matrices()[name]))
            validation.check_codes(name, q.data.dtype, scheme)
            validation.activation_format(
                q.group, scheme.stored if scheme.rebased else scheme, input_scale
            )
            if input_scale is not None:
                scale_validation.check_input_scale(input_scale, q.shape, q.device, wait=True)
            whole = QTensor(q.data, stacked_scale(q).contiguous(), q.group)
            for key, tensor in stored_tensors(whole, scheme, name).items():
                layer._hold(key, tensor)
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
        shared_input: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute ``[..., H]`` from ``[..., H]``, in the dtype of the input (or autocast's).

        Args:
            hidden_states: bf16, fp16 or fp32 ``[..., H]``.
            top_k_index: int32 or int64 ``[..., k]``.
            top_k_weights: float ``[..., k]``.
            logits: float ``[..., E]`` for ``routing``, instead of ids and weights.
            shared_input: read by the shared experts instead of ``hidden_states``, and like it; the
                rounded result of the shared experts is added to that of the others.
            shared_weights: float ``[..., shared]``, weights of the shared experts; ones if omitted.

        Raises:
            TypeError, ValueError: if dtypes, shapes or devices do not fit, or as ``route`` raises.
            UnsupportedError: if no backend computes it.
        """
        if shared_input is not None:
            routed, shared = self.apart(
                hidden_states, top_k_index, top_k_weights, logits=logits,
                shared_input=shared_input, shared_weights=shared_weights,
            )  # fmt: skip
            return routed + shared
        check_rows("hidden_states", hidden_states)
        ids, weights = self._routed(hidden_states, top_k_index, top_k_weights, logits)
        if self.shared or shared_weights is not None:
            more_ids, more_weights = self._shared_pairs(ids, weights, shared_weights)
            ids, weights = torch.cat([ids, more_ids], 1), torch.cat([weights, more_weights], 1)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = experts(rows, ids=ids, weights=weights, **self._options())
        return y.view(hidden_states.shape)

    def apart(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        logits: Tensor | None = None,
        shared_input: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the two summands of ``forward``: of the routed and of the shared experts.

        Args:
            hidden_states: as in ``forward``, like all other arguments.
            top_k_index: ids.
            top_k_weights: weights.
            logits: instead of ids and weights.
            shared_input: read by the shared experts instead of ``hidden_states``.
            shared_weights: of the shared experts.
        """
        given = hidden_states if shared_input is None else shared_input
        for name, tensor in (("hidden_states", hidden_states), ("shared_input", given)):
            check_rows(name, tensor)
        ids, weights = self._routed(hidden_states, top_k_index, top_k_weights, logits)
        also = self._shared_pairs(ids, weights, shared_weights)
        routed, common = (
            experts(x.reshape(-1, x.shape[-1]), ids=i, weights=w, **self._options()).view(x.shape)
            for x, i, w in ((hidden_states, ids, weights), (given, *also))
        )
        return routed, common

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights by ``routing``.

        Raises ``ValueError`` if it is ``None``, and ``TypeError`` if it returns anything else.
        """
        check_rows("logits", logits)
        if self.routing is None:
            raise InvalidValue(
                "Got logits for a layer without a routing.",
                "routing is a function from logits to ids and weights.",
                "Set layer.routing = functools.partial(fp8kit.moe.route, top_k=2), or pass ids "
                "and weights.",
            )
        return pair_of(self.routing(logits.reshape(-1, logits.shape[-1])), "layer.routing")

    @property
    def num_ids(self) -> int:
        """The number of expert ids, shared ones included: E until ``place`` changes the rows."""
        return self.num_experts if self.expert_map is None else self.expert_map.shape[0]

    def count_tokens(self, on: bool = True) -> None:
        """Start or stop counting the tokens of each id in ``tokens`` (int64, from zero).

        Args:
            on: whether later calls are counted. Layers do not count by default, at no cost.
        """
        check_switch("on", on)
        device = self.down_proj.device
        self.tokens = torch.zeros(self.num_ids, dtype=torch.int64, device=device) if on else None

    @torch.no_grad()
    def place(self, placement: Tensor) -> None:
        """Rearrange experts, and replicate or drop some; tokens take turns among replicas.

        Ids keep their meaning. If the number of rows stays, all tensors are written in place, so
        CUDA graphs captured after the first call stay valid (the first call makes ``expert_map``).
        One stack at a time is copied on the way.

        Args:
            placement: integer ``[E']``: for each row of the new stack, the id that it holds.

        Raises:
            TypeError, ValueError: if it is no vector of ids, or has one that is not held here.

        Example:
            >>> layer.place(torch.tensor([0, 1, 2, 3, 3]))  # two replicas of the last expert
        """
        slots, ids, device = expert_stacks.slots_of(placement), self.num_ids, self.down_proj.device
        homes = list(range(ids)) if self.expert_map is None else self.expert_map[:, 0].tolist()
        source = torch.tensor(expert_stacks.placed_rows(slots, homes), device=device)
        table = torch.tensor(expert_stacks.expert_table(slots, ids), device=device)
        with written_together(self, self.stacks.names):
            for name, held in list(self._parameters.items()):
                if held is not None and not name.endswith("_input_scale"):
                    self._refill(name, held, source)
            self.num_experts = len(slots)
            if self.expert_map is not None and self.expert_map.shape == table.shape:
                self.expert_map.copy_(table)
            else:
                self.expert_map = table

    def _refill(self, name: str, held: nn.Parameter, source: Tensor) -> None:
        raw = held.detach().view(torch.uint8) if held.element_size() == 1 else held.detach()
        rows = raw.index_select(0, source)
        if rows.shape == raw.shape:
            raw.copy_(rows)
        else:
            self._hold(name, rows.view(held.dtype))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Accept a placed ``state_dict``; refuse one in the order of ids for a placed layer."""
        held, arrived = self.expert_map, state_dict.get(f"{prefix}expert_map")
        down = state_dict.get(f"{prefix}down_proj", self.down_proj)
        if arrived is None and held is not None and down is not self.down_proj:
            if reason := expert_stacks.rearranged(held, self.num_experts, prefix.rstrip(".")):
                rest[-1].append(reason)
                return
            state_dict = {**state_dict, f"{prefix}expert_map": held}
        elif arrived is not None and held is None and down.shape == self.down_proj.shape:
            self.expert_map = torch.empty_like(arrived, device=self.down_proj.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _routed(
        self, x: Tensor, ids: Tensor | None, weights: Tensor | None, logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if x.dim() > 2:
            _check_leading(x, ids, weights, logits)
        if logits is None:
            ids, weights = flat_routes(ids, weights)
        elif ids is None and weights is None:
            ids, weights = self.route(logits)
        else:
            raise InvalidValue(
                "Got logits beside ids or weights.",
                "layer.routing makes ids and weights of logits, so one of them would be ignored.",
                "Pass logits alone, or ids and weights.",
            )
        if self.tokens is not None:
            self.tokens += tokens_per_expert(ids, self.tokens.shape[0])
        return ids, weights

    def _shared_pairs(
        self, ids: Tensor, weights: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ids and weights of the shared experts for every token; they are the last ids."""
        if not 0 < self.shared <= self.num_ids:
            raise InvalidValue(
                f"Got arguments for shared experts, or layer.shared={self.shared}.",
                f"The last layer.shared of {self.num_ids} experts are shared.",
                "Set layer.shared, or leave the arguments out.",
            )
        first, m = self.num_ids - self.shared, ids.shape[0]
        every = torch.arange(first, self.num_ids, device=ids.device, dtype=ids.dtype)
        if given is None:
            factors = weights.new_ones(m, self.shared)
        else:
            factors = given.reshape(-1, self.shared).to(weights.dtype)
        return every.expand(m, -1), factors

    def _options(self) -> dict[str, Any]:
        """Return the keywords of ``moe.experts`` except input, ids and weights."""
        w13, w2 = map(self.operand, self.stacks.names)
        return {
            **super()._options(), "w13": w13, "w2": w2, "activation": self.activation,
            "expert_map": self.expert_map, "router_weight_on_input": self.router_weight_on_input,
            "batch_invariant": self.batch_invariant,
        }  # fmt: skip

    def extra_repr(self) -> str:
        """Describe the layer in ``print(model)``."""
        sizes = f"{self.num_experts}, {self.hidden_size}, {self.intermediate_size}"
        return f"{sizes}, {self.activation}, scheme={self.scheme}, dtype={self.compute_dtype}"

    def _matrices(self) -> dict[str, tuple[int, int]]:
        (first, down), hidden, inner = self.stacks.names, self.hidden_size, self.intermediate_size
        return {first: (self.activation.columns(inner), hidden), down: (hidden, inner)}

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None and not isinstance(tensor, nn.Parameter):
            tensor = frozen(tensor)
        self.register_parameter(name, tensor)

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script`` with an error that says what to use instead."""
        raise refusals.scripting("an Fp8Experts")


def _check_leading(x: Tensor, *routes: Tensor | None) -> None:
    """Raise if rows of routes are not ordered as the tokens; dimensions of 1 change no order."""
    for given in routes:
        if not isinstance(given, Tensor) or given.dim() < 3:
            continue
        ours, theirs = ([n for n in t.shape[:-1] if n != 1] for t in (x, given))
        if len(theirs) > 1 and ours != theirs:
            raise InvalidValue(
                f"Got tokens {tuple(x.shape)}, and ids, weights or logits {tuple(given.shape)}.",
                "All but the last dimension are those of the tokens, or one for all of them.",
                "Transpose them, or flatten both in the same order.",
            )
