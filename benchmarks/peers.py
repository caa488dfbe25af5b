"""Peers: the libraries that fp8kit is compared with, each called as its own code calls it.

Each is optional; a library that is missing and a case that fails are recorded with the reason. All
run as they ship, with fast accumulation where that is their default. torch and DeepGEMM have no
quantizer, so the fastest, vLLM's, runs before their GEMMs. The environment names the libraries:

* vLLM 0.25: ``VLLM_SO=/path/to/_C_stable_libtorch.abi3.so``, out of its wheel.
* DeepGEMM: ``DG_ROOT=`` the folder that holds ``deep_gemm``, and ``CUDA_HOME``.
* torchao 0.18: ``TORCHAO=1``, or the folder that holds ``torchao``.
* Humming 0.1.19: ``HUMMING=1``, or the folder that holds ``humming``. It calls nvcc.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import ScalingType

import fp8kit
from checking import reason
from timing import Case

E4M3 = torch.float8_e4m3fn
_GROUP = 128
# CUTLASS and cuBLASLt pad rows with 1x128 scales to this; cuBLASLt also scales of weights along K
_ALIGN = 4
_MOST_GRAPHS = 10_000


class DeclinedError(Exception):
    """Raised by a peer that does not serve a shape."""


class Layer(NamedTuple):
    """The input and the weights that every case computes from.

    Args:
        x: bf16 ``[M, K]``.
        dense: copies of the bf16 weight ``[N, K]``.
        weights: the same copies in FP8, by granularity: ``"row"``, ``"tensor"``, ``"block"``.
        x_scale: fp32 ``[1, 1]``, for static cases.
        x_q: ``x`` quantized per row, for cases that start from codes.
    """

    x: Tensor
    dense: list[Tensor]
    weights: Mapping[str, list[fp8kit.QTensor]]
    x_scale: Tensor
    x_q: fp8kit.QTensor


@dataclass
class Libraries:
    """The peers' libraries.

    Args:
        found: the loaded libraries by name.
        missing: for each other name, the reason why it is absent.
    """

    found: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def versions(self) -> dict[str, str]:
        """Return the version of every loaded library, for the result file."""
        return {n: str(getattr(m, "__version__", "present")) for n, m in self.found.items()}


def load_libraries(names: Iterable[str] = ("vllm", "deepgemm", "torchao")) -> Libraries:
    """Load the libraries that the environment names; print and keep why others are missing."""
    libraries = Libraries()
    for name in names:
        variable, load = LOADERS[name]
        where = os.environ.get(variable, "")
        if not where:
            libraries.missing[name] = f"not asked for ({variable})"
            continue
        try:
            libraries.found[name] = load(where)
        except Exception as broken:
            # if a library does not load, only its own columns stay empty
            libraries.missing[name] = reason(broken)
    for name, why in libraries.missing.items():
        print(f"{name}: {why}", flush=True)
    return libraries


def _load_vllm(path: str) -> Any:
    torch.ops.load_library(path)
    return torch.ops._C


def _import(name: str) -> Callable[[str], Any]:
    def load(where: str) -> Any:
        if os.path.isdir(where):
            sys.path.insert(0, where)
        return importlib.import_module(name)

    return load


LOADERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "vllm": ("VLLM_SO", _load_vllm),
    "deepgemm": ("DG_ROOT", _import("deep_gemm")),
    "torchao": ("TORCHAO", _import("torchao")),
    "humming": ("HUMMING", _import("humming")),
}


def vllm_dynamic(scheme: str) -> Callable[[Libraries, Layer], Case]:
    """vLLM's per-token quantizer and CUTLASS GEMM; ``scheme``: weight scales per row or tensor."""

    def build(libraries: Libraries, layer: Layer) -> Case:
        vllm, weights = libraries.found["vllm"], layer.weights[scheme]
        quantize, codes, scale = _per_token(vllm, layer.x)
        y = _result(layer)

        def run(i: int) -> Tensor:
            quantize()
            w = weights[i]
            vllm.cutlass_scaled_mm(y, codes, w.data.t(), scale, w.scale, None)
            return y

        return run

    return build


def vllm_static(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's quantizer with a given scale, and its GEMM with one scale per operand."""
    vllm, weights = libraries.found["vllm"], layer.weights["tensor"]
    codes, y = torch.empty_like(layer.x, dtype=E4M3), _result(layer)

    def run(i: int) -> Tensor:
        vllm.static_scaled_fp8_quant(codes, layer.x, layer.x_scale)
        w = weights[i]
        vllm.cutlass_scaled_mm(y, codes, w.data.t(), layer.x_scale, w.scale, None)
        return y

    return run


def vllm_quantized(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's CUTLASS GEMM alone, on an input that is quantized beforehand."""
    vllm, weights, x_q = libraries.found["vllm"], layer.weights["row"], layer.x_q
    y = _result(layer)

    def run(i: int) -> Tensor:
        w = weights[i]
        vllm.cutlass_scaled_mm(y, x_q.data, w.data.t(), x_q.scale, w.scale, None)
        return y

    return run


def torch_row_fast(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's per-token quantizer and torch's row-wise GEMM with fast accumulation."""
    quantize, codes, scale = _per_token(libraries.found["vllm"], layer.x)
    product = _torch_row_fast(codes, scale, layer.weights["row"])

    def run(i: int) -> Tensor:
        quantize()
        return product(i)

    return run


def torch_quantized_fast(libraries: Libraries, layer: Layer) -> Case:
    """Torch's row-wise GEMM alone, with fast accumulation."""
    del libraries
    return _torch_row_fast(layer.x_q.data, layer.x_q.scale, layer.weights["row"])


def vllm_block(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's group quantizer and its CUTLASS GEMM for block scales."""
    vllm, weights = libraries.found["vllm"], layer.weights["block"]
    quantize, codes, scale = _per_group(vllm, layer.x, padded=True)
    m, n = layer.x.shape[0], layer.dense[0].shape[0]
    y = layer.x.new_empty(codes.shape[0], n)

    def run(i: int) -> Tensor:
        quantize()
        w = weights[i]
        vllm.cutlass_scaled_mm(y, codes, w.data.t(), scale, w.scale.t(), None)
        return y[:m]

    return run


def torch_block(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's group quantizer and torch's recipe for block scales, which has no fast variant."""
    (m, _), (n, k) = layer.x.shape, layer.dense[0].shape
    if n % _GROUP or k % _GROUP:
        raise DeclinedError(f"torch's recipe wants multiples of {_GROUP}, N and K are {n} and {k}")
    quantize, codes, scale = _per_group(libraries.found["vllm"], layer.x, padded=True)
    weights = layer.weights["block"]
    padding = (0, -(k // _GROUP) % _ALIGN)
    scales = [F.pad(w.scale, padding).t() for w in weights]

    def run(i: int) -> Tensor:
        quantize()
        y = F.scaled_mm(
            codes,
            weights[i].data.t(),
            scale,
            ScalingType.BlockWise1x128,
            scales[i],
            ScalingType.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
        return y[:m]

    return run


def deepgemm_block(libraries: Libraries, layer: Layer) -> Case:
    """vLLM's group quantizer, which writes DeepGEMM's scale layout, and DeepGEMM's GEMM."""
    deep_gemm, weights = libraries.found["deepgemm"], layer.weights["block"]
    quantize, codes, scale = _per_group(libraries.found["vllm"], layer.x, padded=False)
    y = _result(layer)

    def run(i: int) -> Tensor:
        quantize()
        deep_gemm.fp8_gemm_nt((codes, scale), (weights[i].data, weights[i].scale), y)
        return y

    return run


@dataclass
class TorchAO:
    """Whole linear layers of torchao, compiled per shape and row count as it recommends.

    Args:
        mode: mode of ``torch.compile``.
        seconds: budget for compiling; once it is spent, no compilation starts.
        spent: seconds spent on compiling so far.
    """

    mode: str = "max-autotune-no-cudagraphs"
    seconds: float = 180.0
    spent: float = 0.0

    def case(self, granularity: str) -> Callable[[Libraries, Layer], Case]:
        """Build layers with ``"PerRow"`` or ``"PerTensor"`` scales of both operands."""

        def build(libraries: Libraries, layer: Layer) -> Case:
            del libraries
            if self.spent >= self.seconds:
                raise DeclinedError(f"{self.seconds:g} seconds of compiling are spent")
            weights = torchao_weights(layer.dense, granularity)
            # all shapes count against the recompile limits of F.linear; exceeding one is an error
            torch._dynamo.config.recompile_limit = _MOST_GRAPHS
            torch._dynamo.config.accumulated_recompile_limit = _MOST_GRAPHS
            linear = torch.compile(F.linear, fullgraph=True, dynamic=False, mode=self.mode)
            start = time.perf_counter()
            for weight in weights[:2]:
                linear(layer.x, weight)
            self.spent += time.perf_counter() - start
            return lambda i: linear(layer.x, weights[i])

        return build


def torchao_weights(dense: list[Tensor], granularity: str) -> list[Tensor]:
    """Quantize weights with torchao, as dynamic FP8 layers hold them.

    Raises:
        DeclinedError: if torchao leaves the weight as it is.
    """
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=getattr(quantization, granularity)()
    )
    (n, k), found = dense[0].shape, []
    for weight in dense:
        module = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
        module.weight = nn.Parameter(weight, requires_grad=False)
        quantization.quantize_(module, config)
        if not isinstance(module.weight, quantization.Float8Tensor):
            raise DeclinedError(f"torchao leaves a weight of {n} x {k} in bf16")
        found.append(module.weight)
    return found


def humming_mx(weight: fp8kit.QTensor) -> nn.Module:
    """Return Humming's layer for an MXFP8 weight ``[N, K]`` and bf16 inputs, as vLLM builds it."""
    n, k = weight.data.shape
    config = {"quant_method": "modelopt", "quant_algo": "mxfp8"}
    layer = importlib.import_module("humming.layer").HummingLayer(
        n, k, config, torch_dtype=torch.bfloat16
    )
    layer.to(weight.data.device)
    layer.load_from_tensors({"weight": weight.data, "weight_scale": weight.scale})
    layer.transform()
    found: nn.Module = layer
    return found


def quantize_by_torchao(model: nn.Module, tuned: bool = True) -> None:
    """Quantize every linear layer in place by torchao, per row of weights and of inputs.

    Args:
        model: the model.
        tuned: let torchao have Inductor tune its kernels by coordinate descent, which is its
            default and takes minutes where kernels are long.

    Raises:
        DeclinedError: if torchao is absent.
    """
    libraries = load_libraries(("torchao",))
    if libraries.missing:
        raise DeclinedError(libraries.missing["torchao"])
    quantization = importlib.import_module("torchao.quantization")
    config = quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=quantization.PerRow(), set_inductor_config=tuned
    )
    quantization.quantize_(model, config)


@dataclass(frozen=True)
class Peer:
    """One way in which libraries compute a layer.

    Args:
        needs: the libraries that take part.
        build: returns the case, a function to time, for a layer.
        beside: the peer is measured only together with this case of fp8kit; empty: always.
    """

    needs: tuple[str, ...]
    build: Callable[[Libraries, Layer], Case]
    beside: str = ""


PEERS = {
    "vllm_row": Peer(("vllm",), vllm_dynamic("row")),
    "vllm_tensor": Peer(("vllm",), vllm_dynamic("tensor")),
    "torch_row_fast": Peer(("vllm",), torch_row_fast),
    "vllm_block": Peer(("vllm",), vllm_block),
    "torch_block": Peer(("vllm",), torch_block),
    "deepgemm_block": Peer(("vllm", "deepgemm"), deepgemm_block),
    "vllm_static": Peer(("vllm",), vllm_static, beside="static"),
    "vllm_quantized": Peer(("vllm",), vllm_quantized, beside="quantized"),
    "torch_quantized_fast": Peer((), torch_quantized_fast, beside="quantized"),
}


def all_peers(torchao: TorchAO) -> dict[str, Peer]:
    """Return every peer by its name in result files."""
    return PEERS | {
        "torchao_row": Peer(("torchao",), torchao.case("PerRow")),
        "torchao_tensor": Peer(("torchao",), torchao.case("PerTensor")),
    }


def peer_cases(
    peers: Mapping[str, Peer], libraries: Libraries, layer: Layer, failed: dict[str, str]
) -> Iterator[tuple[str, Case]]:
    """Yield the names and cases of all peers whose libraries are loaded.

    Args:
        peers: the peers to build, by name.
        libraries: the loaded libraries.
        layer: the layer to compute.
        failed: receives the reason for every peer that has its libraries and fails to build.
    """
    for name, peer in peers.items():
        if not all(library in libraries.found for library in peer.needs):
            continue
        try:
            yield name, peer.build(libraries, layer)
        except Exception as broken:
            # one peer that does not serve a shape must not stop the others
            failed[name] = str(broken) if isinstance(broken, DeclinedError) else reason(broken)


def _result(layer: Layer) -> Tensor:
    return layer.x.new_empty(layer.x.shape[0], layer.dense[0].shape[0])


def _per_token(vllm: Any, x: Tensor) -> tuple[Callable[[], None], Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=E4M3)
    scale = x.new_empty(x.shape[0], 1, dtype=torch.float32)

    def quantize() -> None:
        vllm.dynamic_per_token_scaled_fp8_quant(codes, x, scale, None)

    return quantize, codes, scale


def _per_group(vllm: Any, x: Tensor, padded: bool) -> tuple[Callable[[], None], Tensor, Tensor]:
    """Return vLLM's quantizer of 1x128 groups, and the codes and scales that it writes.

    Scales are column-major and aligned for TMA. With ``padded`` the rows of codes and scales are a
    multiple of 4, as CUTLASS and cuBLASLt demand. vLLM itself pads by a fill and a copy in each
    call; here they are padded once, in the peer's favour.
    """
    m, k = x.shape
    if k % _GROUP:
        raise DeclinedError(f"vLLM's group quantizer wants multiples of {_GROUP}, K is {k}")
    rows = m + -m % _ALIGN
    codes = torch.zeros(rows, k, device=x.device, dtype=E4M3)
    scale = torch.ones(k // _GROUP, rows, device=x.device).t()

    def quantize() -> None:
        vllm.per_token_group_fp8_quant(
            x, codes[:m], scale[:m], _GROUP, 1e-10, -448.0, 448.0, False, True, True
        )

    return quantize, *((codes, scale) if padded else (codes[:m], scale[:m]))


def _torch_row_fast(codes: Tensor, scale: Tensor, weights: list[fp8kit.QTensor]) -> Case:
    def run(i: int) -> Tensor:
        w = weights[i]
        return torch._scaled_mm(
            codes,
            w.data.t(),
            scale_a=scale,
            scale_b=w.scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return run
