"""Scales of 1x128 groups have the layout that the GEMM loads: no kernel runs in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import backend_tables
import fp8kit
from fp8kit.matmul.hopper import gemm
from fp8kit.modules import fused_producers
from fp8kit.modules.shared_input import SharedInput
from fp8kit.runtime.launch_recording import AllocationWatch

launches = pytest.importorskip("launches", reason="cuda-bindings is not installed")

ROWS = (1, 3, 4, 17, 130, 600)
CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=128,
    num_hidden_layers=1,
)


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch, fuses_on_cpu: None) -> list[str]:
    """Return the torch operations that run inside each call of the GEMM, whose launch is faked."""
    ran: list[str] = []

    def watched(*operands: Any) -> Tensor:
        with AllocationWatch() as watch:
            y = gemm.run(*operands)
        ran.append(watch.foreign)
        return y

    launches.fake_layers(monkeypatch, watched)
    return ran


def decoder_layer(scheme: str = "FP8_BLOCK", device: str = "cpu") -> nn.Module:
    with torch.device(device):
        layer = LlamaDecoderLayer(CONFIG, 0).bfloat16().eval()
    fp8kit.convert(layer, scheme, include=["*_proj"], fuse="all")
    assert isinstance(layer.input_layernorm, fused_producers.FusedNorm)
    assert isinstance(layer.mlp, fused_producers.FusedGatedMlp)
    return layer


def run(layer: nn.Module, rows: int) -> None:
    x = torch.randn(1, rows, CONFIG.hidden_size).bfloat16()
    embeddings = LlamaRotaryEmbedding(CONFIG)(x, torch.arange(rows)[None])
    with torch.no_grad():
        layer(x, position_embeddings=embeddings)


@pytest.mark.parametrize("rows", ROWS)
def test_a_decoder_layer_copies_no_scales(rows: int, between: list[str]) -> None:
    layer = decoder_layer()
    run(layer, rows)
    # q, k and v; o; gate and up; down: joined up to 512 rows
    assert between == [""] * (4 if rows <= 512 else 7)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [128, 256, 384])
def test_siblings_copy_no_scales(k: int, rows: int, between: list[str]) -> None:
    layers = [
        fp8kit.Fp8Linear.from_linear(nn.Linear(k, 128, dtype=torch.bfloat16), "FP8_BLOCK")
        for _ in range(2)
    ]
    SharedInput([layer.requires_grad_(False) for layer in layers], unchanging=True)
    x = torch.randn(rows, k, dtype=torch.bfloat16)
    for layer in layers:
        layer(x)
    assert between == [""] * (1 if rows <= 512 else 2)


def test_the_watch_sees_a_copy_of_scales(between: list[str]) -> None:
    layer = fp8kit.Fp8Linear(256, 128, False, "FP8_BLOCK")
    codes = layer.quantize_input(torch.randn(5, 256))
    scale = codes.scale.contiguous()
    by_row = fp8kit.QTensor(codes.data, scale, codes.group)
    fp8kit.scaled_mm(by_row, layer.quantized_weight())
    assert between == ["aten.copy_.default"]


@contextlib.contextmanager
def counted_nodes() -> Iterator[list[int]]:
    """Capture a graph and return the number of its nodes: kernels, copies, fills."""
    from cuda.bindings import driver

    found: list[int] = []
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.no_grad(), torch.cuda.graph(graph):
        yield found
    status, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    assert not status
    found.append(count)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)


@pytest.mark.gpu
@HOPPER
@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("rows", [1, 3, 16, 130])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_a_graph_holds_the_kernels_of_the_package_alone(
    scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_tables.install(monkeypatch, matmul={"hopper_gemm": gemm.BACKEND})
    layer = decoder_layer(scheme, "cuda")
    x = torch.randn(1, rows, CONFIG.hidden_size, device="cuda").bfloat16()
    attention, mlp = layer.self_attn, layer.mlp

    def norm_to_joined() -> None:
        normed = layer.input_layernorm(x)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection(normed)

    def feed_forward() -> None:
        mlp(layer.post_attention_layernorm(x))

    steps: dict[Callable[[], None], int] = {norm_to_joined: 2, feed_forward: 4}
    for step, kernels in steps.items():
        for _ in range(3):  # compiles, then waits for the weights, then is recorded
            with torch.no_grad():
                step()
        with counted_nodes() as found:
            step()
        assert found == [kernels]
