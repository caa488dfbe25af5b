"""vLLM's online methods for layers of experts: dense weights in, FP8 weights kept.

Source: ``fp8.py``, ``mxfp8.py`` and ``moe_base.py`` of
``vllm/model_executor/layers/quantization/online``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.arriving import Arriving, Loader, OnlineMethod, check_coded, fill
from fp8kit.errors import InvalidValue, check_choice
from fp8kit.formats import SCHEMES, TENSOR, QTensor, Scheme
from fp8kit.modules.expert_stacks import quantize_stack
from fp8kit.moe.activation import Activation
from fp8kit.moe.functional import experts
from fp8kit.moe.routing import route
from fp8kit.ops.validation import check_options

_GPT_OSS = Activation("silu", interleaved=True, limit=7.0, alpha=1.702, up_offset=1.0)
_ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": _GPT_OSS,
    "silu_no_mul": Activation("silu", gated=False),
    "gelu_no_mul": Activation("gelu", gated=False),
    "relu2_no_mul": Activation("relu2", gated=False),
}
_SHARDS = ("w1", "w2", "w3")
_WORDS = (
    "top_k scoring_func renormalize use_grouped_topk num_expert_group topk_group activation "
    "e_score_correction_bias routed_scaling_factor custom_routing_function expert_map "
    "apply_router_weight_on_input"
).split()


class _OnlineMoEMethod(OnlineMethod):
    """The base of all granularities.

    Args:
        layer: any module. Its ``moe_config`` is read now, and its own attributes (``has_bias``,
            ``activation``, ``expert_map``, ``apply_router_weight_on_input``, ``top_k`` and the
            other options of the router) when weights are made and applied.
        moe: the ``moe_config``, where a layer has none.
    """

    weight_scale_name = "weight_scale"
    _scheme: Scheme

    def __init__(self, layer: nn.Module | None = None, *, moe: Any = None) -> None:
        self.moe = getattr(layer, "moe_config", moe)

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype = torch.bfloat16,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give a module weights of experts on the meta device that load and quantize themselves.

        Args:
            layer: any module.
            num_experts: E.
            hidden_size: H.
            intermediate_size_per_partition: I.
            params_dtype: dtype of the dense weights.
            extra_weight_attrs: ``weight_loader(param, loaded_weight, weight_name, shard_id,
                expert_id)``; by default one that takes ``"w1"`` (gate), ``"w3"`` (up) or ``"w2"``
                (down) of one expert or of all, whatever ``expert_id`` is then, all of one expert,
                or a whole stack, and gives ``True`` for ``return_success``. Anything else becomes
                an attribute of the Parameters.
        """
        e, h, i = num_experts, hidden_size, intermediate_size_per_partition
        columns = _activation(layer, getattr(layer, "activation", "silu")).columns(i)
        for name, value in {
            "num_experts": e,
            "local_num_experts": e,
            "orig_dtype": params_dtype,
            "weight_block_size": self.weight_block_size,
            "w13_input_scale": None,
            "w2_input_scale": None,
        }.items():
            setattr(layer, name, value)
        loader: Loader = extra_weight_attrs.pop("weight_loader", None) or _loader(columns > i)
        shapes: dict[str, tuple[int, ...]] = {"w13_weight": (e, columns, h), "w2_weight": (e, h, i)}
        if getattr(self.moe, "has_bias", False) or getattr(layer, "has_bias", False):
            shapes |= {"w13_bias": (e, columns), "w2_bias": (e, h)}
        arriving = self._await(layer)
        for name, shape in shapes.items():
            arriving.expect(name, shape, params_dtype, loader, **extra_weight_attrs)

    def _quantized(self, arriving: Arriving) -> dict[str, Tensor]:
        found = {name: arriving.take(name) for name in arriving.names if name.endswith("_bias")}
        for part in ("w13", "w2"):
            q = quantize_stack(arriving.take(f"{part}_weight"), self._scheme, False, [])
            scale = q.scale.flatten() if self._scheme.weight == TENSOR else q.scale
            found |= {f"{part}_weight": q.data, f"{part}_{self.weight_scale_name}": scale}
        return found

    @names_wrong_argument
    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | int | None = None,
        shared_experts: nn.Module | None = None,
        shared_experts_input: Tensor | None = None,
        router_logits: Tensor | None = None,
        **words: Any,
    ) -> Tensor:
        """Compute a layer of experts.

        Args:
            layer: whose weights were processed.
            x: bf16, fp16 or fp32 ``[M, H]``.
            topk_weights: float ``[M, k]``.
            topk_ids: integer ``[M, k]``.
            shared_experts: a module whose result for every token is added.
            shared_experts_input: the input of ``shared_experts``; by default ``x``.
            router_logits: float ``[M, E]``, from which experts are chosen here. In vLLM before 0.12
                they come third, and the number of experts per token fourth; that works here, too.
            words: options of the router and the experts, by default attributes of the layer:
                ``top_k``, ``scoring_func``, ``renormalize``, ``use_grouped_topk``,
                ``num_expert_group``, ``topk_group``, ``e_score_correction_bias``,
                ``routed_scaling_factor``, ``custom_routing_function``, ``expert_map``,
                ``apply_router_weight_on_input``, ``activation``.

        Returns:
            ``[M, H]`` in the dtype of ``x``.

        Raises:
            RuntimeError: if the weights were not processed yet.
            TypeError: for an unknown option that is set, or logits without ``top_k``.
            ValueError: if neither logits nor ids with weights are given, or groups are asked for
                and not numbered.
        """
        check_options([n for n, v in words.items() if _is_set(v)], _WORDS)
        given = {n: getattr(layer, n) for n in _WORDS if hasattr(layer, n)}
        given |= {n: v for n, v in words.items() if v is not None}
        if isinstance(topk_ids, int):
            router_logits, given["top_k"] = topk_weights, topk_ids
        elif topk_ids is None:
            router_logits = topk_weights if router_logits is None else router_logits
        if router_logits is not None:
            ids, weights = _routed(x, router_logits, given)
        else:
            if not isinstance(topk_ids, Tensor) or topk_weights is None:
                raise InvalidValue(
                    "Got neither topk_weights with topk_ids nor router_logits.",
                    "Experts are given with their weights, or chosen from logits.",
                    "Pass both of the router's results, or router_logits= and top_k=.",
                )
            ids, weights = topk_ids, topk_weights
        y = experts(
            x,
            self._weight(layer, "w13"),
            self._weight(layer, "w2"),
            ids,
            weights,
            activation=_activation(layer, given.get("activation", "silu")),
            bias13=getattr(layer, "w13_bias", None),
            bias2=getattr(layer, "w2_bias", None),
            expert_map=given.get("expert_map"),
            router_weight_on_input=bool(given.get("apply_router_weight_on_input", False)),
        )
        if shared_experts is None:
            return y
        shared: Tensor = shared_experts(x if shared_experts_input is None else shared_experts_input)
        return y + shared

    def apply_monolithic(
        self, layer: nn.Module, x: Tensor, router_logits: Tensor, **words: Any
    ) -> Tensor:
        """Compute ``apply`` for the logits of the router."""
        return self.apply(layer, x, router_logits=router_logits, **words)

    def _weight(self, layer: nn.Module, part: str) -> QTensor:
        codes = layer.get_parameter(f"{part}_weight").detach()
        check_coded(codes)
        scale = layer.get_parameter(f"{part}_{self.weight_scale_name}").detach()
        group = self._scheme.weight
        return QTensor(codes, scale.reshape(-1, 1, 1) if group == TENSOR else scale, group)


class Fp8PerTensorOnlineMoEMethod(_OnlineMoEMethod):
    """Experts with one scale for each weight of each expert.

    After loading, ``w13_weight`` and ``w2_weight`` are FP8 and ``w13_weight_scale`` and
    ``w2_weight_scale`` fp32 ``[E]``, as in vLLM.

    Args:
        layer: any module, whose ``moe_config`` is kept as ``moe``; may be left out.
        moe: the ``moe_config``, where there is no layer or it has none.

    Example:
        >>> method = fp8kit.compat.Fp8PerTensorOnlineMoEMethod(layer=layer)
        >>> method.create_weights(layer, 8, 64, 128, torch.bfloat16)
    """

    _scheme = SCHEMES["FP8_TENSOR"]


class Fp8PerBlockOnlineMoEMethod(_OnlineMoEMethod):
    """Experts with a scale for each 128x128 block of each weight.

    After loading, scales are ``w13_weight_scale_inv`` and ``w2_weight_scale_inv``, fp32
    ``[E, ceil(rows / 128), ceil(columns / 128)]``, as in vLLM. No size is rounded up to 128.

    Args:
        layer: as in ``Fp8PerTensorOnlineMoEMethod``.
        moe: likewise.

    Example:
        >>> method = fp8kit.compat.Fp8PerBlockOnlineMoEMethod(layer=layer)
    """

    weight_block_size = [128, 128]  # noqa: RUF012  (an attribute as in vLLM, never written)
    weight_scale_name = "weight_scale_inv"
    _scheme = SCHEMES["FP8_BLOCK"]


class Fp8PtpcOnlineMoEMethod(_OnlineMoEMethod):
    """Experts with a scale for each row of each weight; each token has its own.

    After loading, ``w13_weight_scale`` and ``w2_weight_scale`` are fp32 ``[E, rows, 1]``, as in
    vLLM.

    Args:
        layer: as in ``Fp8PerTensorOnlineMoEMethod``.
        moe: likewise.

    Example:
        >>> method = fp8kit.compat.Fp8PtpcOnlineMoEMethod(layer=layer)
    """

    _scheme = SCHEMES["FP8_DYNAMIC"]


class Mxfp8OnlineMoEMethod(_OnlineMoEMethod):
    """Experts in MXFP8.

    After loading, ``w13_weight_scale`` and ``w2_weight_scale`` have E8M0 bytes
    ``[E, rows, ceil(columns / 32)]``.

    Args:
        layer: as in ``Fp8PerTensorOnlineMoEMethod``.
        moe: likewise.

    Example:
        >>> method = fp8kit.compat.Mxfp8OnlineMoEMethod(layer=layer)
    """

    _scheme = SCHEMES["MXFP8"]


def _is_set(value: Any) -> bool:
    """Return whether an option is set; -1 (all experts), ``False`` and ``None`` set nothing."""
    return not (value is None or value is False or (isinstance(value, int) and value == -1))


def _routed(x: Tensor, logits: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Choose experts from the router's logits; return ids and weights."""
    top_k: Any = given.get("top_k")  # route names what is missing
    scale = float(given.get("routed_scaling_factor") or 1.0)
    renormalize = bool(given.get("renormalize", True))
    custom = given.get("custom_routing_function")
    if custom is not None:
        weights, ids = custom(x, logits, top_k, renormalize)
        return ids, weights * scale
    grouped = given.get("use_grouped_topk", given.get("num_expert_group") is not None)
    if grouped and given.get("num_expert_group") is None:
        raise InvalidValue(
            "Got use_grouped_topk without num_expert_group.",
            "A token chooses its experts from topk_group of num_expert_group groups.",
            "Pass both, or leave out use_grouped_topk.",
        )
    return route(
        logits,
        top_k,
        scoring=given.get("scoring_func", "softmax"),
        renormalize=renormalize,
        groups=given.get("num_expert_group") if grouped else None,
        top_groups=given.get("topk_group") if grouped else None,
        correction_bias=given.get("e_score_correction_bias"),
        scaling_factor=scale,
    )


def _activation(layer: nn.Module, given: Any) -> Activation:
    """Return the activation that ``given`` names, with the layer's ``swiglu_limit``."""
    if isinstance(given, Activation):
        return given
    word = str(getattr(given, "value", given)).lower()
    remedy = "Set layer.activation to one of these, or to a fp8kit.moe.Activation."
    check_choice("activation", word, _ACTIVATIONS, remedy)
    found = _ACTIVATIONS[word]
    limit = getattr(layer, "swiglu_limit", None)
    return found if limit is None or not found.gated else replace(found, limit=float(limit))


def _loader(gated: bool) -> Loader:
    """Return the default loader, of a stack, an expert, or a part of either or of all."""

    def load(
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str = "",  # noqa: ARG001  (given by position in vLLM)
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        if shard_id is not None and shard_id not in (_SHARDS if gated else _SHARDS[:2]):
            raise InvalidValue(
                f"Got shard_id={shard_id!r} of experts {'with' if gated else 'without'} a gate.",
                "Shards of an expert are 'w1' (gate), 'w2' (down) and 'w3' (up); without a gate "
                "'w1' (up) and 'w2'.",
                "Pass one of these.",
            )
        target = param
        if expert_id is not None and loaded_weight.dim() < param.dim():  # else it is of all
            if not (isinstance(expert_id, int) and 0 <= expert_id < len(param)):
                raise InvalidValue(
                    f"Got expert_id={expert_id!r} for {len(param)} experts.",
                    "It is the row of the expert in the stack.",
                    "Leave out the experts of other ranks, which expert_map maps to -1.",
                )
            target = param[expert_id]
        if gated and shard_id in ("w1", "w3"):
            dim = 1 + target.dim() - param.dim()
            half = target.shape[dim] // 2
            target = target.narrow(dim, half if shard_id == "w3" else 0, half)
        fill(target, loaded_weight, "Pass shard_id and expert_id for a part of the stack.")
        return True if return_success else None

    return load
