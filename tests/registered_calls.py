"""Collect the registered operators that run; under a dispatch mode each call runs one of them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RegisteredCalls(TorchDispatchMode):
    """A dispatch mode that collects the names of the package's operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8kit":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
