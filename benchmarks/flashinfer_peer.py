"""FlashInfer's layers of experts in FP8, with static scales or block scales, on an H100 or H200.

It comes from a folder (``--flashinfer FOLDER``) that holds

* ``tvm_ffi/``: the package ``apache-tvm-ffi``, for the Python that runs the benchmark;
* ``fused_moe_90.so``: the compiled module, plain or as ``.so.xz``;
* ``version.txt``: the version of FlashInfer;
* for block scales ``fused_moe_90_block.so``, plain or as ``.so.xz``, and ``include/deep_gemm/``, a
  copy of ``nv_internal/tensorrt_llm/deep_gemm``. Its products are compiled at run time by the nvcc
  of ``CUDA_HOME`` or the search path, for a second or two each, into ``kernels/``, and found there.

The module is what ``gen_cutlass_fused_moe_sm90_module(False).build_and_load()`` of
``flashinfer.jit.fused_moe`` compiles, in hours. A part of it serves, which nvcc compiles in about
an hour of one core. It has all tiles, clusters and epilogues; never set ``FAST_BUILD``, which
leaves one tile. Of the sources named there it needs

* the generated kernels of e4m3 by e4m3 with bf16 output, 72 of them, and no other;
* ``moe_gemm_kernels_fp8_fp8.cu`` with only ``MoeGemmRunner<e4m3, e4m3, bf16>``, and in
  ``moe_gemm_template_dispatch.h`` a throw for each call of ``dispatchMoeGemmToCutlass``, which is
  for older GPUs;
* ``cutlass_fused_moe_instantiation.cu`` with only ``CutlassMoeFCRunner<e4m3, e4m3, bf16>``;
* ``flashinfer_cutlass_fused_moe_binding.cu`` with a constructor that makes only this runner;
* ``moe_gemm_tma_warp_specialized_input.cu``, ``preQuantScaleKernel.cu``,
  ``cutlass_heuristic.cpp``, ``lora.cpp`` and the files of ``nv_internal/cpp/common``.

Their flags are those of the whole module without ``ENABLE_FP4`` and ``ENABLE_FP8_BLOCK_SCALE``.
The module for block scales has the flag ``ENABLE_FP8_BLOCK_SCALE``, ``MoeGemmRunner`` and
``CutlassMoeFCRunner`` of bf16 by e4m3 instead, none of the generated kernels, and also
``fp8_blockscale_gemm.cu`` and ``deepgemm_jit_setup.cu``. It quantizes the input itself.

The static scales are those that vLLM passes: one per expert for each weight, one for the input and
one for the result of the activation. vLLM's quantizer runs before. FlashInfer would choose the
kernels of both products by timing each alone on routes of its own; here they are timed on the
routes and copies of the benchmark, in the whole layer, which serves it at least as well.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fp8kit
from expert_peers import E4M3, Coded, Dense, ExpertLayer, Vllm, silu_and_mul, unpacked
from fp8kit.perf.timing import Effort, Timer
from timing import Case

_SWIGLU = 3  # of FlashInfer's ``ActivationType``
_RANKS = (1, 0, 1, 0)  # size and rank of tensor and expert parallelism
_ROOM = 4  # times the largest value seen; FP8 loses nothing by it
_SHORT = Effort(round_ms=0.0, rounds=3)  # each round calls every copy once

Build = Callable[[ExpertLayer], Case]


class Weights(NamedTuple):
    """One copy of the weights, as FlashInfer reads them.

    Args:
        up_gate: e4m3 ``[E, 2 I, H]``, the up projection before the gate.
        down: e4m3 ``[E, H, I]``.
        scales: fp32. Static: the scale of the first product ``[E]``, by what the activation's
            result is multiplied ``[]``, the scale of the second product ``[E]``, the input's scale
            ``[]``. Blocks: the scales of ``up_gate`` and of ``down``.
    """

    up_gate: Tensor
    down: Tensor
    scales: list[Tensor]


@dataclass
class FlashInfer:
    """The compiled layers.

    Args:
        runner: FlashInfer's ``FusedMoeRunner`` of e4m3 by e4m3 to bf16.
        block_runner: that of bf16 by e4m3 with block scales, if it is there.
        version: version of FlashInfer.
    """

    runner: Any
    block_runner: Any | None
    version: str

    def cases(self, vllm: Vllm, timer: Timer) -> dict[str, tuple[str, Build]]:
        """Return the kind of weights and the builder of each case."""
        found = {"flashinfer_cutlass": ("tensor", partial(self.static_case, vllm, timer))}
        if self.block_runner is not None:
            found["flashinfer_block"] = ("block", partial(block_case, self.block_runner))
        return found

    def static_case(self, vllm: Vllm, timer: Timer, layer: ExpertLayer) -> Case:
        """Build the layer with the fastest kernels for its routes."""
        x_scale, h_scale = static_scales(layer)
        copies = [arranged(coded, x_scale, h_scale) for coded in layer.coded["tensor"]]
        quantize = partial(vllm.quantize, layer.x, x_scale.view(1), E4M3, False)
        run = launcher(self.runner, layer, copies)
        fixed = quantize()[0], torch.empty_like(layer.x)  # nothing is allocated while kernels race
        race = partial(_race, timer, len(layer.routes), layer.x.device)
        tactics = self.fastest(lambda pair: partial(run, pair, *fixed), race)
        return lambda i: run(tactics, quantize()[0], torch.empty_like(layer.x), i)

    def fastest(
        self, case: Callable[[tuple[int, int]], Case], race: Callable[[dict[int, Case]], int]
    ) -> tuple[int, int]:
        """Return the fastest kernel of the first product, and that of the second beside it.

        Args:
            case: returns a case that runs with a pair of kernels; -1 is FlashInfer's default.
            race: returns the fastest of some cases.
        """
        first = self.runner.get_gemm1_tactic_count()
        every = range(first + self.runner.get_gemm2_tactic_count())
        able = [t for t in every if self.runner.get_tactic_occupancy(t) > 0]
        ups, downs = [t for t in able if t < first], [t for t in able if t >= first]
        up = race({t: case((t, -1)) for t in ups})
        return up, race({t: case((up, t)) for t in downs})


def block_case(runner: Any, layer: ExpertLayer) -> Case:
    """Build the layer with block scales, which quantizes its input."""
    copies = []
    for w13, w2 in layer.coded["block"]:
        scales = [up_first(w13.scale), w2.scale.contiguous()]
        copies.append(Weights(up_first(w13.data), w2.data, scales))
    run = launcher(runner, layer, copies)
    return lambda i: run((-1, -1), layer.x, torch.empty_like(layer.x), i)


def launcher(
    runner: Any, layer: ExpertLayer, copies: list[Weights]
) -> Callable[[Sequence[int], Tensor, Tensor, int], Tensor]:
    """Return a function of two kernels, the input, the output to write, and the turn."""
    size = runner.get_workspace_size(
        layer.x.shape[0], layer.x.shape[1], copies[0].down.shape[2], len(copies[0].down),
        layer.routes[0].ids.shape[1], *_RANKS, False, _SWIGLU,
    )  # fmt: skip
    workspace = torch.empty(size, dtype=torch.uint8, device=layer.x.device)

    def run(tactics: Sequence[int], x: Tensor, y: Tensor, i: int) -> Tensor:
        weights, (ids, factors) = copies[i % len(copies)], layer.routes[i]
        runner.run_moe(
            y, x, ids, factors, weights.up_gate, None, weights.down, None, weights.scales,
            *(None,) * 7, False, *_RANKS, 1, 0, False, False, list(tactics), True, _SWIGLU,
            workspace,
        )  # fmt: skip
        return y

    return run


def _race(timer: Timer, turns: int, device: torch.device, cases: dict[int, Case]) -> int:
    running = {}
    for name, case in cases.items():
        try:
            case(0)
        except RuntimeError:
            continue  # FlashInfer's tuner, too, passes over kernels that refuse a problem
        running[str(name)] = case
    if not running:
        raise RuntimeError(f"None of FlashInfer's {len(cases)} kernels runs this layer")
    times = timer(running, turns, _SHORT, device)
    return int(min(times, key=times.__getitem__))


def per_tensor(dense: Dense) -> Coded:
    """Quantize with one scale per expert, which stands in all rows of ``scale``."""

    def quantize(w: Tensor) -> fp8kit.QTensor:
        scale = w.abs().amax((1, 2)).float() / torch.finfo(E4M3).max
        codes = torch.empty_like(w, dtype=E4M3)
        for one, values, s in zip(codes, w, scale, strict=True):
            one.copy_(values.float() / s)
        rows = scale[:, None, None].expand(-1, w.shape[1], 1).contiguous()
        return fp8kit.QTensor(codes, rows, fp8kit.ROW)

    return Coded(*(quantize(w) for w in dense))


def static_scales(layer: ExpertLayer) -> tuple[Tensor, Tensor]:
    """Return scales ``[]`` of the input, and of the activation's result, from one expert."""
    w13 = layer.coded["tensor"][0].w13
    e = int(layer.routes[0].ids[0, 0])
    inner = silu_and_mul(layer.x.float() @ (w13.data[e].float() * w13.scale[e]).t())
    most = torch.finfo(E4M3).max
    return layer.x.abs().amax().float() / most, inner.abs().amax() * _ROOM / most


def arranged(coded: Coded, x_scale: Tensor, h_scale: Tensor) -> Weights:
    """Put the up projection first, and multiply scales."""
    first, second = (w.scale[:, 0, 0] for w in coded)
    scales = [first * x_scale, h_scale.reciprocal(), second * h_scale, x_scale]
    return Weights(up_first(coded.w13.data), coded.w2.data, scales)


def up_first(joined: Tensor) -> Tensor:
    """Swap the halves of a tensor ``[E, 2 n, k]`` of codes or scales; the result is contiguous."""
    plain = joined.view(torch.uint8) if joined.dtype == E4M3 else joined
    return plain.roll(joined.shape[1] // 2, dims=1).contiguous().view(joined.dtype)


def load_flashinfer(folder: Path, into: Path) -> FlashInfer:
    """Load the module of a folder that is described at the head of this file.

    Args:
        folder: where it is.
        into: where to unpack a compressed library.
    """
    sys.path.insert(0, str(folder))
    (path,) = unpacked(folder, into, ("fused_moe_90",))
    load = importlib.import_module("tvm_ffi").load_module
    options = (False, False, False, True, False)  # no other formats; fused finalization
    runner = load(str(path)).init(E4M3, E4M3, torch.bfloat16, False, *options)
    block_runner = None
    for path in unpacked(folder, into, ("fused_moe_90_block",)):
        os.environ.setdefault("TRTLLM_DG_CACHE_DIR", str(folder / "kernels"))
        module = load(str(path))
        module.set_deepgemm_jit_include_dirs([str(folder / "include")])
        block_runner = module.init(torch.bfloat16, E4M3, torch.bfloat16, True, *options)
    return FlashInfer(runner, block_runner, (folder / "version.txt").read_text().strip())
