"""The attention ``fp8kit_sdpa``: what it computes itself, and what it leaves to ``sdpa``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fp8kit
import recorded_calls
from fp8kit.errors import UnsupportedError
from numerics import ATTENTION_ERROR, assert_bits_equal, relative_error

transformers = pytest.importorskip("transformers")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from fp8kit.integrations import transformers_attention  # noqa: E402

transformers_attention.register()  # as the first conversion of a model does
NAME = transformers_attention.NAME
IDS = torch.arange(1, 13).view(2, 6)
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.3, eos_token_id=None)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    fp8kit.convert(made, "FP8_DYNAMIC")
    return made


class Taken(TorchDispatchMode):
    """Collects the shapes of keys that our operator gets."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fp8kit.attention_of_one_token.default:
            self.shapes.append(args[1].shape)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    recorded_calls.fuse_on_cpu(monkeypatch)
    with Taken() as mode:
        yield mode.shapes


def generated(model: Any, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    tokens: Tensor = model.generate(IDS, **settings | options)
    return tokens


def test_fp8kit_sdpa_is_set_by_its_name(model: Any) -> None:
    expected = model(IDS).logits
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    assert_bits_equal(model(IDS).logits, expected)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens_are_those_of_sdpa(
    padded: bool, cache: str, model: Any, taken: list[torch.Size]
) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :3] = not padded
    options = {"attention_mask": mask} | (
        {} if cache == "dynamic" else {"cache_implementation": cache}
    )
    expected = generated(model, **options)
    model.set_attn_implementation(NAME)
    assert torch.equal(generated(model, **options), expected)
    masked = padded or cache == "static"
    assert len(taken) == (2 * 4 if masked else 0)  # layers, and tokens behind the first
    if cache == "static":
        assert len({*taken}) == 1


def test_sliding_windows_hide_tokens(taken: list[torch.Size]) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, initializer_range=0.3, sliding_window=4)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    expected = generated(made, cache_implementation="static")
    made.set_attn_implementation(NAME)
    assert torch.equal(generated(made, cache_implementation="static"), expected)
    assert taken


class Attention(nn.Module):
    """The attributes that the interface needs of a layer's attention module."""

    is_causal, num_key_value_groups, layer_idx = True, 2, 0


def operands(tokens: int = 1) -> dict[str, Any]:
    """Return arguments of the interface for one token, of a cache with room for 9."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 16).bfloat16() for heads, n in ((4, tokens), (2, 9), (2, 9))
    )
    mask = torch.arange(9).expand(2, 1, tokens, 9) < torch.tensor([5, 8]).view(2, 1, 1, 1)
    return {"query": q, "key": k, "value": v, "attention_mask": mask, "scaling": 0.2}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_runs_the_sdpa_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.fuse_on_cpu(monkeypatch)
    given = operands()
    queries = torch.stack([given.pop("query"), torch.randn(2, 4, 1, 16).bfloat16()])
    found, expected = (
        torch.func.vmap(lambda q, attend=attend: attend(Attention(), q, **given)[0])(queries)
        for attend in (transformers_attention.attention_forward, sdpa_attention_forward)
    )
    assert_bits_equal(found, expected)


def test_forward_mode_differentiates_the_sdpa_of_transformers(taken: list[torch.Size]) -> None:
    given, found = operands(), []
    query = given.pop("query")
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # torch's others have no such rule
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        for attend in (transformers_attention.attention_forward, sdpa_attention_forward):
            found.append(forward_ad.unpack_dual(attend(Attention(), dual, **given)[0]))
    for ours, theirs in zip(*found, strict=True):
        assert_bits_equal(ours, theirs)
    assert not taken  # our kernel gives no derivative


def test_one_token_is_taken(taken: list[torch.Size]) -> None:
    given = operands()
    y, weights = transformers_attention.attention_forward(Attention(), **given)
    expected, _ = sdpa_attention_forward(Attention(), **given)
    assert weights is None
    assert y.shape == expected.shape
    assert relative_error(y, expected.double()) <= 2 * ATTENTION_ERROR[torch.bfloat16]
    assert len(taken) == 1
    same, _ = transformers_attention.attention_forward(Attention(), **given | {"scaling": None})
    other, _ = sdpa_attention_forward(Attention(), **given | {"scaling": None})
    assert relative_error(same, other.double()) <= 2 * ATTENTION_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    "changes",
    [
        operands(3),
        {"attention_mask": None},
        {"attention_mask": torch.zeros(2, 1, 1, 9).bfloat16()},
        {"attention_mask": torch.ones(2, 4, 1, 9, dtype=torch.bool)},
        {"query": operands()["query"].requires_grad_()},
        {"value": operands()["value"].requires_grad_()},
        {"position_bias": torch.zeros(2, 4, 1, 9).bfloat16()},
        {"s_aux": torch.zeros(4)},
        {"dropout": 1e-9},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_all_else_is_left_to_sdpa(changes: dict[str, Any], taken: list[torch.Size]) -> None:
    given = operands() | changes
    y, _ = transformers_attention.attention_forward(Attention(), **given)
    expected, _ = sdpa_attention_forward(Attention(), **given)
    assert_bits_equal(y.detach(), expected.detach())
    assert y.requires_grad == expected.requires_grad
    assert not taken


def test_autocast_has_the_dtype_of_sdpa(taken: list[torch.Size]) -> None:
    given = operands()
    given |= {name: given[name].float() for name in ("query", "key", "value")}
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = transformers_attention.attention_forward(Attention(), **given)
        expected, _ = sdpa_attention_forward(Attention(), **given)
    assert expected.dtype == torch.bfloat16
    assert_bits_equal(y, expected)
    assert not taken


def test_paged_caches_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="generate_batch"):
        transformers_attention.attention_forward(Attention(), **operands(), cache=object())


def test_sinks_are_refused_by_transformers() -> None:
    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="does not support"):
        model.set_attn_implementation(NAME)


def test_models_that_ask_for_sdpa_by_its_name_are_refused() -> None:
    config = transformers.Gemma4TextConfig(**SIZES, vocab_size_per_layer_input=64)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    made.set_attn_implementation(NAME)
    with pytest.raises(UnsupportedError, match="any other name than 'sdpa'"):
        made(IDS)
    made.set_attn_implementation("sdpa")
    assert made(IDS).logits.isfinite().all()


def test_a_compiler_sees_one_operator(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.fuse_on_cpu(monkeypatch)
    model.set_attn_implementation(NAME)
    torch.compiler.reset()  # a backend that is gone may have left its address to this one
    targets: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        model(IDS, past_key_values=cache)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert compiled(IDS[:, :1], past_key_values=cache).logits.isfinite().all()
    assert sum("attention_of_one_token" in target for target in targets) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_on_a_gpu(padded: bool, model: Any) -> None:
    model.cuda()
    mask = torch.ones_like(IDS)
    mask[1, :3] = not padded
    options = {
        "attention_mask": mask.cuda(), "cache_implementation": "static", "max_new_tokens": 5,
        "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
        "disable_compile": True,
    }  # fmt: skip
    expected = model.generate(IDS.cuda(), **options)
    model.set_attn_implementation(NAME)
    for _ in range(3):  # the third replays
        found = model.generate(IDS.cuda(), **options)
        first = found.logits[1], expected.logits[1].double()  # by the same tokens
        assert relative_error(*first) < 0.1
    caches = transformers_attention._replays.items()
    repeating = {
        module.layer_idx
        for module, cache in caches
        if module.config is model.config and any(e.recording for e in cache.values())
    }
    assert repeating == set(range(len(model.model.layers)))
