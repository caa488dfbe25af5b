"""KV caches of Transformers that hold keys and values as FP8 codes and scales."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import Cache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from fp8kit.errors import CheckpointError, InvalidValue, UnsupportedError, check_choice
from fp8kit.integrations.encoder_decoder_cache import WithEncoder, transformers_model
from fp8kit.integrations.kv_cache_layers import (
    Fp8Layer,
    Fp8LayerMixin,
    Fp8SlidingLayer,
    Fp8StaticLayer,
    Fp8StaticSlidingLayer,
    Pair,
)

_SCALES = ("token", "checkpoint")
# names of modules that attend to another part of the model, of the same index as self-attention
_CROSSES = re.compile(r"cross|encoder_attn|EncDec|encoder_decoder")
# cache layers of models' layers that have no keys and values
_NO_KEYS = {"linear_attention": LinearAttentionLayer, "conv": LinearAttentionLayer}
if hasattr(cache_utils, "DummyLayer"):  # Transformers 5.17 has none
    _NO_KEYS |= {"dummy": cache_utils.DummyLayer}


_DYNAMIC: dict[str, type[Fp8LayerMixin]] = {
    "full_attention": Fp8Layer,
    "sliding_attention": Fp8SlidingLayer,
    "chunked_attention": Fp8SlidingLayer,
}
_STATIC: dict[str, type[Fp8LayerMixin]] = {
    "full_attention": Fp8StaticLayer,
    "sliding_attention": Fp8StaticSlidingLayer,
    "chunked_attention": Fp8StaticSlidingLayer,
}


class _Fp8Cache(Cache):  # type: ignore[misc]
    @property
    def nbytes(self) -> int:
        """Bytes of memory of codes and scales."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, Fp8LayerMixin))


class Fp8Cache(_Fp8Cache):
    """A growing KV cache in FP8, for ``generate(past_key_values=...)`` or a call of the model.

    Attention reads the stored FP8 values even of the tokens of the same call, so results do not
    depend on how a prompt is split into calls. Layers with a sliding window keep only the window.

    Args:
        model: a Transformers model, also inside PEFT's or torch's wrappers, for its config and the
            scales of its checkpoint. In an encoder-decoder model the decoder's own keys and values
            become FP8; those of the encoder stay as they are, as do those of images in Mllama.
        scale: ``"token"`` for one scale per token and head, taken from the data; ``"checkpoint"``
            for those that ``fp8kit.load`` found, one per layer (or head) for keys and for values.

    Raises:
        ValueError: for another ``scale``, or a checkpoint's scale that is not positive and finite.
        TypeError: if ``model`` is no Transformers model.
        CheckpointError: if the checkpoint had no scales for a layer, or two modules have some.
        UnsupportedError: if the model has a kind of cache layer without an FP8 form.

    Example:
        >>> model = fp8kit.load("fp8-dir")
        >>> cache = fp8kit.Fp8Cache(model)
        >>> model.generate(ids, past_key_values=cache)
    """

    def __init__(self, model: PreTrainedModel, scale: str = "token") -> None:
        model = transformers_model(model)
        super().__init__(layers=list(_layers(model, scale, _DYNAMIC, {})))
        _Fp8CacheWithEncoder.join(self, model)


class Fp8StaticCache(_Fp8Cache):
    """A KV cache in FP8 of fixed size and addresses, for compiled or captured decoding.

    Args:
        model: as for ``Fp8Cache``.
        max_cache_len: the number of tokens that fit, of prompt and answer together.
        scale: as for ``Fp8Cache``.

    Raises:
        ValueError: as for ``Fp8Cache``, or if ``max_cache_len`` is no positive integer.
        TypeError: as for ``Fp8Cache``.
        CheckpointError: as for ``Fp8Cache``.
        UnsupportedError: as for ``Fp8Cache``, or if the cache also holds images, as Mllama's does.

    Example:
        >>> cache = fp8kit.Fp8StaticCache(model, max_cache_len=4096)
        >>> model.generate(ids, past_key_values=cache)
        >>> cache.reset()  # before another prompt
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int, scale: str = "token") -> None:
        if type(max_cache_len) is not int or max_cache_len < 1:
            raise InvalidValue(
                f"Got max_cache_len={max_cache_len!r}.",
                "It must be the number of tokens, of prompt and answer together.",
                "Pass a whole number above zero.",
            )
        room = {"max_cache_len": max_cache_len}
        model = transformers_model(model)
        super().__init__(layers=list(_layers(model, scale, _STATIC, room)))
        _Fp8StaticCacheWithEncoder.join(self, model)


class _Fp8CacheWithEncoder(WithEncoder, Fp8Cache):
    """The class of an ``Fp8Cache`` for an encoder-decoder model."""


class _Fp8StaticCacheWithEncoder(WithEncoder, Fp8StaticCache):
    """The class of an ``Fp8StaticCache`` for an encoder-decoder model."""


def _layers(
    model: PreTrainedModel,
    scale: str,
    classes: dict[str, type[Fp8LayerMixin]],
    room: dict[str, int],
) -> Iterator[Any]:
    check_choice("scale", scale, _SCALES, "Leave it out for one scale per token and head.")
    config = model.config.get_text_config(decoder=True)
    crossing = getattr(config, "cross_attention_layers", ())  # of Mllama, to its images
    if crossing and room:
        raise UnsupportedError(
            f"{type(model).__name__} also keeps keys and values of images in its cache.",
            "A static FP8 cache has one length, that of the text.",
            "Use fp8kit.Fp8Cache(model).",
        )
    kinds, given = get_layer_types_and_kwargs(config)
    given = [given] * len(kinds) if isinstance(given, dict) else given  # one for all in 5.17
    fixed = _scales_of(model) if scale == "checkpoint" else {}
    for index, (kind, kwargs) in enumerate(zip(kinds, given, strict=True)):
        if index in crossing:  # as in an encoder-decoder model
            yield DynamicLayer(**kwargs)
        elif kind in _NO_KEYS:
            yield _NO_KEYS[kind](**kwargs)
        elif kind not in classes:
            raise UnsupportedError(
                f"Layer {index} of {type(model).__name__} has a cache of kind {kind!r}.",
                f"An FP8 cache is known for {', '.join((*classes, *_NO_KEYS))}.",
                "Use the cache of Transformers: leave out past_key_values.",
            )
        elif scale == "checkpoint" and index not in fixed:
            raise CheckpointError(
                f"{type(model).__name__} has no k_scale and v_scale for layer {index}.",
                "fp8kit.load keeps them where a checkpoint has them, as module.cache_scales.",
                "Use scale='token', or load a checkpoint with scales of the KV cache.",
            )
        else:
            yield classes[kind](fixed.get(index), **room, **kwargs)


def _scales_of(model: PreTrainedModel) -> dict[int, Pair]:
    """Return the scales of the decoder's own keys and values that ``load`` set, by layer."""
    found: dict[int, tuple[str, Pair]] = {}
    own = {module for name, module in _decoder(model).named_modules() if not _CROSSES.search(name)}
    for name, module in model.named_modules():
        held, index = getattr(module, "cache_scales", {}), getattr(module, "layer_idx", None)
        if module not in own or index is None or not {"k_scale", "v_scale"} <= held.keys():
            continue
        pair = (held["k_scale"].float(), held["v_scale"].float())
        if not all((s > 0).all() and s.isfinite().all() for s in pair):
            raise InvalidValue(
                f"{name} has k_scale {pair[0].flatten().tolist()} and v_scale "
                f"{pair[1].flatten().tolist()}.",
                "Keys and values are divided by them: they are positive and finite.",
                "Use scale='token', or calibrate the checkpoint again.",
            )
        if index in found:
            raise CheckpointError(
                f"{found[index][0]} and {name} both have scales of layer {index}.",
                "A layer of the cache has one pair, that of the decoder's self-attention.",
                "Use scale='token', or pass the part of the model that uses the cache.",
            )
        found[index] = (name, pair)
    return {index: pair for index, (_, pair) in found.items()}


def _decoder(model: Any) -> Any:
    """Return the part of a model that uses the cache: layers of encoders have indices too."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model
    # an attribute named decoder may also be a head
    attends = any(hasattr(module, "layer_idx") for module in inner.modules())
    return _decoder(inner) if attends and inner is not model else model
