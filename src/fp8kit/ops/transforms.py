"""``linear`` under the transforms of ``torch.func``: ``grad``, ``vjp``, ``jacrev``, ``vmap``.

These transforms do not accept a registered operator's autograd, so they get the same rules as a
``torch.autograd.Function``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError
from fp8kit.ops import schemas
from fp8kit.ops.registration import untraced

_TENSORS = 6  # of the operator's arguments; the rest are its options
_interpreters = torch._C._functorch.peek_interpreter_stack


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` is running."""
    return _interpreters() is not None


def needs_function() -> bool:
    """Return whether to call ``linear`` below; in a graph only if gradients are taken inside it."""
    return _is_differentiated() if torch.compiler.is_compiling() else is_transformed()


def _is_differentiated() -> bool:
    running = torch._C._functorch.get_interpreter_stack() or ()
    return any(one.key() == torch._C._functorch.TransformType.Grad for one in running)


# as torch.compiler.assume_constant_result does, without importing the compiler
_is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]


def linear(*arguments: Any) -> Tensor:
    """Call the operator ``linear`` in a form that ``torch.func`` can transform; breaks a graph.

    Raises ``UnsupportedError`` for ``jvp`` and other forward-mode transforms.
    """
    return _Linear.apply(*arguments)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.fp8kit.linear(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        schemas.save_for_linear(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return schemas.linear_backward(ctx, grad)

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> Any:
        raise UnsupportedError(
            "A forward-mode derivative of an FP8 layer was requested.",
            "FP8 products have a backward and no forward-mode derivative.",
            "Use torch.func.grad, vjp or jacrev, or the dense model.",
        )

    @staticmethod
    @untraced
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        # an outer transform may still be running
        product: Any = linear if is_transformed() else torch.ops.fp8kit.linear
        x, group, dims = arguments[0], arguments[6], in_dims[:_TENSORS]
        whole = group is not None and group[0] < 0 and arguments[4] is None
        if not whole and all(dim is None for dim in dims[1:]):
            return product(x.movedim(dims[0], 0), *arguments[1:]), 0
        # one call per batch entry, since each has its own weight, or its own scale of a whole input
        results = []
        for i in range(info.batch_size):
            each = [
                a if dim is None else a.select(dim, i)
                for a, dim in zip(arguments[:_TENSORS], dims, strict=True)
            ]
            results.append(product(*each, *arguments[_TENSORS:]))
        return torch.stack(results), 0
