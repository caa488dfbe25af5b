"""Parameters of FP8 layers: made frozen, moved without a cast, copied and pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import UnsupportedError
from fp8kit.formats import FP8_FORMATS, MX, Scheme, scale_dtype, scale_shape, stack_scale_shape
from fp8kit.runtime.replay_cache import ReplayCache
from fp8kit.runtime.weight_hazards import UNCOUNTED, invalidate, version

_BYTES = {1: torch.uint8, 4: torch.int32}
_E8M0_NAN = 255
_KINDS = ("", "_scale", "_scale_inv", "_exponents")  # of one weight; vLLM's blocks have the third


def frozen(tensor: Tensor) -> nn.Parameter:
    """Make a Parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors hold; sparse tensors count by their indices and values."""
    parts = ((t._indices(), t._values()) if t.is_sparse else (t,) for t in tensors)
    return sum(part.nbytes for held in parts for part in held)


def any_trained(*layers: nn.Module | None) -> bool:
    """Return whether grad mode is on and a Parameter of these modules requires a gradient."""
    return torch.is_grad_enabled() and any(
        p.requires_grad for m in layers if m is not None for p in m.parameters()
    )


def empty_tensors(
    shape: tuple[int, ...], scheme: Scheme, device: torch.device | str | None, name: str = "weight"
) -> dict[str, Tensor]:
    """Make the uninitialized tensors that a layer holds for a weight ``[..., N, K]``, by name."""
    scales, kind = stack_scale_shape(shape, scheme.weight), scale_dtype(scheme.weight)
    found = {
        name: torch.empty(shape, dtype=scheme.dtype, device=device),
        f"{name}_scale": torch.empty(scales, dtype=kind, device=device),
    }
    if scheme.rebased:
        exponents = scale_shape(shape, MX)
        found[f"{name}_exponents"] = torch.empty(exponents, dtype=torch.uint8, device=device)
    return found


def moved(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """Move a Parameter of codes or scales with ``fn``, without the cast that ``fn`` may make."""
    size = parameter.element_size()
    if size not in _BYTES:
        raise UnsupportedError(
            f"Code has cast codes or scales of an FP8 layer to {parameter.dtype}, past the layer.",
            "They keep their dtype: cast, they give other numbers.",
            "Make it anew, and cast by model.to(dtype); leave DeepSpeed's bf16 and fp16 off.",
        )
    bits = parameter.data.view(_BYTES[size])
    out = fn(bits)
    if out.dtype != bits.dtype:  # .type(dtype) casts integers too
        out = bits.to(out.device)
    view = out.view(parameter.dtype)
    if torch._has_compatible_shallow_copy_type(parameter.data, view):
        parameter.data = view  # the same Parameter object: optimizers and ties stay valid
        invalidate(parameter)  # the new memory may have the address of the old
        return parameter
    return frozen(view)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that load other weights and pass gradients on, with grad mode as it is."""
    recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recording):
        yield


@contextmanager
def written_together(
    module: nn.Module, names: Iterable[str], *, replaced: bool = False, expert: int | None = None
) -> Iterator[None]:
    """Write codes and scales in a block; if it raises and has written some, scales become NaN.

    An interrupt may leave new codes under old scales. Such a layer then computes NaN, in captured
    graphs too, until its weight is loaded again. ``names`` are those of the codes. ``replaced`` if
    the block assigns new Parameters; their memory, and that of the old, may be the caller's.
    ``expert`` if it writes only this one of a stack.
    """
    keys = [f"{name}{kind}" for name in names for kind in _KINDS]
    before = _written(module, keys)
    try:
        yield
    except BaseException:
        if before is not None and before == _written(module, keys):
            raise
        for key in keys:
            held = module._parameters.get(key)
            if held is None or held.dtype in FP8_FORMATS:
                continue
            if replaced:
                module._parameters[key] = held = frozen(torch.empty_like(held))
            rows = held.detach() if expert is None else held.detach()[expert]
            rows.fill_(_E8M0_NAN if held.dtype == torch.uint8 else torch.nan)
        raise


def _written(module: nn.Module, keys: list[str]) -> list[tuple[int, int]] | None:
    """Return which Parameters a module holds, with their versions; ``None`` if one is uncounted."""
    held = [module._parameters.get(key) for key in keys]
    found = [(id(p), 0 if p is None else version(p)) for p in held]
    return None if any(count == UNCOUNTED for _, count in found) else found


def apply_without_casts(
    module: nn.Module, names: Iterable[str], fn: Callable[[Tensor], Tensor], recurse: bool
) -> None:
    """Apply ``fn`` to a module as ``.to()`` and ``.half()`` do, but only move Parameters ``names``.

    These keep their dtype; ``fn`` and ``recurse`` are the arguments of ``nn.Module._apply``.
    """
    # fn may cast every float tensor (.half()); codes and scales, viewed as integers, only move
    held = {name: module._parameters[name] for name in names if name in module._parameters}
    for name in held:
        module._parameters[name] = None
    try:
        nn.Module._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
    finally:
        module._parameters.update(held)
    for name, parameter in held.items():
        if parameter is not None:
            module._parameters[name] = moved(parameter, fn)


def cast_dtype(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: Any) -> torch.dtype:
    """Return the compute dtype after ``fn``: the dtype it casts to, if that is a float dtype."""
    cast = fn(torch.empty(0, dtype=dtype, device=device)).dtype
    return cast if cast.is_floating_point else dtype


def deepcopied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy like any module, without ``__getstate__``: shared Parameters stay shared in the copy."""
    memo[id(module)] = twin = type(module).__new__(type(module))
    twin.__dict__ = copy.deepcopy(module.__dict__, memo)  # Dynamo loses what update() sets
    return twin


def shallow_copied(layer: nn.Module) -> Any:
    """Copy like any module, without ``__getstate__``: both layers hold the same Parameters.

    The copy is no member of the siblings that share an input, and records its own calls.
    """
    twin = type(layer).__new__(type(layer))
    twin.__dict__.update(layer.__dict__, shared=None, place="", replays=ReplayCache())
    return twin


def as_bytes(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return Parameters with codes as uint8: plain pickle has no storage type for FP8."""
    return {
        name: frozen(p.detach().view(torch.uint8))
        if p is not None and p.dtype in FP8_FORMATS
        else p
        for name, p in parameters.items()
    }
