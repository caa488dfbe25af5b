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
_strided = torch.strided
# bound once: looking the names up through torch costs more than calling them
_dispatch_modes, _function_modes = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
)
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_autocast, _grad_enabled = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
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
    if not tapes:
        return None
    try:
        weight, scale = parameters["weight"], parameters["weight_scale"]
        bias, input_scale = parameters["bias"], parameters["input_scale"]
    except KeyError:
        return None
    if weight is None or scale is None or type(x) is not Tensor:
        return None
    # an x of a recorded shape has elements; on the device of the tape it is where the weight is,
    # as long as the weight is at its address, and of a kind that is taped
    found = tapes.get((x.shape, x.dtype, options))
    if found is None or found[1] is None or x.device != found[1].device:
        return None
    if not _plain(x, weight, bias) or found[0] != _state(weight, scale, bias, input_scale):
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
    if type(x) is not Tensor or x.device.type not in TAPED_DEVICES or not x.numel():
        return None
    if x.device != constants[0].device or not _plain(x, constants[0], constants[2]):
        return None
    key, state = (x.shape, x.dtype, options), _state(*constants)
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
        y = call()
        tapes[key] = (
            ("once", *_state(*constants)),
            None,
        )  # the call may have waited for the weight
        return y
    y, taped = tape.record(call, x, constants)
    tapes[key] = (state, taped)
    return y


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Say whether nothing but this call would see it, and ``x`` is what a tape can take."""
    if type(weight) not in _PLAIN:
        return False
    if _dispatch_modes() or _function_modes() or _autocast() or _tracing():
        return False
    # a transform wraps tensors that then have no address, so it is asked for before the address
    if _transforms() is not None or forward_ad._current_level >= 0:
        return False
    if _grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return False
    if x.layout is not _strided or not x.is_contiguous() or x.is_neg():
        return False
    return not x.data_ptr() % _ALIGN


def _state(weight: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor | None) -> State:
    """Give what a tape fixes of its constants.

    A cast may put a new bias at an old address. Launches that read the weight early are repeated
    only if an earlier call has waited for it as it is: neither for another version nor for another
    tensor, which the allocator may have put at the same address.
    """
    address, version = weight.data_ptr(), -1 if weight.is_inference() else weight._version
    return (
        address,
        weight.shape,
        version,
        getattr(weight, tape.WAITED_FOR, None) == (version, address),
        scale.data_ptr(),
        None if bias is None else (bias.data_ptr(), bias.dtype),
        None if input_scale is None else input_scale.data_ptr(),
    )
