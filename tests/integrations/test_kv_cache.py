"""FP8 KV caches, compared with Transformers' caches of the same values in high precision."""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
import numerics
import tiny_experts
from fp8kit.errors import CheckpointError, UnsupportedError
from numerics import assert_bits_equal

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import (  # noqa: E402
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fp8kit.integrations.kv_cache_layers import Fp8Layer, Fp8StaticLayer  # noqa: E402
from zoo.transformers_sizes import tiny_config  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
E4M3 = torch.float8_e4m3fn
BATCH, HEADS, WIDTH = 2, 2, 64


def fake(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Round to e4m3 in plain torch, by the definition."""
    if scale is None:
        scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10 / 448)
    codes = (x.float() / scale).clamp(-448, 448).to(E4M3)
    return (codes.float() * scale).to(x.dtype)


class FakeLayer(DynamicLayer):
    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(fake(k), fake(v))


class FakeSlidingLayer(DynamicSlidingWindowLayer):
    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(fake(k), fake(v))


class FakeStaticLayer(StaticLayer):
    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(fake(k), fake(v))


class FakeStaticSlidingLayer(StaticSlidingWindowLayer):
    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(fake(k), fake(v))


def fake_cache(model: Any, room: int = 0) -> Any:
    """Return a cache of Transformers whose layers round keys and values to FP8."""
    cache = DynamicCache(config=model.config)
    if room:
        cache = StaticCache(config=model.config, max_cache_len=room)
    kinds = {DynamicLayer: FakeLayer, DynamicSlidingWindowLayer: FakeSlidingLayer}
    kinds |= {StaticLayer: FakeStaticLayer, StaticSlidingWindowLayer: FakeStaticSlidingLayer}
    for layer in cache.layers:
        layer.__class__ = kinds[type(layer)]
    return cache


def tiny(kind: str = "Llama", **kwargs: Any) -> Any:
    return tiny_experts.tiny(kind, **kwargs).requires_grad_(False)


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    spread = torch.logspace(-3, 3, tokens).view(1, 1, -1, 1)
    k, v = (torch.randn(BATCH, HEADS, tokens, WIDTH) * spread for _ in "kv")
    return k.to(dtype), v.to(dtype)


@pytest.fixture(scope="module")
def nano() -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        EXAMPLES / "nano", dtype=torch.bfloat16
    )
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "nano")
    ids: Tensor = tokenizer((EXAMPLES / "eval.txt").read_text(), return_tensors="pt").input_ids[0]
    return ids[: 8 * 192].view(8, 192)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scales", ["token", "tensor", "heads"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_states_come_back_as_e4m3_rounds_them(
    static: bool, scales: str, dtype: torch.dtype
) -> None:
    given = {
        "token": None,
        "tensor": (torch.tensor([0.3]), torch.tensor([0.7])),
        "heads": (torch.tensor([0.3, 2.0]).view(2, 1, 1), torch.tensor([1.0, 0.1]).view(2, 1, 1)),
    }[scales]
    layer = Fp8StaticLayer(given, max_cache_len=12) if static else Fp8Layer(given)
    k, v = states(12, dtype)
    layer.update(k[:, :, :7], v[:, :, :7])
    for found, x, scale in zip(
        layer.update(k[:, :, 7:], v[:, :, 7:]), (k, v), given or (None, None), strict=True
    ):
        assert_bits_equal(found, fake(x, scale))
        assert found.dtype == dtype


def test_nan_stays_nan() -> None:
    for given in (None, (torch.ones(1), torch.ones(1))):
        k, v = states(2)
        k[0, 0, 1, 5] = torch.nan
        found, other = Fp8Layer(given).update(k, v)
        assert found[0, 0, 1, 5].isnan()
        assert not found[1].isnan().any()
        assert not other.isnan().any()


def test_memory_halves(nano: Any, tokens: Tensor) -> None:
    dense = DynamicCache(config=nano.config)
    ours, fixed = fp8kit.Fp8Cache(nano), fp8kit.Fp8Cache(with_scales(nano), "checkpoint")
    for cache in (dense, ours, fixed):
        nano(tokens[:2], past_key_values=cache)
    before = sum(t.nbytes for layer in dense.layers for t in (layer.keys, layer.values))
    assert fixed.nbytes == before // 2 + 4 * 2 * len(fixed)  # a byte for two, and fp32 scales
    assert ours.nbytes == before // 2 * (WIDTH + 4) // WIDTH
    static = fp8kit.Fp8StaticCache(nano, 512)
    nano(tokens[:2], past_key_values=static)
    assert static.nbytes * 192 == ours.nbytes * 512  # its room, not its tokens


def with_scales(model: Any) -> Any:
    """Store scales where ``fp8kit.load`` stores those of a checkpoint."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
            module.cache_scales = {"k_scale": torch.tensor([0.05]), "v_scale": torch.tensor([0.02])}
    return model


def losses(model: Any, ids: Tensor, make: Any) -> Tensor:
    logits = torch.cat(
        [model(part, past_key_values=make(model)).logits[:, :-1].float() for part in ids.split(4)]
    )
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return loss.mean(1)


def test_perplexity_is_that_of_rounded_states(nano: Any, tokens: Tensor) -> None:
    dense = losses(nano, tokens, lambda m: DynamicCache(config=m.config))
    found = losses(nano, tokens, fp8kit.Fp8Cache)
    numerics.assert_same_loss(found, losses(nano, tokens, fake_cache))
    difference = found.double() - dense.double()
    assert difference.abs().max() > 0, "a cache that changed no loss rounded nothing"
    numerics.assert_cache_cost(found, dense)


def test_what_was_said_is_found_again(nano: Any, tokens: Tensor) -> None:
    """A text occurs twice: the second time the model copies it out of the cache."""
    half = 96
    twice = torch.cat([tokens[:, :half]] * 2, 1)

    def hits(cache: Any) -> Tensor:
        nano(twice[:, :half], past_key_values=cache)
        guesses = nano(twice[:, half:], past_key_values=cache).logits[:, :-1].argmax(-1)
        return guesses == twice[:, half + 1 :]

    dense = hits(DynamicCache(config=nano.config))
    unaided = nano(tokens[:, :half]).logits[:, :-1].argmax(-1) == tokens[:, 1:half]
    for cache in (fp8kit.Fp8Cache(nano), fp8kit.Fp8StaticCache(nano, 2 * half)):
        found = hits(cache)
        assert found.float().mean() > unaided.float().mean() + 0.2, "nothing came from the cache"
        lost = found.float() - dense.float()
        error = lost.std() / math.sqrt(lost.numel())
        assert abs(lost.mean()) <= 3 * error


CROPPABLE = getattr(StaticLayer, "is_croppable", False)  # not in Transformers 5.17
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several": {"num_beams": 4, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_generate_gives_the_tokens_of_rounded_states(
    nano: Any, tokens: Tensor, option: str
) -> None:
    prompt = tokens[:1, :32] if option == "lookup" else tokens[:2, :32]
    options = {"max_new_tokens": 24, "do_sample": False, **OPTIONS[option]}
    options["attention_mask"] = torch.ones_like(prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Transformers says of its own defaults
        pairs = [(fake_cache(nano), fp8kit.Fp8Cache(nano))]
        if option != "lookup" or CROPPABLE:  # takes tokens back
            pairs.append((fake_cache(nano, 64), fp8kit.Fp8StaticCache(nano, 64)))
        for theirs, ours in pairs:
            wanted = nano.generate(prompt, past_key_values=theirs, **options)
            assert torch.equal(nano.generate(prompt, past_key_values=ours, **options), wanted)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_window_slides_as_that_of_transformers(static: bool) -> None:
    model = tiny("Mistral", sliding_window=8)
    ids = torch.arange(2 * 24).view(2, 24) * 7 % 160
    ours = fp8kit.Fp8StaticCache(model, 32) if static else fp8kit.Fp8Cache(model)
    theirs = fake_cache(model)
    for part in (ids[:, :11], ids[:, 11:12], ids[:, 12:13], ids[:, 13:]):
        wanted = model(part, past_key_values=theirs).logits
        found = model(part, past_key_values=ours).logits
        # masks of another width change the order of the same sums
        assert numerics.relative_error(found, wanted) < 2**-7
    assert ours.nbytes < bytes_without_window(ids.shape[1])


def bytes_without_window(tokens: int) -> int:
    return 2 * 2 * 2 * tokens * 2 * (WIDTH + 4)  # layers, keys and values, batch, heads


@pytest.mark.parametrize("given", [None, (torch.ones(1), torch.ones(1))], ids=["token", "tensor"])
def test_sequences_and_tokens_are_taken_away_and_repeated(given: Any) -> None:
    ours, theirs = Fp8Layer(given), DynamicLayer()
    k, v = states(6)
    theirs.update(*ours.update(k, v))
    for change in (
        lambda c: c.crop(-2),
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.reorder_cache(torch.tensor([5, 0, 3, 3, 1, 2])),
        lambda c: c.batch_select_indices(torch.tensor([4, 0])),
    ):
        change(ours)
        change(theirs)
        k, v = states(1)
        many = theirs.keys.shape[0] // 2
        k, v = k.repeat(many, 1, 1, 1), v.repeat(many, 1, 1, 1)
        scale = None if given is None else given[0]
        found = ours.update(k, v)
        for a, b in zip(found, theirs.update(fake(k, scale), fake(v, scale)), strict=True):
            assert_bits_equal(a, b)
    ours.reset()
    assert ours.get_seq_length() == 0
    ours.update(*states(3))
    ours.offload()
    ours.prefetch()
    assert ours.get_seq_length() == 3


def test_a_static_cache_stays_where_it_is(nano: Any, tokens: Tensor) -> None:
    cache = fp8kit.Fp8StaticCache(nano, 64)
    nano(tokens[:2, :20], past_key_values=cache)

    def held() -> list[Tensor]:
        return [t for c in cache.layers for m in (c.codes, c.scales) for t in (m.keys, m.values)]

    addresses = [t.data_ptr() for t in held()]
    before = [t.clone() for t in held()]
    nano(tokens[:2, 20:21], past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert [t.data_ptr() for t in held()] == addresses
    for old, new in zip(before, held(), strict=True):
        assert torch.equal(old[:, :, :20], new.flip(0)[:, :, :20])
    cache.reset()
    assert [t.data_ptr() for t in held()] == addresses
    assert not any(t.any() for t in held())
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("scale", ["token", "checkpoint"])
def test_decoding_compiles_to_one_graph(scale: str) -> None:
    model = with_scales(tiny())
    caches = [fp8kit.Fp8StaticCache(model, 16, scale) for _ in range(2)]
    ids = torch.arange(12).view(1, -1)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert all(c.is_compileable for c in caches)
    for cache in caches:
        model(ids[:, :8], past_key_values=cache)
    for i in range(8, 12):
        wanted = model(ids[:, i : i + 1], past_key_values=caches[0]).logits
        found = graph(ids[:, i : i + 1], past_key_values=caches[1]).logits
        assert numerics.relative_error(found, wanted) < 2**-7
    for a, b in zip(*(c.layers[0].codes.keys for c in caches), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("target", ["vllm", "sglang", "transformers"])
def test_the_scales_of_a_checkpoint_serve_the_cache(target: str, tmp_path: Path) -> None:
    model = with_scales(tiny())
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / target, target=target)
    with pytest.warns(UserWarning, match="quantizes the KV cache"):
        loaded = fp8kit.load(tmp_path / target).requires_grad_(False)
    ids = torch.arange(12).view(1, -1)
    cache = fp8kit.Fp8Cache(loaded, scale="checkpoint")
    plain = DynamicCache(config=loaded.config)
    loaded(ids, past_key_values=cache)
    loaded(ids, past_key_values=plain)
    states = plain.layers[0].keys
    wanted = (states.float() / 0.05).clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(cache.layers[0].codes.keys, wanted)


@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_the_scales_of_the_decoders_own_attention_serve_the_cache(kind: str) -> None:
    model = with_encoder(kind)
    wanted = []
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "SelfAttention", "encoder_attn", "EncDecAttention")):
            scale = torch.tensor([1.0 + len(wanted)])
            module.cache_scales = {"k_scale": scale, "v_scale": 2 * scale}
            wanted.append((name, (scale, 2 * scale)))
    own = [pair for name, pair in wanted if re.match(r".*decoder.*self_?att", name, re.I)]
    for cache in (
        fp8kit.Fp8Cache(model, "checkpoint"),
        fp8kit.Fp8StaticCache(model, 8, "checkpoint"),
    ):
        assert [layer.fixed for layer in cache.layers] == own
    for name, module in model.named_modules():
        if re.match(r".*decoder.*self_?att", name, re.I):
            module.__dict__.pop("cache_scales", None)
    with pytest.raises(CheckpointError, match="no k_scale and v_scale for layer 0"):
        fp8kit.Fp8Cache(model, "checkpoint")


def test_scales_of_two_modules_for_one_layer_are_refused() -> None:
    model = with_scales(tiny())
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(CheckpointError, match=r"layers\.0.* and .*layers\.1.* of layer 0.*'token'"):
        fp8kit.Fp8Cache(model, "checkpoint")
    model.model.layers[1].self_attn.layer_idx = None  # attention that takes no cache
    with pytest.raises(CheckpointError, match="no k_scale and v_scale for layer 1"):
        fp8kit.Fp8Cache(model, "checkpoint")


def test_scales_are_found_beside_a_head_named_decoder() -> None:
    model = with_scales(tiny())
    model.decoder = model.lm_head
    assert fp8kit.Fp8Cache(model, "checkpoint").layers[0].fixed is not None


def test_caches_refuse_wrong_scales_and_arguments(nano: Any) -> None:
    model = tiny()
    with pytest.raises(CheckpointError, match=r"no k_scale and v_scale for layer 0.*'token'"):
        fp8kit.Fp8Cache(model, "checkpoint")
    with_scales(model).model.layers[1].self_attn.cache_scales["v_scale"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"layers\.1.*positive and finite"):
        fp8kit.Fp8Cache(model, "checkpoint")
    with pytest.raises(ValueError, match=r"scale='row'.*token, checkpoint"):
        fp8kit.Fp8Cache(model, "row")
    with pytest.raises(TypeError, match=r"Got LlamaConfig.*not its config"):
        fp8kit.Fp8Cache(model.config)
    with pytest.raises(ValueError, match=r"max_cache_len=0"):
        fp8kit.Fp8StaticCache(model, 0)
    for change, argument in (
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([0])),
    ):
        with pytest.raises(UnsupportedError, match=rf"{change}.*fp8kit\.Fp8Cache"):
            getattr(fp8kit.Fp8StaticCache(model, 8), change)(argument)
    k, v = states(2)
    with pytest.raises(UnsupportedError, match=r"gradients.*no_grad"):
        Fp8Layer(None).update(k.requires_grad_(), v)
    with torch.no_grad():
        Fp8Layer(None).update(k, v)


@torch.no_grad()
def test_a_full_static_cache_says_so(nano: Any) -> None:
    cache = fp8kit.Fp8StaticCache(nano, max_cache_len=12)
    ids = torch.arange(9).view(1, 9)
    nano(ids, past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"keys of \(2, 2\) sequences and heads, after \(1"):
        nano(ids.expand(2, 9)[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"Got 4 tokens for.* holds 9.*max_cache_len=12.*reset"):
        nano(ids[:, :4], past_key_values=cache)
    expected = nano(ids[:, :3], past_key_values=copy.deepcopy(cache)).logits
    assert torch.equal(nano(ids[:, :3], past_key_values=cache).logits, expected)
    cache.reset()
    assert nano(torch.arange(12).view(1, 12), past_key_values=cache).logits.isfinite().all()


def test_kinds_of_layers_without_such_a_cache_are_named() -> None:
    model = tiny("Qwen3", layer_types=["full_attention", "full_attention"])
    model.config.layer_types = ["full_attention", "hybrid"]
    with pytest.raises(UnsupportedError, match=r"Layer 1 of Qwen3ForCausalLM.*'hybrid'"):
        fp8kit.Fp8Cache(model)


def with_encoder(kind: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 160, "d_model": 128, "decoder_start_token_id": 0}
    if kind == "T5":
        sizes |= {"d_kv": WIDTH, "d_ff": 256, "num_layers": 2, "num_heads": 2}
    else:
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 256}
        sizes["max_position_embeddings"] = 32  # of the decoder alone: the prompt is longer
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_an_encoder_decoder_model_keeps_its_cross_attention(kind: str, static: bool) -> None:
    model = with_encoder(kind)
    prompt, answer = torch.arange(48).view(2, 24) * 37 % 160, torch.arange(16).view(2, 8)
    cache = fp8kit.Fp8StaticCache(model, 32) if static else fp8kit.Fp8Cache(model)
    wanted = EncoderDecoderCache(fake_cache(model, 32 if static else 0), DynamicCache())

    def steps(cache: Any) -> Tensor:
        options = {"input_ids": prompt, "past_key_values": cache}
        return torch.cat([model(decoder_input_ids=i, **options).logits for i in answer.split(1, 1)])

    first = steps(cache)
    assert_bits_equal(first, steps(wanted))
    cache.reset()
    assert_bits_equal(steps(cache), first)
    cache.reset()
    assert_bits_equal(steps(EncoderDecoderCache(cache, DynamicCache())), first)
    cache.reset()
    assert cache.cross_attention_cache.get_seq_length() == 0
    twin = copy.deepcopy(cache)
    beams = {"max_new_tokens": 8, "num_beams": 1 if static else 2, "do_sample": False}
    model.generate(prompt, past_key_values=twin, **beams)
    assert twin.get_seq_length() == 8
    assert twin.cross_attention_cache.get_seq_length() == 24
    assert isinstance(twin, fp8kit.Fp8StaticCache if static else fp8kit.Fp8Cache)
    if not static or CROPPABLE:
        twin.crop(-1)
        assert twin.get_seq_length() == 7
    if not static:
        assert twin.nbytes == sum(layer.nbytes for layer in twin.layers)


def with_images() -> Any:
    text = tiny_experts.SIZES | {"num_hidden_layers": 3, "cross_attention_layers": [1]}
    images = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_global_layers": 1, "attention_heads": 2, "image_size": 28, "patch_size": 14,
        "vision_output_dim": 128, "intermediate_layers_indices": [0], "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]]}  # fmt: skip
    config = transformers.MllamaConfig(text_config=text, vision_config=images, image_token_index=9)
    torch.manual_seed(3)
    model = transformers.MllamaForConditionalGeneration(config).eval().requires_grad_(False)
    for name, gate in model.named_parameters():
        if name.endswith("gate"):  # zeros, which would hide the images
            gate.fill_(0.7)
    return model


def test_cross_attention_to_images_reads_numbers() -> None:
    model = with_images()
    tokens = torch.tensor([[3, 9, 5, 6, 7]])
    image = {
        "pixel_values": torch.randn(1, 1, 1, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
    }
    cache, wanted = fp8kit.Fp8Cache(model), fake_cache(model)
    wanted.layers[1] = DynamicLayer()

    def steps(cache: Any) -> Tensor:
        first = model(input_ids=tokens[:, :3], past_key_values=cache, **image).logits
        rest = [model(input_ids=i, past_key_values=cache).logits for i in tokens[:, 3:].split(1, 1)]
        return torch.cat([first, *rest], 1)

    first = steps(cache)
    assert_bits_equal(first, steps(wanted))
    cache.reset()
    assert_bits_equal(steps(cache), first)
    with pytest.raises(UnsupportedError, match="also keeps keys and values of images"):
        fp8kit.Fp8StaticCache(model, 8)


@pytest.mark.parametrize(
    ("name", "fields", "room"),
    [
        ("DiffusionGemmaForBlockDiffusion", {}, 0),
        ("DiffusionGemmaForBlockDiffusion", {}, 16),
        ("DoryForCausalLM", {}, 0),
        ("DoryForCausalLM", {}, 16),
        ("DoryForCausalLM", {"recurrent_kv_cache_mode": "last_loop"}, 0),
    ],
)
def test_models_that_read_the_cache_get_numbers(name: str, fields: Any, room: int) -> None:
    made = getattr(transformers, name, None)
    if made is None:
        pytest.skip(f"this Transformers has no {name}")
    torch.manual_seed(3)
    model = made(tiny_config(made.config_class.model_type, **fields)).eval().requires_grad_(False)
    for weight in model.parameters():  # small ones would hide the cache
        weight.fill_(1) if weight.dim() == 1 else weight.mul_(6)
    ids, others = torch.arange(18).view(2, 9) * 7 % 100, {}
    if name.startswith("Diffusion"):
        others = {"decoder_input_ids": torch.arange(16).view(2, 8)}

    # the name since Transformers 5.24; models swallow the other one
    argument = (
        "cache" if "cache" in inspect.signature(made.forward).parameters else "past_key_values"
    )

    def steps(cache: Any) -> Tensor:
        parts = (ids[:, :5], ids[:, 5:6], ids[:, 6:])
        return torch.cat([model(i, **others, **{argument: cache}).logits for i in parts], 1)

    found = steps(fp8kit.Fp8StaticCache(model, room) if room else fp8kit.Fp8Cache(model))
    assert_bits_equal(found, steps(fake_cache(model, room)))
    assert not torch.equal(found, steps(DynamicCache(config=model.config)))


def test_cross_attention_may_read_an_fp8_cache() -> None:
    model = with_encoder("Bart")
    prompt, answer = torch.arange(48).view(2, 24) * 37 % 160, torch.arange(6).view(2, 3)
    found, wanted = (
        [
            model(input_ids=prompt, decoder_input_ids=i, past_key_values=cache).logits
            for i in answer.split(1, 1)
        ]
        for cache in (
            EncoderDecoderCache(fp8kit.Fp8Cache(model), fp8kit.Fp8Cache(model)),
            EncoderDecoderCache(fake_cache(model), fake_cache(model)),
        )
    )
    for a, b in zip(found, wanted, strict=True):
        assert_bits_equal(a, b)


def test_wrappers_of_a_model_are_looked_into() -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    tuned = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    for wrapped in (tuned, torch.compile(model), torch.compile(tuned)):
        assert len(fp8kit.Fp8Cache(wrapped)) == len(fp8kit.Fp8StaticCache(wrapped, 8)) == 2


def test_a_cache_may_be_made_before_it_is_used() -> None:
    model = tiny()
    ids = torch.arange(6).view(1, -1)
    ours, late = (fp8kit.Fp8StaticCache(model, 16) for _ in range(2))
    theirs = StaticCache(config=model.config, max_cache_len=16)
    for cache in (ours, theirs):
        cache.early_initialization(1, 2, WIDTH, torch.bfloat16, torch.device("cpu"))
    assert ours.is_initialized
    assert ours.layers[0].keys.shape == theirs.layers[0].keys.shape
    assert_bits_equal(
        model(ids, past_key_values=ours).logits, model(ids, past_key_values=late).logits
    )
