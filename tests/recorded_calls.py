"""Backends for a CPU whose launches are recorded, so that replay is tested without a GPU.

``install`` makes the package use them for a test; ``record_on_cpu`` and ``fuse_on_cpu`` only switch
recording and fusion on. Like a real kernel, theirs get nothing but addresses and numbers: a
recording that passes a stale or wrong address computes a wrong result, or reads memory that a test
has poisoned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import backend_tables
from fp8kit.formats import BLOCK, GroupShape
from fp8kit.fused import reference
from fp8kit.fused.problem import CodesFormat, FusedBackend
from fp8kit.matmul import reference as multiplier
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.tma_operands import by_column
from fp8kit.modules import fused_module
from fp8kit.moe import top_k
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, ExpertWeights, MoeBackend
from fp8kit.moe.top_k import Formula, TopKBackend
from fp8kit.quantizers import reference as quantizer
from fp8kit.quantizers.problem import QuantizerBackend
from fp8kit.quantizers.scale_layout import empty_scale
from fp8kit.runtime import replay_cache
from fp8kit.runtime.launch_recording import is_recording, record_launch
from fp8kit.runtime.weight_hazards import mark_synchronized

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class CpuLaunch:
    """A launch that calls a function on the memory behind its addresses."""

    def __init__(
        self, kernel: Callable[..., None], layouts: Sequence[Layout | None], addresses: list[int]
    ) -> None:
        self.kernel, self.layouts, self.addresses = kernel, layouts, addresses
        self.passed = list(addresses)
        self.moved: list[int] = []
        self.streams: list[int] = []

    def move(self, position: int, address: int) -> None:
        self.moved.append(position)
        self.passed[position] = address

    def start(self, stream: int) -> None:
        self.streams.append(stream)
        with _disable_current_modes(), torch.no_grad():
            self.kernel(*[at(a, lay) for a, lay in zip(self.passed, self.layouts, strict=True)])


def at(address: int, layout: Layout | None) -> Tensor | None:
    """View the memory at an address as a tensor of ``layout``; no layout is an absent tensor."""
    if layout is None:
        return None
    shape, strides, dtype = layout
    if address == 0:
        return torch.empty(shape, dtype=dtype)
    last = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, strides)


def launch(kernel: Callable[..., None], *tensors: Tensor | None) -> None:
    """Run a kernel on the addresses of tensors, and record the launch during a recording."""
    layouts = [None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in tensors]
    made = CpuLaunch(kernel, layouts, [0 if t is None else t.data_ptr() for t in tensors])
    made.start(0)
    if is_recording():
        record_launch(made)


class CpuBackends:
    """Backends of every kind; ``calls`` grows with each run of their Python, not with replays."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def quantize(
        self,
        x: Tensor,
        group: GroupShape,
        dtype: torch.dtype,
        floor: float,
        scale_ub: Tensor | None,
        rounding: str,
        layout: str = "row",
        data: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("quantize")
        x = x.contiguous().resolve_neg()
        scale = empty_scale(x, group, layout)
        data = torch.empty(x.shape, dtype=dtype) if data is None else data

        def kernel(x: Tensor, scale_ub: Tensor | None, data: Tensor, scale: Tensor) -> None:
            codes, found = quantizer.quantize(x, group, dtype, floor, scale_ub, rounding)
            data.copy_(codes)
            scale.copy_(found)

        launch(kernel, x, scale_ub, data, scale)
        return data, scale

    def quantize_static(
        self, x: Tensor, scale: Tensor, group: GroupShape, dtype: torch.dtype
    ) -> Tensor:
        self.calls.append("quantize")
        x = x.contiguous().resolve_neg()
        data = torch.empty(x.shape, dtype=dtype)
        launch(
            lambda x, scale, data: data.copy_(quantizer.quantize_static(x, scale, group, dtype)),
            x,
            scale,
            data,
        )
        return data

    def run(self, operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        self.calls.append("multiply")
        x, x_scale, w, w_scale, bias = operands
        if x_scale is not None and problem.w_group == BLOCK:  # the layout that GPU kernels read
            x_scale = by_column(x_scale)
        y = torch.empty(x.shape[0], w.shape[0], dtype=problem.out_dtype)

        def kernel(*memory: Tensor) -> None:
            *operands, y = memory
            y.copy_(multiplier.run(MatmulOperands(*operands), problem))

        launch(kernel, x, x_scale, w, w_scale, bias, y)
        mark_synchronized(w)
        return y

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        weight_offset: float,
        rounding: str,
        how: CodesFormat,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        self.calls.append("norm")
        total = None if residual is None else torch.empty(x.shape, dtype=x.dtype)

        def kernel(
            how: CodesFormat, x: Tensor, residual: Tensor, weight: Tensor, *results: Tensor
        ) -> None:
            numbers = (eps, weight_offset, rounding)
            found = reference.rms_norm(x, residual, weight, *numbers, how)
            _write(results, found)

        return *_fused(kernel, x, (residual, weight), how, total), total

    def rms_normed(
        self, x: Tensor, weight: Tensor, eps: float, weight_offset: float, rounding: str
    ) -> Tensor:
        self.calls.append(f"norm {x.shape[-1]}")
        y = torch.empty(x.shape, dtype=x.dtype)

        def kernel(x: Tensor, weight: Tensor, y: Tensor) -> None:
            y.copy_(reference.rms_normed(x, weight, eps, weight_offset, rounding))

        launch(kernel, x, weight, y)
        return y

    def rotated(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("rotary")
        q, k = (torch.empty(x.transpose(1, 2).shape, dtype=x.dtype) for x in (query, key))

        def kernel(*operands: Tensor) -> None:
            for memory, turned in zip(operands[4:], reference.rotated(*operands[:4]), strict=True):
                memory.copy_(turned.transpose(1, 2))

        launch(kernel, query, key, cos, sin, q, k)
        return q.transpose(1, 2), k.transpose(1, 2)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        modulation: tuple[Tensor, Tensor] | None,
        eps: float,
        rounding: str,
        how: CodesFormat,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("norm")
        gain, shift = modulation or (None, None)

        def kernel(how: CodesFormat, x: Tensor, *memory: Tensor) -> None:
            weight, bias, gain, shift, *results = memory
            pair = None if gain is None else (gain, shift)
            found = reference.layer_norm(x, weight, bias, pair, eps, rounding, how)
            _write(results, found)

        return _fused(kernel, x, (weight, bias, gain, shift), how)

    def activation(
        self,
        kind: str,
        gate: Tensor,
        up: Tensor | None,
        how: CodesFormat,
        left: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self.calls.append("activate")

        def kernel(
            how: CodesFormat, gate: Tensor, up: Tensor, left: Tensor, *results: Tensor
        ) -> None:
            _write(results, reference.activation(kind, gate, up, how, left))

        columns = 0 if left is None else left.shape[-1]
        return _fused(kernel, gate, (up, left), how, columns=columns)

    def experts(self, operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
        self.calls.append("experts")
        x, w13, w2, ids, weights = operands
        y = torch.empty(x.shape, dtype=x.dtype)

        absent = [part is None for part in (*w13, *w2)]

        def kernel(x: Tensor, ids: Tensor, weights: Tensor, *memory: Tensor) -> None:
            *held, y = memory
            held = [None if gone else t for gone, t in zip(absent, held, strict=True)]
            pair = ExpertWeights(*held[:4]), ExpertWeights(*held[4:])
            y.copy_(_experts(ExpertOperands(x, *pair, ids, weights), problem))

        launch(kernel, x, ids, weights, *w13, *w2, y)
        return y

    def choose(self, x: Tensor, bias: Tensor | None, how: Formula) -> tuple[Tensor, Tensor]:
        self.calls.append("choose")
        ids = torch.empty(x.shape[0], how.top_k, dtype=torch.int64)
        weights = torch.empty(x.shape[0], how.top_k, dtype=how.dtype)

        def kernel(x: Tensor, bias: Tensor, *results: Tensor) -> None:
            _write(results, top_k.choose(x, bias, how))

        launch(kernel, x, bias, ids, weights)
        return ids, weights


def _fused(
    kernel: Callable[..., None],
    x: Tensor,
    operands: Sequence[Tensor | None],
    how: CodesFormat,
    total: Tensor | None = None,
    columns: int = 0,  # of the codes, before those of x
) -> tuple[Tensor, Tensor]:
    whole = x[..., :1].expand(*x.shape[:-1], columns + x.shape[-1])
    data = torch.empty(whole.shape, dtype=how.dtype)
    scale = empty_scale(whole, how.group, how.scale_layout)

    def on_memory(given: Tensor | None, bound: Tensor | None, *memory: Tensor) -> None:
        kernel(how._replace(scale=given, scale_ub=bound), *memory)

    launch(on_memory, how.scale, how.scale_ub, x, *operands, data, scale, total)
    return data, scale


def _experts(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
    """Compute a layer of dequantized experts in fp32, simply; every operand is read."""
    x, w13, w2, ids, weights = operands
    total = torch.zeros(x.shape)
    for expert in range(problem.experts):
        h = problem.activation(_product(x.float(), w13, expert, problem.w_group))
        chosen = (weights * (ids == expert)).sum(1, keepdim=True)
        total += _product(h, w2, expert, problem.w_group) * chosen
    return total


def _product(x: Tensor, w: ExpertWeights, expert: int, group: GroupShape) -> Tensor:
    dense = quantizer.dequantize(w.data[expert], w.scale[expert], group, torch.float32)
    x = x if w.input_scale is None else x * w.input_scale
    return x @ dense.t() + (0.0 if w.bias is None else w.bias[expert].float())


def _write(results: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for memory, value in zip(results, found, strict=False):
        if value is not None:
            memory.copy_(value)


def fuse_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse norms and activations on a CPU too, where the reference computes them."""
    monkeypatch.setattr(fused_module, "FUSED_DEVICES", ("cpu", "cuda"))


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record calls on a CPU, and fuse norms and activations there."""
    monkeypatch.setattr(replay_cache, "RECORDED_DEVICES", ("cpu",))
    fuse_on_cpu(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    """Run layers, experts and fused modules on a CPU by these backends, and record their calls."""
    made = CpuBackends()
    backends = {
        "matmul": MatmulBackend(run=lambda *a: made.run(*a)),
        "quantizers": QuantizerBackend(
            quantize=made.quantize, quantize_static=made.quantize_static
        ),
        "fused": FusedBackend(
            rms_norm=made.rms_norm,
            layer_norm=made.layer_norm,
            activation=made.activation,
            rms_normed=made.rms_normed,
            rotated=made.rotated,
        ),
        "top_k": TopKBackend(choose=made.choose),
        "moe": MoeBackend(experts=made.experts),
    }
    tables = {kind: {"reference": backend} for kind, backend in backends.items()}
    backend_tables.install(monkeypatch, **tables)
    record_on_cpu(monkeypatch)
    return made
