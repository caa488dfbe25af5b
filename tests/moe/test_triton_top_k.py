"""The kernel that chooses experts, compared with torch: ties, NaN, compilation, capture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fp8kit
import recorded_calls
from ahead import compiled_by
from fp8kit.moe import top_k
from fp8kit.moe.top_k import Formula, TopKProblem
from fp8kit.runtime.replay_cache import ReplayCache
from grids import COMPILED, pairwise

kernel = pytest.importorskip("fp8kit.moe.triton_top_k")
from fp8kit.quantizers.triton_encode import INTERPRETED  # noqa: E402

# numpy, which the interpreter computes with, warns of the infinities that these tests provoke
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ADA = ("cuda", (8, 9))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 1), (2, 1), (7, 7), (8, 2), (60, 4), (128, 8), (256, 8), (1000, 32), (1024, 22))


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cpu" and not INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernel is compiled for it")
    return device


def assert_chooses(x: Tensor, bias: Tensor | None, how: Formula) -> None:
    """Check that the best experts are chosen, in order, and that the weights belong to them."""
    ids, weights = kernel.choose(x, bias, how)
    scores = top_k.scores_of(x, how.scoring)
    worth = scores if bias is None else scores + bias.float()
    assert ids.dtype == torch.int64
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    # scores may be as far apart as the hardware's exponential is from torch's
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(worth.gather(-1, ids), worth.topk(how.top_k, -1).values, **close)
    torch.testing.assert_close(weights, top_k.weights_of(scores, ids, how))


@pytest.mark.parametrize(
    ("size", "scoring", "dtype", "out", "renormalize", "biased"),
    pairwise(SIZES, top_k.SCORINGS, DTYPES, DTYPES, (True, False), (True, False)),
)
def test_choices_are_those_of_torch(
    size: tuple[int, int],
    scoring: str,
    dtype: torch.dtype,
    out: torch.dtype,
    renormalize: bool,
    biased: bool,
    device: torch.device,
) -> None:
    experts, k = size
    x = 3 * torch.randn(100 if COMPILED else 3, experts, device=device)
    bias = torch.randn(experts, device=device).to(dtype) if biased else None
    assert_chooses(x.to(dtype), bias, Formula(k, scoring, renormalize, 2.5, out))


@pytest.mark.parametrize("scoring", top_k.SCORINGS)
def test_the_comparison_can_fail(scoring: str, device: torch.device) -> None:
    x, how = torch.randn(3, 16, device=device), Formula(4, scoring, False, 1.0, torch.float32)
    for changed, bias in ((how._replace(scaling_factor=1.01), None), (how, torch.arange(16.0))):
        ids, weights = kernel.choose(x, None if bias is None else bias.to(device), changed)
        ids_, weights_ = top_k.choose(x, None, how)
        assert not torch.allclose(weights, weights_, rtol=1e-3)
        assert torch.equal(ids, ids_) == (bias is None)


@pytest.mark.parametrize(("experts", "k"), [(16, 5), (128, 8)])
@pytest.mark.parametrize("scoring", top_k.SCORINGS)
def test_ids_of_distinct_scores_are_equal(
    experts: int, k: int, scoring: str, device: torch.device
) -> None:
    rows = [torch.randperm(experts) for _ in range(4)]
    x = (torch.stack(rows) / 16 - experts / 16).to(device, torch.bfloat16)
    how = Formula(k, scoring, True, 1.0, torch.float32)
    assert torch.equal(kernel.choose(x, None, how)[0], top_k.choose(x, None, how)[0])


def test_rows_may_be_apart(device: torch.device) -> None:
    wide, how = torch.randn(4, 50, device=device), Formula(3, "softmax", True, 1.0, torch.float32)
    for x in (wide[:, :20], wide[::2, 5:25], wide.T[:20].T, wide.T[:4]):
        assert_chooses(x, None, how)


def test_of_equal_scores_the_lowest_comes_first(device: torch.device) -> None:
    x = torch.zeros(2, 40, device=device)
    x[1, [7, 30, 12]] = 1.0
    for scoring in top_k.SCORINGS:
        ids, _ = kernel.choose(x, None, Formula(5, scoring, True, 1.0, torch.float32))
        assert ids.tolist() == [[0, 1, 2, 3, 4], [7, 12, 30, 0, 1]]


def test_logits_choose_where_sigmoids_are_one(device: torch.device) -> None:
    x = torch.tensor([[18.0, 19.0, 20.0, -0.0, 0.0, -200.0, -150.0, 21.0]], device=device)
    how = Formula(8, "sigmoid", False, 1.0, torch.float32)
    ids, weights = kernel.choose(x, None, how)
    assert ids.tolist() == [[7, 2, 1, 0, 3, 4, 6, 5]]
    assert torch.equal(top_k.choose(x, None, how._replace(top_k=4))[0], ids[:, :4])
    torch.testing.assert_close(weights, x.sigmoid().gather(1, ids))
    biased, _ = kernel.choose(x, torch.zeros(8, device=device), how._replace(top_k=4))
    assert biased.tolist() == [[0, 1, 2, 7]]  # DeepSeek adds a bias to scores, which are equal


@pytest.mark.parametrize("scoring", top_k.SCORINGS)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_number_gives_ids_in_range(
    scoring: str, renormalize: bool, sign: int, device: torch.device
) -> None:
    x = torch.randn(4, 13, device=device)
    x[0, 9], x[1], x[2], x[3, 4] = sign * torch.nan, sign * torch.nan, -torch.inf, torch.inf
    how = Formula(6, scoring, renormalize, 1.0, torch.float32)
    ids, weights = kernel.choose(x, None, how)
    assert ids.amin() >= 0
    assert ids.amax() < 13
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(weights, top_k.choose(x, None, how)[1], equal_nan=True)
    if scoring == "sigmoid":  # a softmax of it has nothing else
        assert ids[0, 0] == 9


def test_no_rows_give_no_choice(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device)
    ids, weights = kernel.choose(x, None, Formula(2, "softmax", True, 1.0, torch.bfloat16))
    assert (ids.shape, ids.dtype) == ((0, 2), torch.int64)
    assert (weights.shape, weights.dtype) == ((0, 2), torch.bfloat16)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (TopKProblem(8, 2, torch.float64, *ADA), "reads bfloat16"),
        (TopKProblem(2000, 2, torch.float32, *ADA), "at most 32 of 1024"),
        (TopKProblem(100, 33, torch.float32, *ADA), "at most 32 of 1024"),
        (TopKProblem(1024, 32, torch.float16, *ADA), ""),
        (TopKProblem(8, 2, torch.float32, "cuda", None), "" if INTERPRETED.value else "sm80"),
    ],
)
def test_what_the_kernel_does_not_cover_is_declined(problem: TopKProblem, said: str) -> None:
    assert said in (kernel.supports(problem) or "")
    assert (kernel.supports(problem) is None) == (not said)


def test_route_takes_the_kernel_where_nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    x = torch.randn(4, 8)
    found = fp8kit.moe.route(x, 2, scoring="sigmoid", scaling_factor=2.0)
    assert calls == ["choose"]
    expected = top_k.choose(x, None, Formula(2, "sigmoid", True, 2.0, torch.float32))
    assert all(map(torch.equal, found, expected))
    fp8kit.moe.route(x, 2, groups=4, top_groups=2)
    fp8kit.moe.route(x, 2, custom=lambda x, k: x.topk(k)[::-1])
    fp8kit.moe.route(x.clone().requires_grad_(), 2)
    fp8kit.moe.route(x, 2, scoring="sigmoid", correction_bias=torch.zeros(8, requires_grad=True))
    torch.vmap(lambda y: fp8kit.moe.route(y, 2))(x.expand(3, 4, 8))
    torch.compile(fp8kit.moe.route, backend="eager", fullgraph=True)(x, 2)
    with torch.autocast("cpu", torch.bfloat16):
        fp8kit.moe.route(x, 2)
    assert calls == ["choose"]


def test_the_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    found = compiled_by(Path(__file__).with_name("top_k_ahead_of_time.py"), tmp_path)
    assert len(found) == 7
    for name, counts in found.items():
        assert counts["stack"] == 0, f"{name}: {counts['stack']} bytes did not fit"
        assert counts["shared"] <= 1024, f"{name}: one warp needs no shared memory"
        assert counts["registers"] <= 255
        assert counts["blocks"] == 16
        assert counts["waits"] == 1


@pytest.mark.gpu
def test_a_captured_choice_follows_its_logits() -> None:
    how = Formula(8, "softmax", True, 1.0, torch.bfloat16)
    x = torch.randn(16, 128, device="cuda")
    top_k.CHOOSE(x, None, *how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = top_k.CHOOSE(x, None, *how)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        ids_, weights_ = top_k.choose(x, None, how)
        assert torch.equal(ids, ids_)
        torch.testing.assert_close(weights, weights_)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [True, False])
def test_replays_choose_by_their_own_logits(biased: bool) -> None:
    how, replays = Formula(8, "sigmoid", True, 2.5, torch.float32), ReplayCache()
    bias = torch.randn(256, device="cuda") if biased else None
    for _ in range(5):
        x = torch.randn(16, 256, device="cuda")
        ids, weights = replays.call(top_k.CHOOSE, (x,), (bias,), how)
        ids_, weights_ = top_k.choose(x, bias, how)
        assert torch.equal(ids, ids_)
        torch.testing.assert_close(weights, weights_)
    assert replays.launches(x.shape) == 1
