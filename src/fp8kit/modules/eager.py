"""Eager calls of a layer, without the work that is the same at every call.

Where nobody else would see the registered operator, its body is called directly: no gradient, no
autocast, no tracer, no dispatch mode, a plain CUDA tensor; callers leave this module out under a
compiler. The second call with a shape is recorded, and later ones repeat the tape (see ``tape``),
if all the call does is launch kernels of this package. What a tape fixes is checked at every call:
shapes, dtypes, the addresses of weight, scales and bias, and the weight's version, so a reload in
place, a move or a new Parameter is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit import tape

TAPED_DEVICES = ("cuda",)
_PLAIN = (
    Tensor,
    nn.Parameter,
)  # a subclass, such as a distributed tensor, has a meaning of its own
_MOST_SHAPES = 64
_ALIGN = 16
# bound once: looking five names up through torch costs more than calling them
_dispatch_modes, _function_modes = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
)
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_autocast, _grad_enabled = torch.is_autocast_enabled, torch.is_grad_enabled
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


def replay(
    tapes: Tapes, x: Tensor, parameters: Mapping[str, Tensor | None], options: Key
) -> Tensor | None:
    """Repeat an earlier call of the layer, if there is a tape that fits.

    Args:
        tapes: of the layer.
        x: the input.
        parameters: of the layer; looking them up there is three times as fast as on the module.
        options: whatever else the result depends on.

    Returns:
        The result; ``None`` if the call has to be made in full.
    """
    weight, scale = parameters.get("weight"), parameters.get("weight_scale")
    if not tapes or weight is None or scale is None:
        return None
    constants = (weight, scale, parameters.get("bias"), parameters.get("input_scale"))
    if not _plain(x, constants):
        return None
    found = tapes.get((x.shape, x.dtype, weight.shape, options))
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
        The result; ``None`` if the registered operator has to be called.
    """
    if not _plain(x, constants):
        return None
    key, state = (x.shape, x.dtype, constants[0].shape, options), _state(constants)
    found, once = tapes.get(key), ("once", *state)
    if found is not None and found[0] == state:
        return call() if found[1] is None else found[1](x)
    if (
        found is None
        or found[0] != once
        or not all(t is None or t.is_contiguous() for t in constants)
    ):
        if len(tapes) >= _MOST_SHAPES:
            tapes.clear()
        tapes[key] = (once, None)
        return call()
    y, taped = tape.record(call, x, constants)
    tapes[key] = (state, taped)
    return y


def _plain(x: Tensor, constants: Constants) -> bool:
    """Say whether nothing but this call would see it, and ``x`` is what a tape can take."""
    if type(x) is not Tensor or type(constants[0]) not in _PLAIN or forward_ad._current_level >= 0:
        return False
    if _dispatch_modes() or _function_modes() or _transforms() is not None or _tracing():
        return False
    kind, bias = x.device.type, constants[2]
    if kind not in TAPED_DEVICES or x.get_device() != constants[0].get_device():
        return False
    if x.layout is not torch.strided or not x.is_contiguous() or x.is_neg():
        return False
    if x.data_ptr() % _ALIGN or not x.numel() or _autocast(kind):
        return False
    trained = x.requires_grad or (bias is not None and bias.requires_grad)
    return not (trained and _grad_enabled())


def _state(constants: Constants) -> State:
    """Give what a tape fixes of its constants.

    A cast may put a new bias at an old address. A weight that has changed is not read early until
    a call has waited for it, so the launches of another version are not repeated.
    """
    weight, scale, bias, input_scale = constants
    return (
        weight.data_ptr(),
        -1 if weight.is_inference() else weight._version,
        scale.data_ptr(),
        None if bias is None else (bias.data_ptr(), bias.dtype),
        None if input_scale is None else input_scale.data_ptr(),
    )
