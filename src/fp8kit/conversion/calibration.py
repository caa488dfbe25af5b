"""Observe the inputs of layers in a calibration run, and derive static input scales from them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import ConversionError, some_of
from fp8kit.formats import TENSOR, fp8_format, min_scale


def observe_amax(
    model: nn.Module, names: Iterable[str], run: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """Run a model and record the largest input magnitude of each named layer.

    The results are fp32 scalars. Raises ``ConversionError`` if a layer never ran, or saw NaN,
    infinities or only zeros.
    """
    amax: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, _: Tensor) -> None:
        if x.numel():
            seen = x.detach().abs().amax().float()
            amax[name] = torch.maximum(amax.get(name, seen), seen)

    names = list(names)
    with torch.no_grad(), watching(model, names, see):
        run(model)
    _check_seen(names, {n: a.item() for n, a in amax.items()})
    return amax


@contextmanager
def watching(
    model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """Watch layers while a model runs.

    Each call of a layer calls ``see`` with the layer's name, input and result.
    """

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
            see(name, args[0] if args else kwargs["input"], y)

        return hook

    handles = [
        model.get_submodule(n).register_forward_hook(watch(n), with_kwargs=True) for n in names
    ]
    try:
        with eagerly():
            yield
    finally:
        for handle in handles:
            handle.remove()


def eagerly() -> AbstractContextManager[object]:
    """Run compiled models eagerly: compiled code skips hooks that were added later."""
    # if dynamo is not loaded, nothing is compiled; importing it would take seconds
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def _check_seen(names: list[str], amax: dict[str, float]) -> None:
    kinds = {
        "never reached": [n for n in names if n not in amax],
        "saw NaN or infinities in": [n for n, a in amax.items() if not math.isfinite(a)],
        "saw only zeros in": [n for n, a in amax.items() if a == 0],
    }
    if any(kinds.values()):
        seen = " and ".join(f"{what} {some_of(layers)}" for what, layers in kinds.items() if layers)
        raise ConversionError(
            f"Calibration {seen}.",
            "A static scheme needs finite inputs of every converted layer, not all zero.",
            "Feed data that exercises these layers, or exclude them.",
        )


def input_scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn an observed amax into a static input scale, fp32 ``[1, 1]``, for codes of a dtype."""
    floor = min_scale(TENSOR, dtype, "activation")
    # divide by a tensor: for a Python number CUDA multiplies by its rounded reciprocal
    scale = amax / torch.full_like(amax, fp8_format(dtype).max)
    return scale.clamp(min=floor).reshape(1, 1)
