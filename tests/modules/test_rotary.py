"""Transformers' attention with rotary embedding in one launch: which classes, others stay."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
import recorded_calls
from fp8kit.conversion.fusible_modules import rotary_forward
from fp8kit.fused import reference
from fp8kit.integrations.quantizer_of_layers import restore_dense
from fp8kit.modules.hooks import is_replaced
from fp8kit.modules.rotary import RotaryForward
from numerics import assert_bits_equal

transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama  # noqa: E402

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.arange(1, 15).view(2, 7)


def tiny(kind: str = "llama", **changes: Any) -> Any:
    """Return a bf16 language model in eval mode."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def rotating(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), RotaryForward)]


def converted(kind: str = "llama", **changes: Any) -> Any:
    model = tiny(kind, **changes)
    fp8kit.convert(model, "FP8_DYNAMIC")
    return model


def patch(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Replace a function in Transformers' module of Llama."""
    monkeypatch.setattr(f"{modeling_llama.__name__}.{name}", value)


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        *((kind, True) for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2")),
        ("phi3", True),  # a part of each head
        ("glm", False),  # pairs of neighbours
        ("cohere", False),
        ("gpt2", False),
    ],
)
def test_which_attention_is_known(kind: str, known: bool) -> None:
    assert len(rotating(converted(kind))) == (2 if known else 0)


def test_conversion_without_fusion_leaves_attention_alone() -> None:
    model = tiny()
    fp8kit.convert(model, "FP8_DYNAMIC", fuse="inputs")
    assert not rotating(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_results_are_those_of_the_class(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    model = converted(kind)
    own = [vars(m)["forward"] for m in rotating(model)]
    with torch.no_grad():
        for module in rotating(model):
            del module.forward
        expected = model(IDS).logits
        for module, forward in zip(
            (layer.self_attn for layer in model.model.layers), own, strict=True
        ):
            module.forward = forward
        for _ in range(4):  # from the third on a recording computes
            calls.clear()
            assert_bits_equal(model(IDS).logits, expected)
        assert calls == []


def test_norms_ahead_of_it_stay_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    model = converted()
    with torch.no_grad():
        model(IDS)
    assert calls.count("rotary") == 2
    fused = [m.input_layernorm for m in model.model.layers]
    assert all(norm.consumers.are_ready() for norm in fused)
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: None
    assert [norm.consumers.are_ready() for norm in fused] == [False, True]
    assert [is_replaced(layer.self_attn) for layer in model.model.layers] == [True, False]


def test_the_class_computes_what_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    model = converted()
    x = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=x).logits.float().sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert "rotary" not in calls


def test_nothing_outside_the_model_changes() -> None:
    function = modeling_llama.apply_rotary_pos_emb
    model, dense = converted(), tiny()
    assert modeling_llama.apply_rotary_pos_emb is function
    assert not rotating(dense)
    first = rotating(model)[0]
    assert type(first).forward is modeling_llama.LlamaAttention.forward
    assert type(first) is modeling_llama.LlamaAttention


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Rotate pairs of neighbours."""

    def turned(x: Tensor) -> Tensor:
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.unsqueeze(unsqueeze_dim) + other * sin.unsqueeze(unsqueeze_dim)

    return turned(q), turned(k)


def in_fp32(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Round once."""
    wide = reference.rotated(*(x.float() for x in (q, k, cos, sin)))
    return tuple(x.to(q.dtype) for x in wide)


def on_a_gpu(*operands: Tensor) -> Any:
    """Fail, like a kernel of another library on a CPU."""
    raise RuntimeError


@pytest.mark.parametrize("other", [interleaved, in_fp32, on_a_gpu])
def test_another_function_stays(other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = tiny().model.layers[0].self_attn
    assert isinstance(rotary_forward(attention), RotaryForward)
    patch(monkeypatch, "apply_rotary_pos_emb", other)
    assert rotary_forward(attention) is None


def test_classes_of_users_stay() -> None:
    class Own(modeling_llama.LlamaAttention):  # type: ignore[misc]
        pass

    attention = Own(tiny().config, 0)
    assert rotary_forward(attention) is None


def test_copies_and_pickles_compute_by_their_own_weights() -> None:
    model = converted()
    with torch.no_grad():
        expected = model(IDS).logits
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [m.forward.module for m in rotating(made)] == rotating(made)
            assert_bits_equal(made(IDS).logits, expected)
            made.model.layers[0].self_attn.o_proj.weight.data.zero_()
            assert not torch.equal(made(IDS).logits, expected)
        assert_bits_equal(model(IDS).logits, expected)


def test_a_compiler_sees_the_class() -> None:
    model = converted()
    with torch.no_grad():
        expected = model(IDS).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert_bits_equal(compiled(IDS).logits, expected)


def test_a_second_conversion_reads_the_same_code() -> None:
    model, other = tiny(hidden_size=256), tiny(hidden_size=256)
    fp8kit.convert(model, "FP8_DYNAMIC", exclude=["*.v_proj"])
    fp8kit.convert(model, "FP8_DYNAMIC")
    fp8kit.convert(other, "FP8_DYNAMIC")
    kinds = [{n: type(m) for n, m in made.named_modules()} for made in (model, other)]
    assert {n: k for n, k in kinds[0].items() if n.endswith("_proj")} == {
        n: k for n, k in kinds[1].items() if n.endswith("_proj")
    }
    assert len(rotating(model)) == 2


def unturned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Leave heads as they are."""
    del cos, sin
    return q, k


@pytest.mark.parametrize("calls", [0, 1])
def test_a_function_that_is_patched_later_is_followed(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_calls.fuse_on_cpu(monkeypatch)
    model = converted()
    with torch.no_grad():
        for _ in range(calls):
            model(IDS)
        patch(monkeypatch, "apply_rotary_pos_emb", unturned)
        found = model(IDS).logits
        for module in rotating(model):
            del module.forward
        assert_bits_equal(found, model(IDS).logits)


def test_other_names_are_those_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = converted(), list[nn.Module]()
    model.set_attn_implementation("eager")
    own = modeling_llama.eager_attention_forward

    def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(module)
        return own(module, *args, **kwargs)

    with torch.no_grad():
        model(IDS)
        patch(monkeypatch, "eager_attention_forward", watched)
        model(IDS)
    assert seen == rotating(model)


def test_a_wrapped_class_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    patch(monkeypatch, "LlamaAttention.forward", recorded_calls.at)
    q = torch.zeros(1, 2, 3, 8)
    assert rotating(model)[0].forward.rotate(q, q, q[0, :1], q[0, :1]) == (q, q)


def renamed(forward: Callable[..., Any], used: list[str]) -> Callable[..., Any]:
    """Decorate a ``forward`` as Transformers does after it has renamed an argument."""

    @functools.wraps(forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        used.append("decorator")
        if "old_name" in kwargs:
            kwargs["hidden_states"] = kwargs.pop("old_name")
        return forward(*args, **kwargs)

    return decorated


def test_a_call_changes_nothing_that_is_pickled() -> None:
    model = converted()
    forward = rotating(model)[0].forward
    before = list(forward.__getstate__().items())
    with torch.no_grad():
        model(IDS)
    assert list(forward.__getstate__().items()) == before  # in this order


def test_decorators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    used: list[str] = []
    own = inspect.unwrap(modeling_llama.LlamaAttention.forward)
    twice = renamed(renamed(own, used), used)
    patch(monkeypatch, "LlamaAttention.forward", twice)
    model = converted()
    attention = rotating(model)[0]
    with torch.no_grad():
        model(IDS)
        assert calls.count("rotary") == 2
        assert used == ["decorator"] * 4
        x = torch.ones(1, 3, 128, dtype=torch.bfloat16)
        angles = model.model.rotary_emb(x, torch.arange(3)[None])
        y, _ = attention(old_name=x, position_embeddings=angles, attention_mask=None)
        expected, _ = twice(attention, x, position_embeddings=angles, attention_mask=None)
    assert_bits_equal(y, expected)
    q = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16)
    calls.clear()
    attention.forward.rotate(q, q, q[0, :1], q[0, :1])  # as a warm-up does
    assert calls == ["rotary"]


def test_a_decorator_that_calls_something_else_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.LlamaAttention.forward
    other = functools.wraps(own)(lambda self, x: (self, x))
    patch(monkeypatch, "LlamaAttention.forward", other)
    assert not rotating(converted())


def test_a_dense_model_has_the_forwards_of_its_classes() -> None:
    model = converted("qwen3")
    restore_dense(model)
    ours = {"forward", "_replicate_for_data_parallel"}
    assert not any(ours & set(vars(module)) for module in model.modules())
    assert b"fp8kit" not in pickle.dumps(model)


def test_a_class_that_changes_later_is_followed() -> None:
    model = converted()
    attention, own = rotating(model)[0], modeling_llama.LlamaAttention.forward
    x = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    try:
        modeling_llama.LlamaAttention.forward = lambda self, x: (self, x)
        assert attention(x) == (attention, x)
    finally:
        modeling_llama.LlamaAttention.forward = own
