"""Attention for Transformers that decodes a token without repeating keys and values in memory.

With grouped-query attention and a mask (for a static cache's free room, or padding), Transformers
copies keys and values for every query head before it calls torch (5.23 only in compiled graphs): in
a batch of 64 that takes longer than the FP8 products of a layer. Under the name ``fp8kit_sdpa`` a
kernel of this package attends to one new token of each sequence, and reads keys and values once.
All other calls run the ``sdpa`` of Transformers, also one token without a mask, for which torch's
kernel repeats nothing. The name contains "sdpa" because Transformers then refuses models for which
sdpa is wrong, such as those with attention sinks. Models whose code compares the name with "sdpa"
are refused here: under another name they pass other arguments, such as token indices for a mask.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp8kit.errors import UnsupportedError
from fp8kit.fused.attention import ATTEND
from fp8kit.modules import fused_module
from fp8kit.ops.transforms import is_transformed
from fp8kit.runtime.replay_cache import ReplayCache

NAME = "fp8kit_sdpa"
# arguments that change the result, which the kernel does not know
_OTHERS = ("position_bias", "softcap", "s_aux", "output_attentions")
_COMPARISON = re.compile(r"""_attn_implementation\s*(==|!=|in\b|not in\b).*["']sdpa["']""")
_compared: dict[str, bool] = {}  # by Python module; functools.cache would be traced by compilers
_replays: WeakKeyDictionary[nn.Module, ReplayCache] = WeakKeyDictionary()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as Transformers' ``sdpa`` does, with the arguments and results of its interface.

    Queries are ``[batch, heads, tokens, head_dim]``, keys and values ``[batch, key_heads, all
    tokens, ...]``, a mask is bool ``[batch or 1, 1, tokens, all tokens]``. Returns ``[batch,
    tokens, heads, value_dim]``, and ``None``. Raises ``UnsupportedError`` for a paged cache
    (``generate_batch``), whose masks are made for ``sdpa``, and for models whose code compares
    the name with "sdpa".
    """
    if _compares_names(type(module).__module__):
        raise UnsupportedError(
            f"Got attn_implementation={NAME!r} for a {type(module).__name__}.",
            "The code of its model computes something else under any other name than 'sdpa'.",
            "Call model.set_attn_implementation('sdpa').",
        )
    if kwargs.get("cache") is not None:
        raise UnsupportedError(
            f"Got a paged cache for attn_implementation={NAME!r}.",
            "Transformers makes the masks of continuous batching for other names.",
            "Call model.set_attn_implementation('sdpa') before generate_batch.",
        )
    mask = attention_mask
    if mask is None or dropout or not _decodes(query, key, value, mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    inputs = (query, key, value, mask)
    if torch.compiler.is_compiling():
        return ATTEND(*inputs, scale), None
    return _replays.setdefault(module, ReplayCache()).call(ATTEND, inputs, (), (scale,)), None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compares_names(module: str) -> bool:
    """Return whether the code of a Python module compares an attention's name with "sdpa"."""
    if module not in _compared:
        try:
            found = _COMPARISON.search(inspect.getsource(sys.modules[module]))
        except (OSError, TypeError, KeyError):  # no source: compiled, or typed interactively
            found = None
        _compared[module] = found is not None
    return _compared[module]


def _decodes(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]
) -> bool:
    """Return whether the kernel computes this call: one token per sequence, no gradient."""
    fusible = query.device.type in fused_module.FUSED_DEVICES
    if not fusible or query.shape[2] != 1 or query.dim() != key.dim():
        return False
    if not torch.compiler.is_compiling() and (is_transformed() or forward_ad._current_level >= 0):
        return False  # the operator has no rules for transforms
    if torch.is_autocast_enabled(query.device.type):  # would cast the inputs of torch's attention
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    if any(kwargs.get(name) is not None and kwargs[name] is not False for name in _OTHERS):
        return False
    batch, heads = query.shape[:2]
    stored = key.shape[:3] == value.shape[:3] and key.shape[0] == batch
    seen = mask.dtype == torch.bool and mask.shape in (
        (1, 1, 1, key.shape[2]),
        (batch, 1, 1, key.shape[2]),
    )
    return stored and seen and heads % key.shape[1] == 0 and query.dtype == key.dtype == value.dtype


def register() -> None:
    """Let models of Transformers choose this attention by its name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
