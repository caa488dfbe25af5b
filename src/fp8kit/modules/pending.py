"""What the first sibling's call leaves for the other siblings: their results, or shared codes.

A sibling takes it if called with the same input object while everything that the result depends on
is unchanged. Any other call computes for itself.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.ops.operators import RowCodes
from fp8kit.runtime.replay_cache import is_traced
from fp8kit.runtime.weight_hazards import version

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

_autocast, _grad_enabled = torch._C._is_any_autocast_enabled, torch.is_grad_enabled
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)

State = tuple[object, ...]
Results = dict[int, tuple[Tensor | None, State]]
OFFERED: State = ()  # no state to compare: the input was never written, only the codes are there


@dataclass(slots=True)
class Pending:
    """What the first sibling left: a result for each layer by id, or codes for all to multiply."""

    x: Tensor
    state: State | None  # of x; None for a stand-in, which only known code sees
    results: Results
    codes: RowCodes | None = None
    values: Tensor | None = None  # a copy of x in host memory, where NumPy's writes go uncounted
    stream: int = 0  # on which the results or codes were computed


class Waiting(threading.local):
    """The pending results of one thread: calls in other threads must not take or replace them."""

    pending: Pending | None = None


def make_stand_in(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a stand-in for an unwritten tensor, with which layers are called: an expanded NaN."""
    make = _kept_nan.__wrapped__ if is_traced() else _kept_nan  # a mode may make fake tensors
    nan: Tensor = make(device, dtype)
    return nan.expand(shape)


def check_written(x: Tensor) -> None:
    """Raise an ``UnsupportedError`` if a layer got a stand-in without its codes."""
    if x.is_meta or any(x.stride()) or not x.dim() or is_traced():
        return
    if _address(x) == _kept_nan(x.device, x.dtype).data_ptr():
        raise UnsupportedError(
            "A layer got what stands for the result of a fused norm.",
            "Such a norm writes codes, which wait for the layers that read it when the model was "
            "converted, until the model is called again.",
            "Convert once each norm is where it will be, or with fuse='inputs'; and let no hook "
            "call the model from inside its own forward.",
        )


@functools.cache
def _kept_nan(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.full((), math.nan, device=device, dtype=dtype)


def input_state(x: Tensor) -> State:
    """Return what results of an input depend on besides its identity: writes and torch's modes."""
    dtype = None
    if _autocast() and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return _grad_enabled(), x.requires_grad, version(x), _address(x), dtype


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr() if type(x) is Tensor else 0  # fake tensors have no data
    except RuntimeError:  # nor have tensors inside a transform
        return 0


def stream_of(x: Tensor) -> int:
    """Return the current stream: on another one, a sibling's result may not be complete."""
    try:
        return _current_stream(x.get_device()) if x.is_cuda else 0
    except RuntimeError:  # a fake tensor may be on a device that is not there
        return 0


def keep_for(stream: int, pending: Pending, *held: Tensor) -> None:
    """Keep the memory of pending tensors while a stream other than their own reads them."""
    if stream != pending.stream:
        for tensor in held:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def weight_state(member: Fp8Linear, stream: int) -> State:
    """Return what a layer's result depends on besides its input; writes show by versions."""
    grad = _grad_enabled()
    facts: list[object] = [member.options(), member.scale_ub, stream]
    for t in (*member._parameters.values(), *member._buffers.values()):
        if t is not None:
            facts += id(t), version(t), grad and t.requires_grad
    return tuple(facts)
