"""Decoder layers that fuse residual sum, norm and quantization into one pass."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fp8kit
from fp8kit.modules.decoder_layer import FLOWS, ResidualForward, find_flow
from fp8kit.modules.fused_producers import FusedNorm
from fp8kit.ops.operators import CodesCall
from numerics import assert_bits_equal, relative_error
from recorded_calls import install
from tiny_experts import SIZES

PLAIN, SANDWICH = FLOWS
pytestmark = pytest.mark.usefixtures("fuses_on_cpu")


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[CodesCall]:
    """Collect the calls of the kernel that adds, norms and quantizes in one pass."""
    seen: list[CodesCall] = []
    codes_of_sum = FusedNorm.codes_of_sum

    def counted(self: FusedNorm, *args: Tensor) -> CodesCall | None:
        call = codes_of_sum(self, *args)
        seen.extend([] if call is None else [call])
        return call

    monkeypatch.setattr(FusedNorm, "codes_of_sum", counted)
    return seen


def llama(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(device, torch.bfloat16).eval()


def run(model: nn.Module, **options: bool) -> Any:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(input_ids=torch.arange(17, device=device)[None], **options)


def test_every_layer_adds_once(device: torch.device, sums: list[CodesCall]) -> None:
    together = llama(device)
    separate = copy.deepcopy(together)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    found, expected = run(together).logits, run(separate).logits
    assert len(sums) == 2
    if device.type == "cpu":
        assert_bits_equal(found, expected)
    else:
        assert relative_error(found, expected) < 0.02


def test_hidden_states_are_still_recorded(device: torch.device) -> None:
    together = llama(device)
    separate = copy.deepcopy(together)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    found = run(together, output_hidden_states=True).hidden_states
    expected = run(separate, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < 0.02


def test_copies_belong_to_themselves(device: torch.device, sums: list[CodesCall]) -> None:
    model = llama(device)
    fp8kit.convert(model)
    expected = run(model).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = twin.model.layers[1]
        assert layer.forward.module is layer
        del sums[:]
        assert_bits_equal(run(twin).logits, expected)
        assert len(sums) == 2


@pytest.mark.parametrize("watched", ["norm", "mlp", "gate_proj"])
def test_a_hook_ends_the_fusion_of_its_layer(
    watched: str, device: torch.device, sums: list[CodesCall]
) -> None:
    model = llama(device)
    fp8kit.convert(model)
    expected = run(model).logits
    layer = model.model.layers[0]
    names = {"norm": "post_attention_layernorm", "mlp": "mlp", "gate_proj": "mlp.gate_proj"}
    seen: list[Tensor] = []
    layer.get_submodule(names[watched]).register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    del sums[:]
    found = run(model).logits
    assert len(sums) == 1
    assert seen[0].isfinite().all()
    assert relative_error(found, expected) < 0.02


def test_a_setting_that_changed_counts(device: torch.device, sums: list[CodesCall]) -> None:
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES)).to(device, torch.bfloat16).eval()
    fp8kit.convert(model)
    before = run(model).logits
    assert len(sums) == 2
    for layer in model.model.layers:
        layer.residual_multiplier = 0.25
    assert not torch.equal(run(model).logits, before)
    assert len(sums) == 2


def test_gradients_flow(device: torch.device, sums: list[CodesCall]) -> None:
    model = llama(device)
    fp8kit.convert(model)
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    model.model(inputs_embeds=x).last_hidden_state.float().sum().backward()
    assert sums == []
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_every_layer_is_checkpointed(device: torch.device) -> None:
    model: Any = llama(device)
    fp8kit.convert(model)
    model.requires_grad_(False).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gain = torch.ones(128, device=device, requires_grad=True)
    computed: list[nn.Module] = []

    def multiplied(module: nn.Module, _: Any, y: Tensor) -> Tensor:
        computed.append(module)
        return y * gain

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(multiplied)
    x = torch.ones(1, 3, 128, device=device, dtype=torch.bfloat16)
    model.model(inputs_embeds=x).last_hidden_state.float().sum().backward()
    first, second = (layer.self_attn.o_proj for layer in model.model.layers)
    assert computed == [first, second, second, first]
    assert gain.grad is not None


def layer_of(kind: type[nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(config, 0)


def test_flows_are_found_by_running_them() -> None:
    assert find_flow(layer_of(LlamaDecoderLayer, LlamaConfig(**SIZES))) == PLAIN
    assert find_flow(layer_of(Gemma2DecoderLayer, Gemma2Config(**SIZES))) == SANDWICH
    assert find_flow(nn.ModuleDict({"self_attn": nn.Identity()})) is None


class Scaled(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs) * 0.5


class Parallel(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        y, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + y + self.mlp(self.post_attention_layernorm(hidden_states))


class Returning(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        return (super().forward(hidden_states, **kwargs),)


class Dropout(LlamaDecoderLayer):
    """Has a different formula in training."""

    @functools.wraps(LlamaDecoderLayer.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return nn.functional.dropout(super().forward(*args, **kwargs), 0.5, self.training)


class Dropping(LlamaDecoderLayer):
    """Does not pass an argument on to the attention."""

    def forward(self, hidden_states: Tensor, use_cache: bool = False, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, **kwargs)


class Defaulting(LlamaDecoderLayer):
    """Passes the attention a value that differs from its default."""

    def forward(self, hidden_states: Tensor, scale: float | None = None, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states, scale=2.0 if scale is None else scale, **kwargs)


@pytest.mark.parametrize("kind", [Scaled, Parallel, Returning, Dropout, Dropping, Defaulting])
def test_other_layers_are_left_alone(kind: type[nn.Module]) -> None:
    assert find_flow(layer_of(kind, LlamaConfig(**SIZES)).eval()) is None


def test_a_multiplied_residual_is_noticed_in_each_layer() -> None:
    config = GraniteConfig(**SIZES)
    assert find_flow(layer_of(GraniteDecoderLayer, config)) == PLAIN
    config.residual_multiplier = 0.5
    assert find_flow(layer_of(GraniteDecoderLayer, config)) is None


def test_a_forward_on_the_instance_is_kept() -> None:
    model = llama(torch.device("cpu"))
    layer = model.model.layers[0]
    layer.forward = mine = functools.partial(layer.forward)
    fp8kit.convert(model)
    assert layer.forward is mine
    assert isinstance(model.model.layers[1].forward, ResidualForward)


def moved_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight.data = layer.mlp.gate_proj.weight.data.clone()


def written_weight(layer: Any) -> None:
    bits = layer.mlp.down_proj.weight.view(torch.uint8)
    bits.copy_(bits.flip(0))


def another_scale(layer: Any) -> None:
    scale = layer.mlp.down_proj.weight_scale
    layer.mlp.down_proj.weight_scale = nn.Parameter(scale * 2, requires_grad=False)


def another_gain(layer: Any) -> None:
    layer.post_attention_layernorm.weight = nn.Parameter(torch.full((128,), 0.5).bfloat16())


def another_layer(layer: Any) -> None:
    layer.mlp.down_proj = copy.deepcopy(layer.mlp.down_proj)
    layer.mlp.down_proj.weight_scale.mul_(0.5)


def dense_layer(layer: Any) -> None:
    layer.mlp.down_proj = layer.mlp.down_proj.to_linear()


def hook(layer: Any) -> None:
    layer.mlp.down_proj.register_forward_pre_hook(lambda m, args: (args[0].clamp(-0.01, 0.01),))


def another_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


class Louder(fp8kit.Fp8Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def another_class(name: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.get_submodule(name).__class__ = Louder

    return change


class Doubled(nn.Module):
    """Reads the module that it wraps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states) * 2


def wrapped_norm(name: str) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, Doubled(getattr(layer, name)))


class Unsized(nn.SiLU):
    """Has no truth value, like a module after ``torch.compile``."""

    def __len__(self) -> int:
        raise TypeError

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def unsized_activation(layer: Any) -> None:
    layer.mlp.act_fn = Unsized()


CHANGES = (
    unsized_activation,
    wrapped_norm("input_layernorm"),
    wrapped_norm("post_attention_layernorm"),
    another_class("mlp.gate_proj"),
    another_class("mlp.down_proj"),
    moved_weight,
    written_weight,
    another_scale,
    another_gain,
    another_layer,
    dense_layer,
    hook,
    another_activation,
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_recorded_feed_forward_follows_its_layers(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install(monkeypatch).calls
    model = llama(torch.device("cpu"))
    fp8kit.convert(model)
    before = [run(model).logits for _ in range(4)][-1]
    calls.clear()
    assert_bits_equal(run(model).logits, before)
    assert not calls
    with torch.no_grad():
        for layer in model.model.layers:
            change(layer)
    fresh = copy.deepcopy(model)
    expected = run(fresh).logits
    assert expected.isfinite().all()
    assert not torch.equal(expected, before)
    for _ in range(4):
        assert_bits_equal(run(model).logits, expected)
