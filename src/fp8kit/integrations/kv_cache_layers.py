"""Cache layers of Transformers that hold keys and values as FP8 codes and scales.

A layer here owns two Transformers cache layers of its kind: one of codes, as bytes (torch has no
``index_copy_`` of FP8 on a CPU), and one of scales. Both put a token at the same position, so
growth, windows and masks are Transformers'. Code that reads ``keys`` and ``values`` of the layer
gets numbers, decoded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from fp8kit import functional
from fp8kit.errors import InvalidValue, UnsupportedError
from fp8kit.formats import ROW
from fp8kit.integrations.decoded_copies import DecodedCopies
from fp8kit.matmul.dequantized import decode
from fp8kit.ops import operators

_E4M3 = torch.float8_e4m3fn
Pair = tuple[Tensor, Tensor]


def _states(name: str) -> property:
    """Return a property for keys or values in the model's dtype: a copy, not to be written into.

    Assigned states are quantized, with ``None`` forgotten.
    """

    def read(layer: Fp8LayerMixin) -> Tensor | None:
        codes, fixed, dtype = getattr(layer.codes, name), layer.fixed, layer.dtype
        if codes is None or dtype is None:
            return None
        if not codes.numel():  # also a growing layer's [0] before the first token
            return codes.to(dtype)
        layer.copies[name].refuse_writes(name)
        scale = fixed[name == "values"] if fixed else getattr(layer.scales, name)
        scale = scale.to(codes.device)  # fixed ones are not offloaded
        return layer.copies[name].watch(_decode(codes, scale, dtype))

    def write(layer: Fp8LayerMixin, states: Tensor | None) -> None:
        parts: Any = (None, None)
        layer.copies[name].forget()
        if states is not None:
            layer._follow(states)
            parts = _encode(states, layer.fixed and layer.fixed[name == "values"])
        for part_layer, part in zip(layer._layers(), parts, strict=False):
            layer._put(part_layer, name, part)

    return property(read, write)


class Fp8LayerMixin(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that owns a Transformers cache layer of codes and one of scales.

    ``codes`` holds bytes, ``scales`` fp32 ``[batch, heads, tokens, 1]``. ``fixed`` are scales of
    keys and of values, fp32 ``[1]`` or ``[heads, 1, 1]``; with ``None`` there is one per token and
    head, from the data. A subclass also inherits from ``plain``, the Transformers class of both:
    Transformers asks for it. Other attributes are those of ``codes``; set, they reach both.
    """

    plain: type[CacheLayerMixin]
    _own = frozenset(("codes", "scales", "fixed", "dtype", "copies", "keys", "values"))

    def __init__(self, fixed: Pair | None, **kwargs: Any) -> None:
        self.codes: Any = self.plain(**kwargs)
        self.scales: Any = self.plain(**kwargs) if fixed is None else None
        self.fixed = fixed
        self.dtype: torch.dtype | None = None  # of the decoded keys and values
        self.copies = {name: DecodedCopies() for name in ("keys", "values")}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer of codes, such as ``is_initialized``."""
        if name in self._own or name.startswith("__"):  # a copy has none yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.codes, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the layers of codes and of scales; tensors keep their addresses.

        What hides a method or another name of the class is set on this layer alone.
        """
        if name in self._own or hasattr(type(self), name):
            super().__setattr__(name, value)
            return
        for layer in self._layers():
            held = getattr(layer, name, None)
            if isinstance(held, Tensor) and isinstance(value, Tensor):
                held.copy_(value)
            else:
                setattr(layer, name, value)

    def __copy__(self) -> Fp8LayerMixin:
        """Copy the layers, which share their tensors, as copies of Transformers' layers do."""
        made = type(self).__new__(type(self))
        made.__dict__.update({name: copy.copy(held) for name, held in self.__dict__.items()})
        made.copies = copy.deepcopy(self.copies)
        return made

    keys = _states("keys")
    values = _states("values")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store keys and values of new tokens, and return those of all tokens, decoded.

        They are bf16, fp16 or fp32 ``[batch, heads, tokens, head_dim]``; Transformers ignores other
        arguments. Raises ``UnsupportedError`` if a gradient would be lost.
        """
        codes, scales = self._encoded(key_states, value_states)
        codes = self.codes.update(*codes, *args, **kwargs)
        if self.scales is not None:
            scales = self.scales.update(*scales)
        keys, values = map(_decode, codes, scales, (key_states.dtype, value_states.dtype))
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate codes and scales for states of high precision, before any update."""
        codes, scales = self._encoded(key_states, value_states)
        self.codes.lazy_initialization(*codes)
        if self.scales is not None:
            self.scales.lazy_initialization(*scales)

    def _encoded(self, *states: Tensor) -> tuple[Pair, Pair]:
        for name, copies in self.copies.items():
            copies.refuse_writes(name)
        self._follow(*states)
        (k, k_scale), (v, v_scale) = map(_encode, states, self.fixed or (None, None))
        return (k, v), (k_scale, v_scale)

    def _follow(self, *states: Tensor) -> None:
        """Take over dtype and device of new states, without gradients."""
        _refuse_gradients(states)
        device, dtype = states[0].device, states[0].dtype
        if self.dtype != dtype:
            self.dtype = dtype
        if self.fixed is not None and self.fixed[0].device != device:
            key_scale, value_scale = (s.to(device) for s in self.fixed)
            self.fixed = (key_scale, value_scale)

    def _put(self, layer: CacheLayerMixin, name: str, part: Tensor | None) -> None:
        setattr(layer, name, part)

    def get_seq_length(self) -> Any:
        """Return the number of tokens so far; of static layers as a tensor."""
        return self.codes.get_seq_length()

    @property
    def nbytes(self) -> int:
        """Bytes of memory of codes and scales."""
        held = [t for layer in self._layers() for t in (layer.keys, layer.values)]
        held += self.fixed or ()
        return sum(t.untyped_storage().nbytes() for t in held if t is not None)

    def _layers(self) -> list[CacheLayerMixin]:
        return [layer for layer in (self.codes, self.scales) if layer is not None]

    def _both(self, method: str, *args: Any) -> None:
        """Call a method of the layers of codes and of scales."""
        for layer in self._layers():
            getattr(layer, method)(*args)

    offload = partialmethod(_both, "offload")
    prefetch = partialmethod(_both, "prefetch")
    reset = partialmethod(_both, "reset")


class _Growing(Fp8LayerMixin):
    """Methods of growing layers that change tokens and sequences."""

    reorder_cache = partialmethod(Fp8LayerMixin._both, "reorder_cache")
    crop = partialmethod(Fp8LayerMixin._both, "crop")
    batch_repeat_interleave = partialmethod(Fp8LayerMixin._both, "batch_repeat_interleave")
    batch_select_indices = partialmethod(Fp8LayerMixin._both, "batch_select_indices")

    def reset(self) -> None:
        """Forget every token."""
        for layer in self._layers():
            layer.keys = layer.values = None  # Transformers 5.17 only fills the tokens with zeros
            layer.is_initialized = False
            layer.reset()


class Fp8Layer(_Growing, DynamicLayer):  # type: ignore[misc]
    """FP8 keys and values of every token so far."""

    plain = DynamicLayer


class Fp8SlidingLayer(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """FP8 keys and values of the tokens in a sliding window."""

    plain = DynamicSlidingWindowLayer

    activate_past_recording = partialmethod(Fp8LayerMixin._both, "activate_past_recording")


class _Fixed(Fp8LayerMixin):
    """Methods of layers of fixed size and addresses that change sequences, or refuse to."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Store new tokens, and return all, decoded; refuse another batch or too many tokens."""
        if self.codes.is_initialized and not torch.compiler.is_compiling():
            held, arrived = tuple(self.codes.keys.shape[:2]), tuple(key_states.shape[:2])
            if held != arrived:
                raise _not_static(f"keys of {arrived} sequences and heads, after {held},")
        self._check_room(key_states.shape[-2])
        return super().update(key_states, value_states, *args, **kwargs)

    def _check_room(self, tokens: int) -> None:
        """Do nothing: a window always has room. ``Fp8StaticLayer`` refuses too many tokens."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences by these indices, in the same memory."""
        if self.get_seq_length() > 0:
            for tensor in (t for layer in self._layers() for t in (layer.keys, layer.values)):
                tensor.copy_(tensor.index_select(0, beam_idx.to(tensor.device)))

    def _put(self, layer: CacheLayerMixin, name: str, part: Tensor | None) -> None:
        held = getattr(layer, name)
        if part is None or held is None:
            setattr(layer, name, part)
        elif part.shape == held.shape and part.device == held.device:
            held.copy_(part)
        else:
            raise _not_static(f"{name} of shape {(*part.shape,)} for {(*held.shape,)}")

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens (``-1``: one), unless a window has lost those before them."""
        if not getattr(self, "is_croppable", False):  # Transformers 5.17 has no such attribute
            raise _not_static(f"crop({tokens_to_remove})")
        if self.is_initialized:  # else the length would become negative
            self._both("crop", tokens_to_remove)

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
        count = self.codes.cumulative_length
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


def _encode(x: Tensor, scale: Tensor | None) -> Pair:
    """Return codes as bytes, and their scales: given ones, or new ones per token and head."""
    if not x.numel():
        return x.to(torch.uint8), x[..., :1].float() if scale is None else scale
    if scale is None:
        # role="weight" for its lower least scale: that of activations coarsens small states
        made = functional.quantize(x, ROW, role="weight")
        return made.data.view(torch.uint8), made.scale
    rows = scale.expand(*x.shape[:-1], 1).contiguous()
    codes: Tensor = operators.QUANTIZE_STATIC(x, rows, (ROW.rows, ROW.cols), _E4M3)
    return codes.view(torch.uint8), scale


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
