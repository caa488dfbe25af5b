"""Which layers determine a module's ``dtype``: those that hold its first floating Parameter.

``model.dtype`` of Transformers and diffusers gives the dtype of the first Parameter, and code casts
its inputs to it. The first Parameter of an ``Fp8Linear`` is its bias, which has the right dtype;
without a bias it would be the codes. Code that reads a Parameter itself is found by
``weight_reads``.
"""

from __future__ import annotations

import inspect

from torch import nn

from fp8kit.conversion.readers.values import first_holder


def dtype_answers(model: nn.Module) -> dict[nn.Module, str]:
    """Find the linear layers without a bias whose weight gives a module its ``dtype``.

    Each comes with the reason, as the end of a sentence; the model is neither run nor changed.
    """
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if isinstance(inspect.getattr_static(type(module), "dtype", None), property):
            layer = first_holder(module)
            if isinstance(layer, nn.Linear) and layer.bias is None:
                said = (
                    f"its weight is the first of {type(module).__name__}, whose dtype code asks for"
                )
                found.setdefault(layer, said)
    return found
