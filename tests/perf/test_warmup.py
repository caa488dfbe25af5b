"""What a warm-up runs is what a request runs, fused producers of every kind included."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import backend_tables
import fp8kit
from fp8kit.matmul.problem import MatmulBackend, MatmulProblem
from fp8kit.matmul.reference import run as multiply

pytestmark = pytest.mark.usefixtures("fuses_on_cpu")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
ROWS = 17


class Operators(TorchDispatchMode):
    """Collect which operators of the package run, on what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "fp8kit":
            values = [*args, *(kwargs or {}).values()]
            first = next(i for i, a in enumerate(values) if isinstance(a, Tensor))
            x, rest = values[first], values[:first] + values[first + 1 :]
            rows = (math.prod(x.shape[:-1]), x.shape[-1])
            others = [a.dtype if isinstance(a, Tensor) else str(a) for a in rest]
            self.seen.add((func.name(), rows, x.dtype, *others))
        return func(*args, **(kwargs or {}))


class Feed(nn.Module):
    """Norm, projection, activation, projection: what a rule of a user can name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128, elementwise_affine=False)
        self.fc1, self.act, self.fc2 = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.linspace(-2, 2, 128 * ROWS, dtype=torch.bfloat16, device=input_ids.device)
        y: Tensor = self.fc2(self.act(self.fc1(self.norm(x.view(ROWS, 128)))))
        return y


@pytest.mark.parametrize("name", ["llama", "gemma2", "rules"])
def test_a_request_runs_nothing_that_was_not_warmed_up(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    fuse: Any = "all"
    if name == "rules":
        model: nn.Module = nn.Sequential(Feed())
        fuse = {"0": ["norm -> fc1", "act -> fc2"]}
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**SIZES))
    model = model.to(device, torch.bfloat16).eval()
    fp8kit.convert(model, fuse=fuse)
    with Operators() as warmed:
        fp8kit.warmup(model, m=[ROWS])
    with Operators() as ran, torch.no_grad():
        model(torch.arange(ROWS, device=device)[None])
    names = {str(key[0]) for key in ran.seen}
    assert any("norm_quantize" in n for n in names)
    assert "fp8kit::scaled_mm" in names
    assert ran.seen <= warmed.seen


def test_row_counts_that_are_cut_otherwise_are_warmed_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def row_counts(problem: MatmulProblem) -> list[int]:
        asked.append((problem.m, problem.n))
        return [5, 8]

    backend = MatmulBackend(supports=lambda _: None, run=multiply, row_counts=row_counts)
    backend_tables.install(monkeypatch, warmup={"reference": backend})
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).to(device, torch.bfloat16)
    fp8kit.convert(model)
    with Operators() as warmed:
        assert fp8kit.warmup(model, m=[7]) == 6
    assert asked == [(8, 256), (8, 128)]
    assert {rows for _, (rows, _), *_ in warmed.seen} == {5, 7, 8}


def test_adaptive_norms_of_diffusers_are_warmed_up(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what diffusers warns about on import is not ours to fix
        diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24)}
    model = diffusers.FluxTransformer2DModel(
        in_channels=64,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        num_layers=1,
        num_single_layers=1,
        **heads,
    )
    model = model.to(device, torch.bfloat16).eval()
    fp8kit.convert(model)
    images, words = 24, 8
    shapes = {
        "hidden_states": (1, images, 64),
        "encoder_hidden_states": (1, words, 64),
        "pooled_projections": (1, 32),
        "timestep": (1,),
        "img_ids": (images, 3),
        "txt_ids": (words, 3),
    }
    inputs = {k: torch.rand(*v, device=device, dtype=torch.bfloat16) for k, v in shapes.items()}
    with Operators() as warmed:
        fp8kit.warmup(model, m=[1, images, words, images + words])
    with Operators() as ran, torch.no_grad():
        model(**inputs)
    names = [str(key[0]) for key in ran.seen]
    assert any("norm_quantize" in n for n in names)
    assert any("activation_quantize" in n for n in names)
    assert ran.seen <= warmed.seen
