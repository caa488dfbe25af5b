"""KV caches of Transformers that hold keys and values as FP8 codes and scales.

A cache layer here subclasses the Transformers cache layer of its kind. The subclass holds codes as
bytes (torch has no ``index_copy_`` of FP8 on a CPU) and owns a second Transformers layer for the
scales. Both put a token at the same position, so growth, windows and masks are Transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from fp8kit import functional
from fp8kit.errors import CheckpointError, InvalidValue, UnsupportedError, check_choice
from fp8kit.formats import ROW
from fp8kit.integrations.encoder_decoder_cache import WithEncoder, transformers_model
from fp8kit.matmul.dequantized import decode
from fp8kit.ops import operators

_E4M3 = torch.float8_e4m3fn
_SCALES = ("token", "checkpoint")
# cache layers of models' layers that have no keys and values
_NO_KEYS = {"linear_attention": LinearAttentionLayer, "conv": LinearAttentionLayer}
if hasattr(cache_utils, "DummyLayer"):  # Transformers 5.17 has none
    _NO_KEYS |= {"dummy": cache_utils.DummyLayer}
_Pair = tuple[Tensor, Tensor]


class _Fp8Layer(CacheLayerMixin):  # type: ignore[misc]
    """A mixin that stores codes in the Transformers cache layer that follows it in the MRO.

    ``fixed`` are scales of keys and of values, fp32 ``[1]`` or ``[heads, 1, 1]``; with ``None``
    there is one scale per token and head, from the data.
    """

    plain: type[CacheLayerMixin]

    def __init__(self, fixed: _Pair | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fixed = fixed
        self.scales: Any = self.plain(**kwargs) if fixed is None else None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> _Pair:
        """Store keys and values of new tokens, and return those of all tokens, decoded.

        They are bf16, fp16 or fp32 ``[batch, heads, tokens, head_dim]``; Transformers ignores other
        arguments. Raises ``UnsupportedError`` if a gradient would be lost.
        """
        states = (key_states, value_states)
        _refuse_gradients(states)
        if self.fixed is None:
            # role="weight" for its lower least scale: that of activations coarsens small states
            new = [functional.quantize(x, ROW, role="weight") for x in states]
            held = super().update(*(q.data.view(torch.uint8) for q in new), *args, **kwargs)
            scales = self.scales.update(*(q.scale for q in new))
        else:
            self._move_scales(key_states)
            scales = self.fixed
            coded = (_encode(x, scale) for x, scale in zip(states, scales, strict=True))
            held = super().update(*coded, *args, **kwargs)
        keys, values = (
            _decode(codes, scale, x.dtype)
            for codes, scale, x in zip(held, scales, states, strict=True)
        )
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate codes; also scales, if states come in high precision, before any update."""
        early = key_states.is_floating_point()
        codes = (x.to(torch.uint8) if early else x for x in (key_states, value_states))
        super().lazy_initialization(*codes)
        if early and self.scales is not None:
            widths = (x[..., :1].float() for x in (key_states, value_states))
            self.scales.lazy_initialization(*widths)
        elif early:
            self._move_scales(key_states)

    def _move_scales(self, states: Tensor) -> None:
        assert self.fixed is not None
        if self.fixed[0].device != states.device:
            key_scale, value_scale = (s.to(states.device) for s in self.fixed)
            self.fixed = (key_scale, value_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of memory of codes and scales."""
        held = (self.keys, self.values)
        beside = self.fixed or (self.scales.keys, self.scales.values)
        return sum(t.untyped_storage().nbytes() for t in (*held, *beside) if t is not None)

    def _both(self, method: str, *args: Any) -> None:
        """Call a method of Transformers' cache layer for the codes, then for the scales."""
        getattr(super(), method)(*args)
        if self.scales is not None:
            getattr(self.scales, method)(*args)

    offload = partialmethod(_both, "offload")
    prefetch = partialmethod(_both, "prefetch")
    reset = partialmethod(_both, "reset")


class _Growing(_Fp8Layer):
    """Methods of growing layers that change tokens and sequences."""

    reorder_cache = partialmethod(_Fp8Layer._both, "reorder_cache")
    crop = partialmethod(_Fp8Layer._both, "crop")
    batch_repeat_interleave = partialmethod(_Fp8Layer._both, "batch_repeat_interleave")
    batch_select_indices = partialmethod(_Fp8Layer._both, "batch_select_indices")

    def reset(self) -> None:
        """Forget every token."""
        self._both("reset")
        for layer in (self, self.scales):  # Transformers 5.17 only fills the tokens with zeros
            if layer is not None:
                layer.keys = layer.values = None
                layer.is_initialized = False


class Fp8Layer(_Growing, DynamicLayer):  # type: ignore[misc]
    """FP8 keys and values of every token so far."""

    plain = DynamicLayer


class Fp8SlidingLayer(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """FP8 keys and values of the tokens in a sliding window."""

    plain = DynamicSlidingWindowLayer

    activate_past_recording = partialmethod(_Fp8Layer._both, "activate_past_recording")


class _Fixed(_Fp8Layer):
    """Methods of layers of fixed size and addresses that change sequences, or refuse to."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> _Pair:
        """Store new tokens, and return all, decoded; refuse another batch or too many tokens."""
        if self.is_initialized and not torch.compiler.is_compiling():
            held, arrived = tuple(self.keys.shape[:2]), tuple(key_states.shape[:2])
            if held != arrived:
                raise _not_static(f"keys of {arrived} sequences and heads, after {held},")
        self._check_room(key_states.shape[-2])
        return super().update(key_states, value_states, *args, **kwargs)

    def _check_room(self, tokens: int) -> None:
        """Do nothing: a window always has room. ``Fp8StaticLayer`` refuses too many tokens."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences by these indices, in the same memory."""
        if self.get_seq_length() > 0:
            held = [self.keys, self.values]
            held += [] if self.scales is None else [self.scales.keys, self.scales.values]
            for tensor in held:
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, as Transformers' static layers do."""
        raise _not_static(f"crop({tokens_to_remove})")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: the size is fixed."""
        raise _not_static(f"batch_repeat_interleave({repeats})")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Refuse: the size is fixed."""
        raise _not_static(f"batch_select_indices of {len(indices)} sequences")


class Fp8StaticLayer(_Fixed, StaticLayer):  # type: ignore[misc]
    """FP8 keys and values in memory for a given number of tokens."""

    plain = StaticLayer

    def _check_room(self, tokens: int) -> None:
        if torch.compiler.is_compiling():
            return
        count = self.cumulative_length
        held = int(count) if count.device.type == "cpu" else 0  # reading a GPU's count would wait
        if held + tokens > self.max_cache_len:
            raise InvalidValue(
                f"Got {tokens} tokens for an Fp8StaticCache that holds {held}.",
                f"It has room for max_cache_len={self.max_cache_len}, prompt and answer.",
                "Make a larger one, call reset() before another prompt, or use "
                "fp8kit.Fp8Cache(model), which grows.",
            )


class Fp8StaticSlidingLayer(_Fixed, StaticSlidingWindowLayer):  # type: ignore[misc]
    """FP8 keys and values in memory for a sliding window."""

    plain = StaticSlidingWindowLayer


_DYNAMIC: dict[str, type[_Fp8Layer]] = {
    "full_attention": Fp8Layer,
    "sliding_attention": Fp8SlidingLayer,
    "chunked_attention": Fp8SlidingLayer,
}
_STATIC: dict[str, type[_Fp8Layer]] = {
    "full_attention": Fp8StaticLayer,
    "sliding_attention": Fp8StaticSlidingLayer,
    "chunked_attention": Fp8StaticSlidingLayer,
}


class _Fp8Cache(Cache):  # type: ignore[misc]
    @property
    def nbytes(self) -> int:
        """Bytes of memory of codes and scales."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, _Fp8Layer))


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
        CheckpointError: if the checkpoint had no scales for a layer.
        UnsupportedError: if the model has a kind of cache layer without an FP8 form, or reads the
            cache directly.

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
    model: PreTrainedModel, scale: str, classes: dict[str, type[_Fp8Layer]], room: dict[str, int]
) -> Iterator[Any]:
    check_choice("scale", scale, _SCALES, "Leave it out for one scale per token and head.")
    config = model.config.get_text_config(decoder=True)
    _refuse_readers(model, config)
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
        if index in crossing:  # read directly, as in an encoder-decoder model
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


def _refuse_readers(model: PreTrainedModel, config: Any) -> None:
    """Raise ``UnsupportedError`` for a model whose self-attention reads the cache directly."""
    last_loop = getattr(config, "recurrent_kv_cache_mode", None) == "last_loop"  # of Dory
    if last_loop or config.model_type.startswith("diffusion_gemma"):
        raise UnsupportedError(
            f"{type(model).__name__} reads keys and values in the layers of its cache directly.",
            "An FP8 cache holds codes there, which it would take for numbers.",
            "Use the cache of Transformers: leave out past_key_values.",
        )


def _scales_of(model: PreTrainedModel) -> dict[int, _Pair]:
    """Return the scales of keys and values that ``load`` set on attention modules, by layer."""
    found = {}
    for name, module in model.named_modules():
        held = getattr(module, "cache_scales", {})
        if {"k_scale", "v_scale"} <= held.keys() and hasattr(module, "layer_idx"):
            pair = (held["k_scale"].float(), held["v_scale"].float())
            if not all((s > 0).all() and s.isfinite().all() for s in pair):
                raise InvalidValue(
                    f"{name} has k_scale {pair[0].flatten().tolist()} and v_scale "
                    f"{pair[1].flatten().tolist()}.",
                    "Keys and values are divided by them: they are positive and finite.",
                    "Use scale='token', or calibrate the checkpoint again.",
                )
            found[int(module.layer_idx)] = pair
    return found


def _encode(x: Tensor, scale: Tensor) -> Tensor:
    rows = scale.expand(*x.shape[:-1], 1).contiguous()
    codes: Tensor = operators.QUANTIZE_STATIC(x, rows, (ROW.rows, ROW.cols), _E4M3)
    return codes.view(torch.uint8)


def _decode(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    held = codes.view(_E4M3)
    # a compiler fuses the cast with the product; eagerly, decode() is the fastest way
    wide = held.float() if torch.compiler.is_compiling() else decode(held, torch.float32)
    return (wide * scale).to(dtype)


def _refuse_gradients(states: Iterable[Tensor]) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise UnsupportedError(
            "Got keys and values that require gradients.",
            "Rounding to FP8 has none: they would be lost.",
            "Run under torch.no_grad(), or train without a cache (use_cache=False).",
        )


def _not_static(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Got {what} of a static FP8 cache.",
        "Its size and addresses are fixed.",
        "Use fp8kit.Fp8Cache(model).",
    )
