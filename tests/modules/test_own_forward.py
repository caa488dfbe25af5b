"""Modules whose ``forward`` this package replaced: they are freed, and follow their class."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fp8kit
import recorded_calls
import tiny_experts
from fp8kit.modules.own_forward import ModuleForward
from numerics import assert_bits_equal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what diffusers warns about on import is not ours to fix
    diffusers = pytest.importorskip("diffusers")

DECODERS = ("Llama", "Qwen3", "Qwen3Moe", "Mixtral", "GptOss", "Gemma3Text", "DeepseekV3")
SIDES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "bert": {**SIDES, "num_attention_heads": 2, "vocab_size": 64},
    "t5": {"d_model": 128, "d_kv": 64, "d_ff": 256, "num_layers": 1, "num_heads": 2},
    "vit": {**SIDES, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}
INNER = {
    "activation": ("Llama", "model.layers.0.mlp.act_fn"),
    "first layer": ("flux", "transformer_blocks.0.ff.net.0"),
    "adapted norm": ("flux", "transformer_blocks.0.norm1.norm"),
}
IDS = torch.arange(1, 15).view(2, 7)


def flux() -> nn.Module:
    model: nn.Module = diffusers.FluxTransformer2DModel(
        in_channels=16, joint_attention_dim=64, pooled_projection_dim=32, num_layers=1,
        num_single_layers=1, num_attention_heads=2, attention_head_dim=64,
        axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return model.bfloat16()


def made(kind: str) -> nn.Module:
    """Return a random model in bf16."""
    if kind == "flux":
        return flux()
    if kind in DECODERS:
        return tiny_experts.tiny(kind)
    config = transformers.AutoConfig.for_model(kind, **OTHERS[kind])
    model: nn.Module = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def inputs(kind: str) -> dict[str, Tensor]:
    if kind == "flux":
        shapes = {"hidden_states": (2, 8, 16), "encoder_hidden_states": (2, 4, 64)}
        shapes["pooled_projections"] = (2, 32)
        given = {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()}
        places = {"img_ids": torch.zeros(8, 3), "txt_ids": torch.zeros(4, 3)}
        return {**given, **places, "timestep": torch.tensor([0.5, 0.25])}
    if kind == "vit":
        return {"pixel_values": torch.ones(2, 3, 16, 16).bfloat16()}
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS} if kind == "t5" else {})


def use(kind: str, model: Any) -> None:
    """Call a model as users do: until launches are replayed, with gradients, and to generate."""
    with torch.inference_mode():
        for _ in range(3):
            model(**inputs(kind))
    result = model(**inputs(kind), return_dict=False)[0]
    if result.requires_grad:
        result.float().sum().backward()
    if kind in DECODERS:
        model.generate(IDS, max_new_tokens=2, do_sample=False)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parts(model: nn.Module) -> list[weakref.ref[Any]]:
    return [weakref.ref(part) for part in (*model.modules(), *model.parameters())]


def left(refs: list[weakref.ref[Any]]) -> set[str]:
    """Return the types of the objects that are still alive."""
    return {type(part).__name__ for ref in refs if (part := ref()) is not None}


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "dense"])
@pytest.mark.parametrize("kind", [*DECODERS, *OTHERS, "flux"])
def test_models_are_freed_at_once(kind: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_calls.install(monkeypatch)
    with without_collector():
        model = made(kind)
        if fp8:
            assert fp8kit.convert(model).converted
        use(kind, model)
        refs = parts(model)
        del model
        assert left(refs) == set()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "flux"])
def test_copies_are_freed_at_once(
    kind: str, copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_calls.install(monkeypatch)
    with without_collector():
        model = made(kind)
        fp8kit.convert(model)
        twin = copied(model)
        use(kind, twin)
        refs = parts(model)
        del model
        assert left(refs) == set()
        refs = parts(twin)
        del twin
        assert left(refs) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*DECODERS, *OTHERS, "flux"])
def test_what_is_replayed_on_a_gpu_keeps_no_model(kind: str) -> None:
    given = {name: tensor.cuda() for name, tensor in inputs(kind).items()}
    with without_collector():
        model = made(kind).cuda()
        fp8kit.convert(model)
        with torch.no_grad():
            for _ in range(4):
                model(**given)
        refs = parts(model)
        del model
        assert left(refs) == set()


def test_a_circle_is_not_freed_at_once() -> None:
    with without_collector():
        layer = nn.Linear(2, 2)
        layer.itself = [layer]
        refs = parts(layer)
        del layer
        assert left(refs) == {"Linear", "Parameter"}
        gc.collect(0)
        assert left(refs) == set()


def test_a_forward_without_its_module_says_so() -> None:
    model = made("Llama")
    fp8kit.convert(model)
    forward = model.get_submodule("model.layers.0.self_attn").forward
    assert isinstance(forward, ModuleForward)
    del model
    with pytest.raises(fp8kit.UnsupportedError, match="the module is gone"):
        forward(torch.zeros(1, 1, 128))


# by model, the path of a fused module
FUSED = {
    "decoder layer": ("Llama", "model.layers.0"),
    "feed-forward": ("Llama", "model.layers.0.mlp"),
    "norm before layers": ("Llama", "model.layers.0.input_layernorm"),
    "norm of heads": ("Qwen3", "model.layers.0.self_attn.q_norm"),
    "router": ("Qwen3Moe", "model.layers.0.mlp.gate"),
    "feed-forward of diffusers": ("flux", "transformer_blocks.0.ff"),
}


@pytest.mark.parametrize("case", ["attention", *FUSED])
def test_a_shallow_copy_has_settings_of_its_own(case: str, fuses_on_cpu: None) -> None:
    kind, name = FUSED.get(case, ("Llama", "model.layers.0.self_attn"))
    model = made(kind)
    model.get_submodule(name).of_mine = "first"
    fp8kit.convert(model)
    module = model.get_submodule(name)
    own, seen = replaced(module), []
    twin = copy.copy(module)
    shared = list(zip(twin.parameters(), module.parameters(), strict=True))
    assert all(a is b for a, b in shared)
    twin.of_mine = "second"
    own_forward = own.forward
    own.forward = lambda self, *args: seen.append(self.of_mine)
    try:
        twin(None)
        module(None)
    finally:
        own.forward = own_forward
    assert seen == ["second", "first"]


@contextlib.contextmanager
def patched(kind: type[Any]) -> Iterator[list[bool]]:
    """Replace the forward of a class; return a list of whether each call got a real input."""
    own, seen = kind.forward, list[bool]()

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(bool(x.isfinite().all()))
        return own(self, -x, *args, **kwargs)

    kind.forward = forward
    try:
        yield seen
    finally:
        kind.forward = own


def replaced(module: Any) -> type[Any]:
    return type(vars(module).get("replaced", (module,))[0])


@pytest.mark.parametrize("case", FUSED)
def test_a_class_that_is_patched_later_is_followed(case: str, fuses_on_cpu: None) -> None:
    kind, name = FUSED[case]
    model = made(kind)
    fp8kit.convert(model)
    module = model.get_submodule(name)
    others = [m for m in model.modules() if replaced(m) is replaced(module)]
    with torch.no_grad():
        before = model(**inputs(kind))[0]
        with patched(replaced(module)) as seen:
            after = model(**inputs(kind))[0]
            assert seen == [True] * len(others)
            assert not torch.equal(after, before)
            for made_later in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                seen.clear()
                assert_bits_equal(made_later(**inputs(kind))[0], after)
                assert seen == [True] * len(others)
        assert_bits_equal(model(**inputs(kind))[0], before)


@pytest.mark.parametrize("case", INNER)
def test_a_class_within_a_fused_module_that_is_patched_later_is_followed(
    case: str, fuses_on_cpu: None
) -> None:
    kind, name = INNER[case]
    dense = made(kind)
    fused, separate = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(fused)
    fp8kit.convert(separate, fuse="none")
    with torch.no_grad(), patched(type(dense.get_submodule(name))):
        expected = separate(**inputs(kind))[0]
        for model in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert_bits_equal(model(**inputs(kind))[0], expected)


@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors_offloads_a_model() -> None:
    """compressed-tensors wraps the function of each module's ``forward``, as methods have one."""
    offload = pytest.importorskip("compressed_tensors.offload")
    model: Any = made("Llama")
    fp8kit.convert(model)
    assert any(isinstance(vars(m).get("forward"), ModuleForward) for m in model.modules())
    with torch.no_grad():
        expected = model(IDS).logits
        offload.offload_model(model, torch.device("cpu"))
        assert_bits_equal(model(IDS).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["norm", "layers.0.self_attn", "layers.0"])
def test_a_module_alone_is_exported_with_the_shapes_of_its_class(path: str) -> None:
    model = tiny_experts.tiny("Llama").eval()
    fp8kit.convert(model)
    module, x = model.model.get_submodule(path), torch.randn(1, 6, model.config.hidden_size)
    assert isinstance(module.forward, ModuleForward)
    tokens, x = torch.export.Dim("tokens", min=2, max=64), x.to(model.dtype)
    angles = model.model.rotary_emb(x, torch.arange(6)[None])
    others = {} if path == "norm" else {"position_embeddings": angles, "attention_mask": None}
    shapes: dict[str, Any] = {"hidden_states": {1: tokens}}
    if others:
        shapes |= {"position_embeddings": ({1: tokens}, {1: tokens}), "attention_mask": None}
    program = torch.export.export(module, (x,), others, dynamic_shapes=shapes)
    found, expected = program.module()(x, **others), module(x, **others)
    assert_bits_equal(*((r[0] if isinstance(r, tuple) else r) for r in (found, expected)))
