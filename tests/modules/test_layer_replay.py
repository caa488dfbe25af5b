"""Decoder layers of two recordings, each replayed behind one check, and attention in between."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

import fp8kit
from fp8kit.modules.fused_producers import FusedGatedMlp
from numerics import assert_bits_equal
from recorded_calls import CpuBackends, install
from replayed_layers import CALLS, is_replayed, of_attention, run, tiny, told


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> CpuBackends:
    return install(monkeypatch)


class Counting(LlamaAttention):
    """Counts its calls on itself."""

    called = 0

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        assert self.q_proj.in_features == 128
        self.called += 1
        return super().forward(hidden_states, **kwargs)


@pytest.fixture
def model(backends: CpuBackends) -> Any:
    return of_attention(Counting)


def decoded(model: Any, steps: int) -> Tensor:
    """Return the logits of single tokens behind a prompt of three, with a cache."""
    cache = DynamicCache(config=model.config)
    found = [run_with(model, cache, 3)[:, -1]]
    found += [run_with(model, cache, 1)[:, -1] for _ in range(steps)]
    return torch.stack(found)


@torch.no_grad()
def run_with(model: Any, cache: DynamicCache, tokens: int) -> Tensor:
    logits: Tensor = model(
        input_ids=torch.arange(5, 5 + tokens)[None], past_key_values=cache, use_cache=True
    ).logits
    return logits


def test_the_third_call_is_replayed_with_the_same_bits(model: Any) -> None:
    first = run(copy.deepcopy(model))
    assert [is_replayed(model) for _ in range(4)] == [False, False, True, True]
    assert_bits_equal(run(model), first)


@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)]
)
def test_a_growing_cache_is_read(kind: Any, config: Any, backends: CpuBackends) -> None:
    together = tiny(kind, config)
    separate = copy.deepcopy(together)
    fp8kit.convert(together)
    fp8kit.convert(separate, fuse="none")
    assert_bits_equal(decoded(together, 12), decoded(separate, 12))
    backends.calls.clear()
    assert_bits_equal(decoded(together, 3), decoded(separate, 3))


def another_projection(layer: Any) -> None:
    layer.self_attn.k_proj = copy.deepcopy(layer.self_attn.k_proj)
    layer.self_attn.k_proj.weight_scale.mul_(0.5)


def dense_projection(layer: Any) -> None:
    layer.self_attn.v_proj = layer.self_attn.v_proj.to_linear()


def written_projection(layer: Any) -> None:
    bits = layer.self_attn.v_proj.weight.view(torch.uint8)
    bits.copy_(bits.flip(0))


def moved_projection(layer: Any) -> None:
    layer.self_attn.v_proj.weight.data = layer.self_attn.k_proj.weight.data.clone()


def another_gain(layer: Any) -> None:
    layer.input_layernorm.weight = nn.Parameter(torch.full((128,), 0.5).bfloat16())


def hook_on_attention(layer: Any) -> None:
    layer.self_attn.register_forward_hook(lambda m, args, y: (y[0] * 2, y[1]))


def hook_on_a_projection(layer: Any) -> None:
    layer.self_attn.v_proj.register_forward_hook(lambda m, args, y: y * 2)


def hook_on_the_norm(layer: Any) -> None:
    layer.input_layernorm.register_forward_hook(lambda m, args, y: y * 2)


def hook_on_the_output(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda m, args, y: y * 2)


def another_setting(layer: Any) -> None:
    layer.self_attn.scaling *= 4


def another_option(layer: Any) -> None:
    layer.self_attn.v_proj.scale_ub = 0.01


def another_dtype(layer: Any) -> None:
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.out_dtype = torch.float32
    attention.o_proj.out_dtype = torch.bfloat16


def hook_on_the_feed_forward(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda m, args, y: y * 2)


def another_attention(layer: Any) -> None:
    layer.self_attn = copy.deepcopy(layer.self_attn)
    layer.self_attn.v_proj.weight_scale.mul_(0.5)


def another_feed_forward_of_the_same_weights(layer: Any) -> None:
    plain = copy.copy(layer.mlp)
    vars(plain)["_modules"] = {**dict(plain.named_children()), "act_fn": nn.GELU()}
    layer.mlp = FusedGatedMlp(plain, "gelu")


class Louder(Counting):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        y, weights = super().forward(hidden_states, **kwargs)
        return y * 2, weights


def another_class(layer: Any) -> None:
    layer.self_attn.__class__ = Louder


def forward_on_the_instance(layer: Any) -> None:
    attention = layer.self_attn
    attention.forward = lambda **kwargs: (type(attention).forward(attention, **kwargs)[0] * 2, None)


CHANGES = (
    another_projection,
    dense_projection,
    written_projection,
    moved_projection,
    another_gain,
    hook_on_attention,
    hook_on_a_projection,
    hook_on_the_norm,
    hook_on_the_output,
    another_setting,
    another_option,
    another_dtype,
    hook_on_the_feed_forward,
    another_attention,
    another_feed_forward_of_the_same_weights,
    another_class,
    forward_on_the_instance,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_follows_the_layer(change: Callable[[Any], None], model: Any) -> None:
    before = [run(model, 2) for _ in range(CALLS)][-1]
    with torch.no_grad():
        for layer in model.model.layers:
            change(layer)
    fresh = copy.deepcopy(model) if change is not forward_on_the_instance else None
    expected = run(model if fresh is None else fresh, 2)
    assert expected.isfinite().all()
    assert not torch.equal(expected, before)
    for _ in range(CALLS):
        assert_bits_equal(run(model, 2), expected)


@pytest.mark.parametrize("part", ["mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"])
def test_a_kept_weight_is_followed(part: str, backends: CpuBackends) -> None:
    model = tiny()
    fp8kit.convert(model, weight_storage="keep")
    before = [run(model, 2) for _ in range(CALLS)][-1]
    with torch.no_grad():
        model.model.layers[0].get_submodule(part).original_weight.mul_(-2)
    expected = run(copy.deepcopy(model), 2)
    assert not torch.equal(expected, before)
    assert_bits_equal(run(model, 2), expected)


def test_modes_and_shapes_are_told_apart(model: Any) -> None:
    expected = {tokens: run(model, tokens) for tokens in (1, 2, 3)}
    for _ in range(CALLS):
        for tokens, logits in expected.items():
            assert_bits_equal(run(model, tokens), logits)
    assert is_replayed(model)
    with torch.autocast("cpu", torch.float16):
        assert not is_replayed(model)
    x = torch.randn(1, 1, 128, dtype=torch.bfloat16, requires_grad=True)
    y: Tensor = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert is_replayed(model)


def test_many_shapes_are_replayed_in_turn(model: Any) -> None:
    shapes = range(1, 11)
    for tokens in [*shapes] * 3:
        run(model, tokens)
    told.clear()
    for tokens in shapes:
        run(model, tokens)
    assert not told


def watched_projection(layer: Any) -> Any:
    return layer.self_attn.q_proj.register_forward_hook(lambda *_: None).remove


def watched_last_projection(layer: Any) -> Any:
    return layer.mlp.down_proj.register_forward_hook(lambda *_: None).remove


def kept_weight(layer: Any) -> Any:
    gate = layer.mlp.gate_proj
    gate.keep(gate.to_linear().weight.detach())
    return lambda: setattr(gate, "original_weight", None)


@pytest.mark.parametrize("forbid", [watched_projection, watched_last_projection, kept_weight])
def test_a_layer_is_replayed_once_nothing_forbids_it(
    forbid: Callable[[Any], Any], model: Any
) -> None:
    permit = [forbid(layer) for layer in model.model.layers]
    for _ in range(2 * CALLS):
        run(model)
    assert not is_replayed(model)
    for each in permit:
        each()
    for _ in range(CALLS - 1):
        run(model)
    assert is_replayed(model)


def test_what_attention_writes_on_itself_arrives(model: Any) -> None:
    for _ in range(CALLS):
        run(model)
    assert is_replayed(model)
    assert [layer.self_attn.called for layer in model.model.layers] == [CALLS + 1] * 2
    held = {*vars(model.model.layers[0].self_attn)}
    run(model)
    assert {*vars(model.model.layers[0].self_attn)} == held


def gain_of_the_sum(layer: Any) -> None:
    layer.post_attention_layernorm.weight = nn.Parameter(torch.full((128,), 3.0).bfloat16())


def hook_behind_attention(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_hook(lambda m, args, y: y * 2)


def bound_behind_attention(layer: Any) -> None:
    layer.mlp.down_proj.scale_ub = 0.01


def moved_behind_attention(layer: Any) -> None:
    down = layer.mlp.down_proj
    down.weight_scale.data = down.weight_scale.data * 2


@pytest.mark.parametrize(
    "change",
    [gain_of_the_sum, hook_behind_attention, bound_behind_attention, moved_behind_attention],
)
def test_a_change_during_attention_is_followed(change: Callable[[Any], None], model: Any) -> None:
    before = [run(model) for _ in range(CALLS)][-1]
    layer = model.model.layers[0]
    with torch.no_grad():
        hook = layer.self_attn.o_proj.register_forward_hook(lambda m, args, y: change(layer))
        found = run(model)
    hook.remove()
    expected = run(copy.deepcopy(model))
    assert not torch.equal(expected, before)
    assert_bits_equal(found, expected)


def test_a_layer_with_a_new_feed_forward_is_replayed_again(model: Any) -> None:
    for _ in range(CALLS):
        run(model)
    with torch.no_grad():
        for layer in model.model.layers:
            moved_behind_attention(layer)
    for _ in range(CALLS):
        run(model)
    assert is_replayed(model)


def test_a_layer_is_traced_with_symbolic_shapes(model: Any) -> None:
    def compute(x: Tensor) -> Tensor:
        angles = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        y: Tensor = model.model.layers[0](x, position_embeddings=angles)
        return y

    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        graph = make_fx(compute, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
        assert_bits_equal(graph(x), compute(x))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_an_argument_under_its_former_name_arrives(model: Any) -> None:
    layer, twin = model.model.layers[0], copy.deepcopy(model.model.layers[0])
    fresh, cache = (DynamicCache(config=model.config) for _ in range(2))
    for step in range(2 * CALLS):
        x = torch.randn(1, 1, 128, generator=torch.Generator().manual_seed(step)).bfloat16()
        angles = model.model.rotary_emb(x, torch.tensor([[step]]))
        passed = {"position_embeddings": angles, "use_cache": True}
        with torch.no_grad():
            y = layer(x, past_key_values=cache, **passed)
            expected = type(twin).forward(twin, x, past_key_values=fresh, **passed)
        assert_bits_equal(y, expected)
    assert cache.get_seq_length() == fresh.get_seq_length() == 2 * CALLS


class Twice(Counting):
    """Projects a second tensor, and gives its result in another dtype where ``wide``."""

    wide = False

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        y, weights = super().forward(hidden_states, **kwargs)
        found.append(self.q_proj(GIVEN))
        return y.float() if self.wide else y, weights


GIVEN = torch.randn(1, 1, 128).bfloat16()
found: list[Tensor] = []


@pytest.fixture
def twice(backends: CpuBackends) -> Any:
    del found[:]
    return of_attention(Twice)


def test_a_projection_of_another_input_is_computed(twice: Any) -> None:
    for _ in range(CALLS):
        run(twice)
    assert is_replayed(twice)
    with torch.no_grad():
        expected = [layer.self_attn.q_proj(GIVEN) for layer in twice.model.layers]
    for i, y in enumerate(found):
        assert_bits_equal(y, expected[i % 2])


def test_attention_may_give_another_dtype(twice: Any) -> None:
    layer = twice.model.layers[0]
    x, angles = (
        torch.randn(1, 1, 128).bfloat16(),
        twice.model.rotary_emb(GIVEN, torch.tensor([[3]])),
    )
    with torch.no_grad():
        narrow = [layer(x, position_embeddings=angles) for _ in range(CALLS)][-1]
        layer.self_attn.wide = True
        expected = copy.deepcopy(layer)(x, position_embeddings=angles)
        assert expected.dtype == torch.float32 != narrow.dtype
        assert_bits_equal(layer(x, position_embeddings=angles), expected)


def test_inputs_of_other_dtypes_and_addresses_are_told_apart(model: Any) -> None:
    layer = model.model.layers[0]
    x, angles = (
        torch.randn(1, 1, 128).bfloat16(),
        model.model.rotary_emb(GIVEN, torch.tensor([[3]])),
    )
    odd = torch.zeros(129).bfloat16()[1:].view_as(x).copy_(x)
    strided = torch.zeros(1, 1, 256).bfloat16()[..., ::2].copy_(x)
    with torch.no_grad():
        expected = [layer(x, position_embeddings=angles) for _ in range(CALLS)][-1]
        for other, is_new in ((odd, True), (strided, True), (x, False)):
            told.clear()
            assert_bits_equal(layer(other, position_embeddings=angles), expected)
            assert bool(told) == is_new
        wide = layer(x.float(), position_embeddings=angles)
    assert wide.dtype == torch.float32


def test_an_error_in_attention_leaves_the_layer_as_it_was(model: Any) -> None:
    expected = [run(model) for _ in range(CALLS)][-1]
    with pytest.raises(TypeError, match="NoneType"), torch.no_grad():
        model.model.layers[0](torch.zeros(1, 1, 128).bfloat16(), position_embeddings=None)
    assert isinstance(model.model.layers[0].self_attn.q_proj, fp8kit.Fp8Linear)
    assert_bits_equal(run(model), expected)


def test_copies_are_replayed_by_themselves(model: Any) -> None:
    expected = [run(model) for _ in range(CALLS)][-1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_replayed(twin)
        for _ in range(CALLS):
            assert_bits_equal(run(twin), expected)
        with torch.no_grad():
            twin.model.layers[0].self_attn.v_proj.weight_scale.mul_(2)
        assert not torch.equal(run(twin), expected)
        assert_bits_equal(run(model), expected)


@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn", "self_attn.q_proj", "mlp"])
def test_what_was_replaced_is_freed(part: str, model: Any) -> None:
    for _ in range(CALLS):
        run(model)
    old = weakref.ref(next(model.get_submodule(f"model.layers.0.{part}").parameters()))
    model.set_submodule(f"model.layers.0.{part}", nn.Identity())
    gc.collect()
    assert old() is None


def test_threads_get_results_of_their_own(model: Any) -> None:
    expected = {n: [run(model, n) for _ in range(CALLS)][-1] for n in (1, 2)}
    wrong: list[int] = []

    def repeat(tokens: int) -> None:
        for _ in range(20):
            if not torch.equal(run(model, tokens), expected[tokens]):
                wrong.append(tokens)

    threads = [threading.Thread(target=repeat, args=(n,)) for n in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
