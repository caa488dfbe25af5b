"""FP8 caches of encoder-decoder models, and the Transformers model inside wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from fp8kit.errors import InvalidType
from fp8kit.modules.libraries import unwrapped


def transformers_model(model: Any) -> Any:
    """Return the Transformers model inside wrappers of PEFT, ``torch.compile`` or DDP.

    Raises ``TypeError`` if there is none.
    """
    inner: Any = unwrapped(model) if isinstance(model, nn.Module) else model
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if not isinstance(inner, PreTrainedModel):
        raise InvalidType(
            f"Got {type(model).__name__} as the model.",
            "The cache follows the layers of a Transformers model.",
            "Pass the model that will use the cache, not its config.",
        )
    return inner


class WithEncoder(EncoderDecoderCache):  # type: ignore[misc]
    """Extends a decoder's cache by the encoder's keys and values, in high precision.

    Cross-attention reads these from the cache at every step, and would decode all of them.
    """

    @classmethod
    def join(cls, cache: Any, model: PreTrainedModel) -> None:
        """Give a cache this class, if its model has cross-attention."""
        decoder = model.config.get_text_config(decoder=True)
        crossing = model.config.is_encoder_decoder or getattr(decoder, "add_cross_attention", False)
        if crossing:
            cache.__class__ = cls
            cache.self_attention_cache = Cache(layers=cache.layers)
            cache.reset()

    def check_dynamic_cache(self, method: str) -> None:
        """Accept every method here: the layers refuse those that they lack."""

    def reset(self) -> None:
        """Forget every token, and the encoder's states."""
        self.self_attention_cache.reset()
        self.cross_attention_cache: Any = DynamicCache()
        self.is_updated: dict[int, bool] = {}
