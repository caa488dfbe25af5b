"""Register an operator of the package with ``torch.library``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8kit.errors import UnsupportedError

library: Any = torch.library.Library("fp8kit", "DEF")  # type: ignore[no-untyped-call]


def register(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Register an operator: one implementation for every device, run outside autocast.

    ``fake`` gives empty results of the same shapes, dtypes and device. Returns the qualified name.
    """
    # operators take any strides; without the tag Inductor recomputes an input for each reader
    library.define(schema, tags=torch.Tag.flexible_layout)
    name = schema.partition("(")[0]
    library.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8kit::{name}", fake, lib=library)
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, _outside_autocast(name, device_type), key)
    return f"fp8kit::{name}"


def refuse_backward(name: str, *said: str) -> None:
    """Make a backward through the operator ``name`` raise an error of three sentences."""

    def backward(*_: Any) -> None:
        raise UnsupportedError(*said)

    torch.library.register_autograd(name, backward, lib=library)


def _outside_autocast(name: str, device_type: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        # autocast would run the implementation's fp32 matmuls in 16 bit, where bare codes overflow
        with torch.autocast(device_type, enabled=False):
            return getattr(torch.ops.fp8kit, name)(*args)

    return kernel
