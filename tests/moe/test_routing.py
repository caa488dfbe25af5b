"""Routing, compared with the models' own routers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8kit import moe

EXPERTS, HIDDEN, TOKENS = 16, 32, 64


def router_of(module: str, name: str, **settings: Any) -> Any:
    """Build a model's own router with random weights, from a tiny config."""
    pytest.importorskip("transformers")
    models = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    router = getattr(models, name)(type("Config", (), {"hidden_size": HIDDEN, **settings})())
    torch.nn.init.normal_(router.weight)
    return router


def assert_same_choice(ours: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor) -> None:
    """Check that every token has the same experts with the same weights, in any order."""
    for found, expected in zip(*(_by_id(*each) for each in (ours, (ids, weights))), strict=True):
        torch.testing.assert_close(found, expected)


def _by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(1)
    return ids.gather(1, order), weights.float().gather(1, order)


@pytest.mark.parametrize(
    ("module", "name", "settings", "options"),
    [
        ("mixtral", "MixtralTopKRouter", {"num_local_experts": EXPERTS}, {}),
        ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": EXPERTS, "norm_topk_prob": True}, {}),
        (
            "qwen3_moe",
            "Qwen3MoeTopKRouter",
            {"num_experts": EXPERTS, "norm_topk_prob": False},
            {"renormalize": False},
        ),
        ("gpt_oss", "GptOssTopKRouter", {"num_local_experts": EXPERTS}, {}),
        (
            "deepseek_v2",
            "DeepseekV2TopkRouter",
            {
                "num_experts": EXPERTS,
                "routed_scaling_factor": 2.5,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
            },
            {"renormalize": False, "scaling_factor": 2.5, "groups": 4, "top_groups": 2},
        ),
        (
            "deepseek_v3",
            "DeepseekV3TopkRouter",
            {
                "num_local_experts": EXPERTS,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "n_group": 4,
                "topk_group": 2,
            },
            {"scoring": "sigmoid", "scaling_factor": 2.5, "groups": 4, "top_groups": 2},
        ),
    ],
)
def test_choices_are_those_of_the_models(
    module: str, name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    router = router_of(module, name, num_experts_per_tok=4, **settings)
    if module == "deepseek_v3":
        options["correction_bias"] = torch.randn(EXPERTS)
        router.e_score_correction_bias = options["correction_bias"]
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, ids = router(x)
    assert_same_choice(moe.route(logits, 4, **options), ids, weights)


@pytest.mark.parametrize("bias", [None, torch.zeros(EXPERTS)], ids=["plain", "bias"])
def test_no_tokens_choose_no_experts(bias: torch.Tensor | None) -> None:
    options: list[dict[str, Any]] = [{}, {"groups": 2, "top_groups": 1, "correction_bias": bias}]
    for given in options:
        ids, weights = moe.route(torch.randn(0, EXPERTS), 2, **given)
        assert ids.shape == weights.shape == (0, 2)


def test_llama4_takes_the_sigmoid_of_the_best() -> None:
    logits = torch.randn(TOKENS, EXPERTS)
    ids, weights = moe.route(logits, 1, scoring="sigmoid", renormalize=False)
    assert torch.equal(ids, logits.argmax(1, keepdim=True))
    torch.testing.assert_close(weights, logits.amax(1, keepdim=True).sigmoid())


def test_a_custom_function_replaces_all_but_the_scaling() -> None:
    def first(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(top_k, dtype=torch.int32).expand(len(logits), -1)
        return ids, torch.ones(ids.shape, dtype=torch.bfloat16)

    ids, weights = moe.route(torch.randn(3, 8), 2, custom=first, scaling_factor=3.0)
    assert ids.tolist() == [[0, 1]] * 3
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[3.0, 3.0]] * 3
    with pytest.raises(TypeError, match="Ids are int32 or int64"):
        moe.route(torch.randn(3, 8), 2, custom=lambda a, k: first(a, k)[::-1])


def test_one_graph_takes_every_number() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def route(logits: Tensor, top_k: int, factor: float) -> tuple[Tensor, Tensor]:
        return moe.route(logits, top_k, scaling_factor=factor)

    for tokens, top_k, factor in ((5, 2, 1.5), (9, 3, 2.5)):
        logits = torch.randn(tokens, 8)
        ids, weights = moe.route(logits, top_k, scaling_factor=factor)
        assert_same_choice(route(logits, top_k, factor), ids, weights)


def test_the_router_gets_gradients() -> None:
    logits = torch.randn(5, 8, requires_grad=True)
    _, weights = moe.route(logits, 2, renormalize=False)
    weights.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


def test_a_group_of_one_expert_is_worth_its_score() -> None:
    logits, bias = torch.randn(5, 8), torch.randn(8)
    plain = moe.route(logits, 2, scoring="sigmoid", correction_bias=bias)
    alone = {"groups": 8, "top_groups": 2, "correction_bias": bias}
    for found, wanted in zip(moe.route(logits, 2, scoring="sigmoid", **alone), plain, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 0}, "1 to E experts"),
        ({"top_k": 9}, "1 to E experts"),
        ({"scoring": "relu"}, "It must be one of softmax, sigmoid"),
        ({"groups": 3, "top_groups": 1}, "divide the experts evenly"),
        ({"groups": 4.0, "top_groups": 1}, "divide the experts evenly"),
        ({"groups": 4}, "come together"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "from these groups, which hold 2"),
        ({"correction_bias": torch.zeros(3)}, r"needs \(8,\) on its device"),
        ({"custom": lambda *_: None, "scoring": "sigmoid"}, "scores and chooses itself"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        moe.route(torch.randn(3, 8), **{"top_k": 2, **options})


def test_tokens_are_counted() -> None:
    ids = torch.randint(-2, 10, (40, 3), dtype=torch.int32)
    expected = [(ids == i).sum().item() for i in range(8)]
    assert moe.tokens_per_expert(ids, 8).tolist() == expected
    assert moe.tokens_per_expert(ids[:0], 8).tolist() == [0] * 8


def test_a_correction_bias_is_a_tensor() -> None:
    with pytest.raises(TypeError, match="Got correction_bias of type list"):
        moe.route(torch.randn(3, 8), 2, correction_bias=[0.0] * 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", ["2", 2.0, None, torch.ones(8)])
def test_a_count_that_is_no_integer_is_refused(top_k: Any) -> None:
    with pytest.raises(TypeError, match="How many experts a token takes is an integer"):
        moe.route(torch.randn(3, 8), top_k)


def test_a_custom_formula_is_a_function() -> None:
    with pytest.raises(TypeError, match="It must be a function from logits and top_k"):
        moe.route(torch.randn(3, 8), 2, custom="softmax")  # type: ignore[arg-type]
