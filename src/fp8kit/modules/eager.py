"""Eager calls of a layer, without the work that is the same at every call.

The first call with a shape runs the registered operator, the second one records it, and later ones
repeat the tape (see ``tape``). That is only done where the operator would be seen by nobody else:
no gradient, no autocast, no compiler or tracer, no dispatch mode, a plain CUDA tensor. What a tape
fixes is checked at every call: shapes, dtypes, and the addresses of weight, scales and bias, so a
reload in place goes on with the new values, and a move or a new Parameter is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8kit import tape

TAPED_DEVICES = ("cuda",)
_MOST_SHAPES = 64
_ALIGN = 16
Key = tuple[object, ...]
Constants = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
State = tuple[object, ...]


class Tapes(dict[Key, tuple[State, tape.Tape | None]]):
    """The tapes of one layer; a copy or a pickle of the layer starts without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tapes:
        """Give an empty one: addresses belong to the original."""
        return Tapes()

    def __reduce__(self) -> tuple[type[Tapes], tuple[()]]:
        """As ``__deepcopy__``."""
        return Tapes, ()


def replay(tapes: Tapes, x: Tensor, constants: Constants, options: Key) -> Tensor | None:
    """Repeat an earlier call of the layer, if there is a tape that fits.

    Args:
        tapes: of the layer.
        x: the input.
        constants: weight, its scales, bias and input scale.
        options: whatever else the result depends on.

    Returns:
        The result; ``None`` if the call has to be made in full.
    """
    if torch.compiler.is_compiling() or not tapes or not _plain(x, constants):
        return None
    found = tapes.get((x.shape, x.dtype, constants[0].shape, options))
    if found is None or found[1] is None or found[0] != _state(constants):
        return None
    return found[1](x)


def run(
    tapes: Tapes,
    call: Callable[[], Tensor],
    x: Tensor,
    constants: Constants,
    options: Key,
) -> Tensor | None:
    """Repeat an earlier call, or record this one if it is the second of its kind.

    Args:
        tapes: of the layer.
        call: computes the layer by the operator's implementation.
        x: the input.
        constants: weight, its scales, bias and input scale.
        options: whatever else the result depends on.

    Returns:
        The result; ``None`` if the operator has to be called.
    """
    if torch.compiler.is_compiling() or not _plain(x, constants):
        return None
    key, state = (x.shape, x.dtype, constants[0].shape, options), _state(constants)
    found = tapes.get(key)
    if found is not None and found[0] == state:
        return None if found[1] is None else found[1](x)
    if found is None or not all(t is None or t.is_contiguous() for t in constants):
        if len(tapes) >= _MOST_SHAPES:
            tapes.clear()
        tapes[key] = ((), None)
        return None
    y, taped = tape.record(call, x, constants)
    tapes[key] = (state, taped)
    return y


def _plain(x: Tensor, constants: Constants) -> bool:
    """Say whether nothing but this call would see it, and ``x`` is what a tape can take."""
    bias = constants[2]
    return (
        type(x) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and x.device.type in TAPED_DEVICES
        and x.device == constants[0].device
        and x.layout is torch.strided
        and x.is_contiguous()
        and not x.data_ptr() % _ALIGN
        and x.numel() > 0
        and not x.is_neg()
        and not torch.is_autocast_enabled(x.device.type)
        and not (
            torch.is_grad_enabled()
            and (x.requires_grad or (bias is not None and bias.requires_grad))
        )
    )


def _state(constants: Constants) -> State:
    """Give what a tape fixes of its constants; a cast may put a new bias at an old address."""
    weight, scale, bias, input_scale = constants
    return (
        weight.data_ptr(),
        scale.data_ptr(),
        None if bias is None else (bias.data_ptr(), bias.dtype),
        None if input_scale is None else input_scale.data_ptr(),
    )
