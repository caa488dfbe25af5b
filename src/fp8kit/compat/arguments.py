"""Errors for arguments of a wrong type, in functions whose originals do not check them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue, UnsupportedError

_KINDS: dict[str, Any] = {
    "Tensor": Tensor, "float": float | int, "int": int, "bool": bool, "str": str,
    "torch.dtype": torch.dtype, "None": NoneType,
}  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])


def names_wrong_argument(function: Function) -> Function:
    """Decorate a function so that it raises ``InvalidType`` with the argument of a wrong type.

    The annotations give the types. They are read only after the function has raised an error of
    Python or torch, so that a call costs no more.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (InvalidType, InvalidValue, UnsupportedError):
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            scope = function.__globals__
            for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
                kinds = str(signature.parameters[name].annotation).split(" | ")
                found = [_KINDS.get(k, scope.get(k.partition("[")[0])) for k in kinds]
                known = tuple(k for k in found if isinstance(k, type | UnionType))
                if len(known) == len(kinds) and not isinstance(value, known):
                    raise InvalidType(
                        f"Got {name} of type {type(value).__name__}.",
                        f"{function.__qualname__} takes {' or '.join(kinds)} there.",
                        "Pass a torch.Tensor." if "Tensor" in kinds else f"Pass {name}= by name.",
                    ) from error
            raise

    return cast(Function, call)
