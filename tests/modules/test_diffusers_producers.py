"""Fused norms and feed-forwards in real diffusers models: equal results, or NaN in doubt."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8kit
from fp8kit.modules import fused_module
from fp8kit.modules.consumers import Consumers
from numerics import assert_bits_equal, relative_error
from registered_calls import RegisteredCalls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what diffusers warns about on import is not ours to fix
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.attention import FeedForward
    from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZeroSingle

Inputs = dict[str, Tensor]
pytestmark = pytest.mark.usefixtures("fuses_on_cpu")

HEADS = {"num_attention_heads": 2, "attention_head_dim": 64}


def flux() -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (16, 24, 24)}
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, joint_attention_dim=64, pooled_projection_dim=32, **sizes, **HEADS
    )
    return model, {
        "hidden_states": torch.randn(2, 24, 16),
        "encoder_hidden_states": torch.randn(2, 8, 64),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.5, 0.25]),
        "img_ids": torch.randn(24, 3),
        "txt_ids": torch.randn(8, 3),
    }


def sd3() -> tuple[nn.Module, Inputs]:
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 16}
    widths = {"joint_attention_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 64}
    model = diffusers.SD3Transformer2DModel(num_layers=2, **sizes, **widths, **HEADS)
    return model, {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 8, 64),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([3.0, 400.0]),
    }


def wan() -> tuple[nn.Module, Inputs]:
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 64, "freq_dim": 64, "ffn_dim": 256}
    model = diffusers.WanTransformer3DModel(num_layers=1, rope_max_seq_len=32, **sizes, **HEADS)
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 8, 64),
        "timestep": torch.tensor([3.0]),
    }


def basic(**options: Any) -> tuple[nn.Module, Inputs]:
    sizes = {"in_channels": 32, "norm_num_groups": 8, "num_layers": 2, "sample_size": 8}
    options = {"cross_attention_dim": 160, **options}
    model = diffusers.Transformer2DModel(**sizes, **HEADS, **options)
    states = torch.randn(2, 8, options["cross_attention_dim"])
    return model, {"hidden_states": torch.randn(2, 32, 8, 8), "encoder_hidden_states": states}


Build = Callable[[], tuple[nn.Module, Inputs]]
# by model: builder, number of norms that hand over codes in a run, number of fused feed-forwards
MODELS: dict[str, tuple[Build, int, int]] = {
    "flux": (flux, 3, 2),
    "sd3": (sd3, 4, 3),
    "wan": (wan, 0, 1),
    "basic": (basic, 6, 2),
    "geglu-approximate": (lambda: basic(activation_fn="geglu-approximate"), 6, 0),
    "gelu": (lambda: basic(activation_fn="gelu"), 6, 2),
    "self-attention-possible": (lambda: basic(cross_attention_dim=128), 4, 2),
}


def ready(build: Build, device: torch.device) -> tuple[nn.Module, Inputs]:
    """Return a bf16 model whose norms are not the identity, and its inputs."""
    torch.manual_seed(0)
    model, inputs = build()
    model = model.to(device, torch.bfloat16).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model, {k: v.to(device, torch.bfloat16) for k, v in inputs.items()}


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(**inputs, return_dict=False)[0]
    return y


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Collect the stand-ins and codes that producers give instead of their results."""
    seen: list[Tensor] = []
    produce = Consumers.produce

    def counted(self: Consumers, *args: Any) -> list[Tensor]:
        given = produce(self, *args)
        seen.append(given[0])
        return given

    monkeypatch.setattr(Consumers, "produce", counted)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_fused_models_compute_what_separate_layers_do(
    name: str, device: torch.device, handed_over: list[Tensor]
) -> None:
    build, norms, feed_forwards = MODELS[name]
    dense, inputs = ready(build, device)
    separate, together = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    found = output(together, inputs)
    kinds = [type(m).__name__ for m in together.modules()]
    assert len(handed_over) == norms
    assert kinds.count("FusedFeedForward") == feed_forwards
    expected = output(separate, inputs)
    assert found.isfinite().all()
    if device.type == "cpu" and not norms:
        assert_bits_equal(found, expected)
    else:
        # statistics and exponentials may round differently in the last bit of bf16, which moves a
        # code here and there: far below the error of FP8 itself
        noise = relative_error(expected, output(dense, inputs))
        assert relative_error(found, expected) < 0.5 * noise


@pytest.mark.parametrize("name", ["flux", "sd3", "basic"])
def test_state_dict_and_copies(name: str, device: torch.device) -> None:
    model, inputs = ready(MODELS[name][0], device)
    names = model.state_dict().keys()
    fp8kit.convert(model)
    assert {n for n in model.state_dict() if not n.endswith("weight_scale")} == names
    expected = output(model, inputs)
    assert_bits_equal(output(copy.deepcopy(model), inputs), expected)
    assert_bits_equal(output(model.to("cpu").to(device), inputs), expected)


# changes that a user may make to a block; the number of its two norms that then give real numbers
CHANGES: dict[str, tuple[Callable[[Any], object], int]] = {
    "norm hook": (lambda b: b.norm1.register_forward_hook(lambda m, a, y: None), 1),
    "attention hook": (lambda b: b.attn.register_forward_pre_hook(lambda m, a: None), 2),
    "processor": (lambda b: setattr(b.attn, "processor", type(b.attn.processor)()), 2),
    "layer": (lambda b: setattr(b.attn, "to_k", copy.deepcopy(b.attn.to_k)), 1),
    "forward": (lambda b: setattr(b.attn.to_k, "forward", partial(b.attn.to_k.forward)), 1),
    "its own forward": (lambda b: setattr(b.attn.to_k, "forward", b.attn.to_k.forward), 0),
    "nothing": (lambda b: None, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_conversion_is_noticed(
    change: str, device: torch.device, handed_over: list[Tensor]
) -> None:
    model, inputs = ready(flux, device)
    fp8kit.convert(model)
    expected = output(model, inputs)
    before = len(handed_over)
    act, stopped = CHANGES[change]
    act(model.transformer_blocks[0])
    found = output(model, inputs)
    assert len(handed_over) == 2 * before - stopped
    assert found.isfinite().all()
    assert relative_error(found, expected) < 0.02


def test_chunked_feed_forwards_get_real_numbers(
    device: torch.device, handed_over: list[Tensor]
) -> None:
    model, inputs = ready(basic, device)
    fp8kit.convert(model)
    expected = output(model, inputs)
    del handed_over[:]
    for block in model.transformer_blocks:
        block.set_chunk_feed_forward(16, 1)
    assert relative_error(output(model, inputs), expected) < 0.02
    assert len(handed_over) == 0  # a block that is set up differently is unknown as a whole


@pytest.mark.parametrize("name", ["flux", "basic"])
def test_compiles_to_one_graph(name: str, device: torch.device) -> None:
    model, inputs = ready(MODELS[name][0], device)
    fp8kit.convert(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        found = compiled(**inputs, return_dict=False)[0]
        assert counter.frame_count == 1
        difference = relative_error(found, output(model, inputs))
    # in the graph every norm is the model's own
    assert difference < 0.02


BEHIND = "concatenated_activation_quantize"


def flux2() -> tuple[nn.Module, Inputs]:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=64,
        axes_dims_rope=(16, 16, 16, 16),
        timestep_guidance_channels=64,
        **HEADS,
    )
    return model, {
        "hidden_states": torch.randn(2, 24, 16),
        "encoder_hidden_states": torch.randn(2, 8, 64),
        "timestep": torch.tensor([0.5, 0.25]),
        "guidance": torch.tensor([1.0, 2.0]),
        "img_ids": torch.randn(24, 4),
        "txt_ids": torch.randn(8, 4),
    }


def hunyuan() -> tuple[nn.Module, Inputs]:
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1}
    widths = {
        "in_channels": 4,
        "out_channels": 4,
        "text_embed_dim": 64,
        "pooled_projection_dim": 64,
    }
    model = diffusers.HunyuanVideoTransformer3DModel(
        **sizes, **widths, **HEADS, rope_axes_dim=(16, 24, 24), patch_size_t=1
    )
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 4, 4),
        "encoder_hidden_states": torch.randn(1, 8, 64),
        "encoder_attention_mask": torch.ones(1, 8),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([500]),
        "guidance": torch.tensor([1000.0]),
    }


# by model: its builder, the number of activations quantized alone, and of those after attention
ACTIVATED: dict[str, tuple[Build, int, int]] = {
    "flux": (flux, 2, 1),
    "flux2": (flux2, 2, 1),
    "hunyuan": (hunyuan, 2, 1),  # the refiner of the text stays dense
}


@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_are_quantized_behind_attention(name: str, device: torch.device) -> None:
    build, alone, behind = ACTIVATED[name]
    dense, inputs = ready(build, device)
    separate, together = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    with RegisteredCalls() as seen:
        found = output(together, inputs)
    assert seen.names.count("activation_quantize") == alone
    assert seen.names.count(BEHIND) == behind
    expected = output(separate, inputs)
    noise = relative_error(expected, output(dense, inputs))
    assert relative_error(found, expected) < 0.5 * noise


# changes that a user may make to a block whose activation is read after the attention's result
BLOCK_CHANGES: dict[str, Callable[[Any], object]] = {
    "activation hook": lambda b: b.act_mlp.register_forward_hook(lambda m, a, y: 2 * y),
    "activation": lambda b: setattr(b, "act_mlp", nn.ReLU()),
    "approximation": lambda b: setattr(b.act_mlp, "approximate", "none"),
    "layer hook": lambda b: b.proj_out.register_forward_pre_hook(lambda m, a: (2 * a[0],)),
    "layer": lambda b: setattr(b, "proj_out", copy.deepcopy(b.proj_out)),
    "forward": lambda b: setattr(b.act_mlp, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", BLOCK_CHANGES)
def test_a_changed_block_concatenates_itself(change: str, device: torch.device) -> None:
    model, inputs = ready(flux, device)
    plain = copy.deepcopy(model)
    fp8kit.convert(model)
    fp8kit.convert(plain, fuse="none")
    with RegisteredCalls() as before:
        output(model, inputs)
    for changed in (model, plain):
        BLOCK_CHANGES[change](changed.single_transformer_blocks[0])
    with RegisteredCalls() as after:
        found = output(model, inputs)
    assert relative_error(found, output(plain, inputs)) < 0.02
    assert (before.names.count(BEHIND), after.names.count(BEHIND)) == (1, 0)


def test_gradients_flow(device: torch.device) -> None:
    model, inputs = ready(flux, device)
    fp8kit.convert(model)
    x = inputs["hidden_states"].requires_grad_()
    # cuDNN's attention of torch 2.11 reads unwritten memory in its backward, dense models' too
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        model(**inputs, return_dict=False)[0].float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


def test_dropout_in_training_is_kept(device: torch.device) -> None:
    module = FeedForward(128, dropout=0.5).to(device, torch.bfloat16)
    holder = nn.ModuleDict({"ff": module})
    fp8kit.convert(holder)
    assert type(holder["ff"]).__name__ == "FusedFeedForward"
    x = torch.randn(4, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not torch.equal(holder["ff"](x), holder["ff"](x))
        holder.eval()
        assert_bits_equal(holder["ff"](x), holder["ff"](x))


@pytest.mark.parametrize("training", [False, True])
def test_another_module_in_place_of_the_dropout_runs(training: bool, device: torch.device) -> None:
    module = FeedForward(128).to(device, torch.bfloat16)
    holder = nn.ModuleDict({"ff": module}).train(training)
    fp8kit.convert(holder)
    holder["ff"].net[1] = nn.Flatten(-2)
    with torch.no_grad():
        y = holder["ff"](torch.randn(4, 1, 128, device=device, dtype=torch.bfloat16))
    assert y.shape == (4, 128)


@pytest.mark.parametrize("kind", ["swiglu", "linear-silu"])
def test_a_hook_of_an_activation_is_called(kind: str, device: torch.device) -> None:
    module = FeedForward(128, activation_fn=kind).to(device, torch.bfloat16)
    holder = nn.ModuleDict({"ff": module}).eval()
    fp8kit.convert(holder)
    seen: list[Tensor] = []
    activation = holder["ff"].get_submodule("net.0.activation")
    activation.register_forward_hook(lambda m, a, y: seen.append(y))
    with torch.no_grad():
        holder["ff"](torch.randn(4, 128, device=device, dtype=torch.bfloat16))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["geglu", "gelu", "gelu-approximate", "swiglu", "linear-silu"])
def test_every_feed_forward(kind: str, device: torch.device) -> None:
    dense = nn.ModuleDict({"ff": FeedForward(128, activation_fn=kind, final_dropout=True)})
    dense = dense.to(device, torch.bfloat16).eval()
    separate = copy.deepcopy(dense)
    fp8kit.convert(separate, fuse="none")
    x = torch.randn(2, 4, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        expected, exact = separate["ff"](x), dense["ff"](x)
        fp8kit.convert(dense)
        assert type(dense["ff"]).__name__ == "FusedFeedForward"
        found = dense["ff"](x)
    if device.type == "cpu":
        assert_bits_equal(found, expected)
    else:
        assert relative_error(found, expected) < 0.5 * relative_error(expected, exact)


def test_attributes_of_fused_modules_are_told_from_those_of_what_they_replace(
    device: torch.device,
) -> None:
    model, _ = ready(flux, device)
    fp8kit.convert(model)
    made = [m for m in model.modules() if isinstance(m, fused_module.Fused)]
    assert {type(m).__name__ for m in made} >= {"FusedAdaptiveNorm", "FusedFeedForward"}
    for module in made:
        assert {n for n in vars(module) if n[0] != "_"} - set(
            vars(nn.Module())
        ) <= fused_module._OWN


def test_another_activation_after_conversion_counts() -> None:
    results = []
    for fuse in ("none", "all"):
        torch.manual_seed(0)
        model = nn.ModuleDict({"ff": FeedForward(128, activation_fn="gelu")}).bfloat16().eval()
        fp8kit.convert(model, fuse=fuse)
        x = torch.randn(2, 4, 128, dtype=torch.bfloat16)
        with torch.no_grad():
            before = model["ff"](x)
            model["ff"].net[0].approximate = "tanh"
            results.append(model["ff"](x))
        assert not torch.equal(results[-1], before)
    assert_bits_equal(*results)


class Adaptive(nn.Module):
    """A block like Flux's single one, with any adaptive norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.left, self.right = nn.Linear(128, 128), nn.Linear(128, 256)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = self.norm(x, emb)
        y = y[0] if isinstance(y, tuple) else y
        return torch.cat([self.left(y), self.right(y)], -1)


@pytest.mark.parametrize("affine", [False, True])
def test_adaptive_norms_called_by_position(
    affine: bool, device: torch.device, handed_over: list[Tensor]
) -> None:
    norms = (AdaLayerNormZeroSingle(128), AdaLayerNormContinuous(128, 128, affine, 1e-6))
    for norm in norms:
        dense = Adaptive(norm).to(device, torch.bfloat16)
        separate = copy.deepcopy(dense)
        fp8kit.convert(separate, fuse="none")
        fp8kit.convert(dense, fuse={"": ["norm -> left right"]})
        x = torch.randn(2, 5, 128, device=device, dtype=torch.bfloat16)
        emb = torch.randn(2, 128, device=device, dtype=torch.bfloat16)
        del handed_over[:]
        with torch.no_grad():
            found, expected = dense(x, emb), separate(x, emb)
        assert len(handed_over) == 1
        assert relative_error(found, expected) < 1e-2
        for model in (dense, separate):
            model.norm.norm.eps = 1.0
        with torch.no_grad():
            assert relative_error(dense(x, emb), separate(x, emb)) < 1e-2
        assert len(handed_over) == 1
        wide = dense(x, emb.float()) if isinstance(norm, AdaLayerNormContinuous) else None
        assert wide is None or wide.isfinite().all()
