"""A warm-up runs the kernels that requests run, with fused producers of every kind."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import backend_tables
import fp8kit
from fp8kit.dispatch.device import capability
from fp8kit.matmul.problem import MatmulBackend, MatmulProblem, m_bucket
from fp8kit.matmul.reference import run as multiply
from fp8kit.moe import reference
from fp8kit.moe.hopper.tile_config import FEW_PAIRS, PAIRS_OF_BLOCK
from fp8kit.moe.hopper.tile_config import choose as choose_tiles
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, MoeBackend
from fp8kit.perf.row_counts import counts_of_pairs
from recorded_calls import install
from tiny_experts import SIZES, tiny

pytestmark = pytest.mark.usefixtures("fuses_on_cpu")

ROWS = 17


class Operators(TorchDispatchMode):
    """Collects the package's operators that run, with their arguments."""

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
    """Norm, projection, activation, projection, which a user's rule can name."""

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

    backend = MatmulBackend(run=multiply, row_counts=row_counts)
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
    names = {str(key[0]) for key in ran.seen}
    assert any("norm_quantize" in n for n in names)
    assert {f"fp8kit::{n}activation_quantize" for n in ("", "concatenated_")} <= names
    assert ran.seen <= warmed.seen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ExpertsProblem]]:
    """Collect the tokens and the problem of each layer of experts that runs."""
    found: list[tuple[int, ExpertsProblem]] = []

    def run(operands: ExpertOperands, problem: ExpertsProblem) -> Tensor:
        found.append((operands.x.shape[0], problem))
        return reference.BACKEND.experts(operands, problem)

    backend = MoeBackend(experts=run)
    backend_tables.install(monkeypatch, moe={"reference": backend})
    return found


def layer(
    scheme: str = "FP8_DYNAMIC", count: int = 4, top_k: int | None = 2, **options: Any
) -> fp8kit.Fp8Experts:
    """Make FP8 experts; ``top_k`` is that of their routing, ``None`` for no routing."""
    made = fp8kit.Fp8Experts.from_dense(
        torch.randn(count, 256, 128), torch.randn(count, 128, 128), scheme, **options
    )
    if top_k:
        made.routing = functools.partial(fp8kit.moe.route, top_k=top_k)
    return made


def test_each_kind_of_experts_runs_once_per_count(
    calls: list[tuple[int, ExpertsProblem]],
) -> None:
    gelu, invariant = fp8kit.moe.Activation("gelu"), layer()
    invariant.batch_invariant = True
    kinds = [layer(), layer("FP8_BLOCK"), layer(activation=gelu), layer(top_k=1), invariant]
    model = nn.Sequential(*kinds, layer(), layer("FP8_BLOCK"))
    assert fp8kit.warmup(model, m=[1, 16, 1]) == 2 * len(kinds) == len(calls)
    assert [tokens for tokens, _ in calls] == [1, 16] * len(kinds)
    assert len({problem for _, problem in calls}) == len(calls)
    assert [problem.top_k for _, problem in calls[::2]] == [2, 2, 2, 1, 2]


def test_experts_run_beside_linear_layers(calls: list[tuple[int, ExpertsProblem]]) -> None:
    linear = fp8kit.Fp8Linear.from_linear(nn.Linear(128, 128))
    assert fp8kit.warmup(nn.ModuleList([linear, layer()]), m=[1, 16]) == 4
    assert len(calls) == 2


def test_norms_of_one_launch_and_routers_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Qwen3Moe")
    fp8kit.convert(model)
    backends = install(monkeypatch)
    fp8kit.warmup(model, m=6)
    warm = set(backends.calls)
    backends.calls.clear()
    with torch.no_grad():
        model(torch.arange(6)[None])
    assert set(backends.calls) <= warm
    assert {"choose", "experts", "norm 128", "norm 64", "rotary"} <= warm


@pytest.mark.parametrize("kind", ["llama", "Qwen3Moe"])
def test_the_first_call_after_a_warm_up_repeats_recordings(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if kind == "llama" else tiny(kind)
    model = model.to(torch.bfloat16).eval()
    fp8kit.convert(model)
    backends = install(monkeypatch)
    fp8kit.warmup(model, m=6)
    backends.calls.clear()
    with torch.no_grad():
        for ids in (torch.arange(6)[None], torch.arange(6)[:, None]):
            model(ids)
            assert not backends.calls
        model(torch.arange(5)[None])
    assert len(set(backends.calls)) > 2  # the check sees calls that were not warmed up


def test_experts_on_meta_are_refused() -> None:
    with pytest.raises(ValueError, match="holds 1 FP8 layers, or they are on meta"):
        fp8kit.warmup(fp8kit.Fp8Experts(4, 128, 128, device="meta"))


@pytest.mark.parametrize(
    "kind", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss", "Llama4Text", "NemotronH"]
)
def test_a_request_runs_no_experts_that_were_not_warmed_up(
    kind: str, calls: list[tuple[int, ExpertsProblem]]
) -> None:
    model = tiny(kind)
    fp8kit.convert(model)
    fp8kit.warmup(model, m=[ROWS])
    warmed = {problem for _, problem in calls}
    assert len(warmed) == 1  # of all that a token might take, only what the model says
    calls.clear()
    with torch.no_grad():
        model(torch.arange(ROWS)[None])
    assert {problem for _, problem in calls} == warmed


class Holder(nn.Module):
    """A block that holds experts without a routing, and may say how many each token takes."""

    def __init__(self, count: int = 8, **said: Any) -> None:
        super().__init__()
        self.experts = layer(count=count, top_k=None)
        self.router = nn.Linear(128, count)
        for name, value in said.items():
            setattr(self, name, value)


def _router_says(top_k: int) -> nn.Module:
    block = Holder()
    block.router.top_k = top_k
    return block


def _module_says(top_k: int) -> nn.Module:
    block = Holder(top_k=top_k + 1)
    block.experts.num_experts_per_tok = top_k
    return block


class Config:
    """A config as in other libraries, whose ``top_k`` is about the sampling of tokens."""

    top_k = 5

    def __init__(self, name: str, value: int) -> None:
        setattr(self, name, value)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda: Holder(top_k=3), [3]),
        (lambda: Holder(num_experts_per_tok=3), [3]),
        (lambda: _router_says(3), [3]),
        (lambda: _module_says(3), [3]),
        (lambda: Holder(config=Config("num_experts_per_tok", 3)), [3]),
        (lambda: Holder(config=Config("top_k_experts", 3)), [3]),
        (lambda: Holder(config=Config("other", 3)), [1, 2, 4, 8]),
        (lambda: Holder(top_k=50), [1, 2, 4, 8]),
        (lambda: Holder(top_k=[3, 3]), [1, 2, 4, 8]),
        (lambda: Holder(count=6), [1, 2, 4]),
        (lambda: layer(top_k=None), [1, 2, 4]),
    ],
    ids=[
        "block", "block_by_long_name", "router", "module_first", "config", "config_of_gemma",
        "config_for_sampling", "too_many", "no_integer", "unknown", "alone",
    ],
)  # fmt: skip
def test_experts_run_with_as_many_per_token_as_the_model_says(
    make: Callable[[], nn.Module], wanted: list[int], calls: list[tuple[int, ExpertsProblem]]
) -> None:
    fp8kit.warmup(make(), m=4)
    assert [problem.top_k for _, problem in calls] == wanted


def test_shared_experts_run_with_the_others_and_apart(
    calls: list[tuple[int, ExpertsProblem]],
) -> None:
    experts = layer(count=6, top_k=3)
    experts.shared = 2
    experts.count_tokens()
    assert fp8kit.warmup(experts, m=4) == 1
    assert {problem.top_k for _, problem in calls} == {3 + 2, 3, 2}
    assert experts.tokens is not None
    assert not experts.tokens.any()


def test_placed_experts_run_through_their_map(calls: list[tuple[int, ExpertsProblem]]) -> None:
    placed = layer(top_k=4)
    placed.place(torch.tensor([0, 1, 2, 3, 3, 3]))
    assert fp8kit.warmup(nn.Sequential(layer(top_k=4), placed), m=4) == 2
    assert [problem.experts for _, problem in calls] == [4, 6]


class OwnGate(nn.Module):
    """Experts with a gate that this package does not compute."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 512, 128))
        self.down_proj = nn.Parameter(torch.randn(4, 128, 256))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.sin(gate) * up

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(4):
            token, slot = torch.where(ids == expert)
            h = self._apply_gate(x[token] @ self.gate_up_proj[expert].T)
            y = h @ self.down_proj[expert].T
            total = total.index_add(0, token, y * weights[token, slot, None])
        return total


def test_experts_with_a_gate_of_their_own_run_for_every_part_of_the_tokens() -> None:
    fp8kit.register_experts(OwnGate, lambda _: fp8kit.ExpertStacks(activation=None))
    model = nn.Sequential(OwnGate())
    fp8kit.convert(model)
    with Operators() as warmed:
        assert fp8kit.warmup(model, m=7) == 4
    assert {rows for _, (rows, _), *_ in warmed.seen} == {1, 2, 4, 7}
    with Operators() as ran, torch.no_grad():
        ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
        model[0](torch.randn(4, 128), ids, torch.ones(4, 2))
    assert {key[0] for key in ran.seen} == {key[0] for key in warmed.seen}
    assert ran.seen <= warmed.seen


def hopper_kernels(pairs: int, experts: int, whole_blocks: bool) -> tuple[object, ...]:
    sorting = (pairs <= FEW_PAIRS, pairs <= PAIRS_OF_BLOCK)
    return (choose_tiles(pairs, experts, whole_blocks), *sorting)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300, 341, 4096])
@pytest.mark.parametrize(
    ("count", "top_k", "shared"), [(8, 2, 0), (12, 3, 2), (64, 6, 0), (128, 8, 0), (256, 8, 1)]
)
def test_counts_cover_every_kernel_of_hopper(
    count: int, top_k: int, shared: int, tokens: int
) -> None:
    most = m_bucket(tokens)
    every = range(most // 2 + 1, most + 1)
    takes = (top_k + shared, top_k, shared) if shared else (top_k,)
    found = counts_of_pairs(tokens, takes, count, on_hopper=True)
    assert found[0] == tokens
    assert set(found) <= set(every)
    for k in takes:
        for whole in (False, True):
            wanted = {hopper_kernels(rows * k, count, whole) for rows in every}
            assert {hopper_kernels(rows * k, count, whole) for rows in found} == wanted
    cuts = [tuple(hopper_kernels(rows * k, count, True) for k in takes) for rows in found]
    assert len(set(cuts)) == len(cuts)  # and nothing runs twice


def test_counts_that_are_cut_otherwise_are_run(
    calls: list[tuple[int, ExpertsProblem]], device: torch.device
) -> None:
    experts = layer(count=8, top_k=2).to(device)
    hopper_here = (capability(device) or (0, 0))[0] == 9
    # 3 pairs for each of 8 experts are the most for tiles of 8 tokens
    wanted = [16, 12] if hopper_here else [16]
    assert fp8kit.warmup(experts, m=16) == len(wanted)
    # on a GPU they run again for their recordings
    assert [tokens for tokens, _ in calls[: len(wanted)]] == wanted
    assert {tokens for tokens, _ in calls} == set(wanted)


def test_experts_of_sorted_rows_see_the_count_each(
    calls: list[tuple[int, ExpertsProblem]],
) -> None:
    model = tiny("Llama4Text", num_local_experts=6)
    fp8kit.convert(model)
    fp8kit.warmup(model, m=16)
    # of all experts together 96 rows, and 60, which is another power of two
    assert [rows for rows, _ in calls] == [6 * 16, 6 * 10]


def test_sorted_rows_cover_every_kernel_of_hopper() -> None:
    found = counts_of_pairs(341, [1], 6, on_hopper=True, copies=6)
    wanted = {hopper_kernels(6 * rows, 6, True) for rows in range(257, 513)}
    assert {hopper_kernels(6 * rows, 6, True) for rows in found} == wanted
    assert len(wanted) > 1
