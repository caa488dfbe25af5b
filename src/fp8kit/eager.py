"""Calls of a layer, without the work that is the same at every call.

Where nobody else would see the registered operator, its body is called directly: no gradient, no
autocast, no tracer, no compiler, no dispatch mode, a plain CUDA tensor. The second call with a
shape is recorded, and later ones repeat the tape (see ``tape``), if all the call does is launch
kernels of this package. Layers whose weights are joined have tapes together; the product of codes
that were made elsewhere has them, and so have norms and activations that make such codes. Below the
operators, which compiled code and ``functional`` call, each weight has tapes of its own. What a
tape fixes is checked at every call: shapes, dtypes, the addresses of weights, scales and biases,
and the versions of a layer's weights, so a reload in place, a move or a new Parameter is recorded
anew.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit import dispatch, tape
from fp8kit.formats import RowCodes

TAPED_DEVICES = ("cuda",)
_PLAIN = (
    Tensor,
    nn.Parameter,
)  # a subclass, such as a distributed tensor, has a meaning of its own
_INPUTS = (Tensor, RowCodes)
_CONSTANTS = ("weight", "weight_scale", "bias", "input_scale")
_MOST_SHAPES = 64
_ALIGN = 16
_TAPES = "_fp8kit_tapes"  # attribute of a weight
_ONCE = "once"  # before the state of a call that was made once, and is recorded next
_strided = torch.strided
# bound once: looking the names up through torch costs more than calling them
_dispatch_modes, _function_modes = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
)
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_autocast, _grad_enabled = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
Key = tuple[object, ...]
# of a layer; looking them up there is three times as fast as on the module
Parameters = Mapping[str, Tensor | None]
State = list[object]  # of each layer


class Product(Protocol):
    """What a layer computes from one input."""

    def __call__(self, *, directly: bool) -> Tensor:
        """Compute it: by the registered operator, or ``directly`` by its body."""


class Make(Protocol):
    """What a fused norm or activation makes."""

    def __call__(self, *, directly: bool) -> tuple[Tensor, ...]:
        """Make it: by the public function, or ``directly`` by the body of its operator."""


class Tapes(dict[Key, tuple[State, tape.Tape | None]]):
    """The tapes of layers that run as one; a copy or a pickle of them starts without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tapes:
        """Give an empty one: addresses belong to the original."""
        return type(self)()

    def __reduce__(self) -> tuple[type[Tapes], tuple[()]]:
        """As ``__deepcopy__``."""
        return Tapes, ()


class _OfWeight(Tapes):
    """Those of operators, an attribute of their weight, with which they may be saved."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Give an empty one of a type that ``torch.load`` takes for weights."""
        return OrderedDict, ()


def replay(
    tapes: Tapes, x: Tensor | RowCodes, layers: Sequence[Parameters], options: Key
) -> Tensor | None:
    """Repeat an earlier call, if there is a tape that fits.

    Args:
        tapes: of the layers.
        x: the input, or its codes.
        layers: what is multiplied, as one.
        options: whatever else the result depends on.

    Returns:
        The result; ``None`` if the call has to be made in full.
    """
    if not tapes or type(x) not in _INPUTS:
        return None
    inputs, key = _described(x, options)
    found = tapes.get(key)
    # an x of a recorded shape has elements; on the device of the tape it is where the weight is,
    # as long as the weight is at its address, and of a kind that is taped
    if found is None or found[1] is None or inputs[0].device != found[1].device:
        return None
    if not _plain(inputs) or found[0] != [_state(layer) for layer in layers]:
        return None
    return found[1](*inputs)[0]


def run(
    tapes: Tapes,
    product: Product,
    x: Tensor | RowCodes,
    layers: Sequence[Parameters],
    options: Key,
) -> Tensor:
    """Repeat an earlier call, or make it; it is recorded if it is the second of its kind.

    Args:
        tapes: of the layers.
        product: computes the result, in full.
        x: the input, or its codes; known to fit the layers, and on their device.
        layers: what is multiplied, as one.
        options: whatever else the result depends on.

    Returns:
        The result.
    """
    repeated = replay(tapes, x, layers, options)
    if repeated is not None:
        return repeated
    inputs, key = _described(x, options)
    state = _tapeable(inputs, layers)
    if state is None:
        return product(directly=False)
    found, constants = tapes.get(key), [layer[name] for layer in layers for name in _CONSTANTS]
    if found is not None and found[0] == state:
        return product(directly=True)  # it was found that no tape can repeat it
    steady = all(t is None or t.is_contiguous() for t in constants)
    if found is None or found[0] != [_ONCE, *state] or not steady:
        y = product(directly=True)
        # the call may have waited for the weights
        _keep(tapes, key, [_ONCE, *map(_state, layers)], None)
        return y
    y, taped = tape.record(functools.partial(product, directly=True), inputs, constants)
    _keep(tapes, key, state, taped)
    return y


def run_body(
    body: Callable[[], Tensor],
    x: Tensor | RowCodes,
    constants: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    options: Key,
) -> Tensor:
    """Repeat an earlier call of an operator's body, or make it, as ``run`` does for layers.

    A weight that is another tensor at every call, a fresh view for one, never gets a tape.

    Args:
        body: computes the result.
        x: the input, or its codes.
        constants: weight, its scale, bias and static input scale.
        options: whatever else the result depends on.
    """
    weight = constants[0]
    plain = type(weight) in _PLAIN and weight.device.type in TAPED_DEVICES
    if not plain or tape.recording():
        return body()
    tapes: Any = getattr(weight, _TAPES, None)
    if type(tapes) is not _OfWeight:
        tapes = _OfWeight()
        setattr(weight, _TAPES, tapes)

    def product(*, directly: bool) -> Tensor:
        del directly  # there is nothing below a body
        return body()

    layer = dict(zip(_CONSTANTS, constants, strict=True))
    return run(tapes, product, x, (layer,), options)


def make_codes(
    tapes: Tapes,
    make: Make,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor | None],
    options: Key,
) -> Sequence[Tensor]:
    """Make codes by a fused norm or activation, or repeat an earlier call that made such.

    The first call of a kind is made in full, with its checks; the second is recorded.

    Args:
        tapes: of the module.
        make: computes codes, scales and whatever else results.
        inputs: what it reads; a tape wants others of their shapes, dtypes and strides.
        constants: the other operands, of which the addresses stay.
        options: whatever else the result depends on.
    """
    ordinary = all(t is None or type(t) in _PLAIN for t in constants)
    apart = len({x.data_ptr() for x in inputs}) == len(inputs)  # a tape tells them by address
    if not (ordinary and apart and _unseen() and all(map(_strided_plain, inputs))):
        return make(directly=False)
    # options are compared, which is by identity as a rule, and need not be hashed
    state: State = [options]
    state += [
        None if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in constants
    ]
    key = (inputs[0].device, *[(x.shape, x.stride(), x.dtype) for x in inputs])
    found = tapes.get(key)
    if found is not None and found[0] == state:
        taped = found[1]
        if taped is None or any(x.device != taped.device for x in inputs):
            return make(directly=False)
        return taped(*inputs)
    if inputs[0].device.type not in TAPED_DEVICES:
        return make(directly=False)
    steady = all(t is None or t.is_contiguous() for t in constants)
    if found is None or found[0] != [_ONCE, *state] or not steady:
        made = make(directly=False)  # what it refuses is not noted, and never made directly
        _keep(tapes, key, [_ONCE, *state], None)
        return made
    made, recorded = tape.record(functools.partial(make, directly=True), inputs, constants)
    _keep(tapes, key, state, recorded)
    return made


def _keep(tapes: Tapes, key: Key, state: State, taped: tape.Tape | None) -> None:
    if key not in tapes and len(tapes) >= _MOST_SHAPES:
        tapes.pop(next(iter(tapes), key), None)  # the oldest, which another thread may have dropped
    tapes[key] = (state, taped)


def _tapeable(inputs: Sequence[Tensor], layers: Sequence[Parameters]) -> State | None:
    """Give what a tape would fix, ``None`` if somebody else would see the operator."""
    data = inputs[0]
    if data.device.type not in TAPED_DEVICES or not data.numel() or not _plain(inputs):
        return None
    state: State = [_state(layer) for layer in layers]
    return None if None in state else state


def _described(x: Tensor | RowCodes, options: Key) -> tuple[tuple[Tensor, ...], Key]:
    """Give the tensors of an input, and all that a call depends on but the layers."""
    key = (x.shape, x.dtype, options, dispatch.generation)
    if isinstance(x, Tensor):
        return (x,), key
    codes = (x.data.dtype, x.group, x.scale.shape, x.scale.stride())
    return (x.data, x.scale), (*key, codes)


def _plain(inputs: Sequence[Tensor]) -> bool:
    """Say whether nothing but this call would see it, and ``inputs`` are what a tape can take."""
    x = inputs[0]
    if not _unseen() or not _strided_plain(x) or not x.is_contiguous():
        return False
    return len(inputs) == 1 or not inputs[1].data_ptr() % _ALIGN


def _unseen() -> bool:
    """Say whether nothing looks on: no mode, autocast, tracer or transform."""
    if _function_modes() or _autocast():
        return False
    # a transform wraps tensors that then have no address, so it is asked for before the address
    return not is_traced() and forward_ad._current_level < 0


def is_traced() -> bool:
    """Say whether a mode, tracer or transform may have other tensors than ordinary ones."""
    return bool(_dispatch_modes() or _tracing()) or _transforms() is not None


def _strided_plain(x: Tensor) -> bool:
    """Say whether an input is an ordinary tensor that starts where launches may repeat."""
    if type(x) is not Tensor or x.layout is not _strided or x.is_neg():
        return False
    return not (_grad_enabled() and x.requires_grad) and not x.data_ptr() % _ALIGN


def _state(layer: Parameters) -> tuple[object, ...] | None:
    """Give what a tape fixes of a layer, ``None`` if somebody else would see the operator.

    A cast may put a new bias at an old address. Launches that read the weight early are repeated
    only if an earlier call has waited for it as it is: neither for another version nor for another
    tensor, which the allocator may have put at the same address.
    """
    try:
        weight, scale = layer["weight"], layer["weight_scale"]
        bias, input_scale = layer["bias"], layer["input_scale"]
    except KeyError:
        return None
    if weight is None or scale is None or type(weight) not in _PLAIN:
        return None
    if bias is not None and bias.requires_grad and _grad_enabled():
        return None
    version, address = tape.version(weight), weight.data_ptr()
    return (
        address,
        weight.shape,
        weight.dtype,
        # others may be copied before a launch, and the copy's address is none to come back to
        weight.is_contiguous() and scale.is_contiguous() and (bias is None or bias.is_contiguous()),
        version,
        # tape.settled, which would ask for both again at every call
        getattr(weight, tape.WAITED_FOR, None) == (version, address),
        scale.data_ptr(),
        None if bias is None else (bias.data_ptr(), bias.dtype),
        None if input_scale is None else input_scale.data_ptr(),
    )
