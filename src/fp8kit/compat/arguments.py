"""Errors for arguments that are no tensors, in functions that others published without any."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar, cast

from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue, UnsupportedError

_KINDS: dict[str, Any] = {"Tensor": Tensor, "float": float | int, "int": int, "None": NoneType}
Function = TypeVar("Function", bound=Callable[..., Any])


def teaches(function: Function) -> Function:
    """Let a function that fails on what is no tensor say which argument that is.

    Which are tensors, its annotations tell. They are read after an error of Python alone, so that a
    call costs no more.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (InvalidType, InvalidValue, UnsupportedError):
            raise
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
                kinds = str(signature.parameters[name].annotation).split(" | ")
                if "Tensor" in kinds and not isinstance(value, tuple(_KINDS[k] for k in kinds)):
                    raise InvalidType(
                        f"Got {name} of type {type(value).__name__}.",
                        f"{function.__qualname__} takes {' or '.join(kinds)} there.",
                        "Pass a torch.Tensor.",
                    ) from error
            raise

    return cast(Function, call)
