"""Peers that compute layers of experts: Transformers in bf16, and vLLM 0.25 in FP8.

Transformers has two ways, ``batched_mm`` and ``grouped_mm`` of ``transformers.integrations.moe``;
the same operators are called here on a layer with gates, without biases.

vLLM's Triton experts come from a folder (``--vllm FOLDER``) that holds

* ``vllm/``: the package, or the part of it that ``TritonExperts`` imports, with a
  ``FusedMoEQuantConfig(w1_scale, w2_scale, per_token, block_shape)``;
* ``moe.so`` and ``c.so``: its compiled operators, plain or as ``.so.xz``;
* ``fallback_ops.py``, optional: functions that replace operators that do not run here.

They are called as ``FusedMoEKernelModularImpl`` calls them, without the last copy of the result.
"""

from __future__ import annotations

import importlib
import lzma
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from checking import reason
from timing import Case

E4M3 = torch.float8_e4m3fn
_BLOCK = 128
_LAYERS = "vllm.model_executor.layers.fused_moe"


class Dense(NamedTuple):
    """bf16 weights of all experts: ``[E, 2 I, H]`` and ``[E, H, I]``."""

    w13: Tensor
    w2: Tensor


class Coded(NamedTuple):
    """The same weights in FP8."""

    w13: fp8kit.QTensor
    w2: fp8kit.QTensor


class Routes(NamedTuple):
    """The routing of all tokens: expert ids ``int32 [M, k]`` and weights ``float32 [M, k]``."""

    ids: Tensor
    weights: Tensor


@dataclass
class ExpertLayer:
    """The input, routes and weights of every case; calls alternate between routes and copies.

    Args:
        x: bf16 ``[M, H]``.
        routes: one per turn; call ``i`` uses the routes ``i``.
        dense: copies of the bf16 weights.
        coded: the same copies in FP8, by granularity: ``"row"`` and, if blocks fit, ``"block"``.
    """

    x: Tensor
    routes: list[Routes]
    dense: list[Dense]
    coded: dict[str, list[Coded]]


def silu_and_mul(y: Tensor) -> Tensor:
    """Multiply the second half of each row by SiLU of the first."""
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def batched_mm(x: Tensor, dense: Dense, ids: Tensor, weights: Tensor) -> Tensor:
    """Gather the weights of each pair (token, expert), and multiply pair by pair; ``ids`` int64."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], dim=0)[:, :, None]
    inner = silu_and_mul(torch.bmm(dense.w13[flat], rows).squeeze(-1))
    y = torch.bmm(dense.w2[flat], inner[:, :, None]).squeeze(-1) * weights.reshape(-1, 1)
    return y.view(*ids.shape, -1).sum(dim=1).to(x.dtype)


def grouped_mm(x: Tensor, dense: Dense, ids: Tensor, weights: Tensor) -> Tensor:
    """Sort pairs by expert, and multiply group by group; ``ids`` int64."""
    experts, (tokens, top_k) = dense.w13.shape[0], ids.shape
    by_expert, order = ids.reshape(-1).sort()
    # histc counts integers on a GPU only
    numbers = by_expert.int() if ids.is_cuda else by_expert.float()
    ends = torch.histc(numbers, experts, 0, experts - 1).cumsum(0, dtype=torch.int32)
    inner = silu_and_mul(F.grouped_mm(x[order // top_k], dense.w13.mT, offs=ends))
    y = F.grouped_mm(inner, dense.w2.mT, offs=ends) * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return y[back].view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def transformers_case(function: Callable[..., Tensor], layer: ExpertLayer) -> Case:
    """Build a case of one of the two functions, with the dtypes of a model's ids and weights."""
    routes = [(ids.long(), weights.to(layer.x.dtype)) for ids, weights in layer.routes]
    dense = layer.dense
    return lambda i: function(layer.x, dense[i % len(dense)], *routes[i])


def unpacked(folder: Path, into: Path, names: Sequence[str] = ("moe", "c")) -> list[Path]:
    """Return the paths of compiled operators; compressed ones are unpacked into ``into``."""

    def one(name: str) -> Path | None:
        plain, packed = folder / f"{name}.so", folder / f"{name}.so.xz"
        if plain.is_file() or not packed.is_file():
            return plain if plain.is_file() else None
        with lzma.open(packed) as source, (into / plain.name).open("wb") as target:
            shutil.copyfileobj(source, target)
        return into / plain.name

    with ThreadPoolExecutor() as threads:
        return [path for path in threads.map(one, names) if path is not None]


@dataclass
class Vllm:
    """vLLM's Triton experts.

    Args:
        experts: the class ``TritonExperts``.
        config: the class ``FusedMoEQuantConfig``.
        quantize: the function that quantizes the input.
        activation: vLLM's name of gated SiLU.
        version: version of the package.
        activate_and_quantize: the function between the two GEMMs, for groups of 128.
        operators: by name, what runs: vLLM's own operator, or a fallback and the reason.
    """

    experts: Any
    config: Any
    quantize: Callable[..., tuple[Tensor, Tensor]]
    activation: Any
    version: str
    activate_and_quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    operators: dict[str, str] = field(default_factory=dict)

    def case(self, kind: str, layer: ExpertLayer) -> Case:
        """Build the layer with scales per channel and token (``"row"``) or of blocks."""
        block = [_BLOCK, _BLOCK] if kind == "block" else None
        copies = []
        for w13, w2 in layer.coded[kind]:
            scales = w13.scale.contiguous(), w2.scale.contiguous()
            config = self.config(*scales, block is None, block)
            copies.append((self.experts(None, config), w13, w2))

        def run(i: int) -> Tensor:
            experts, w13, w2 = copies[i % len(copies)]
            return self._apply(experts, layer.x, w13.data, w2.data, layer.routes[i])

        return run

    def _apply(self, experts: Any, x: Tensor, w13: Tensor, w2: Tensor, routes: Routes) -> Tensor:
        config, (count, wide, hidden) = experts.quant_config, w13.shape
        codes, scale = self.quantize(
            x, None, E4M3, config.per_act_token_quant, block_shape=config.block_shape
        )
        top_k = routes.ids.shape[1]
        *scratch, _ = experts.workspace_shapes(
            x.shape[0], wide, hidden, top_k, count, count, None, self.activation
        )
        first, second = (x.new_empty(math.prod(shape)).view(shape) for shape in scratch)
        y = torch.empty_like(x)
        experts.apply(
            output=y,
            hidden_states=codes,
            w1=w13,
            w2=w2,
            topk_weights=routes.weights,
            topk_ids=routes.ids,
            activation=self.activation,
            global_num_experts=count,
            expert_map=None,
            a1q_scale=scale,
            a2_scale=None,
            workspace13=first,
            workspace2=second,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return y


def load_vllm(folder: Path, libraries: list[Path], device: torch.device) -> Vllm:
    """Import vLLM's experts from a folder, and replace operators that do not run by fallbacks.

    Args:
        folder: described at the head of this file.
        libraries: the paths that ``unpacked`` returned.
        device: the device on which operators are tried.
    """
    sys.path.insert(0, str(folder))
    # vLLM's import compiles helper functions that the layers measured here never call
    with mock.patch.object(torch, "compile", return_value=lambda function: function):
        triton_moe = importlib.import_module(f"{_LAYERS}.experts.triton_moe")
        utils = importlib.import_module(f"{_LAYERS}.utils")
        config = importlib.import_module(f"{_LAYERS}.config").FusedMoEQuantConfig
        package = importlib.import_module("vllm")
    for path in libraries:
        torch.ops.load_library(str(path))
    operators = {
        name: _tried(operator, folder) for name, operator in _operators(utils, device).items()
    }
    silu = triton_moe.MoEActivation.SILU
    # the version of an excerpted package has a suffix behind a dash
    version = str(getattr(package, "__version__", "present")).partition("-")[0]
    ops = importlib.import_module("vllm._custom_ops")

    def activate_and_quantize(y: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = ops.silu_and_mul_per_block_quant(
            y, group_size=_BLOCK, quant_dtype=E4M3
        )
        return found

    found = (triton_moe.TritonExperts, config, utils.moe_kernel_quantize_input)
    return Vllm(*found, silu, version, activate_and_quantize, operators)


class _Operator(NamedTuple):
    """One operator that the layer calls: how to try it, and how to replace it."""

    attempt: Callable[[], object]
    replace: Callable[[Any], None]


def _operators(utils: Any, device: torch.device) -> dict[str, _Operator]:
    ops = importlib.import_module("vllm._custom_ops")
    align = importlib.import_module(f"{_LAYERS}.moe_align_block_size").moe_align_block_size
    experts = importlib.import_module(f"{_LAYERS}.experts.triton_moe").TritonExperts
    x = torch.ones(8, 2 * _BLOCK, device=device, dtype=torch.bfloat16)
    ids = torch.arange(8, device=device, dtype=torch.int32).view(4, 2)

    def put(owner: Any, name: str) -> Callable[[Any], None]:
        return lambda fallback: setattr(owner, name, getattr(fallback, name))

    def put_activation(fallback: Any) -> None:
        def activation(_: Any, kind: Any, y: Tensor, gated: Tensor, **__: Any) -> None:
            del kind
            fallback.silu_and_mul(y, gated)

        experts.activation = activation

    return {
        "moe_align_block_size": _Operator(
            lambda: align(ids, 16, 8), put(ops, "moe_align_block_size")
        ),
        "moe_sum": _Operator(
            lambda: ops.moe_sum(x.view(4, 2, -1), x.new_empty(4, x.shape[1])), put(ops, "moe_sum")
        ),
        "silu_and_mul": _Operator(
            lambda: torch.ops._C.silu_and_mul(x.new_empty(8, _BLOCK), x), put_activation
        ),
        "silu_and_mul_per_block_quant": _Operator(
            lambda: ops.silu_and_mul_per_block_quant(x, group_size=_BLOCK, quant_dtype=E4M3),
            put(ops, "silu_and_mul_per_block_quant"),
        ),
        "scaled_fp8_quant": _Operator(
            lambda: ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True),
            put(ops, "scaled_fp8_quant"),
        ),
        "per_token_group_quant_fp8": _Operator(
            lambda: utils.per_token_group_quant_fp8(x, _BLOCK),
            put(utils, "per_token_group_quant_fp8"),
        ),
    }


def _tried(operator: _Operator, folder: Path) -> str:
    try:
        operator.attempt()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as broken:
        # for whatever reason an operator fails, the folder may hold a fallback
        if not (folder / "fallback_ops.py").is_file():
            return f"fails: {reason(broken)}"
        operator.replace(importlib.import_module("fallback_ops"))
        return f"fallback: {reason(broken)}"
    return "vLLM's"
