"""Peers that compute layers of experts: grouped FP8 GEMMs of torch and DeepGEMM, and FlashInfer.

Torch and DeepGEMM only multiply. vLLM's quantizers and activation run around their GEMMs, and torch
sorts, pads and adds up the pairs (token, expert), without a host sync. DeepGEMM (``deep_gemm``) has
a contiguous form, which pads each expert's rows to its alignment, and a masked form, which gives
each expert room for every token. FlashInfer's ``mono_moe`` is one kernel for the whole layer; it
takes logits, and serves one shape with up to eight tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert_peers import E4M3, Coded, ExpertLayer, Routes, Vllm
from timing import Case

_BLOCK = 128
_MOST_MASKED = 128  # tokens; each expert has room for all of them
_MASKED_ROWS = 64  # the kernel stores whole tiles, over whatever rows follow
_MONO_SHAPE, _MONO_TOKENS = (256, 1024, 2048), 8  # of ``w13``


class Sorted(NamedTuple):
    """Pairs (token, expert) in the order of their experts.

    Args:
        experts: int64 ``[pairs]``, the expert of each pair, ascending.
        tokens: int64 ``[pairs]``, the token of each pair.
        back: int64 ``[pairs]``, the sorted position of each original pair.
        counts: int64 ``[E]``, the number of pairs of each expert.
    """

    experts: Tensor
    tokens: Tensor
    back: Tensor
    counts: Tensor


def sort_pairs(ids: Tensor, experts: int) -> Sorted:
    """Sort pairs by expert."""
    by_expert, order = ids.reshape(-1).long().sort()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, by_expert, torch.ones_like(by_expert))
    return Sorted(by_expert, order // ids.shape[1], back, counts)


def add_up(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up the weighted rows of each token; ``rows`` are in the original order of pairs."""
    tokens, top_k = weights.shape
    return (rows.view(tokens, top_k, -1) * weights[..., None]).sum(dim=1).to(dtype)


def gathered(codes: Tensor, rows: Tensor) -> Tensor:
    """Gather rows of FP8 codes as bytes, because torch cannot index FP8."""
    return codes.view(torch.uint8)[rows].view(E4M3)


def torch_row(vllm: Vllm, layer: ExpertLayer) -> Case:
    """Torch's grouped GEMM with a scale per token and weight row, fast accumulation."""

    def product(codes: Tensor, scale: Tensor, w: Any, ends: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(
            codes, w.data.mT, scale.view(-1), w.scale.squeeze(-1), offs=ends,
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip

    def run(w13: Any, w2: Any, routes: Routes) -> Tensor:
        found = sort_pairs(routes.ids, w13.data.shape[0])
        ends = found.counts.cumsum(0, dtype=torch.int32)
        codes, scale = vllm.quantize(layer.x, None, E4M3, True)
        up = product(gathered(codes, found.tokens), scale[found.tokens], w13, ends)
        gated = up.new_empty(up.shape[0], up.shape[1] // 2)
        torch.ops._C.silu_and_mul(gated, up)
        codes, scale = vllm.quantize(gated, None, E4M3, True)
        return add_up(product(codes, scale, w2, ends)[found.back], routes.weights, layer.x.dtype)

    return in_turns(run, layer, "row")


def deepgemm_contiguous(vllm: Vllm, layer: ExpertLayer) -> Case:
    """DeepGEMM's contiguous form: the rows of one expert after another, padded to its alignment."""
    gemm = importlib.import_module("deep_gemm")
    get = getattr(gemm, "get_mk_alignment_for_contiguous_layout", None)
    align = get() if get else gemm.get_m_alignment_for_contiguous_layout()

    def run(w13: Any, w2: Any, routes: Routes) -> Tensor:
        (count, wide, hidden), pairs = w13.data.shape, routes.ids.numel()
        found = sort_pairs(routes.ids, count)
        room = (found.counts + align - 1) // align * align
        begins = (room.cumsum(0) - room) - (found.counts.cumsum(0) - found.counts)
        rows = begins[found.experts] + torch.arange(pairs, device=routes.ids.device)
        total = (pairs + min(pairs, count) * (align - 1) + align - 1) // align * align
        of_row = routes.ids.new_full((total,), -1, dtype=torch.int32)
        of_row[rows] = found.experts.int()
        codes, scale = vllm.quantize(layer.x, None, E4M3, False, block_shape=[_BLOCK, _BLOCK])
        x = layer.x.new_empty(total, hidden, dtype=E4M3)
        x.view(torch.uint8)[rows] = codes.view(torch.uint8)[found.tokens]
        x_scale = by_column(total, hidden // _BLOCK, layer.x.device)
        x_scale[rows] = scale[found.tokens]
        up, down = layer.x.new_empty(total, wide), layer.x.new_empty(total, hidden)
        gemm.m_grouped_fp8_gemm_nt_contiguous((x, x_scale), (w13.data, w13.scale), up, of_row)
        h = vllm.activate_and_quantize(up)
        gemm.m_grouped_fp8_gemm_nt_contiguous(h, (w2.data, w2.scale), down, of_row)
        return add_up(down[rows[found.back]], routes.weights, layer.x.dtype)

    return in_turns(run, layer, "block")


def deepgemm_masked(vllm: Vllm, layer: ExpertLayer) -> Case:
    """DeepGEMM's masked form, with room for every token at every expert; for few tokens."""
    gemm = importlib.import_module("deep_gemm")
    product = getattr(gemm, "m_grouped_fp8_gemm_nt_masked", None)
    product = product or gemm.fp8_m_grouped_gemm_nt_masked  # its name before 2.1
    tokens = layer.x.shape[0]
    room = (tokens + _MASKED_ROWS - 1) // _MASKED_ROWS * _MASKED_ROWS

    def run(w13: Any, w2: Any, routes: Routes) -> Tensor:
        (count, wide, hidden), pairs = w13.data.shape, routes.ids.numel()
        found = sort_pairs(routes.ids, count)
        places = torch.arange(pairs, device=routes.ids.device)
        places -= (found.counts.cumsum(0) - found.counts)[found.experts]
        rows = found.experts * room + places
        codes, scale = vllm.quantize(layer.x, None, E4M3, False, block_shape=[_BLOCK, _BLOCK])
        x = layer.x.new_empty(count * room, hidden, dtype=E4M3)
        x.view(torch.uint8)[rows] = codes.view(torch.uint8)[found.tokens]
        x_scale = scale.new_empty(count * room, hidden // _BLOCK)
        x_scale[rows] = scale[found.tokens]
        up = layer.x.new_empty(count, room, wide)
        down = layer.x.new_empty(count, room, hidden)
        taken, mean = found.counts.int(), max(1, pairs // count)
        x, x_scale = x.view(count, room, -1), x_scale.view(count, room, -1)
        product((x, x_scale), (w13.data, w13.scale), up, taken, mean)
        h, h_scale = (t.view(count, room, -1) for t in vllm.activate_and_quantize(up.flatten(0, 1)))
        product((h, h_scale), (w2.data, w2.scale), down, taken, mean)
        return add_up(down.flatten(0, 1)[rows[found.back]], routes.weights, layer.x.dtype)

    return in_turns(run, layer, "block")


def mono(_: Vllm, layer: ExpertLayer) -> Case:
    """FlashInfer's one kernel. It also routes, so it gets logits that give the same weights."""
    api = importlib.import_module("flashinfer.fused_moe.monomoe")
    ups = [api.interleave_for_tma_wgmma_up(w13.data) for w13, _ in layer.coded["block"]]
    scratch, y = api.alloc_scratchpad(layer.x.device), torch.empty_like(layer.x)
    logits = []
    for ids, weights in layer.routes:
        of_token = layer.x.new_full((layer.x.shape[0], ups[0].shape[0]), -100.0)
        logits.append(of_token.scatter_(1, ids.long(), weights.log().to(layer.x.dtype)))

    def run(i: int) -> Tensor:
        at = i % len(ups)
        w13, w2 = layer.coded["block"][at]
        scales = w13.scale, w2.scale
        top_k = layer.routes[i].ids.shape[1]
        return api.mono_moe(
            layer.x, logits[i], ups[at], scales[0], w2.data, scales[1], top_k,
            out=y, scratchpad=scratch, interleave_up=False,
        )  # fmt: skip

    return run


def by_column(rows: int, columns: int, device: torch.device) -> Tensor:
    """Allocate scales ``[rows, columns]`` in the layout that DeepGEMM's TMA reads."""
    return torch.empty(columns, (rows + 3) // 4 * 4, device=device).t()[:rows]


def in_turns(run: Callable[[Any, Any, Routes], Tensor], layer: ExpertLayer, kind: str) -> Case:
    """Return a case that alternates between routes and copies of the weights."""
    coded: list[Coded] = layer.coded[kind]
    return lambda i: run(*coded[i % len(coded)], layer.routes[i])


Build = Callable[[Vllm, ExpertLayer], Case]
# each case: granularity, the package that it needs, its builder
GROUPED: dict[str, tuple[str, str, Build]] = {
    "torch_grouped_row": ("row", "torch", torch_row),
    "deepgemm_contiguous": ("block", "deep_gemm", deepgemm_contiguous),
    "deepgemm_masked": ("block", "deep_gemm", deepgemm_masked),
    "flashinfer_mono": ("block", "flashinfer", mono),
}


def serves(name: str, w13: tuple[int, int, int], tokens: int) -> bool:
    """Return whether a case supports a layer and a token count.

    Args:
        name: name of the case.
        w13: shape of the joined gate and up weights.
        tokens: number of tokens.
    """
    if name == "flashinfer_mono":
        return w13 == _MONO_SHAPE and tokens <= _MONO_TOKENS
    return name != "deepgemm_masked" or tokens <= _MOST_MASKED


def versions() -> dict[str, str]:
    """Return the versions of the installed packages, by name."""
    found = {}
    for package in sorted({package for _, package, _ in GROUPED.values()}):
        try:
            module = importlib.import_module(package)
        except (ImportError, OSError, RuntimeError):
            continue
        found[package] = str(getattr(module, "__version__", "present"))
    return found
